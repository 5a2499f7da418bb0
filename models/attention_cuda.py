"""A GPU's kernels for attention of runs of tokens, which read the bounds on the device, and what a GPU can do.

FlashAttention by torch's `varlen_attn`, and by its private operators where parts are to be merged by their log-sum-exp;
in float32, with dropout or on an older GPU the memory-efficient kernel, which knows bounds too. On a Hopper card torch
puts FlashAttention 3 in the place of 2 where its package is installed. Scores with a soft cap are FlexAttention's,
which Triton compiles into one kernel.

Shape letters: T query tokens, U key tokens, A heads, G key-value heads, D head width, N runs.
"""

import math
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor

aten = torch.ops.aten
AMPERE, HOPPER = (8, 0), (9, 0)  # compute capabilities; what dtypes need stands in core/hardware.py
GROUPED: Any = {"enable_gqa": True} if torch.__version__ >= "2.12" else {}  # torch 2.11 takes groups unasked
# by the index of a device, in place of what torch says: set by a test, or where a machine stands in for another
CAPABILITIES: dict[int | None, tuple[int, int]] = {}
SIDES = ("fwd_BLOCK_M", "fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
# of FlexAttention: with the larger ones that torch takes, masks beside a cap need more registers than there are
TILES: Any = {name: 64 if name.startswith("fwd") else 32 for name in SIDES}


def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a GPU; where there is none, and one is simulated, of the oldest with every kernel."""
    if device.index in CAPABILITIES or not torch.cuda.is_available():
        return CAPABILITIES.get(device.index, AMPERE)
    return torch.cuda.get_device_capability(device)


# What torch.compiler.assume_constant_result does; calling it here would import the compiler.
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_computes(dtype: str, device: torch.device) -> None:
    """Refuse a dtype that a GPU cannot compute fast, and a GPU for which this torch has no kernels at all."""
    from ..core.errors import Refused
    from ..core.hardware import check_dtype  # needs psutil, which a bare machine with a GPU may lack

    found, name = capability(device), torch.cuda.get_device_name(device)
    check_dtype(dtype, capability="{}.{}".format(*found), name=name)
    compiled = [int(arch[3:].rstrip("af")) for arch in torch.cuda.get_arch_list() if arch.startswith("sm_")]
    if compiled and 10 * found[0] + found[1] < min(compiled):
        what, where = f"this torch has no kernels for {name}", "compute capability {}.{}".format(*found)
        why = f"torch {torch.__version__} was compiled for {', '.join(torch.cuda.get_arch_list())}"
        fix = "install torch from its index for an older CUDA: https://download.pytorch.org/whl/cu126"
        raise Refused(what, where=where, why=why, fix=fix)


def has_flash(q: Tensor) -> bool:
    """Whether FlashAttention takes queries (..., D) like these."""
    return (
        q.is_cuda
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and hasattr(aten, "_flash_attention_forward")
        and capability(q.device)[0] >= AMPERE[0]
    )


def take_newest(device: torch.device) -> None:
    """Let torch compute by FlashAttention 3, which has no dropout, where there are a card for it and its package."""
    if device.type != "cuda" or capability(device) != HOPPER or find_spec("flash_attn_interface") is None:
        return
    from torch.nn import attention

    if "FA3" in attention.list_flash_attention_impls() and attention.current_flash_attention_impl() != "FA3":
        attention.activate_flash_attention_impl("FA3")


def has_flex(q: Tensor) -> bool:
    """Whether FlexAttention is one kernel: inside torch.compile, for tensor cores that Triton knows well."""
    return torch.compiler.is_compiling() and q.is_cuda and capability(q.device)[0] >= AMPERE[0]


def attend_capped(
    q_BASD: Tensor, k_BGPD: Tensor, v_BGPD: Tensor, seen: Tensor | None, is_causal: bool, softcap: float
) -> Tensor:
    """(B, A, S, D) of scores x that become c tanh(x / c). `seen`: documents' numbers (B, S), or a mask (B, S, P)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def capped(score: Tensor, row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        score = torch.tanh(score / softcap) * softcap
        if seen is None:
            return score
        near = seen[row, query] == seen[row, key] if seen.dim() == 2 else seen[row, query, key]
        return torch.where(near, score, -math.inf)

    def behind(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query

    sizes = q_BASD.shape[2], k_BGPD.shape[2]
    blocks = create_block_mask(behind, None, None, *sizes, device=q_BASD.device) if is_causal else None
    q, k = q_BASD.to(v_BGPD.dtype), k_BGPD.to(v_BGPD.dtype)
    grouped = q.shape[1] != k.shape[1]
    how: dict[str, Any] = {"score_mod": capped, "block_mask": blocks, "enable_gqa": grouped}
    return cast(Tensor, flex_attention(q, k, v_BGPD, **how, kernel_options=TILES))


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
        out = varlen_attn(q_TAD, k_TGD, v_TGD, *inputs, window_size=sides, **(GROUPED if groups > 1 else {}))
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
    sinks: Tensor | None = None,
) -> Tensor:
    """(T, A, D): of the run of queries of each row of a cache, the last of which see its first `seen_R` (int32) places,
    less than `window` away (0: all). Where `has_flash`; nothing is read beyond them.
    """
    rows, places = k_RPGD.shape[:2]
    starts_N = torch.arange(rows + 1, dtype=torch.int32, device=q_TAD.device) * places
    out, lse_AT, *_ = aten._flash_attention_forward(
        *(q_TAD, k_RPGD.flatten(0, 1), v_RPGD.flatten(0, 1), bounds_N, starts_N, longest, most_seen),
        *(0.0, not window, False),  # no dropout, causal, no mask to look at
        window_size_left=window - 1,  # -1 is everything
        window_size_right=0,
        seqused_k=seen_R,
    )
    return out if sinks is None else out * (lse_AT - sinks[:, None]).sigmoid().t()[..., None].to(out.dtype)


def forward(
    q_TAD: Tensor,
    k_UGD: Tensor,
    v_UGD: Tensor,
    q_bounds: Tensor,
    k_bounds: Tensor,
    longest: int,
    causal: bool,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """As `attention_cpu.forward`, where `has_flash`; a window is causal."""
    inputs = q_TAD, k_UGD, v_UGD, q_bounds, k_bounds, longest, longest
    out, lse, *_ = aten._flash_attention_forward(*inputs, 0.0, causal and not window, False, **_sides(window))
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
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `attention_cpu.backward`, where `has_flash`."""
    none = torch.zeros((), dtype=torch.uint64, device=q_TAD.device)  # the state of a dropout of 0
    return aten._flash_attention_backward(
        *(grad_TAD, q_TAD, k_UGD, v_UGD, out_TAD, lse_AT),
        *(q_bounds, k_bounds, longest, longest, 0.0, causal and not window, none, none),
        **_sides(window),
    )


def _sides(window: int) -> dict[str, int]:
    """How far a query sees: with a window to the left alone."""
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}
