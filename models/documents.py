"""Attention of documents that share a row, and of rows with padding, without a dense mask.

A `Documents` takes the place of the mask: where the documents begin and end, computed once for a batch.
Attention then costs what the documents cost, not what the rows do. On CUDA the kernel is torch's
`varlen_attn`, in float32 or with dropout the memory-efficient kernel, which knows bounds too. On a CPU each
stretch of equally long documents is a call of its own; short ones in bf16 are computed in plain products, which are
two to five times as fast there as the fused backward (benchmarks/documents.py).

Shape letters: B rows, S positions of a row, T = B x S tokens, A heads, G key-value heads, D head width, N
documents.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from .band import band_bias, band_slices
from .kernels import HALVES, wide_dtype
from .varlen import equal_runs, varlen_backward, varlen_forward

aten = torch.ops.aten
SHORT = 512  # tokens of a bf16 document up to which plain products are faster on a CPU
QUERIES = 256  # of a causal document at a time at most: the keys to the right of them are left out


@dataclass(frozen=True)
class Documents:
    """Runs of the flattened (B x S) tokens; a token sees those of its own run only.

    `bounds_N` (N + 1,) int32 rises from 0 to B x S; equal neighbours are a document without tokens.
    `longest` is at least the length of every document.
    """

    bounds_N: Tensor
    longest: int

    def ids(self, rows: int, length: int) -> Tensor:
        """The number of each token's document, (B, S)."""
        places = torch.arange(rows * length, device=self.bounds_N.device)
        return torch.bucketize(places, self.bounds_N[1:], right=True).view(rows, length)

    def mask(self, rows: int, length: int, is_causal: bool) -> Tensor:
        """The same as a dense mask (B, 1, S, S), for what has no other way."""
        ids = self.ids(rows, length)
        same = ids[:, :, None] == ids[:, None, :]
        return (same.tril() if is_causal else same)[:, None]


def attend_documents(
    q_BASD: Tensor,
    k_BGSD: Tensor,
    v_BGSD: Tensor,
    documents: Documents,
    is_causal: bool,
    dropout: float,
    window: int = 0,
) -> Tensor:
    """Attention (B, A, S, D) within the documents.

    `window`: to tokens less than so far away, 0 for all; only where `knows_windows`.
    """
    rows, heads, length, _ = q_BASD.shape
    # products of the same dtype: rotary positions leave queries and keys in float32 under autocast
    q, k, v = (x.to(v_BGSD.dtype).transpose(1, 2).flatten(0, 1) for x in (q_BASD, k_BGSD, v_BGSD))
    if q.is_cuda:
        out = _on_cuda(q, k, v, documents, is_causal, dropout, window)
    elif dropout == 0.0 and q.device.type == "cpu":
        out = _attend_on_cpu(q, k, v, documents.bounds_N, is_causal, window)[0]
    else:
        out = None
    if out is None:
        assert not window
        return F.scaled_dot_product_attention(
            q_BASD,
            k_BGSD,
            v_BGSD,
            attn_mask=documents.mask(rows, length, is_causal),
            dropout_p=dropout,
            enable_gqa=k_BGSD.shape[1] != heads,
        )
    return out.unflatten(0, (rows, length)).transpose(1, 2)


def _on_cuda(
    q_TAD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    documents: Documents,
    is_causal: bool,
    dropout: float,
    window: int,
) -> Tensor | None:
    """(T, A, D), or None where this torch has no kernel for it."""
    bounds, longest = documents.bounds_N, documents.longest
    groups = q_TAD.shape[1] // k_TGD.shape[1]
    if has_varlen(q_TAD, dropout):
        from torch.nn.attention.varlen import varlen_attn

        reach = window - 1  # -1 is everything
        sides = (reach, 0 if is_causal else reach)
        inputs = (q_TAD, k_TGD, v_TGD, bounds, bounds, longest, longest)
        return cast(Tensor, varlen_attn(*inputs, window_size=sides, enable_gqa=groups > 1))
    assert not window
    if not hasattr(aten, "_efficient_attention_forward"):
        return None
    k, v = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (k_TGD, v_TGD))
    return aten._efficient_attention_forward(
        q_TAD[None], k[None], v[None], None, bounds, bounds, longest, longest, dropout, int(is_causal), True
    )[0][0]


def knows_windows(q: Tensor, dropout: float) -> bool:
    """Whether documents with such queries (..., D) can have a window too."""
    return has_varlen(q, dropout) or (q.device.type == "cpu" and dropout == 0.0)


def has_varlen(q: Tensor, dropout: float) -> bool:
    """Whether torch's variable-length kernel takes such queries (..., D)."""
    return (
        q.is_cuda
        and q.dtype in HALVES
        and dropout == 0.0
        and q.shape[-1] % 8 == 0
        and hasattr(aten, "_flash_attention_forward")
    )


