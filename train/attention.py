"""Which attention kernel a run uses, put into the model from outside.

torch's fused CPU kernel is slow at the backward pass of short bf16 sequences. Forward and backward on one core of an EPYC with
AVX512-BF16: 64 rows of 64 positions, 4 heads of 32, take 35 ms fused and 7 ms in plain products; 4 rows of 256, 12 heads
of 64, take 42 and 23 ms; at 1,024 positions they are equal.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..models.layers import Block, scaled_dot_product

LONGEST = 512  # beyond it the (S, S) scores of every head cost more than the products save


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
    mask: Tensor | None = None,
    is_causal: bool = False,
    dropout: float = 0.0,
) -> Tensor:
    """As `scaled_dot_product`, in plain products for bf16 sequences of at most LONGEST with as many key as query heads."""
    batch, heads, length, size = q_BASD.shape
    places = k_BGTD.shape[2]
    if q_BASD.dtype != torch.bfloat16 or max(length, places) > LONGEST or k_BGTD.shape[1] != heads:
        return scaled_dot_product(q_BASD, k_BGTD, v_BGTD, mask=mask, is_causal=is_causal, dropout=dropout)
    if is_causal:
        mask = torch.ones(length, places, dtype=torch.bool, device=q_BASD.device).tril()
    q, k, v = (x.reshape(batch * heads, -1, size) for x in (q_BASD, k_BGTD, v_BGTD))
    bias = q.new_zeros(())
    if mask is not None:
        bias = mask.to(q.dtype) if mask.is_floating_point() else torch.where(mask, 0.0, -math.inf).to(q.dtype)
        if bias.dim() == 4:
            bias = bias.expand(batch, heads, length, places).reshape(batch * heads, length, places)
    scores = torch.baddbmm(bias, q, k.mT, alpha=1 / math.sqrt(size))
    weights = F.dropout(scores.softmax(-1), dropout)
    return (weights @ v).view(batch, heads, length, size)
