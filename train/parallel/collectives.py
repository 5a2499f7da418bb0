"""The collectives that every axis uses inside autograd, started early and waited for late.

While a block is compiled they are torch's functional ones, which a graph may hold: the same transfers, with the wait
as an operation of its own. Eagerly they are those of `torch.distributed`, which cost less to start.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from .mesh import Axis

# renamed in torch 2.13; the old names warn there, the new ones are absent before
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

_OPERATIONS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "wait_tensor")
# what torch.distributed's own tensors call; without them what sends over the tensor axis is not compiled
FIT_A_GRAPH = all(hasattr(torch.ops._c10d_functional, name) for name in _OPERATIONS)


Exchanged = Callable[[Tensor, Axis], Tensor]


class Gathering:
    """An all-gather along a dim, in flight."""

    def __init__(self, x: Tensor, dim: int, axis: Axis) -> None:
        self.dim, self.shape = dim, (axis.size, *x.shape)
        self.work: dist.Work | None = None
        if is_compiling():
            self.parts = torch.ops._c10d_functional.all_gather_into_tensor(
                x.reshape(-1), axis.size, axis.group_name
            )
        else:
            self.parts = x.new_empty(axis.size * x.numel())
            self.work = _all_gather(self.parts, x.reshape(-1), group=axis.group, async_op=True)

    def wait(self) -> Tensor:
        """The whole, the parts in order along the dim; a copy unless the dims before it have size 1."""
        parts = _waited(self.parts, self.work)
        return parts.view(self.shape).movedim(0, self.dim).flatten(self.dim, self.dim + 1)


class Scattering:
    """A reduce-scatter along a dim, in flight."""

    def __init__(self, x: Tensor, dim: int, axis: Axis) -> None:
        # alive until the sum is there
        self.parts = x.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
        self.shape = self.parts.shape[1:]
        self.work: dist.Work | None = None
        if is_compiling():
            self.out = torch.ops._c10d_functional.reduce_scatter_tensor(
                self.parts.view(-1), "sum", axis.size, axis.group_name
            )
        else:
            self.out = x.new_empty(self.shape.numel())
            self.work = _reduce_scatter(self.out, self.parts.view(-1), group=axis.group, async_op=True)

    def wait(self) -> Tensor:
        """This process's part of the sum."""
        return _waited(self.out, self.work).view(self.shape)


def reduced(x: Tensor, axis: Axis, how: str = "sum") -> Tensor:
    """The sum ("max", "min") over the axis, in a tensor of its own."""
    if is_compiling():
        return _waited(torch.ops._c10d_functional.all_reduce(x, how, axis.group_name), None)
    return axis.all_reduce(x.contiguous().clone(), getattr(dist.ReduceOp, how.upper()))


class Exchange(torch.autograd.Function):
    """What `there` makes of a tensor over an axis, and `back` of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, there: Exchanged, back: Exchanged) -> Tensor:
        ctx.axis, ctx.back = axis, back
        return there(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.axis), None, None, None


def _waited(x: Tensor, work: dist.Work | None) -> Tensor:
    if work is None:
        return torch.ops._c10d_functional.wait_tensor(x)
    work.wait()
    return x
