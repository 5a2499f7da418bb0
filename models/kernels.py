"""Softmax attention of equally long runs, with the log-sum-exp that lets parts be merged.

Forward returns the result and each query's log of the sum of exponentials; backward takes them, and may be given
those of a result merged from several calls. On a CPU both are torch's private operators; where a torch lacks them,
and for short runs in 16 bits, plain products of a few hundred queries at a time replace them.

Shape letters: A heads, G key-value heads, D head width; R equal runs computed together, L queries and M keys of
each.
"""

import math

import torch
from torch import Tensor

aten = torch.ops.aten
QUERIES = 256  # computed at a time by plain products
# Keys up to which they are faster than the CPU's fused backward in 16 bits: 12 heads of 64 take 1.2 ms for 128 tokens
# instead of 4.2, 5 instead of 7.5 for 256, 40 instead of 28 for 512 (one core of an EPYC)
SHORT = 256
HALVES = (torch.bfloat16, torch.float16)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over a number of this dtype are kept in."""
    return torch.float32 if dtype in HALVES else dtype


def _has_cpu_kernel(q: Tensor) -> bool:
    return q.device.type == "cpu" and hasattr(aten, "_scaled_dot_product_flash_attention_for_cpu")


def kernel_forward(
    q_RALD: Tensor, k_RGMD: Tensor, v_RGMD: Tensor, causal: bool, bias_LM: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Result (R, A, L, D) and log-sum-exp (R, A, L)."""
    if _has_cpu_kernel(q_RALD):
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q_RALD, k_RGMD, v_RGMD, 0.0, causal, attn_mask=bias_LM
        )
    k, v = (_for_every_head(x, q_RALD.shape[1]) for x in (k_RGMD, v_RGMD))
    results = []
    for start in range(0, q_RALD.shape[2], QUERIES):
        scores = _scores(q_RALD[:, :, start : start + QUERIES], k, start, causal, bias_LM)
        lse = scores.logsumexp(-1)
        results.append(((scores - lse[..., None]).exp().to(v.dtype) @ v, lse))
    outs, lses = zip(*results)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def kernel_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse_RAL: Tensor,
    causal: bool,
    bias_LM: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values; shapes as forward has them."""
    if _has_cpu_kernel(q) and not (q.dtype in HALVES and k.shape[2] <= SHORT):
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse_RAL, 0.0, causal, attn_mask=bias_LM
        )
    heads, kv_heads, wide = q.shape[1], k.shape[1], wide_dtype(q.dtype)
    k_all, v_all = _for_every_head(k, heads), _for_every_head(v, heads)
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k_all, dtype=wide), torch.zeros_like(v_all, dtype=wide)
    for start in range(0, q.shape[2], QUERIES):
        here = slice(start, start + QUERIES)
        shares = _scores(q[:, :, here], k_all, start, causal, bias_LM).sub_(lse_RAL[:, :, here, None]).exp_()
        dv += shares.to(v.dtype).mT @ grad[:, :, here]
        delta = (grad[:, :, here].to(wide) * out[:, :, here]).sum(-1, keepdim=True)
        dshares = (grad[:, :, here] @ v_all.mT).to(wide).sub_(delta)
        dscores = shares.mul_(dshares).div_(math.sqrt(q.shape[-1])).to(q.dtype)
        dq[:, :, here] = dscores @ k_all
        dk += dscores.mT @ q[:, :, here]
    if heads != kv_heads:
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _scores(q: Tensor, k: Tensor, start: int, causal: bool, bias_LM: Tensor | None) -> Tensor:
    """Scaled scores of the queries from `start` on, in the wide dtype."""
    scores = (q @ k.mT).to(wide_dtype(q.dtype)).div_(math.sqrt(q.shape[-1]))
    if causal:
        right = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(start + 1)
        scores.masked_fill_(right, -math.inf)
    if bias_LM is not None:
        scores += bias_LM[start : start + q.shape[2]]
    return scores


def _for_every_head(x_RGMD: Tensor, heads: int) -> Tensor:
    groups = heads // x_RGMD.shape[1]
    return x_RGMD if groups == 1 else x_RGMD.repeat_interleave(groups, 1)
