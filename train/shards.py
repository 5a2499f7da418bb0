"""What this process holds of each parameter of its stages: the box that the layout's table says, and its weights."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..planner.tables import Box, Coordinates, ShardSpec, is_of_experts, make_shard_spec
from .parallel.data import sum_gradients
from .parallel.mesh import ALONE, Axis, Mesh
from .precision import wide_dtype
from .stage import Stage


@dataclass
class LocalShard:
    """This process's box of one parameter.

    The module computes with `parameter`, which may be sharded or have rows of zeros below; `computed` is the
    local part of it, and has its gradient after backward; `value` is what an optimizer moves and a checkpoint
    saves: a master in fp32, or `computed` itself.
    """

    spec: ShardSpec
    parameter: nn.Parameter
    computed: nn.Parameter
    value: nn.Parameter

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def cut(self) -> int | None:
        """The dim that is cut over the tensor axis."""
        return self.spec.placement if isinstance(self.spec.placement, int) else None

    def take_gradient(self) -> None:
        """Let `computed` have its part of the gradient of `parameter`."""
        if self.computed is not self.parameter and self.parameter.grad is not None:
            gradient = local_part(self.parameter.grad)[: len(self.computed)]
            self.computed.grad_dtype = gradient.dtype  # of 16-bit weights fp32, as `GradientBuffer` has them
            self.computed.grad = gradient


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor that `fully_shard` may have cut (a DTensor), sharing its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_shards(stage: Stage, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[LocalShard]:
    """The boxes of a stage that has memory, by the whole shapes of the model. Rows below the words of a vocabulary
    become 0 and stay so: no box has them.
    """
    mesh, config = stage.mesh, stage.model.config
    place = Coordinates(mesh.pipeline.rank, mesh.tensor.rank, mesh.replica.rank, mesh.shard.rank)
    for name, parameter in stage.model.named_parameters():
        spec = make_shard_spec(
            name, shapes[name], config, stage.index, mesh.layout, place, rows=len(parameter)
        )
        part, rows = local_part(parameter.detach()), spec.box.size[0]
        computed = parameter
        if hasattr(parameter, "to_local") or len(part) != rows:
            part[rows:].zero_()
            computed = nn.Parameter(part[:rows], parameter.requires_grad)
        assert tuple(computed.shape) == spec.box.size, (name, tuple(computed.shape), spec.box)
        yield LocalShard(spec, parameter, computed, computed)


def summed_over(shards: Iterable[LocalShard], mesh: Mesh) -> Iterator[tuple[Axis, list[nn.Parameter]]]:
    """The trained parameters, by the axis over which their copies sum gradients: experts that processes share have
    fewer copies.
    """
    others: list[nn.Parameter] = []
    experts: list[nn.Parameter] = []
    for local in shards:
        if local.parameter.requires_grad:
            shared = mesh.expert.size > 1 and is_of_experts(local.name)
            (experts if shared else others).append(local.parameter)
    yield from (
        (axis, part) for axis, part in ((mesh.gradient, others), (mesh.expert_gradient, experts)) if part
    )


def whole_shard(name: str, parameter: nn.Parameter) -> LocalShard:
    """A parameter that one process holds as a whole."""
    shape = tuple(parameter.shape)
    spec = ShardSpec(name, shape, Box.whole(shape), 0, "same", True)
    return LocalShard(spec, parameter, parameter, parameter)


def make_master(parameter: nn.Parameter, device: torch.device | str | None = None) -> nn.Parameter:
    """An fp32 copy of a weight (fp64 of an fp64 one), its own memory, by default where it is."""
    wide = parameter.detach().to(device, wide_dtype(parameter.dtype), copy=True)
    return nn.Parameter(wide, parameter.requires_grad)


@dataclass(frozen=True)
class WholeParameters:
    """Every parameter of a process, of some of which it may hold nothing, with the axes over which their parts lie."""

    parts: Sequence[LocalShard]
    tensor: Axis = ALONE
    shard: Axis = ALONE

    @classmethod
    def of(cls, model: Any) -> "WholeParameters":
        """Those of a plain model or of an engine, in the same order on all processes of an axis."""
        if isinstance(model, nn.Module):
            return cls([whole_shard(*named) for named in model.named_parameters()])
        return cls(model.local_shards, model.mesh.tensor, model.mesh.shard)

    def sums(
        self, numbers: Sequence[Tensor], cut: Sequence[bool], over_shards: bool = True
    ) -> Sequence[Tensor]:
        """Each tensor summed in place over the tensor axis where `cut`, and over the shards."""
        if over_shards:
            sum_gradients(numbers, self.shard)
        sum_gradients([tensor for tensor, flag in zip(numbers, cut) if flag], self.tensor)
        return numbers
