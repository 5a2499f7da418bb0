"""Softmax attention of runs of tokens with the log-sum-exp that lets parts be merged: forward and backward on a CPU,
and where a GPU has no kernel for it.

Queries and keys are flat streams of tokens; `bounds` say where the runs begin and end, and the queries of run i see
the keys of run i (FlashAttention's cu_seqlens). Neighbours of equal length are computed together: by torch's fused
kernel whole, or, with a window of near tokens, for some hundred queries at a time over the slice of the keys that any
of them sees, so that no copy of keys is made and nothing is kept for backward but the result and its log-sum-exp.

Short runs and windows in bf16, whose fused backward is two to five times as slow (benchmarks/documents.py), are plain
products, and so is everything where torch lacks its private operators.

Shape letters: T query tokens, U key tokens, A heads, G key-value heads, D head width, N runs; R equal runs computed
together, L queries and M keys of each.
"""

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten
Bounds = Tensor | list[int]  # a list on the host spares a CPU the reading
QUERIES = 256  # of plain products at a time: of a causal run the keys to the right of them are left out
SHORT = 512  # tokens of a bf16 run up to which plain products are faster


def forward(
    q_TAD: Tensor,
    k_UGD: Tensor,
    v_UGD: Tensor,
    q_bounds: Bounds,
    k_bounds: Bounds,
    longest: int,
    causal: bool,
    window: int = 0,
    mergeable: bool = True,
) -> tuple[Tensor, Tensor]:
    """Result (T, A, D) and log-sum-exp (A, T) in float32 at least; 0 and -inf for a run without keys.

    `longest` bounds the length of a run, for a GPU's kernel. `causal` is for runs that have as many queries as keys;
    with a `window` (a query sees the keys less than so far away; 0: all) the last query stands at the last key. A
    result that is not `mergeable` may lack its log-sum-exp.
    """
    out = torch.zeros_like(q_TAD, memory_format=torch.contiguous_format)
    lse = q_TAD.new_full((q_TAD.shape[1], len(q_TAD)), -math.inf, dtype=_wide(q_TAD))
    for queries, keys, count in equal_runs(q_bounds, k_bounds):
        q, k, v, result = (_rows(x, count) for x in (q_TAD[queries], k_UGD[keys], v_UGD[keys], out[queries]))
        sums = lse[:, queries].unflatten(1, (count, -1)).transpose(0, 1)
        plain = _is_plain(q, k, window, mergeable)
        if plain:
            q, k, v = _heads_first(q, k, v)
        for here, seen, bias in _pieces(q, k, causal, window, plain):
            inputs = q[..., here, :], k[..., seen, :], v[..., seen, :]
            if plain:
                part, part_lse = _plain_forward(*inputs, bias, mergeable)
            else:
                part, part_lse = aten._scaled_dot_product_flash_attention_for_cpu(
                    *inputs, 0.0, causal and bias is None, attn_mask=bias
                )
            result[..., here, :] = part.view(result[..., here, :].shape)
            if part_lse is not None:
                sums[..., here] = part_lse.view(sums[..., here].shape)
    return out, lse


