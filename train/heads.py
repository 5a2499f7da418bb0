"""Heads and losses of a stage that ends the model, with the vocabulary cut over the tensor axis.

No process ever holds logits or gradients of the whole vocabulary: the softmax is normalised by sums over the
axis (Shoeybi et al. 2019, section 3).

Shape letters: B batch, S positions of a row (of this context part), P of this tensor process, T = B x S, W
width, N predicted positions, V vocabulary (here).
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..models.linear import linear
from ..planner.tables import even_part
from .head_loss import Shares, head_loss_sum, softmax_shares
from .loss import cross_entropy_sum
from .objective import IGNORED, Batch
from .parallel.mesh import Axis
from .parallel.tensor import gather_rows, gather_same, sum_gradient
from .precision import wide_dtype

Model = Any  # a GPT or a BERT, perhaps cut: nn.Module promises none of their attributes


def vocabulary_shares(
    logits_NV: Tensor,
    targets_N: Tensor,
    with_gradient: bool,
    *,
    first_id: int,
    axis: Axis,
    vocabulary: int,
    smoothing: float = 0.0,
) -> tuple[Tensor, Tensor | None]:
    """`head_loss.Shares` of logits of which each process of the axis has some columns: the sum of the losses is
    the same on every one. Computed in float32 at least.
    """
    peak_N = axis.all_reduce(logits_NV.amax(-1).to(wide_dtype(logits_NV.dtype)), dist.ReduceOp.MAX)
    shares_NV = logits_NV - peak_N[:, None]
    local_N = targets_N - first_id
    held_N = (local_N >= 0) & (local_N < logits_NV.shape[1])
    index_N = local_N.where(held_N, 0)
    at_target_N = shares_NV.gather(1, index_N[:, None])[:, 0] * held_N
    if smoothing:
        at_target_N = (1 - smoothing) * at_target_N + smoothing / vocabulary * shares_NV.sum(-1)
    total_N, at_target_N = axis.all_reduce(torch.stack((shares_NV.exp_().sum(-1), at_target_N)))
    valid_N = targets_N != IGNORED
    loss = ((total_N.log() - at_target_N) * valid_N).sum()
    if not with_gradient:
        return loss, None
    shares_NV.mul_((valid_N / total_N)[:, None])
    taken_N = (smoothing - 1) * (held_N & valid_N).to(shares_NV.dtype)
    shares_NV.scatter_add_(1, index_N[:, None], taken_N[:, None])
    if smoothing:
        shares_NV.sub_(valid_N[:, None].to(shares_NV.dtype), alpha=smoothing / vocabulary)
    return loss, shares_NV.to(logits_NV.dtype)


def cut_shares(model: Model, axis: Axis, smoothing: float = 0.0) -> Shares | None:
    """How a stage's loss computes the softmax; None where the vocabulary is whole."""
    if axis.group is None:
        return None
    vocabulary = model.config.vocab_size
    first_id = even_part(vocabulary, axis.size, axis.rank)[0]
    return partial(
        vocabulary_shares, first_id=first_id, axis=axis, vocabulary=vocabulary, smoothing=smoothing
    )


def mlm_logits(model: Model, hidden_NW: Tensor, axis: Axis) -> Tensor:
    """Logits (N, V) of the predicted positions, this process's columns."""
    if axis.group is None:
        return model.mlm_head(hidden_NW)
    features_NW = model.mlm_features(hidden_NW)
    return linear(sum_gradient(features_NW, axis), model.token_table.weight, model.mlm_bias)


def gpt_sums(model: Model, hidden_BPW: Tensor, batch: Batch, axis: Axis) -> Tensor:
    """The sum of next-token losses of a micro-batch: (1,)."""
    hidden_NW, targets_N = gather_rows(hidden_BPW, axis).flatten(0, 1), batch["targets"].flatten()
    return head_loss_sum(hidden_NW, model.output_weight(), None, targets_N, cut_shares(model, axis)).view(1)


def bert_sums(model: Model, hidden_BPW: Tensor, batch: Batch, axis: Axis, smoothing: float = 0.0) -> Tensor:
    """The sums of masked-token and sentence-pair losses of a micro-batch: (2,)."""
    hidden_TW = gather_same(hidden_BPW, axis).flatten(0, 1)
    features_NW = sum_gradient(model.mlm_features(hidden_TW.index_select(0, batch["predicted"])), axis)
    masked = head_loss_sum(
        features_NW,
        model.token_table.weight,
        model.mlm_bias,
        batch["predicted_targets"],
        cut_shares(model, axis, smoothing),
        smoothing,
    )
    if "pairs" in batch:
        pairs = cross_entropy_sum(
            model.nsp_head(hidden_TW.index_select(0, batch["pairs"])), batch["pair_targets"]
        )
    else:
        pairs = torch.zeros_like(masked)
    return torch.stack((masked, pairs))


def gpt_figures(model: Model, hidden_BPW: Tensor, batch: Batch, axis: Axis) -> Tensor:
    """What a validation counts, (5,) float64: sum of losses, count of targets, 0, 0, 0."""
    (loss,) = gpt_sums(model, hidden_BPW, batch, axis)
    count = (batch["targets"] != IGNORED).sum()
    return torch.stack((loss.double(), count.double(), *loss.new_zeros(3).double()))


def bert_figures(model: Model, hidden_BPW: Tensor, batch: Batch, axis: Axis) -> Tensor:
    """What a validation counts, (5,) float64: masked loss, right ones, count; right pairs, count."""
    hidden_TW = gather_same(hidden_BPW, axis).flatten(0, 1)
    targets = batch["predicted_targets"]
    logits_NV = mlm_logits(model, hidden_TW.index_select(0, batch["predicted"]), axis)
    right = (largest(model, logits_NV, axis) == targets).sum()
    shares = cut_shares(model, axis) or softmax_shares
    figures = [shares(logits_NV, targets, False)[0], right, (targets != IGNORED).sum()]
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


FIGURES = {"gpt": gpt_figures, "bert": bert_figures}
