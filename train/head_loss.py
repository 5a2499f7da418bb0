"""The last matrix product and the cross-entropy together, over slices of the positions: nothing holds the logits
of all positions, nor their gradient.

A slice's gradient by its logits is computed beside its loss. Where one slice is all, it is kept in the logits'
dtype; of several slices the gradients of the hidden states and of the matrix are kept instead, so no product is done
twice (the way of Liger's kernel, Hsu et al. 2024). Losses, and products of several slices, are added up in
float32 at least: the loss of torch's own `linear_cross_entropy` is a bf16 number in bf16, useless for a curve.

On a GPU the products have a multiple of 64 columns (NVIDIA's guide to matrix products asks for whole tiles, and 50,257
is odd): rows of zeros are put below the matrix for the products alone, so parameters, checkpoints and exports have the
vocabulary's size, and the softmax sees its columns. The copy costs 1 / N of the product.

Shape letters: N positions, W width, V vocabulary (of this process), A the same aligned.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..models.linear import linear
from ..planner.software import LARGE_VOCABULARY
from .loss import CHUNK_LOGITS, IGNORED, cross_entropy_sum
from .precision import wide_dtype

COLUMNS = {"cpu": 1, "cuda": 64}  # of the products, a multiple of
SLICE_LOGITS = {"cpu": 1 << 26, "cuda": 1 << 27}  # at a time: 256 and 512 MiB in float32

# (logits, targets, whether the gradient is wanted) -> sum of the losses, its gradient by the logits in their dtype
Shares = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


def head_loss_sum(
    hidden_NW: Tensor,
    weight_VW: Tensor,
    bias_V: Tensor | None,
    targets_N: Tensor,
    shares: Shares | None = None,
    smoothing: float = 0.0,
) -> Tensor:
    """Sum over the targets that are not IGNORED of the cross-entropies of `hidden @ weight + bias`.

    `shares` computes the softmax: by default over all columns here, with a vocabulary cut over processes
    over those of all. `smoothing` of the target's weight goes to all tokens alike (Szegedy et al. 2016,
    section 7).
    """
    if shares is None and smoothing:
        shares = partial(softmax_shares, smoothing=smoothing)
    if shares is None:
        small = len(weight_VW) < LARGE_VOCABULARY
        if small or (
            torch.compiler.is_compiling() and hidden_NW.device.type == "cpu"
        ):  # the compiler fuses it
            return cross_entropy_sum(linear(hidden_NW, weight_VW, bias_V), targets_N)
        shares = softmax_shares
    if not torch.is_grad_enabled():
        hidden_NW, weight_VW = hidden_NW.detach(), weight_VW.detach()
        bias_V = None if bias_V is None else bias_V.detach()
    return _HeadLoss.apply(hidden_NW, weight_VW, bias_V, targets_N, shares)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NW: Tensor,
        weight_VW: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        shares: Shares,
    ) -> Tensor:
        ctx.dtypes = hidden_NW.dtype, weight_VW.dtype, None if bias_V is None else bias_V.dtype
        wanted = any(ctx.needs_input_grad[:3])
        rows = max(SLICE_LOGITS[hidden_NW.device.type] // len(weight_VW), 1)
        ctx.whole = len(hidden_NW) <= rows
        ctx.vocabulary = len(weight_VW)
        weight_AW = _aligned(weight_VW)
        bias_A = None if bias_V is None else _aligned(bias_V)

        def slice_loss(hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | None]:
            logits_NA = linear(hidden, weight_AW, bias_A)
            loss, gradient = shares(logits_NA[:, : ctx.vocabulary], targets, wanted)
            if gradient is None or gradient.shape == logits_NA.shape:
                return loss, gradient
            if gradient.data_ptr() != logits_NA.data_ptr():
                logits_NA[:, : ctx.vocabulary] = gradient
            return loss, logits_NA  # 0 in the columns of the rows that were put below

        if ctx.whole:
            total, gradient = slice_loss(hidden_NW, targets_N)
            ctx.save_for_backward(gradient, hidden_NW, weight_VW)
            return total
        total = hidden_NW.new_zeros((), dtype=wide_dtype(hidden_NW.dtype))
        hidden_parts: list[Tensor] = []
        sums: list[Tensor | None] = [None, None]
        for hidden, targets in zip(hidden_NW.split(rows), targets_N.split(rows)):
            loss, gradient = slice_loss(hidden, targets)
            total = total + loss
            if gradient is not None:
                for_hidden, *parts = _products(gradient, hidden, weight_AW, ctx.needs_input_grad)
                hidden_parts += [] if for_hidden is None else [for_hidden]
                sums = [_add(x, part) for x, part in zip(sums, parts)]
        ctx.save_for_backward(torch.cat(hidden_parts) if hidden_parts else None, *sums)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.whole:
            gradient, hidden_NW, weight_VW = ctx.saved_tensors
            hidden_NW = hidden_NW * grad.to(hidden_NW.dtype)  # the smallest thing that the factor can go into
            results = list(_products(gradient, hidden_NW, _aligned(weight_VW), ctx.needs_input_grad))
            factors: tuple[Tensor | None, ...] = (grad, None, grad)
        else:
            results, factors = list(ctx.saved_tensors), (grad,) * 3
        for place, (x, factor) in enumerate(zip(results, factors)):
            if x is not None:
                x = x if place == 0 else x[: ctx.vocabulary]
                results[place] = (x if factor is None else x * factor.to(x.dtype)).to(ctx.dtypes[place])
        return *results, None, None


def _aligned(x: Tensor) -> Tensor:
    """A matrix (V, W) or bias (V,) with zeros below; the same tensor where nothing is missing."""
    missing = -len(x) % COLUMNS[x.device.type]
    return x if not missing else torch.cat((x, x.new_zeros((missing, *x.shape[1:]))))


def _products(
    gradient_NA: Tensor, hidden_NW: Tensor, weight_AW: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the hidden states, the aligned matrix and bias, those that are needed."""
    return (
        linear(gradient_NA, weight_AW.t()) if needed[0] else None,
        linear(gradient_NA.t(), hidden_NW.t()) if needed[1] else None,
        gradient_NA.sum(0, dtype=wide_dtype(gradient_NA.dtype)) if needed[2] else None,
    )