def backward(
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
    mergeable: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from the result and log-sum-exp of all keys the queries saw."""
    dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q_TAD, k_UGD, v_UGD))
    for queries, keys, count in equal_runs(q_bounds, k_bounds):
        grad, q, out, for_q = (_rows(x[queries], count) for x in (grad_TAD, q_TAD, out_TAD, dq))
        k, v, for_k, for_v = (_rows(x[keys], count) for x in (k_UGD, v_UGD, dk, dv))
        lse = lse_AT[:, queries].unflatten(1, (count, -1)).transpose(0, 1)
        plain = _is_plain(q, k, window, mergeable)
        if plain:
            q, k, v, grad, out = _heads_first(q, k, v, grad, out)
            lse = lse.flatten(0, 1)
        sums: list[Tensor] = []
        for here, seen, bias in _pieces(q, k, causal, window, plain):
            there = [x[..., here, :] for x in (grad, q, out)]
            inputs = there[0], there[1], k[..., seen, :], v[..., seen, :], there[2]
            if plain:
                parts = _plain_backward(*inputs, lse[..., here] if mergeable else None, bias)
            else:
                parts = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                    *inputs, lse[..., here], 0.0, causal and bias is None, attn_mask=bias
                )
            for_q[..., here, :] = parts[0].view(for_q[..., here, :].shape)
            if parts[0].shape == q.shape and parts[1].shape == k.shape:
                sums = list(parts[1:])
                continue
            sums = sums or [torch.zeros_like(x) for x in (k, v)]
            for total, part in zip(sums, parts[1:]):
                total[..., seen, :] += part
        for whole, total in zip((for_k, for_v), sums):
            if total.numel() > whole.numel():  # key heads that were repeated
                total = total.view(len(whole), whole.shape[1], -1, *whole.shape[2:]).sum(2)
            whole.copy_(total.view(whole.shape))
    return dq, dk, dv


def equal_runs(q_bounds: Bounds, k_bounds: Bounds) -> Iterator[tuple[slice, slice, int]]:
    """Stretches of neighbouring runs that are as long, none empty: their queries, their keys, how many runs."""
    q_starts, k_starts = (x.tolist() if isinstance(x, Tensor) else x for x in (q_bounds, k_bounds))
    sizes = [(q - p, k - j) for p, q, j, k in zip(q_starts, q_starts[1:], k_starts, k_starts[1:])]
    run = 0
    for size, same in itertools.groupby(sizes):
        first, count = run, len(list(same))
        run += count
        if all(size):
            yield slice(q_starts[first], q_starts[run]), slice(k_starts[first], k_starts[run]), count


def band_slices(
    queries: int, keys: int, window: int, causal: bool, step: int
) -> Iterator[tuple[slice, slice]]:
    """Stretches of `step` queries, and the keys that any of them sees: those less than `window` away, 0 for all."""
    behind = keys - queries if window else 0
    for start in range(0, queries, step):
        stop = min(start + step, queries)
        first = max(0, behind + start - window + 1) if window else 0
        last = min(keys, behind + stop + window - 1) if window else keys
        yield slice(start, stop), slice(first, behind + stop if causal else last)


@functools.lru_cache(maxsize=16)  # all stretches of a band but the first and the last have the same
def band_bias(
    count: int, width: int, offset: int, window: int, causal: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """0 where a query sees a key, -inf where not, of `count` queries that begin `offset` behind the first of `width`
    keys: (count, width), or one 0 where all see all.
    """
    if not causal and not window:
        return torch.zeros((), dtype=dtype, device=device)
    unseen = torch.full((count, width), -math.inf, dtype=dtype, device=device)
    right = unseen.triu(offset + (1 if causal else window))
    return right + unseen.tril(offset - window) if window else right


def _pieces(
    q: Tensor, k: Tensor, causal: bool, window: int, plain: bool
) -> Iterator[tuple[slice, slice, Any]]:
    """Queries, the keys that they see, and their bias: none where the fused kernel takes a run whole."""
    queries, keys = q.shape[-2], k.shape[-2]
    near = window if window < keys or queries < keys else 0
    if not plain and not near:
        yield slice(0, queries), slice(0, keys), None
        return
    # Few queries see little beyond the window, many add to a key's gradient less often. On an EPYC with 12 heads of
    # 64 the fused kernel takes the same from 64 to 256 with a window of 512, and a quarter less by 256 with 2,048.
    step = min(QUERIES, max(near // 4, 128) if plain and near else max(near // 8, 64) if near else QUERIES)
    for here, seen in band_slices(queries, keys, near, causal, step):
        behind = keys - queries if near else 0
        sizes = here.stop - here.start, seen.stop - seen.start, behind + here.start - seen.start
        yield here, seen, band_bias(*sizes, near, causal, q.dtype, q.device)


def _is_plain(q: Tensor, k: Tensor, window: int, mergeable: bool) -> bool:
    """Whether plain products are the faster kernel for equal runs (R, heads, L, D), or the only one."""
    if q.device.type != "cpu" or not hasattr(aten, "_scaled_dot_product_flash_attention_for_cpu"):
        return True
    fast = k.shape[2] <= SHORT or 0 < window < k.shape[2]
    return fast and q.dtype == torch.bfloat16 and not mergeable


def scores_of(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """(N, L, D) and (N, M, D) -> (N, L, M)."""
    return torch.baddbmm(bias, q, k.mT, alpha=1 / math.sqrt(q.shape[-1]))


def _plain_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mergeable: bool
) -> tuple[Tensor, Tensor | None]:
    scores = scores_of(q, k, bias)
    return scores.softmax(-1) @ v, scores.to(_wide(q)).logsumexp(-1) if mergeable else None


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`lse`: that of a merged result; None where the result is of these keys alone."""
    scores = scores_of(q, k, bias)
    shares = scores.softmax(-1) if lse is None else (scores - lse[..., None]).exp().to(q.dtype)
    for_v, for_shares = shares.mT @ grad, grad @ v.mT
    if lse is None and hasattr(aten, "_softmax_backward_data"):  # one pass; a private operator
        for_scores = aten._softmax_backward_data(for_shares, shares, -1, shares.dtype)
    else:
        wide = _wide(q)
        delta = (grad.to(wide) * out).sum(-1, keepdim=True)
        for_scores = (shares.to(wide) * (for_shares.to(wide) - delta)).to(q.dtype)
    for_scores *= 1 / math.sqrt(q.shape[-1])
    return for_scores @ k, for_scores.mT @ q, for_v


def _wide(x: Tensor) -> torch.dtype:
    """What sums are kept in."""
    return torch.promote_types(x.dtype, torch.float32)


def _rows(x_TAD: Tensor, count: int) -> Tensor:
    """(R L, A, D) -> (R, A, L, D), a view."""
    return x_TAD.unflatten(0, (count, -1)).transpose(1, 2)


def _heads_first(q_RALD: Tensor, *others: Tensor) -> list[Tensor]:
    """(R A, L, D) each, key heads repeated for the query heads that share them."""
    heads = q_RALD.shape[1]
    every = (x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1) for x in others)
    return [x.flatten(0, 1) for x in (q_RALD, *every)]


