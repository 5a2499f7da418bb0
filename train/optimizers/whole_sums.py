"""Sums over whole parameters of which each process holds a part: what LAMB and Adafactor need of every tensor.

A parameter can be cut over the tensor axis (on dim 0 or 1) and over the shards of the data axis (on dim 0).
All sums of one kind travel together, so a step has a few collectives whatever the number of parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ..engine import Engine
from ..parallel.mesh import ALONE, Axis
from ..parallel.sharding import sum_gradients
from ..shards import LocalShard, whole_shard


@dataclass(frozen=True)
class WholeParameters:
    """Every parameter of a process, of some of which it may hold nothing, with the axes over which their parts lie."""

    parts: Sequence[LocalShard]
    tensor: Axis = ALONE
    shard: Axis = ALONE

    @classmethod
    def of(cls, model: nn.Module | Engine) -> "WholeParameters":
        """The parameters of a plain model, or of this process's stages, in the same order on all processes of
        an axis.
        """
        if isinstance(model, nn.Module):
            return cls([whole_shard(*named) for named in model.named_parameters()])
        return cls(model.local_shards, model.mesh.tensor, model.mesh.shard)

    def sums(
        self, numbers: Sequence[Tensor], cut: Sequence[bool], over_shards: bool = True
    ) -> Sequence[Tensor]:
        """Each tensor summed in place over the processes with the other parts: over the tensor axis where `cut`, and
        over the shards.
        """
        if over_shards:
            sum_gradients(numbers, self.shard)
        sum_gradients([tensor for tensor, flag in zip(numbers, cut) if flag], self.tensor)
        return numbers
