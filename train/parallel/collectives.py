"""The two collectives that every axis uses inside autograd, started early and waited for late."""

import torch.distributed as dist
from torch import Tensor

from .mesh import Axis

# renamed in torch 2.13; the old names warn there, the new ones are absent before
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Gathering:
    """An all-gather along a dim, in flight."""

    def __init__(self, x: Tensor, dim: int, axis: Axis) -> None:
        self.dim, self.parts = dim, x.new_empty(axis.size, *x.shape)
        self.work = _all_gather(self.parts.view(-1), x.reshape(-1), group=axis.group, async_op=True)

    def wait(self) -> Tensor:
        """The whole, the parts in order along the dim; a copy unless the dims before it have size 1."""
        self.work.wait()
        return self.parts.movedim(0, self.dim).flatten(self.dim, self.dim + 1)


class Scattering:
    """A reduce-scatter along a dim, in flight."""

    def __init__(self, x: Tensor, dim: int, axis: Axis) -> None:
        self.parts = (
            x.unflatten(dim, (axis.size, -1)).movedim(dim, 0).contiguous()
        )  # alive until the sum is there
        self.out = x.new_empty(self.parts.shape[1:])
        self.work = _reduce_scatter(self.out.view(-1), self.parts.view(-1), group=axis.group, async_op=True)

    def wait(self) -> Tensor:
        """This process's part of the sum."""
        self.work.wait()
        return self.out