# One operator, so that a compiler does not look inside: the lengths of the documents are other ones in every batch.
@torch.library.custom_op("throughline::attend_documents", mutates_args=())
def attend_runs(
    q_TAD: Tensor, k_TGD: Tensor, v_TGD: Tensor, bounds_N: Tensor, is_causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    """The result (T, A, D) within the runs, and what backward needs of it besides."""
    bounds = bounds_N.tolist()
    return forward(q_TAD, k_TGD, v_TGD, bounds, bounds, 0, is_causal, window, mergeable=False)


@attend_runs.register_fake
def _(
    q_TAD: Tensor, k_TGD: Tensor, v_TGD: Tensor, bounds_N: Tensor, is_causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    return _like(q_TAD), q_TAD.new_empty(q_TAD.shape[1], len(q_TAD), dtype=_wide(q_TAD))


@torch.library.custom_op("throughline::attend_documents_backward", mutates_args=())
def _attend_runs_backward(
    grad_TAD: Tensor,
    q_TAD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_TAD: Tensor,
    lse_AT: Tensor,
    bounds_N: Tensor,
    is_causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    bounds, tensors = bounds_N.tolist(), (grad_TAD, q_TAD, k_TGD, v_TGD, out_TAD, lse_AT)
    return backward(*tensors, bounds, bounds, 0, is_causal, window, mergeable=False)


@_attend_runs_backward.register_fake
def _(
    grad_TAD: Tensor, q_TAD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q_TAD), _like(k_TGD), _like(v_TGD)


def _like(x_TAD: Tensor) -> Tensor:
    return torch.empty_like(x_TAD, memory_format=torch.contiguous_format)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.is_causal, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _give_back(ctx: Any, grad_TAD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, bounds, out, lse = ctx.saved_tensors
    rules = bounds, ctx.is_causal, ctx.window
    return *_attend_runs_backward(grad_TAD, q, k, v, out, lse, *rules), None, None, None


torch.library.register_autograd("throughline::attend_documents", _give_back, setup_context=_save)
