"""Sums over whole parameters of which each process holds a part: what LAMB and Adafactor need of every tensor.

A parameter can be cut over the tensor axis (on dim 0 or 1) and over the shards of the data axis (on dim 0).
All sums of one kind travel together, so a step has a few small collectives whatever the number of parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ..planner.tables import Box
from .engine import Engine
from .parallel.mesh import ALONE, Axis


@dataclass(frozen=True)
class PartOfParameter:
    """What this process holds of one parameter: perhaps nothing, but then it takes part in the sums."""

    name: str
    parameter: nn.Parameter
    shape: tuple[int, ...]  # of the whole
    box: Box
    cut: int | None = None  # the dim that is cut over the tensor axis


@dataclass(frozen=True)
class WholeParameters:
    """Every parameter of a process with the axes over which its parts lie."""

    parts: Sequence[PartOfParameter]
    tensor: Axis = field(default=ALONE)
    shard: Axis = field(default=ALONE)

    @classmethod
    def of(cls, model: nn.Module | Engine) -> "WholeParameters":
        """The parameters of a plain model, or of this process's stages, in the same order on all processes of
        an axis.
        """
        if isinstance(model, nn.Module):
            named = model.named_parameters()
            return cls([PartOfParameter(n, p, tuple(p.shape), Box.whole(tuple(p.shape))) for n, p in named])
        specs = [(local.spec, local.value) for local in model.local_shards]
        return cls(
            [
                PartOfParameter(
                    spec.name,
                    value,
                    spec.shape,
                    spec.box,
                    spec.placement if isinstance(spec.placement, int) else None,
                )
                for spec, value in specs
            ],
            model.mesh.tensor,
            model.mesh.shard,
        )

    def sums(self, numbers: Sequence[Tensor], cut: Sequence[bool], over_shards: bool = True) -> list[Tensor]:
        """Each tensor summed over the processes with the other parts: over the tensor axis where `cut`, and
        over the shards.
        """
        found = list(numbers)
        if over_shards:
            found = _together(found, self.shard)
        chosen = [index for index, flag in enumerate(cut) if flag]
        for index, summed in zip(chosen, _together([found[index] for index in chosen], self.tensor)):
            found[index] = summed
        return found


def _together(tensors: list[Tensor], axis: Axis) -> list[Tensor]:
    """Each tensor summed over the axis, all in one collective."""
    if axis.group is None or not tensors:
        return tensors
    flat = axis.all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]))
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]