# One operator, so that a compiler does not look inside: the lengths of the documents are other ones in every batch.
@torch.library.custom_op("throughline::attend_documents", mutates_args=())
def _attend_on_cpu(
    q_TAD: Tensor, k_TGD: Tensor, v_TGD: Tensor, bounds_N: Tensor, is_causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    """(T, A, D), and the log-sum-exp (A, T), which products leave unset."""
    if not _in_products(q_TAD, k_TGD, bounds_N, window):
        bounds = bounds_N.tolist()
        return varlen_forward(q_TAD, k_TGD, v_TGD, bounds, bounds, 0, is_causal, window)
    out = _like(q_TAD)
    for tokens, _, count in equal_runs(bounds_N, bounds_N):
        q, k, v = (_heads_first(x[tokens], count) for x in (q_TAD, k_TGD, v_TGD))
        for here, seen in _pieces(q.shape[1], is_causal, window):
            shares = _shares(q[:, here], k[:, seen], band_bias(here, seen, window, is_causal, q.dtype))
            part = shares @ v[:, seen]
            _view(out[tokens], count)[:, :, here] = part.unflatten(0, (count, -1))
    return out, _log_sums(q_TAD)


@_attend_on_cpu.register_fake
def _(
    q_TAD: Tensor, k_TGD: Tensor, v_TGD: Tensor, bounds_N: Tensor, is_causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    return _like(q_TAD), _log_sums(q_TAD)


@torch.library.custom_op("throughline::attend_documents_backward", mutates_args=())
def _attend_on_cpu_backward(
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
    if not _in_products(q_TAD, k_TGD, bounds_N, window):
        bounds = bounds_N.tolist()
        tensors = (grad_TAD, q_TAD, k_TGD, v_TGD, out_TAD, lse_AT)
        return varlen_backward(*tensors, bounds, bounds, 0, is_causal, window)
    results = _like(q_TAD), _like(k_TGD), _like(v_TGD)
    scale = 1 / math.sqrt(q_TAD.shape[-1])
    for tokens, _, count in equal_runs(bounds_N, bounds_N):
        grad, q, k, v = (_heads_first(x[tokens], count) for x in (grad_TAD, q_TAD, k_TGD, v_TGD))
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for here, seen in _pieces(q.shape[1], is_causal, window):
            shares = _shares(q[:, here], k[:, seen], band_bias(here, seen, window, is_causal, q.dtype))
            dv[:, seen] += shares.mT @ grad[:, here]
            dscores = _through_softmax(grad[:, here] @ v[:, seen].mT, shares)
            dscores *= scale
            dq[:, here] = dscores @ k[:, seen]
            dk[:, seen] += dscores.mT @ q[:, here]
        for whole, part in zip(results, (dq, dk, dv)):
            _view(whole[tokens], count).copy_(part.unflatten(0, (count, -1)))
    return results


@_attend_on_cpu_backward.register_fake
def _(
    grad_TAD: Tensor, q_TAD: Tensor, k_TGD: Tensor, v_TGD: Tensor, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return _like(q_TAD), _like(k_TGD), _like(v_TGD)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.is_causal, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _give_back(ctx: Any, grad_TAD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, bounds, out, lse = ctx.saved_tensors
    rules = bounds, ctx.is_causal, ctx.window
    return *_attend_on_cpu_backward(grad_TAD, q, k, v, out, lse, *rules), None, None, None


torch.library.register_autograd("throughline::attend_documents", _give_back, setup_context=_save)


def _like(x_TAD: Tensor) -> Tensor:
    return torch.empty_like(x_TAD, memory_format=torch.contiguous_format)


def _log_sums(q_TAD: Tensor) -> Tensor:
    return q_TAD.new_empty(q_TAD.shape[1], len(q_TAD), dtype=wide_dtype(q_TAD.dtype))


def _in_products(q_TAD: Tensor, k_TGD: Tensor, bounds_N: Tensor, window: int) -> bool:
    """Whether plain products are the faster kernel of this CPU for these documents."""
    if q_TAD.dtype != torch.bfloat16 or k_TGD.shape != q_TAD.shape:
        return False
    longest = int(bounds_N.diff().amax())
    return longest <= SHORT or 0 < window < longest


def _through_softmax(grad: Tensor, shares: Tensor) -> Tensor:
    """The gradient of scores from that of their softmax."""
    if hasattr(aten, "_softmax_backward_data"):  # one pass; a private operator
        return aten._softmax_backward_data(grad, shares, -1, shares.dtype)
    wide = wide_dtype(shares.dtype)
    parts = grad.to(wide) * shares.to(wide)
    return (parts - shares.to(wide) * parts.sum(-1, keepdim=True)).to(shares.dtype)


def _pieces(length: int, is_causal: bool, window: int) -> Iterator[tuple[slice, slice]]:
    step = min(QUERIES, max(window // 4, 128)) if 0 < window < length else QUERIES if is_causal else length
    return band_slices(length, window, is_causal, step)


def _heads_first(x_TAD: Tensor, count: int) -> Tensor:
    """(R L, A, D) -> (R A, L, D), contiguous."""
    return x_TAD.unflatten(0, (count, -1)).transpose(1, 2).flatten(0, 1)


def _view(x_TAD: Tensor, count: int) -> Tensor:
    """(R L, A, D) -> (R, A, L, D), a view."""
    return x_TAD.unflatten(0, (count, -1)).transpose(1, 2)


def _shares(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    """Softmax of the scores."""
    return torch.baddbmm(bias, q, k.mT, alpha=1 / math.sqrt(q.shape[-1])).softmax(-1)
