"""A GPU's kernels for attention of runs of tokens; they read the bounds on the device.

FlashAttention by torch's `varlen_attn`, and by its private operators where parts are to be merged by their log-sum-exp;
in float32, with dropout or on an older GPU the memory-efficient kernel, which knows bounds too.

Shape letters: T query tokens, U key tokens, A heads, G key-value heads, D head width, N runs.
"""

import math
from typing import cast

import torch
from torch import Tensor

from .capability import NEEDS, capability

aten = torch.ops.aten


def has_flash(q: Tensor) -> bool:
    """Whether FlashAttention takes queries (..., D) like these."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and hasattr(aten, "_flash_attention_forward")
        and capability(q.device) >= NEEDS["flash"]
    )


def attend_runs(
    q_TAD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    bounds_N: Tensor,
    longest: int,
    is_causal: bool,
    dropout: float,
    window: int,
) -> Tensor | None:
    """(T, A, D), or None where this torch has no kernel for it. A window only where `has_flash`, without dropout."""
    inputs = (bounds_N, bounds_N, longest, longest)
    groups = q_TAD.shape[1] // k_TGD.shape[1]
    if has_flash(q_TAD) and dropout == 0.0:
        from torch.nn.attention.varlen import varlen_attn

        reach = window - 1  # -1 is everything
        sides = (reach, 0 if is_causal else reach)
        out = varlen_attn(q_TAD, k_TGD, v_TGD, *inputs, window_size=sides, enable_gqa=groups > 1)
        return cast(Tensor, out)
    assert not window
    if not hasattr(aten, "_efficient_attention_forward"):
        return None
    k, v = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (k_TGD, v_TGD))
    return aten._efficient_attention_forward(
        q_TAD[None], k[None], v[None], None, *inputs, dropout, int(is_causal), True
    )[0][0]


def attend_cache(
    q_TAD: Tensor,
    k_RPGD: Tensor,
    v_RPGD: Tensor,
    bounds_N: Tensor,
    seen_R: Tensor,
    longest: int,
    most_seen: int,
    window: int,
) -> Tensor:
    """(T, A, D): of the run of queries of each row of a cache, the last of which see its first `seen_R` (int32) places,
    less than `window` away (0: all). Where `has_flash`; nothing is read beyond them.
    """
    rows, places = k_RPGD.shape[:2]
    starts_N = torch.arange(rows + 1, dtype=torch.int32, device=q_TAD.device) * places
    reach = window - 1  # -1 is everything
    return aten._flash_attention_forward(
        *(q_TAD, k_RPGD.flatten(0, 1), v_RPGD.flatten(0, 1), bounds_N, starts_N, longest, most_seen),
        *(0.0, not window, False),  # no dropout, causal, no mask to look at
        window_size_left=reach,
        window_size_right=0,
        seqused_k=seen_R,
    )[0]


def forward(
    q_TAD: Tensor,
    k_UGD: Tensor,
    v_UGD: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    longest: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """As `attention_cpu.forward`, where `has_flash`."""
    out, lse, *_ = aten._flash_attention_forward(
        q_TAD, k_UGD, v_UGD, q_bounds, k_bounds, longest, longest, 0.0, causal, False
    )
    return out, lse.masked_fill(lse == math.inf, -math.inf)  # what the kernel gives a run without keys


def backward(
    grad_TAD: Tensor,
    q_TAD: Tensor,
    k_UGD: Tensor,
    v_UGD: Tensor,
    out_TAD: Tensor,
    lse_AT: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    longest: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention_cpu.backward`, where `has_flash`."""
    none = torch.zeros((), dtype=torch.uint64, device=q_TAD.device)  # the state of a dropout of 0
    return aten._flash_attention_backward(
        *(grad_TAD, q_TAD, k_UGD, v_UGD, out_TAD, lse_AT),
        *(q_bounds, k_bounds, longest, longest, 0.0, causal, none, none),
    )
