"""Attention over runs of tokens of different lengths, with the log-sum-exp that lets parts be merged.

Queries and keys are flat streams of tokens; `bounds` say where the runs begin and end, and the queries of run
i see the keys of run i (FlashAttention's cu_seqlens). Forward returns the result and each query's log of the
sum of exponentials; backward takes them, and may be given those of a result merged from several calls.

On CUDA this is one call of torch's variable-length kernel, which reads nothing on the host. On a CPU it is
one call of the dense kernel for each stretch of equally long runs: 8 documents of 128 tokens in a row of 1,024
cost a fifth of one call with a dense mask. A window of near tokens is cut into such calls (`band.py`).

Shape letters: T query tokens, U key tokens, A heads, G key-value heads, D head width, N runs.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .band import band_backward, band_forward
from .kernels import HALVES, kernel_backward, kernel_forward, wide_dtype

aten = torch.ops.aten
Bounds = Tensor | list[int]  # a list on the host spares a CPU the reading


def varlen_forward(
    q_TAD: Tensor,
    k_UGD: Tensor,
    v_UGD: Tensor,
    q_bounds: Bounds,
    k_bounds: Bounds,
    longest: int,
    causal: bool,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """Result (T, A, D) and log-sum-exp (A, T) in float32 at least; 0 and -inf for a run without keys.

    `longest` bounds the length of a run. `causal` and `window` (a query sees the keys less than so far away; 0: all;
    not on CUDA) are for runs that have as many queries as keys.
    """
    if has_cuda_kernel(q_TAD):
        assert not window
        out, lse, *_ = aten._flash_attention_forward(
            q_TAD, k_UGD, v_UGD, q_bounds, k_bounds, longest, longest, 0.0, causal, False
        )
        return out, lse.masked_fill(lse == math.inf, -math.inf)  # what the kernel gives a run without keys
    out = torch.zeros_like(q_TAD, memory_format=torch.contiguous_format)
    lse = q_TAD.new_full((q_TAD.shape[1], len(q_TAD)), -math.inf, dtype=wide_dtype(q_TAD.dtype))
    for queries, keys, count in equal_runs(q_bounds, k_bounds):
        q, k, v = _rows(q_TAD[queries], count), _rows(k_UGD[keys], count), _rows(v_UGD[keys], count)
        if 0 < window < q.shape[2]:
            part, part_lse = band_forward(q, k, v, window, causal)
        else:
            part, part_lse = kernel_forward(q, k, v, causal)
        out[queries] = part.transpose(1, 2).flatten(0, 1)
        lse[:, queries] = part_lse.transpose(0, 1).flatten(1)
    return out, lse


def varlen_backward(
    grad_TAD: Tensor,
    q_TAD: Tensor,
    k_UGD: Tensor,
    v_UGD: Tensor,
    out_TAD: Tensor,
    lse_AT: Tensor,
    q_bounds: Bounds,
    k_bounds: Bounds,
    longest: int,
    causal: bool,
    window: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from the result and log-sum-exp of all keys the queries saw."""
    if has_cuda_kernel(q_TAD):
        assert not window
        none = torch.zeros((), dtype=torch.uint64, device=q_TAD.device)  # the state of a dropout of 0
        return aten._flash_attention_backward(
            *(grad_TAD, q_TAD, k_UGD, v_UGD, out_TAD, lse_AT),
            *(q_bounds, k_bounds, longest, longest, 0.0, causal, none, none),
        )
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_TAD, k_UGD, v_UGD))
    for queries, keys, count in equal_runs(q_bounds, k_bounds):
        grad, q, out = (_rows(x[queries], count) for x in (grad_TAD, q_TAD, out_TAD))
        k, v = (_rows(x[keys], count) for x in (k_UGD, v_UGD))
        lse_RAL = lse_AT[:, queries].unflatten(1, (count, -1)).transpose(0, 1)
        if 0 < window < q.shape[2]:
            parts = band_backward(grad, q, k, v, out, lse_RAL, window, causal)
        else:
            parts = kernel_backward(grad, q, k, v, out, lse_RAL, causal)
        for whole, place, part in zip((dq, dk, dv), (queries, keys, keys), parts):
            whole[place] = part.transpose(1, 2).flatten(0, 1)
    return dq, dk, dv


def equal_runs(q_bounds: Bounds, k_bounds: Bounds) -> Iterator[tuple[slice, slice, int]]:
    """Stretches of neighbouring runs that are as long: their queries, their keys, how many runs.

    Runs without queries or without keys are left out.
    """
    q_starts, k_starts = (x.tolist() if isinstance(x, Tensor) else x for x in (q_bounds, k_bounds))
    run = 0
    while run < len(q_starts) - 1:
        queries, keys = q_starts[run + 1] - q_starts[run], k_starts[run + 1] - k_starts[run]
        first, run = run, run + 1
        while (
            run < len(q_starts) - 1
            and q_starts[run + 1] - q_starts[run] == queries
            and k_starts[run + 1] - k_starts[run] == keys
        ):
            run += 1
        if queries and keys:
            yield slice(q_starts[first], q_starts[run]), slice(k_starts[first], k_starts[run]), run - first


def has_cuda_kernel(q: Tensor) -> bool:
    """Whether the GPU's kernel takes these queries (..., D), and bounds as they lie on the device."""
    return (
        q.is_cuda
        and q.dtype in HALVES
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and hasattr(aten, "_flash_attention_forward")
    )


def _rows(x_TAD: Tensor, count: int) -> Tensor:
    """(R L, A, D) -> (R, A, L, D)."""
    return x_TAD.unflatten(0, (count, -1)).transpose(1, 2)
