"""What a step, a validation and a checkpoint ask of the model in training, on one process or on thousands.

`SingleEngine` holds a whole model, `LayoutEngine` this process's part of one. Both compute with `computed`
weights, in 16 bits where the precision says so, and hand plain `value`s to the optimizer: fp32 masters of
16-bit weights (Micikevicius et al. 2018, section 3.1), otherwise the weights themselves. Nothing above an
engine asks which of the two it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from ..models.config import ModelConfig
from ..models.init import initial_values
from ..planner.layout import Layout
from ..planner.tables import Box, ShardSpec
from .objective import StepBatch
from .offload import HostOffload
from .parallel.mesh import Mesh

Values = Callable[[str, Box], Tensor]  # a part of the parameter of a name, on the host
Mark = Callable[[str], None]  # is told the end of each phase of a step


def no_mark(phase: str) -> None:
    """Nobody watches the phases of this step."""


@dataclass
class LocalShard:
    """This process's box of one parameter.

    The module computes with `parameter`, which may be sharded; `computed` is the local part of it, and has
    its gradient after backward; `value` is what an optimizer moves and a checkpoint saves: a master in fp32,
    or `computed` itself.
    """

    spec: ShardSpec
    parameter: nn.Parameter
    computed: nn.Parameter
    value: nn.Parameter

    @property
    def name(self) -> str:
        return self.spec.name


class Engine(ABC):
    """A model in training. `local_shards` are what this process holds of it; `dtype` is that of its products."""

    config: ModelConfig
    mesh: Mesh
    dtype: torch.dtype
    local_shards: list[LocalShard]
    seed: int = 0
    offload: HostOffload | None = None  # the masters' side, where they are on the host

    @abstractmethod
    def accumulate(
        self,
        batch: StepBatch,
        step: int,
        loss_scale: float = 1.0,
        mark: Mark = no_mark,
        signal: int = 0,
        upcoming: StepBatch | None = None,
    ) -> Tensor:
        """Forward and backward of all micro-batches: the mean loss of every term and the norm of the gradient,
        of the whole batch, and the largest signal that any process has received (terms + 2,), on the device.

        With the batch of the next step, `upcoming`, its target counts are summed on the same way.
        """

    @abstractmethod
    def evaluate(self, rows: dict[str, np.ndarray], mask_fraction: float) -> Tensor:
        """Sums of a validation batch, (5,) float64 on the host: see `heads.gpt_figures`, `bert_figures`."""

    @abstractmethod
    def discard(self) -> None:
        """Forget the gradients of the step."""

    @abstractmethod
    def states(self) -> dict[str, Tensor]:
        """What else of this process must be in a checkpoint, by unique names; not copies."""

    @abstractmethod
    def load_states(self, names: Iterable[str], read: Callable[[str], Tensor], same_layout: bool) -> None:
        """Go on with the `states` of a checkpoint that has these names."""

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        """Multiply the gradients by `factor`, let the optimizer move the values, compute with them from now."""
        if self.offload is not None:
            self.offload.step(optimizer, factor)
            return
        gradients = self.gradients()
        if factor != 1.0 and gradients:
            torch._foreach_mul_(gradients, factor)
        for local in self.local_shards:
            local.value.grad = local.computed.grad
        optimizer.step()
        self.publish()
        self.discard()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters, where there are any, into the weights that the model computes with."""
        if self.offload is not None:
            self.offload.publish()
            return
        masters = [local for local in self.local_shards if local.value is not local.computed]
        if masters:
            torch._foreach_copy_(
                [local.computed.detach() for local in masters], [local.value.detach() for local in masters]
            )

    @torch.no_grad()
    def fill(self, values: Values | None = None) -> None:
        """Give every parameter its values, by default the initial ones of the seed, as every layout has them."""
        for local in self.local_shards:
            spec = local.spec
            if values is None:
                shape, part = torch.Size(spec.shape), spec.box.slices()
                local.value.copy_(initial_values(spec.name, shape, self.config, self.seed, part))
            else:
                local.value.copy_(values(spec.name, spec.box))
        self.publish()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and values that hold anything: what an optimizer moves."""
        return ((local.name, local.value) for local in self.local_shards if local.value.numel())

    def gradients(self) -> list[Tensor]:
        """The gradients of the local shards, those without any left out."""
        return [local.computed.grad for local in self.local_shards if local.computed.grad is not None]

    def wait(self) -> None:
        """Wait for updates that are still under way, before values are read."""
        if self.offload is not None:
            self.offload.wait()

    def rescale(self, factor: float) -> None:  # noqa: B027 (most keep nothing of that scale)
        """fp16's loss scale, and with it every gradient to come, has become `factor` times as large."""

    @property
    def layout(self) -> Layout:
        return self.mesh.layout

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    @property
    def bytes_sent(self) -> float:
        """Bytes that this process has sent so far to sum gradients, as far as they are counted."""
        return 0.0


def whole_shard(name: str, parameter: nn.Parameter, value: nn.Parameter | None = None) -> LocalShard:
    """A parameter that one process holds as a whole."""
    shape = tuple(parameter.shape)
    spec = ShardSpec(name, shape, Box.whole(shape), 0, "same", True)
    return LocalShard(spec, parameter, parameter, parameter if value is None else value)


def make_master(parameter: nn.Parameter) -> nn.Parameter:
    """An fp32 copy of a weight, its own memory; of a meta tensor nothing."""
    return nn.Parameter(parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True))
