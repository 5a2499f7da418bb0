"""Which keys a query sees, and which kernel computes it: the one place that chooses. And keys kept for generation.

| mask | where | kernel |
|---|---|---|
| none, dense | a CPU in bf16, short rows with as many key as query heads, not for inference | plain products |
| none, dense | else | torch's fused one |
| documents | a CPU without dropout | `attention_cpu.py`, by their bounds |
| documents | CUDA | `attention_cuda.py`, by their bounds |
| documents | else | as with a dense mask |
| any | scores with a soft cap, compiled on CUDA | `attention_cuda.py`, FlexAttention |
| any | scores with a soft cap, else | plain products, S x P scores in float32 |
| none, causal; documents | with sinks, not compiled | as documents, merged with the sinks by the log-sum-exp |
| else | with sinks | plain products, S x P scores in float32 |

torch's fused one is, on a GPU in 16 bits without a mask, cuDNN's from Hopper on and FlashAttention on Ampere and Ada,
the order that torch prefers; with a mask, in 32 bits or before Ampere the memory-efficient kernel.

torch's fused CPU kernel is slow at the backward pass of short bf16 sequences. Forward and backward on one core of an
EPYC with AVX512-BF16: 64 rows of 64 positions, 4 heads of 32, take 35 ms fused and 7 ms in plain products; 4 rows of
256, 12 heads of 64, take 48 and 20 ms. One row of 1,024 takes 78 ms fused, 102 in one plain product, and 60 in one for
every 256 queries, which leaves out the keys to the right of them. The fused kernel rounds less: where nothing is
learnt it is kept.

Shape letters: B rows, S query positions, P key positions, T = B x S tokens, A heads, G key-value heads, D head width,
N documents; of the cache L layers, T places of a row.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from . import attention_cpu, attention_cuda
from .attention_cpu import QUERIES, attend_runs, band_slices, scores_of
from .config import GPTConfig

SHORT_ROW = 1024  # beyond it the (S, S) scores of every head cost more than plain products save


@dataclass(frozen=True)
class Documents:
    """Takes the place of a mask: runs of the flattened (B x S) tokens, which see those of their own run only.

    `bounds_N` (N + 1,) int32 rises from 0 to B x S; equal neighbours are a document without tokens. `longest` is at
    least the length of every document. Attention costs what the documents cost, not what the rows do.
    """

    bounds_N: Tensor
    longest: int
    parted: ClassVar[bool] = False  # whether others have parts of the rows

    def ids(self, rows: int, length: int) -> Tensor:
        """The number of each token's document, (B, S)."""
        places = torch.arange(rows * length, device=self.bounds_N.device)
        return torch.bucketize(places, self.bounds_N[1:], right=True).view(rows, length)

    def mask(self, rows: int, length: int, is_causal: bool) -> Tensor:
        """The same as a dense mask (B, 1, S, S), for what has no other way."""
        ids = self.ids(rows, length)
        same = ids[:, :, None] == ids[:, None, :]
        return (same.tril() if is_causal else same)[:, None]

    def attend(
        self,
        q_BASD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        is_causal: bool,
        dropout: float = 0.0,
        window: int = 0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention (B, A, S, D) within the documents, to tokens less than `window` away (0: all), where
        `knows_windows`. `sinks`: as in `scaled_dot_product`, without dropout.
        """
        rows, _, length, _ = q_BASD.shape
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BASD, k_BGSD, v_BGSD))
        out = None
        if sinks is not None:
            out = attend_beside(q, k, v, sinks, *(self.bounds_N,) * 2, self.longest, is_causal, window)
        elif q.is_cuda:
            out = attention_cuda.attend_runs(q, k, v, self.bounds_N, self.longest, is_causal, dropout, window)
        elif dropout == 0.0 and q.device.type == "cpu":
            out, _ = attend_runs(q, k, v, self.bounds_N, is_causal, window)
        if out is None:
            assert not window
            mask = self.mask(rows, length, is_causal)
            return scaled_dot_product(q_BASD, k_BGSD, v_BGSD, mask=mask, dropout=dropout)
        return out.unflatten(0, (rows, length)).transpose(1, 2)


Mask = Tensor | Documents  # which keys a query sees


def rows_of(q_BASD: Tensor) -> Documents:
    """Each row as a document."""
    rows, _, length, _ = q_BASD.shape
    ends = torch.arange(rows + 1, dtype=torch.int32, device=q_BASD.device)
    return Documents(ends * length, length)


class _Beside(torch.autograd.Function):
    """Attention of runs, beside a sink of each head if there are any: a key without a value, merged as parts of a row
    are in a ring. The kernels' backward of a merged result is that of its part.
    """

    @staticmethod
    def forward(
        ctx: Any, q_TAD: Tensor, k_UGD: Tensor, v_UGD: Tensor, sinks_A: Tensor | None, *rules: Any
    ) -> Tensor:
        *bounds, ctx.longest, ctx.causal, ctx.window = rules
        ctx.kernel = attention_cuda if attention_cuda.has_flash(q_TAD) else attention_cpu
        out, lse_AT = ctx.kernel.forward(q_TAD, k_UGD, v_UGD, *rules)
        if sinks_A is not None:
            whole_AT = torch.logaddexp(lse_AT, sinks_A[:, None].to(lse_AT.dtype))
            out = out * (lse_AT - whole_AT).exp().t()[..., None].to(out.dtype)
            lse_AT = whole_AT
        ctx.save_for_backward(q_TAD, k_UGD, v_UGD, out, lse_AT, *bounds, sinks_A)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TAD: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, sinks_A = ctx.saved_tensors
        found = ctx.kernel.backward(grad_TAD, *tensors, ctx.longest, ctx.causal, ctx.window)
        for_sinks = None if sinks_A is None else sink_gradient(sinks_A, grad_TAD, *tensors[3:5])
        return *found, for_sinks, *(None,) * 5


attend_beside = _Beside.apply


def sink_gradient(sinks_A: Tensor, grad_TAD: Tensor, out_TAD: Tensor, lse_AT: Tensor) -> Tensor:
    """Of the sinks that a result and its log-sum-exp have in them."""
    shares_AT = (sinks_A[:, None] - lse_AT).exp()
    return -(shares_AT * (grad_TAD.to(lse_AT.dtype) * out_TAD).sum(-1).t()).sum(1).to(sinks_A.dtype)


def knows_windows(q: Tensor, dropout: float) -> bool:
    """Whether documents with such queries (..., D) can have a window too."""
    return dropout == 0.0 and (q.device.type == "cpu" or attention_cuda.has_flash(q))


def scaled_dot_product(
    q_BASD: Tensor,
    k_BGPD: Tensor,
    v_BGPD: Tensor,
    *,
    mask: Mask | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Softmax attention (B, A, S, D).

    `mask` broadcasts to (B, A, S, P): True (or 0.0) where a query may look, False (or -inf) where not; or it is the
    documents of the rows. With `is_causal` and no dense mask nothing is computed to the right of the diagonal.
    `softcap` c, without dropout: scores x become c tanh(x / c) first. `sinks` (A,), without dropout: scores beside
    those of each query, whose share of the softmax goes to no value.
    """
    whole = is_causal and q_BASD.shape[2] == k_BGPD.shape[2] and not isinstance(mask, Tensor)
    whole = whole and knows_windows(v_BGPD, dropout)  # and a kernel for runs, which give their log-sum-exp
    if softcap or (sinks is not None and (torch.compiler.is_compiling() or not whole)):
        return _attend_plainly(q_BASD, k_BGPD, v_BGPD, mask, is_causal, softcap, sinks)
    if sinks is not None:
        runs = mask if isinstance(mask, Documents) else rows_of(q_BASD)
        return runs.attend(q_BASD, k_BGPD, v_BGPD, is_causal, sinks=sinks)
    if isinstance(mask, Documents):
        return mask.attend(q_BASD, k_BGPD, v_BGPD, is_causal, dropout)
    if _is_short(q_BASD, k_BGPD):
        return _attend_short(q_BASD, k_BGPD, v_BGPD, mask, is_causal, dropout)
    grouped = k_BGPD.shape[1] != q_BASD.shape[1]
    if grouped and q_BASD.is_cuda and (mask is not None or not attention_cuda.has_flash(q_BASD)):
        # torch's memory-efficient kernel, which is left, takes as many key heads as query heads
        groups, grouped = q_BASD.shape[1] // k_BGPD.shape[1], False
        k_BGPD, v_BGPD = (x.repeat_interleave(groups, 1) for x in (k_BGPD, v_BGPD))
    return F.scaled_dot_product_attention(
        q_BASD, k_BGPD, v_BGPD, attn_mask=mask, is_causal=is_causal, dropout_p=dropout, enable_gqa=grouped
    )


def _is_short(q_BASD: Tensor, k_BAPD: Tensor) -> bool:
    """Whether plain products, whose shares torch keeps for backward, are the faster kernel."""
    return (
        q_BASD.device.type == "cpu"
        and q_BASD.dtype == torch.bfloat16
        and q_BASD.shape[1] == k_BAPD.shape[1]
        and max(q_BASD.shape[2], k_BAPD.shape[2]) <= SHORT_ROW
        and (torch.compiler.is_compiling() or not torch.is_inference_mode_enabled())
    )


def _attend_short(
    q_BASD: Tensor, k_BAPD: Tensor, v_BAPD: Tensor, mask: Tensor | None, is_causal: bool, dropout: float
) -> Tensor:
    batch, heads, length, _ = q_BASD.shape
    places = k_BAPD.shape[2]
    q, k, v = (x.flatten(0, 1) for x in (q_BASD, k_BAPD, v_BAPD))
    bias = q.new_zeros(())
    if mask is not None:
        bias = mask if mask.is_floating_point() else torch.where(mask, 0.0, -math.inf)
        if bias.dim() == 4:
            bias = bias.expand(batch, heads, length, places).flatten(0, 1)
    parts = []
    for here, seen in band_slices(length, places, 0, is_causal, QUERIES if is_causal else length):
        if is_causal:
            bias = q.new_full((here.stop - here.start, seen.stop), -math.inf).triu(here.start + 1)
        shares = scores_of(q[:, here], k[:, seen], bias.to(q.dtype)).softmax(-1)
        parts.append(F.dropout(shares, dropout) @ v[:, seen])
    return (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).unflatten(0, (batch, heads))


def _attend_plainly(
    q_BASD: Tensor,
    k_BGPD: Tensor,
    v_BGPD: Tensor,
    mask: Mask | None,
    is_causal: bool,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    (rows, _, length, size), groups = q_BASD.shape, k_BGPD.shape[1]
    biased = isinstance(mask, Tensor) and mask.dtype != torch.bool
    if attention_cuda.has_flex(q_BASD) and not biased and sinks is None:
        seen = mask.ids(rows, length) if isinstance(mask, Documents) else None
        if isinstance(mask, Tensor):
            seen = mask.expand(rows, *mask.shape[-3:])[:, 0] if mask.dim() > 2 else mask.expand(rows, -1, -1)
            is_causal = False
        return attention_cuda.attend_capped(q_BASD, k_BGPD, v_BGPD, seen, is_causal, softcap)
    if isinstance(mask, Documents):
        mask = mask.mask(rows, length, is_causal)
    elif mask is None and is_causal:
        mask = torch.ones(length, k_BGPD.shape[2], dtype=torch.bool, device=q_BASD.device).tril()
    q, k, v = q_BASD.unflatten(1, (groups, -1)), k_BGPD[:, :, None], v_BGPD[:, :, None]
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32))  # (B, G, A / G, S, P)
    if softcap:
        scores = torch.tanh(scores / (math.sqrt(size) * softcap)) * softcap
    else:
        scores = scores / math.sqrt(size)
    if mask is not None:
        mask = mask[:, :, None] if mask.dim() == 4 else mask
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask, -math.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(groups, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), -1)
    shares = scores.softmax(-1)[..., : k.shape[-2]]
    return (shares.to(v.dtype) @ v).flatten(1, 2)


class KeyValueCache:
    """Keys and values of the tokens read so far, where and as `like` is: `places` in each of `rows` sequences."""

    def __init__(self, config: GPTConfig, rows: int, places: int, like: Tensor) -> None:
        self.rows, self.places, sizes = rows, places, [config.key_value_heads, places]
        # a GPU's kernels read runs of tokens, a CPU's the tokens of a head
        shape = (config.layers, rows, *(sizes[::-1] if like.is_cuda else sizes), config.head_size)
        # zeros, not empty: a masked place still enters a product with probability 0, and 0 x NaN is NaN
        stores = (torch.zeros(shape, device=like.device, dtype=like.dtype) for _ in range(2))
        self.keys_LBGTD, self.values_LBGTD = (x.transpose(2, 3) if like.is_cuda else x for x in stores)
        self.held = [0] * rows  # tokens of each row
        self.steps: dict[tuple[int, int], Any] = {}  # captured, for who runs them

    @property
    def token_bytes(self) -> int:
        """What a token of a row takes."""
        return 2 * self.keys_LBGTD.nbytes // (self.places * self.rows)

    @property
    def has_flash(self) -> bool:
        """Whether a kernel with bounds reads it."""
        return attention_cuda.has_flash(self.keys_LBGTD)
