"""Attention over runs of tokens of different lengths, with the log-sum-exp that lets parts be merged.

Queries and keys are flat streams of tokens; `bounds` say where the runs begin and end, and the queries of run
i see the keys of run i (FlashAttention's cu_seqlens). Forward returns the result and each query's log of the
sum of exponentials; backward takes them, and may be given those of a result merged from several calls.

On CUDA this is one call of torch's variable-length kernel, which reads nothing on the host. On a CPU it is
one call of the dense kernel for each stretch of equally long runs: 8 documents of 128 tokens in a row of 1,024
cost a fifth of one call with a dense mask. Both are torch's private operators; where a torch lacks them, plain
products of a few hundred queries at a time replace them.

Shape letters: T query tokens, U key tokens, A heads, G key-value heads, D head width, N runs; R equal runs
computed together, L queries and M keys of each.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

aten = torch.ops.aten
QUERIES = 256  # computed at a time by plain products
# Keys up to which they are faster than the CPU's fused backward in 16 bits: 12 heads of 64 take 1.2 ms for 128 tokens
# instead of 4.2, 5 instead of 7.5 for 256, 40 instead of 28 for 512 (one core of an EPYC)
SHORT = 256
HALVES = (torch.bfloat16, torch.float16)
Bounds = Tensor | list[int]  # a list on the host spares a CPU the reading


def varlen_forward(
    q_TAD: Tensor,
    k_UGD: Tensor,
    v_UGD: Tensor,
    q_bounds: Bounds,
    k_bounds: Bounds,
    longest: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Result (T, A, D) and log-sum-exp (A, T) in float32 at least; 0 and -inf for a run without keys.

    `longest` bounds the length of a run. `causal` is for runs that have as many queries as keys.
    """
    if has_cuda_kernel(q_TAD):
        out, lse, *_ = aten._flash_attention_forward(
            q_TAD, k_UGD, v_UGD, q_bounds, k_bounds, longest, longest, 0.0, causal, False
        )
        return out, lse.masked_fill(lse == math.inf, -math.inf)  # what the kernel gives a run without keys
    out = torch.zeros_like(q_TAD, memory_format=torch.contiguous_format)
    lse = q_TAD.new_full((q_TAD.shape[1], len(q_TAD)), -math.inf, dtype=wide_dtype(q_TAD.dtype))
    for queries, keys, count in equal_runs(q_bounds, k_bounds):
        part, part_lse = _forward(
            _rows(q_TAD[queries], count), _rows(k_UGD[keys], count), _rows(v_UGD[keys], count), causal
        )
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from the result and log-sum-exp of all keys the queries saw."""
    if has_cuda_kernel(q_TAD):
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
        parts = _backward(grad, q, k, v, out, lse_RAL, causal)
        for whole, place, part in zip((dq, dk, dv), (queries, keys, keys), parts):
            whole[place] = part.transpose(1, 2).flatten(0, 1)
    return dq, dk, dv


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over a number of this dtype are kept in."""
    return torch.float32 if dtype in HALVES else dtype


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


def _has_cpu_kernel(q: Tensor) -> bool:
    return q.device.type == "cpu" and hasattr(aten, "_scaled_dot_product_flash_attention_for_cpu")


def _forward(q_RALD: Tensor, k_RGMD: Tensor, v_RGMD: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Result (R, A, L, D) and log-sum-exp (R, A, L)."""
    if _has_cpu_kernel(q_RALD):
        return aten._scaled_dot_product_flash_attention_for_cpu(q_RALD, k_RGMD, v_RGMD, 0.0, causal)
    k, v = (_for_every_head(x, q_RALD.shape[1]) for x in (k_RGMD, v_RGMD))
    results = []
    for start in range(0, q_RALD.shape[2], QUERIES):
        scores = _scores(q_RALD[:, :, start : start + QUERIES], k, start, causal)
        lse = scores.logsumexp(-1)
        results.append(((scores - lse[..., None]).exp().to(v.dtype) @ v, lse))
    outs, lses = zip(*results)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse_RAL: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if _has_cpu_kernel(q) and not (q.dtype in HALVES and k.shape[2] <= SHORT):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse_RAL, 0.0, causal
        )
    heads, kv_heads, wide = q.shape[1], k.shape[1], wide_dtype(q.dtype)
    k_all, v_all = _for_every_head(k, heads), _for_every_head(v, heads)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k_all, dtype=wide), torch.zeros_like(v_all, dtype=wide)
    for start in range(0, q.shape[2], QUERIES):
        here = slice(start, start + QUERIES)
        shares = _scores(q[:, :, here], k_all, start, causal).sub_(lse_RAL[:, :, here, None]).exp_()
        dv += shares.to(v.dtype).mT @ grad[:, :, here]
        delta = (grad[:, :, here].to(wide) * out[:, :, here]).sum(-1, keepdim=True)
        dshares = (grad[:, :, here] @ v_all.mT).to(wide).sub_(delta)
        dscores = shares.mul_(dshares).div_(math.sqrt(q.shape[-1])).to(q.dtype)
        dq[:, :, here] = dscores @ k_all
        dk += dscores.mT @ q[:, :, here]
    if heads != kv_heads:
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, start: int, causal: bool) -> Tensor:
    """Scaled scores of the queries from `start` on, in the wide dtype."""
    scores = (q @ k.mT).to(wide_dtype(q.dtype)).div_(math.sqrt(q.shape[-1]))
    if causal:
        right = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(start + 1)
        scores.masked_fill_(right, -math.inf)
    return scores


def _for_every_head(x_RGMD: Tensor, heads: int) -> Tensor:
    groups = heads // x_RGMD.shape[1]
    return x_RGMD if groups == 1 else x_RGMD.repeat_interleave(groups, 1)
