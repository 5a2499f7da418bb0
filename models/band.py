"""Attention to a window of near tokens, one stretch of queries after another over a slice of the keys.

The keys that a stretch sees stand in a row, so no copy of them is made, and nothing is kept for backward but the
result and its log-sum-exp: gathered blocks take memory for each block that a query block sees, and fresh memory
costs a CPU more than the products.

Shape letters: R runs of equal length, A heads, G key-value heads, L tokens of a run, D head width.
"""

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from .kernels import kernel_backward, kernel_forward, wide_dtype


def band_slices(length: int, window: int, causal: bool, step: int) -> Iterator[tuple[slice, slice]]:
    """Stretches of `step` queries, and the keys that any of them sees: those less than `window` away, 0 for all."""
    for start in range(0, length, step):
        stop = min(start + step, length)
        first = max(0, start - window + 1) if window else 0
        last = min(length, stop + window - 1) if window else length
        yield slice(start, stop), slice(first, stop if causal else last)


def band_bias(queries: slice, keys: slice, window: int, causal: bool, dtype: torch.dtype) -> Tensor:
    """0 where a query of the stretch sees a key, -inf where not: (queries, keys), or one 0 where all see all."""
    count, width = queries.stop - queries.start, keys.stop - keys.start
    return _bias(count, width, queries.start - keys.start, window, causal, dtype)


@functools.lru_cache(maxsize=16)  # all stretches of a band but the first and the last have the same
def _bias(count: int, width: int, offset: int, window: int, causal: bool, dtype: torch.dtype) -> Tensor:
    if not causal and not window:
        return torch.zeros((), dtype=dtype)
    unseen = torch.full((count, width), -math.inf, dtype=dtype)
    right = unseen.triu(offset + (1 if causal else window))
    return right + unseen.tril(offset - window) if window else right


def band_forward(
    q_RALD: Tensor, k_RGLD: Tensor, v_RGLD: Tensor, window: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """Result (R, A, L, D) and log-sum-exp (R, A, L)."""
    out = torch.empty_like(q_RALD)
    lse = out.new_empty(out.shape[:3], dtype=wide_dtype(out.dtype))
    for queries, keys in band_slices(q_RALD.shape[2], window, causal, _step(window)):
        bias = band_bias(queries, keys, window, causal, q_RALD.dtype)
        found = kernel_forward(q_RALD[:, :, queries], k_RGLD[:, :, keys], v_RGLD[:, :, keys], False, bias)
        out[:, :, queries], lse[:, :, queries] = found
    return out, lse


def band_backward(
    grad_RALD: Tensor,
    q_RALD: Tensor,
    k_RGLD: Tensor,
    v_RGLD: Tensor,
    out_RALD: Tensor,
    lse_RAL: Tensor,
    window: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    dq = torch.empty_like(q_RALD)
    dk, dv = (torch.zeros_like(x, dtype=wide_dtype(x.dtype)) for x in (k_RGLD, v_RGLD))
    for queries, keys in band_slices(q_RALD.shape[2], window, causal, _step(window)):
        bias = band_bias(queries, keys, window, causal, q_RALD.dtype)
        grad, q, out = (x[:, :, queries] for x in (grad_RALD, q_RALD, out_RALD))
        k, v = k_RGLD[:, :, keys], v_RGLD[:, :, keys]
        parts = kernel_backward(grad, q, k, v, out, lse_RAL[:, :, queries], False, bias)
        dq[:, :, queries] = parts[0]
        dk[:, :, keys] += parts[1]
        dv[:, :, keys] += parts[2]
    return dq, dk.to(k_RGLD.dtype), dv.to(v_RGLD.dtype)


def _step(window: int) -> int:
    """Queries at a time of the fused kernel: few see little beyond the window, many add to a key's gradient less
    often. On an EPYC with 12 heads of 64 a window of 512 takes the same from 64 to 256, one of 2,048 a quarter less
    by 256.
    """
    return max(64, min(256, window // 8))
