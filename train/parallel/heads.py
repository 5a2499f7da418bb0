"""Heads and losses of a stage that ends the model, with the vocabulary cut over the tensor axis.

No process ever holds logits or gradients of the whole vocabulary: the softmax is normalised by sums over the axis (Shoeybi et
al. 2019, section 3).

Shape letters: B batch, S positions of a row (of this context part), P of this tensor process, T = B x S, W width,
N predicted positions, V vocabulary (here).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...models.linear import linear
from ..loss import cross_entropy_sum
from ..objective import IGNORED, Batch
from .mesh import Axis
from .plan import even_part
from .tensor import column_linear, computing_dtype, gather_same, sum_gradient

Model = Any  # a GPT or a BERT, perhaps cut: nn.Module promises none of their attributes


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax at the targets, from logits of which each process has some columns."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, first_id: int, axis: Axis) -> Tensor:
        dtype = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
        peak_N = axis.all_reduce(logits_NV.amax(-1).to(dtype), dist.ReduceOp.MAX)
        shares_NV = logits_NV.to(dtype) - peak_N[:, None]
        local_N = targets_N - first_id
        held_N = (local_N >= 0) & (local_N < logits_NV.shape[1])
        index_N = local_N.where(held_N, 0)
        at_target_N = shares_NV.gather(1, index_N[:, None])[:, 0] * held_N
        total_N, at_target_N = axis.all_reduce(torch.stack((shares_NV.exp_().sum(-1), at_target_N)))
        valid_N = targets_N != IGNORED
        shares_NV /= total_N[:, None]
        ctx.dtype = logits_NV.dtype
        ctx.save_for_backward(shares_NV, index_N, held_N, valid_N)
        return ((total_N.log() - at_target_N) * valid_N).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shares_NV, index_N, held_N, valid_N = ctx.saved_tensors
        factor_N = valid_N * grad
        grad_NV = shares_NV.mul_(factor_N[:, None])  # in place: the largest tensor of the step, used once
        grad_NV.scatter_add_(1, index_N[:, None], -(held_N * factor_N)[:, None])
        return grad_NV.to(ctx.dtype), None, None, None


def vocabulary_cross_entropy(logits_NV: Tensor, targets_N: Tensor, vocab_size: int, axis: Axis) -> Tensor:
    """Sum over targets (ignored ones left out) of the cross-entropy; the same on every process of the axis.

    `logits_NV` are the columns of this process. Computed in float32 at least.
    """
    return _VocabularyCrossEntropy.apply(
        logits_NV, targets_N, even_part(vocab_size, axis.size, axis.rank)[0], axis
    )


def gpt_logits(model: Model, hidden_BPW: Tensor, axis: Axis) -> Tensor:
    """Logits (B x S, V) of every position, this process's columns."""
    if axis.group is None:
        return model.head(hidden_BPW).flatten(0, 1)
    return column_linear(hidden_BPW, model.output_weight(), None, axis).flatten(0, 1)


def mlm_logits(model: Model, hidden_NW: Tensor, axis: Axis) -> Tensor:
    """Logits (N, V) of the predicted positions, this process's columns."""
    if axis.group is None:
        return model.mlm_head(hidden_NW)
    features_NW = model.mlm_features(hidden_NW)
    features_NW = features_NW.to(
        computing_dtype(features_NW)
    )  # as the product casts it: so the gradient is summed in as few bytes
    return linear(sum_gradient(features_NW, axis), model.token_table.weight, model.mlm_bias)


def loss_sum(model: Model, logits_NV: Tensor, targets_N: Tensor, axis: Axis) -> Tensor:
    """Sum of the cross-entropies (scalar), the same on every process of the axis."""
    if axis.group is None:
        return cross_entropy_sum(logits_NV, targets_N)
    return vocabulary_cross_entropy(logits_NV, targets_N, model.config.vocab_size, axis)


def gpt_sums(model: Model, hidden_BPW: Tensor, batch: Batch, axis: Axis) -> Tensor:
    """The sum of next-token losses of a micro-batch: (1,)."""
    return loss_sum(model, gpt_logits(model, hidden_BPW, axis), batch["targets"].flatten(), axis).view(1)


def bert_sums(model: Model, hidden_BPW: Tensor, batch: Batch, axis: Axis) -> Tensor:
    """The sums of masked-token and sentence-pair losses of a micro-batch: (2,)."""
    hidden_TW = gather_same(hidden_BPW, axis).flatten(0, 1)
    logits_NV = mlm_logits(model, hidden_TW.index_select(0, batch["predicted"]), axis)
    masked = loss_sum(model, logits_NV, batch["predicted_targets"], axis)
    if "pairs" in batch:
        pairs = cross_entropy_sum(
            model.nsp_head(hidden_TW.index_select(0, batch["pairs"])), batch["pair_targets"]
        )
    else:
        pairs = torch.zeros_like(masked)
    return torch.stack((masked, pairs))


def gpt_figures(model: Model, hidden_BPW: Tensor, batch: Batch, axis: Axis) -> Tensor:
    """What `evaluate.gpt_sums` counts, (5,) float64: sum of losses, count of targets, 0, 0, 0."""
    targets = batch["targets"].flatten()
    loss = loss_sum(model, gpt_logits(model, hidden_BPW, axis), targets, axis)
    count = (targets != IGNORED).sum()
    return torch.stack((loss.double(), count.double(), *loss.new_zeros(3).double()))


def bert_figures(model: Model, hidden_BPW: Tensor, batch: Batch, axis: Axis) -> Tensor:
    """What `evaluate.bert_sums` counts, (5,) float64: masked loss, right ones, count; right pairs, count."""
    hidden_TW = gather_same(hidden_BPW, axis).flatten(0, 1)
    targets = batch["predicted_targets"]
    logits_NV = mlm_logits(model, hidden_TW.index_select(0, batch["predicted"]), axis)
    right = (largest(model, logits_NV, axis) == targets).sum()
    figures = [loss_sum(model, logits_NV, targets, axis), right, (targets != IGNORED).sum()]
    if "pairs" in batch:
        pairs = batch["pair_targets"]
        chosen = model.nsp_head(hidden_TW.index_select(0, batch["pairs"])).argmax(-1)
        figures += [(chosen == pairs).sum(), (pairs != IGNORED).sum()]
    else:
        figures += [torch.zeros_like(right)] * 2
    return torch.stack([figure.double() for figure in figures])


def largest(model: Model, logits_NV: Tensor, axis: Axis) -> Tensor:
    """The id (N,) of the largest logit, of all columns."""
    value_N, index_N = logits_NV.max(-1)
    if axis.group is None:
        return index_N
    top_N = axis.all_reduce(value_N.clone(), dist.ReduceOp.MAX)
    first_id = even_part(model.config.vocab_size, axis.size, axis.rank)[0]
    candidate_N = torch.where(value_N == top_N, index_N + first_id, model.config.vocab_size)
    return axis.all_reduce(candidate_N, dist.ReduceOp.MIN)
