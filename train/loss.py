"""The losses: sums over targets, and what a validation counts, with the vocabulary whole or cut over the tensor axis.

Of a large vocabulary the last matrix product and the softmax go together, over slices of the positions: nothing holds
the logits of all positions, nor their gradient, which is computed beside the loss and in place of them. Where one
slice is all, it is kept; of several the gradients of the hidden states and of the matrix are kept instead, so no
product is done twice (the way of Liger's kernel, Hsu et al. 2024). Sums are in float32 at least: the loss of torch's
own `linear_cross_entropy` is a bf16 number in bf16, useless for a curve.

Shape letters: B batch, S positions of a row (of this context part), P of this tensor process, T = B x S, W width, N
predicted positions, V vocabulary (of this process), A the same with rows of zeros (`pad_vocabulary`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..models.experts import Routing
from ..models.linear import linear
from ..planner.tables import even_part
from ..planner.work import LARGE_VOCABULARY
from .parallel.mesh import ALONE, Axis, reduced
from .parallel.tensor import gather_rows, gather_same, sum_gradient

IGNORED = -100
COLUMNS = {"cpu": 1, "cuda": 64}  # of the products, a multiple of
SLICE_LOGITS = {"cpu": 1 << 26, "cuda": 1 << 27}  # at a time: 256 and 512 MiB in float32
CHUNK_LOGITS = 1 << 20  # on a CPU, worked on while they are in the cache: 4 MiB in float32

Batch = dict[str, Tensor]
Model = Any  # a GPT or a BERT, perhaps cut: nn.Module promises none of their attributes
Sums = Callable[[Model, Tensor, Batch, Axis], Tensor]  # of the last hidden states


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over numbers of this dtype are kept in, and what an optimizer moves for weights of it."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Words:
    """The words of a vocabulary of `size` whose logits this process of the axis has."""

    size: int
    axis: Axis

    @property
    def first(self) -> int:
        return even_part(self.size, self.axis.size, self.axis.rank)[0]

    @property
    def count(self) -> int:
        return even_part(self.size, self.axis.size, self.axis.rank)[1]


def pad_vocabulary(model: Model, device: torch.device) -> None:
    """Give the matrix of the head, and its bias, whole tiles of rows (NVIDIA's guide to matrix products; 50,257 is
    odd). The model, perhaps cut, is on the meta device: whoever fills it makes the rows below its words 0. The engine
    moves and saves the words' rows alone, and the softmax sees their columns.
    """
    output = getattr(model, "output", None)
    owners = (model.token_table, "weight"), (output, "weight"), (output, "bias"), (model, "mlm_bias")
    for owner, name in owners:
        parameter = getattr(owner, name, None)
        if parameter is not None and (missing := -len(parameter) % COLUMNS[device.type]):
            shape = (len(parameter) + missing, *parameter.shape[1:])
            setattr(owner, name, nn.Parameter(parameter.new_empty(shape)))


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Sum of the cross-entropies (scalar) over the targets that are not IGNORED, of few or small logits."""
    logits_NV = logits_NV.to(wide_dtype(logits_NV.dtype))
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")


