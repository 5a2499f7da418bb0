"""Which attention kernel a run uses, put into the model from outside.

torch's fused CPU kernel is slow at the backward pass of short bf16 sequences. Forward and backward on one
core of an EPYC with AVX512-BF16: 64 rows of 64 positions, 4 heads of 32, take 35 ms fused and 7 ms in plain
products; 4 rows of 256, 12 heads of 64, take 48 and 20 ms. One row of 1,024 takes 78 ms fused, 102 in one
plain product, and 60 in one for every 256 queries, which leaves out the keys to the right of them (67 for 128
queries, 80 for 512).
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models.documents import Documents
from ..models.layers import Block, Mask, scaled_dot_product

LONGEST = 1024  # beyond it the (S, S) scores of every head cost more than the products save
QUERIES = 256  # of a causal sequence at a time


def fit_attention(model: nn.Module, device: torch.device, precision: str) -> None:
    """Give the model the faster kernel where torch's default is not."""
    if device.type == "cpu" and precision == "bf16":
        for block in cast(nn.ModuleDict, model.blocks).values():
            attention = cast(Block, block).attention
            if attention.attend is scaled_dot_product:  # a pattern keeps its own
                attention.attend = short_attention


def short_attention(
    q_BASD: Tensor,
    k_BGTD: Tensor,
    v_BGTD: Tensor,
    *,
    mask: Mask | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """As `scaled_dot_product`, in plain products for bf16 sequences of at most LONGEST with as many key as
    query heads.
    """
    batch, heads, length, size = q_BASD.shape
    places = k_BGTD.shape[2]
    if (
        isinstance(mask, Documents)
        or q_BASD.dtype != torch.bfloat16
        or max(length, places) > LONGEST
        or k_BGTD.shape[1] != heads
    ):
        return scaled_dot_product(q_BASD, k_BGTD, v_BGTD, mask=mask, is_causal=is_causal, dropout=dropout)
    q, k, v = (x.reshape(batch * heads, -1, size) for x in (q_BASD, k_BGTD, v_BGTD))
    if is_causal:
        starts = range(0, length, QUERIES)
        parts = [_causal(q[:, start : start + QUERIES], k, v, start, dropout) for start in starts]
        return (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).view(batch, heads, length, size)
    bias = q.new_zeros(())
    if mask is not None:
        bias = mask.to(q.dtype) if mask.is_floating_point() else torch.where(mask, 0.0, -math.inf).to(q.dtype)
        if bias.dim() == 4:
            bias = bias.expand(batch, heads, length, places).reshape(batch * heads, length, places)
    return _products(q, k, v, bias, dropout).view(batch, heads, length, size)


def _causal(q: Tensor, k: Tensor, v: Tensor, start: int, dropout: float) -> Tensor:
    """The queries that stand at `start` and after it, over the keys up to the last of them."""
    stop = start + q.shape[1]
    right = torch.ones(q.shape[1], stop, dtype=torch.bool, device=q.device).triu(start + 1)
    return _products(q, k[:, :stop], v[:, :stop], torch.where(right, -math.inf, 0.0).to(q.dtype), dropout)


def _products(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout: float) -> Tensor:
    scores = torch.baddbmm(bias, q, k.mT, alpha=1 / math.sqrt(q.shape[-1]))
    return F.dropout(scores.softmax(-1), dropout) @ v