def _add(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return None if part is None else part.to(wide_dtype(part.dtype))
    return total.add_(part)


def softmax_shares(
    logits_NV: Tensor, targets_N: Tensor, with_gradient: bool, smoothing: float = 0.0
) -> tuple[Tensor, Tensor | None]:
    """Shares of a whole vocabulary. On a CPU a few rows at a time, while they are in the cache."""
    kept_N, wide = targets_N != IGNORED, wide_dtype(logits_NV.dtype)
    safe_N = targets_N.where(kept_N, 0)
    rows = max(CHUNK_LOGITS // logits_NV.shape[1], 1) if logits_NV.device.type == "cpu" else len(logits_NV)
    at_target_N = logits_NV.gather(1, safe_N[:, None])[:, 0].to(wide)
    if smoothing:  # the logit that the loss is lower by: of the target mostly, and of every token a little
        at_target_N = at_target_N.lerp(logits_NV.mean(-1, dtype=wide), smoothing)
    log_sums = []
    for logits, target, kept in zip(logits_NV.split(rows), safe_N.split(rows), kept_N.split(rows)):
        log_sum = logits.to(wide).logsumexp(-1)
        log_sums.append(log_sum)
        if with_gradient:
            chunk = torch.sub(logits, log_sum[:, None]).exp_()  # in the wider dtype of the two
            taken = torch.full_like(target[:, None], smoothing - 1, dtype=chunk.dtype)
            chunk.scatter_add_(1, target[:, None], taken)
            if smoothing:
                chunk.sub_(smoothing / logits_NV.shape[1])
            torch.mul(chunk, kept[:, None], out=logits)  # in place of the logits, which nobody else has
    loss = ((torch.cat(log_sums) - at_target_N) * kept_N).sum()
    return loss, logits_NV if with_gradient else None