def softmax_loss(
    logits_NV: Tensor, targets_N: Tensor, words: Words, wanted: bool, smoothing: float = 0, z_loss: float = 0
) -> Tensor:
    """Sums (2,) of the cross-entropies of all words, and of `z_loss` times the squares of their log-sum-exps (Chowdhery
    et al. 2022, section 5), the same on every process. Where it is `wanted` the logits become the gradient by both.

    On a CPU a few rows at a time; with a cut vocabulary all, for the softmax is normalised by sums over the axis
    (Shoeybi et al. 2019, section 3).
    """
    wide, cut = wide_dtype(logits_NV.dtype), words.axis.group is not None
    rows = CHUNK_LOGITS // words.count if logits_NV.device.type == "cpu" and not cut else len(logits_NV)
    losses, squares = [], []
    for logits, targets in zip(logits_NV.split(max(rows, 1)), targets_N.split(max(rows, 1))):
        kept_N, local_N = targets != IGNORED, targets - words.first
        held_N = kept_N & (local_N >= 0) & (local_N < words.count)
        index_N1 = local_N.where(held_N, 0)[:, None]
        chosen_N = logits.gather(1, index_N1)[:, 0].to(wide) * held_N
        if smoothing:  # the logit that the loss is lower by: of the target mostly, and of every word a little
            chosen_N = chosen_N * (1 - smoothing) + logits.sum(-1, dtype=wide) * (smoothing / words.size)
        log_sum_N = logits.to(wide).logsumexp(-1)
        if cut:
            peak_N = reduced(log_sum_N, words.axis, "max")
            parts = torch.stack(((log_sum_N - peak_N).exp(), chosen_N))
            total_N, chosen_N = reduced(parts, words.axis, "sum").unbind()
            log_sum_N = peak_N + total_N.log()
        losses.append((log_sum_N - chosen_N) * kept_N)
        squares.append(log_sum_N.square() * kept_N)
        if wanted:
            shares = torch.sub(logits, log_sum_N[:, None]).exp_()  # in the wider dtype of the two
            if z_loss:
                shares.mul_(1 + 2 * z_loss * log_sum_N[:, None])
            shares.scatter_add_(1, index_N1, (smoothing - 1) * held_N[:, None].to(shares.dtype))
            if smoothing:
                shares.sub_(smoothing / words.size)
            logits.copy_(shares.mul_(kept_N[:, None]))
    return torch.stack((torch.cat(losses).sum(), z_loss * torch.cat(squares).sum()))


