"""Tensor parallelism with sequence parallelism (Shoeybi et al. 2019; Korthikanti et al. 2022), from outside a model.

Between the matrices each process works on its part of every row; a column-cut matrix gathers the row first, a
row-cut one reduce-scatters its partial sums. What differs from torch's DTensor plan: a column-cut linear
keeps its shard of the input for backward and gathers again there (4 s b h per layer are kept instead of 7.4,
measured on 8 processes), and tensors are plain.

Shape letters: B batch, S positions of a row, P of this process (S / tensor), W width, N selected ones, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from ...models.layers import Latent
from ...models.linear import linear
from ...planner.tables import even_part, tensor_box, tensor_placement
from .mesh import Axis, Exchange, Gathering, Scattering, reduced

Which = Literal["output", "input", "weight"]  # a product, or the gradient of one of its factors
Product = Callable[[Tensor, Tensor, Tensor | None, Which], Tensor]


def _wanted(ctx: Any, index: int) -> bool:
    """Whether this pass of backward wants an input's gradient, which `ctx.needs_input_grad` does not know: zero-bubble
    schedules take two passes. Without torch's private answer both are computed: right and slower.
    """
    if is_compiling():  # a graph computes all of its gradients at once
        return ctx.needs_input_grad[index]
    node = ctx.next_functions[index][0]
    if node is None or not ctx.needs_input_grad[index]:
        return False
    try:
        return torch._C._will_engine_execute_node(node)
    except (AttributeError, RuntimeError):  # asked about a local, which is only met when it is wanted
        return True


class _Columns(torch.autograd.Function):
    """Matrices cut by outputs, of one input: weights, then biases where there are any."""

    @staticmethod
    def forward(ctx: Any, x_BPW: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        *matrices, count, axis, product, keeps = rest
        ctx.count, ctx.axis, ctx.product, ctx.keeps = count, axis, product, keeps
        x_BSW = Gathering(x_BPW, axis).wait()
        weights, biases = matrices[:count], matrices[count:] or [None] * count
        ctx.biased = len(matrices) > count
        ctx.save_for_backward(x_BSW if keeps else x_BPW, *weights)
        return tuple(product(x_BSW, *both, "output") for both in zip(weights, biases))

    @staticmethod
    def backward(ctx: Any, *grads_BSV: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        wanted = [_wanted(ctx, 1 + index) for index in range((1 + ctx.biased) * ctx.count)]
        # hidden behind the products below, as is the sum behind those of the weights
        gathering = Gathering(x, ctx.axis) if any(wanted[: ctx.count]) and not ctx.keeps else None
        scattering = None
        if _wanted(ctx, 0):
            parts = [ctx.product(grad, weight.t(), None, "input") for grad, weight in zip(grads_BSV, weights)]
            scattering = Scattering(sum(parts[1:], parts[0]), ctx.axis)
        x_NW = (x if gathering is None else gathering.wait()).flatten(0, 1)
        found: list[Tensor | None] = [
            ctx.product(grad.flatten(0, 1).t(), x_NW.t(), None, "weight") if asked else None
            for grad, asked in zip(grads_BSV, wanted)
        ]
        found += [grad.sum((0, 1)) if asked else None for grad, asked in zip(grads_BSV, wanted[ctx.count :])]
        return None if scattering is None else scattering.wait(), *found, None, None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSV: Tensor, weight: Tensor, axis: Axis, product: Product) -> Tensor:
        ctx.axis, ctx.product = axis, product
        ctx.save_for_backward(x_BSV, weight)
        return Scattering(product(x_BSV, weight, None, "output"), axis).wait()

    @staticmethod
    def backward(ctx: Any, grad_BPW: Tensor) -> tuple[Tensor | None, ...]:
        x_BSV, weight = ctx.saved_tensors
        grad_BSW = Gathering(grad_BPW, ctx.axis).wait()
        grad_input, grad_weight = None, None
        if _wanted(ctx, 0):
            grad_input = ctx.product(grad_BSW, weight.t(), None, "input")
        if _wanted(ctx, 1):
            grad_weight = ctx.product(grad_BSW.flatten(0, 1).t(), x_BSV.flatten(0, 1).t(), None, "weight")
        return grad_input, grad_weight, None, None


def _gather(x_BPW: Tensor, axis: Axis) -> Tensor:
    return Gathering(x_BPW, axis).wait()


def _scatter(x_BSW: Tensor, axis: Axis) -> Tensor:
    return Scattering(x_BSW, axis).wait()


def _own_part(x_BSW: Tensor, axis: Axis) -> Tensor:
    length = x_BSW.shape[1] // axis.size
    return x_BSW.narrow(1, axis.rank * length, length)


def _same(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


def gather_rows(x_BPW: Tensor, axis: Axis) -> Tensor:
    """(B, P, W) -> (B, S, W) before a matrix cut by outputs: the partial gradients are summed, each keeps its part."""
    return Exchange.apply(x_BPW, axis, _gather, _scatter)


def gather_same(x_BPW: Tensor, axis: Axis) -> Tensor:
    """(B, P, W) -> (B, S, W) for heads that every process computes alike: each keeps its part of the gradient."""
    return Exchange.apply(x_BPW, axis, _gather, _own_part)


def sum_gradient(x: Tensor, axis: Axis) -> Tensor:
    """Before a cut matrix whose input every process has whole: backward sums the gradients of the parts."""
    return Exchange.apply(x, axis, _same, reduced)


def plain_product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, which: Which) -> Tensor:
    """(..., I) -> (..., O) in the dtype of both: all three kinds alike."""
    return linear(x, weight_OI, bias_O)


class _CutLinear(nn.Module):
    def __init__(self, linear: nn.Linear, axis: Axis) -> None:
        super().__init__()
        self.weight, self.bias, self.axis = linear.weight, linear.bias, axis
        self.product: Product = plain_product


class ColumnLinear(_CutLinear):
    """A linear layer cut by outputs; its input is a part of the row, its output the whole row, which stays for backward
    with `keeps` and is else gathered again. One that is not cut (the key head that all query heads share) has partial
    gradients: each process uses its output for its heads.
    """

    keeps = False

    def forward(self, x_BPW: Tensor) -> Tensor:
        return self.together(x_BPW, [self])[0]

    def together(self, x_BPW: Tensor, layers: Sequence["ColumnLinear"]) -> tuple[Tensor, ...]:
        """The outputs of several layers of one input, which is gathered once."""
        weights = [layer.weight for layer in layers]
        biases = [layer.bias for layer in layers if layer.bias is not None]
        return _Columns.apply(x_BPW, *weights, *biases, len(layers), self.axis, self.product, self.keeps)


class RowLinear(_CutLinear):
    """A linear layer cut by inputs; its output is a part of the row, to which the whole bias is added once."""

    def forward(self, x_BSV: Tensor) -> Tensor:
        y_BPW = _Row.apply(x_BSV, self.weight, self.axis, self.product)
        return y_BPW if self.bias is None else y_BPW + self.bias


class VocabularyEmbedding(nn.Module):
    """A token table cut by rows: each process looks up the ids it holds, the sum is scattered over the row."""

    def __init__(self, table: nn.Embedding, first_id: int, axis: Axis) -> None:
        super().__init__()
        self.weight, self.first_id, self.axis = table.weight, first_id, axis
        self.words = len(table.weight)

    def forward(self, ids_BS: Tensor) -> Tensor:
        local_BS = ids_BS - self.first_id
        held_BS = (local_BS >= 0) & (local_BS < self.words)
        x_BSW = F.embedding(local_BS.where(held_BS, 0), self.weight) * held_BS[..., None]
        return Exchange.apply(x_BSW, self.axis, _scatter, _gather)


class SequenceEmbedding(nn.Module):
    """A whole table of which each process looks up its part of the row; its gradient is partial."""

    def __init__(self, table: nn.Embedding, axis: Axis) -> None:
        super().__init__()
        self.weight, self.axis = table.weight, axis

    def forward(self, ids: Tensor) -> Tensor:
        """Ids (S,) or (B, S) -> (P, W) or (B, P, W)."""
        length = ids.shape[-1] // self.axis.size
        return F.embedding(ids.narrow(-1, self.axis.rank * length, length), self.weight)


class HeadsNorm(nn.Module):
    """An RMS norm over the heads of all processes: each has the scales of its own, squares are summed over the axis."""

    def __init__(self, norm: nn.RMSNorm, whole: int, axis: Axis) -> None:
        super().__init__()
        assert norm.eps is not None
        self.weight, self.eps, self.whole, self.axis = norm.weight, norm.eps, whole, axis

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        # every process's heads hang on the sum, so its gradient is summed over them too
        squares = Exchange.apply(wide.square().sum(-1, keepdim=True), self.axis, reduced, reduced)
        return (wide * torch.rsqrt(squares / self.whole + self.eps) * self.weight).to(x.dtype)


def apply_tensor_parallel(model: Any, axis: Axis, keeps: bool = False) -> None:
    """Cut a model on the meta device. With `keeps`, for repeated forwards, gathered rows stay for backward."""
    if axis.group is None:
        return
    for name, parameter in list(model.named_parameters()):
        box = tensor_box(name, tuple(parameter.shape), model.config, axis.size, axis.rank)
        path, _, attribute = name.rpartition(".")
        cut = nn.Parameter(parameter.new_empty(box.size), parameter.requires_grad)
        setattr(model.get_submodule(path), attribute, cut)
    first_id = even_part(model.config.vocab_size, axis.size, axis.rank)[0]
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            placement = tensor_placement(f"{name}.weight", model.config)
            # the head is computed with the loss
            if (placement == 0 and name != "output") or name.endswith(".attention.kv"):
                model.set_submodule(name, column := ColumnLinear(module, axis))
                column.keeps = keeps
            elif placement == 1:
                model.set_submodule(name, RowLinear(module, axis))
        elif isinstance(module, nn.RMSNorm) and tensor_placement(f"{name}.weight", model.config) == 0:
            model.set_submodule(name, HeadsNorm(module, module.normalized_shape[0], axis))
        elif isinstance(module, Latent):
            module.gather = partial(gather_rows, axis=axis)
        elif name == "token_table":
            model.token_table = VocabularyEmbedding(module, first_id, axis)
        elif name in ("position_table", "type_table"):
            setattr(model, name, SequenceEmbedding(module, axis))