def head_loss_sum(
    hidden_NW: Tensor,
    weight_AW: Tensor,
    bias_A: Tensor | None,
    targets_N: Tensor,
    words: Words | None = None,
    smoothing: float = 0.0,
    softcap: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Sum (1,) over the targets that are not IGNORED of the cross-entropies of `hidden @ weight + bias`; with `z_loss`
    that of `softmax_loss` besides: (2,), whose gradients must be equal.

    `words` are those of the matrix, by default all of its rows. `smoothing` of the target's weight goes to all
    words alike (Szegedy et al. 2016, section 7). `softcap` c: logits x are c tanh(x / c) instead (Gemma 2).
    """
    words = words or Words(len(weight_AW), ALONE)
    if words.axis.group is None and not smoothing and not z_loss and words.size < LARGE_VOCABULARY:
        logits_NA = linear(hidden_NW, weight_AW, bias_A)
        logits_NA = torch.tanh(logits_NA / softcap) * softcap if softcap else logits_NA
        whole = words.size == logits_NA.shape[1]  # backward of a slice would copy
        return cross_entropy_sum(logits_NA if whole else logits_NA[:, : words.size], targets_N).view(1)
    if not torch.is_grad_enabled():
        hidden_NW, weight_AW = hidden_NW.detach(), weight_AW.detach()
        bias_A = None if bias_A is None else bias_A.detach()
    sums = _HeadLoss.apply(hidden_NW, weight_AW, bias_A, targets_N, words, smoothing, softcap, z_loss)
    return sums if z_loss else sums[:1]


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_NW: Tensor, weight_AW: Tensor, bias_A: Tensor | None, *how: Any) -> Tensor:
        targets_N, words, smoothing, softcap, z_loss = how
        ctx.dtypes = hidden_NW.dtype, weight_AW.dtype, None if bias_A is None else bias_A.dtype
        wanted = any(ctx.needs_input_grad[:3])
        rows = max(SLICE_LOGITS[hidden_NW.device.type] // len(weight_AW), 1)
        ctx.whole = len(hidden_NW) <= rows
        total = hidden_NW.new_zeros(2, dtype=wide_dtype(hidden_NW.dtype))
        hidden_parts: list[Tensor] = []
        sums: list[Tensor | None] = [None, None]
        for hidden, targets in zip(hidden_NW.split(rows), targets_N.split(rows)):
            gradient = linear(hidden, weight_AW, bias_A)  # the logits; 0 below the words
            bent = torch.tanh(gradient / softcap) if softcap else None
            gradient = gradient if bent is None else bent * softcap
            logits = gradient[:, : words.count]
            total = total + softmax_loss(logits, targets, words, wanted, smoothing, z_loss)
            if bent is not None:
                gradient.mul_(1 - bent * bent)
            if ctx.whole:
                ctx.save_for_backward(gradient if wanted else None, hidden_NW, weight_AW)
            elif wanted:
                for_hidden, *parts = _products(gradient, hidden, weight_AW, ctx.needs_input_grad)
                hidden_parts += [] if for_hidden is None else [for_hidden]
                sums = [_add(x, part) for x, part in zip(sums, parts)]
                del gradient, parts  # before the next slice has its own
        if not ctx.whole:
            ctx.save_for_backward(torch.cat(hidden_parts) if hidden_parts else None, *sums)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        if ctx.whole:
            gradient, hidden_NW, weight_AW = ctx.saved_tensors
            hidden_NW = hidden_NW * grad.to(hidden_NW.dtype)  # the smallest thing that the factor can go into
            results = list(_products(gradient, hidden_NW, weight_AW, ctx.needs_input_grad))
            factors: tuple[Tensor | None, ...] = (grad, None, grad)
        else:
            results, factors = list(ctx.saved_tensors), (grad,) * 3
        for place, (x, factor, dtype) in enumerate(zip(results, factors, ctx.dtypes)):
            if x is not None:
                results[place] = (x if factor is None else x * factor.to(x.dtype)).to(dtype)
        return *results, None, None, None, None, None


def _products(
    gradient_NA: Tensor, hidden_NW: Tensor, weight_AW: Tensor, needed: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    return (
        linear(gradient_NA, weight_AW.t()) if needed[0] else None,
        linear(gradient_NA.t(), hidden_NW.t()) if needed[1] else None,
        gradient_NA.sum(0, dtype=wide_dtype(gradient_NA.dtype)) if needed[2] else None,
    )


def _add(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return None if part is None else part.to(wide_dtype(part.dtype))
    return total.add_(part)


def gpt_sums(model: Model, hidden_BPW: Tensor, batch: Batch, axis: Axis, z_loss: float = 0.0) -> Tensor:
    """The sums of next-token losses of a micro-batch, and of their z-losses if there are any: (1,) or (2,)."""
    hidden_BSW = hidden_BPW if axis.group is None else gather_rows(hidden_BPW, axis)
    hidden_NW, targets_N = hidden_BSW.flatten(0, 1), batch["targets"].flatten()
    words = Words(model.config.vocab_size, axis)
    head, softcap = (model.output_weight(), model.output_bias()), model.config.logit_softcap
    return head_loss_sum(hidden_NW, *head, targets_N, words, softcap=softcap, z_loss=z_loss)


def router_sums(routing: Routing, chosen_RE: Tensor) -> Tensor:
    """Of the tokens here the sums of a router's losses, of the entropy of its scores, and of answers dropped: (4,).

    `chosen_RE` counts how often each row, with its parts on other processes, chose each expert. The balance loss of a
    token is the sum over experts of its score, as a share of all, times the expert's load in the row over the mean one:
    1 where all are loaded alike (Fedus et al. 2021, equation 4, row by row as DeepSeek-V3's: so it depends on no
    layout). The other is the square of the logits' log-sum-exp (Zoph et al. 2022, ST-MoE, equation 5).
    """
    scores_NE = routing.scores_NE / routing.scores_NE.sum(-1, keepdim=True)
    load_RE = chosen_RE / chosen_RE.mean(-1, keepdim=True)
    balance = (scores_NE.unflatten(0, (len(load_RE), -1)).sum(1) * load_RE.to(scores_NE.dtype)).sum()
    entropy = -torch.special.xlogy(scores_NE, scores_NE).sum()
    none = balance.new_zeros(())
    dropped = none if routing.dropped_NK is None else routing.dropped_NK.sum().to(none.dtype)
    return torch.stack((balance, routing.logits_NE.logsumexp(-1).square().sum(), entropy.detach(), dropped))


def bert_sums(model: Model, hidden_BPW: Tensor, batch: Batch, axis: Axis, smoothing: float = 0.0) -> Tensor:
    """Sums (2,) of masked-token losses, their labels smoothed, and sentence-pair losses, where there are targets."""
    hidden_TW, words = _whole_rows(hidden_BPW, axis), Words(model.config.vocab_size, axis)
    features_NW = model.mlm_features(hidden_TW.index_select(0, batch["predicted"]))
    features_NW = features_NW if axis.group is None else sum_gradient(features_NW, axis)
    head, targets_N = (model.token_table.weight, model.mlm_bias), batch["predicted_targets"]
    masked = head_loss_sum(features_NW, *head, targets_N, words, smoothing)
    if "pairs" in batch:
        pair_logits = model.nsp_head(hidden_TW.index_select(0, batch["pairs"]))
        pairs = cross_entropy_sum(pair_logits, batch["pair_targets"]).view(1)
    else:
        pairs = torch.zeros_like(masked)
    return torch.cat((masked, pairs))


def _whole_rows(hidden_BPW: Tensor, axis: Axis) -> Tensor:
    """For heads that every process computes alike: (B, P, W) -> (T, W)."""
    return (hidden_BPW if axis.group is None else gather_same(hidden_BPW, axis)).flatten(0, 1)


def gpt_figures(model: Model, hidden_BPW: Tensor, batch: Batch, axis: Axis) -> Tensor:
    """What a validation counts, (5,) float64: sum of losses, count of targets, 0, 0, 0."""
    (loss,) = gpt_sums(model, hidden_BPW, batch, axis)
    count = (batch["targets"] != IGNORED).sum()
    return torch.stack((loss.double(), count.double(), *loss.new_zeros(3).double()))


def bert_figures(model: Model, hidden_BPW: Tensor, batch: Batch, axis: Axis) -> Tensor:
    """What a validation counts, (5,) float64: masked loss, right ones, count; right pairs, count."""
    hidden_TW, words = _whole_rows(hidden_BPW, axis), Words(model.config.vocab_size, axis)
    targets, features_NW = batch["predicted_targets"], hidden_TW.index_select(0, batch["predicted"])
    logits_NA = linear(model.mlm_features(features_NW), model.token_table.weight, model.mlm_bias)
    logits_NV = logits_NA[:, : words.count]
    right = (largest(logits_NV, words) == targets).sum()
    figures = [softmax_loss(logits_NV, targets, words, False)[0], right, (targets != IGNORED).sum()]
    if "pairs" in batch:
        pairs = batch["pair_targets"]
        chosen = model.nsp_head(hidden_TW.index_select(0, batch["pairs"])).argmax(-1)
        figures += [(chosen == pairs).sum(), (pairs != IGNORED).sum()]
    else:
        figures += [torch.zeros_like(right)] * 2
    return torch.stack([figure.double() for figure in figures])


def largest(logits_NV: Tensor, words: Words) -> Tensor:
    """The word (N,) of the largest logit, of all words."""
    value_N, index_N = logits_NV.max(-1)
    if words.axis.group is None:
        return index_N
    top_N = reduced(value_N, words.axis, "max")
    return reduced(torch.where(value_N == top_N, index_N + words.first, words.size), words.axis, "min")


FIGURES: dict[str, Sums] = {"gpt": gpt_figures, "bert": bert_figures}
