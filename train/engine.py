"""What a step, a validation and a checkpoint ask of the model in training, on one process or on thousands.

An engine holds this process's stages of a model in their layout, of which one process has the trivial one. Weights are
computed with in 16 bits where the precision says so; the optimizer gets plain `value`s, fp32 masters of 16-bit weights
(Micikevicius et al. 2018, section 3.1). After backward the rest of a step is local but for one sum over all processes.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from signal import SIGINT, Signals
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..core.signals import STOP_SIGNALS
from ..models.config import ModelConfig, family_of
from ..models.init import initial_values
from ..planner.layout import Layout
from ..planner.tables import Box, table_at_ends
from .loss import wide_dtype
from .objective import Model, Objective, StepBatch, fill_up, prepare, pretraining
from .optimizers.averages import follow
from .optimizers.offload import HostOffload
from .parallel.data import Communicator, GradientBuffer, before_backward, sum_gradients
from .parallel.mesh import Mesh
from .parallel.pipeline import Pipeline, run_forward
from .parallelize import parallelize
from .precision import computing_dtype
from .stage import LocalShard, Routers, Stage, local_shards, make_master, remove_other_stages, summed_over

if TYPE_CHECKING:
    from .parallel.compression import CommunicationHook

# that stop a run; of several the largest number counts, as in `Ranks.most`
SIGNALS = tuple(sorted((SIGINT, *STOP_SIGNALS)))

Values = Callable[[str, Box], Tensor]  # a part of the parameter of a name, on the host
Mark = Callable[[str], None]  # is told the end of each phase of a step


class Engine:
    """The stages of this process. With `offload`, the micro-batches of a step, the masters are on the host. `objective`
    is pretraining unless given. `row_length` is that of the training rows, by default the config's. `memory` is entered
    where tensors get theirs: a simulation gives none.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        precision: str,
        seed: int = 0,
        recomputing: str = "none",
        *,
        offload: int = 0,
        compiling: str = "off",
        matmul: str = "same",
        objective: Objective | None = None,
        row_length: int = 0,
        memory: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.config, self.mesh, self.seed = config, mesh, seed
        self.layout, self.device = mesh.layout, mesh.device
        self.objective = objective or pretraining(config)
        self.dtype = computing_dtype(precision)  # of the products
        self.wide = wide_dtype(self.dtype)  # of masters and of summed gradients
        self.offload: HostOffload | None = None  # the masters' side, where they are on the host
        # counts what copies send for gradients; `fully_shard` sends by itself, uncounted
        self.communicator = Communicator(mesh.gradient)
        self.communication_hook: CommunicationHook | None = None  # a compressed sum over the copies
        self.copied: torch.cuda.Event | None = None  # a checkpoint's copies, before which nothing changes
        self.stages: list[Stage] = []
        self.local_shards: list[LocalShard] = []
        self.routers = Routers(config, mesh)
        self._pipelines: dict[tuple[int, int, int], Any] = {}  # of the shape that the batch has now
        self.sharded = mesh.shard.group is not None
        self._table_apart = self.layout.stages > 1 and table_at_ends(config)
        # the shards of `fully_shard` are masters; without it, and with offload, weights have the products' dtype
        held = self.wide if self.sharded and not offload else self.dtype
        for index in self.layout.stages_of(mesh.pipeline.rank):
            model = self.objective.empty(held)
            self.shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
            remove_other_stages(model, index, mesh)
            stage = Stage(model, index, mesh, self.objective.sums)
            stage.row_length = row_length or config.sequence_length
            parallelize(stage, precision, matmul, compiling, recomputing)
            self.routers.watch(stage)
            with memory or nullcontext():
                stage.to_empty(device=mesh.device)
            self.stages.append(stage.train())
            self.local_shards += local_shards(stage, self.shapes)
        self.partial = [x for x in self.local_shards if mesh.tensor.group and x.spec.placement == "partial"]
        copies = mesh.gradient.group is not None and not self.sharded
        with memory or nullcontext():
            if offload:
                late = self.local_shards if copies else self.partial
                passes = offload if self.layout.world == 1 else 1
                names = {local.name for local in late}
                self.offload = HostOffload(self.stages[0], passes, self.local_shards, names)
            elif held != self.wide:
                for local in self.local_shards:
                    if local.computed.dtype != self.wide:  # a router is its own master
                        local.value = make_master(local.computed)
            # gradients of 16-bit weights are added up in fp32, those of copies where their sum reads them
            added_up = copies or (not self.sharded and self.dtype != self.wide)
            self.buffers: list[GradientBuffer] = []  # one for each axis over which they are summed
            if added_up and not (offload and self.layout.world == 1):
                for axis, trained in summed_over(self.local_shards, mesh):
                    self.buffers.append(GradientBuffer(trained, self.dtype if offload else self.wide, axis))

    @classmethod
    def holding(cls, model: Model, precision: str, device: torch.device) -> "Engine":
        """One process with the values of a model that is there."""
        engine, given = cls(model.config, Mesh(Layout(), device), precision), dict(model.named_parameters())
        engine.fill(lambda name, box: given[name].detach()[box.slices()])
        return engine

    def accumulate(
        self,
        batch: StepBatch,
        step: int,
        loss_scale: float = 1.0,
        mark: Mark = lambda phase: None,
        signal: Callable[[], int] = lambda: 0,
        upcoming: StepBatch | None = None,
    ) -> Tensor:
        """Forward and backward of this process's `batch`: figures of the routers, the mean loss of every term and the
        norm of the gradient, of the whole batch, and the largest signal that any process has received, on the device.
        The target counts of the next batch, `upcoming`, are summed on the same way.
        """
        if self.config.dropout:  # a stream of each step and process: no two of a sequence draw the same
            digest = hashlib.sha256(f"dropout:{self.seed}:{step}:{self.mesh.rank}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        micro_batches = batch.micro_batches
        inverse_counts = batch.agreed  # 1 / target count (terms,) over the rows of all processes
        if inverse_counts is None:
            inverse_counts = self._inverse(self.mesh.gradient.all_reduce(batch.counts_there.clone()))
        for stage in self.stages:
            stage.load(micro_batches, inverse_counts, loss_scale)
        for buffer in self.buffers if self.communication_hook is None else ():
            buffer.expect(len(micro_batches))
        if self.offload is not None and self.layout.world == 1:
            self.offload.micro_batches = len(micro_batches)
        if self.layout.pipeline > 1:
            self._pipeline(batch).run()
        else:
            (stage,) = self.stages
            for index in range(len(micro_batches)):
                last = index == len(micro_batches) - 1
                if self.sharded:
                    before_backward(stage, self.layout, last)
                if self.offload is not None:
                    self.offload.leaving = last or self.layout.world == 1
                loss = stage(torch.empty(0))
                mark("forward")
                loss.backward()
        self.finish_gradients()
        mark("backward")
        return self._totals(inverse_counts, signal(), upcoming)

    def _pipeline(self, batch: StepBatch) -> Any:
        rows, part = batch.micro_batches[0]["input_ids"].shape
        shape = (len(batch.micro_batches), rows, part * self.mesh.context.size)
        if shape not in self._pipelines:  # a schedule is for one shape: another one would abort the processes
            self._pipelines.clear()
            self._pipelines[shape] = Pipeline(self.stages, *shape, self.dtype)
        return self._pipelines[shape]

    def _inverse(self, counts: Tensor) -> Tensor:
        """0 for a term without targets."""
        return torch.where(counts > 0, 1 / counts, 0).to(self.wide)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[dict[str, np.ndarray]], mask_fraction: float) -> Tensor:
        """Sums of validation batches over all processes, (5,) float64 on the host: see `loss.FIGURES`. Every process
        gives the whole batches and computes its part. Missing rows and ends are filled up without targets. Nothing is
        waited for before the last batch, so each stage of a pipeline has one of its own.
        """
        heads, figures = [stage.head for stage in self.stages], self.objective.figures
        assert figures is not None, "an objective that measures otherwise"
        data, context, tensor = self.mesh.data, self.mesh.context.size, self.mesh.tensor.size
        # what a whole row is a multiple of: a table of positions has no more
        multiple = tensor if context == 1 else math.lcm(2 * context, context * tensor)
        total = torch.zeros(5, dtype=torch.float64, device=self.device)
        for stage in self.stages:
            stage.eval().head = figures
        for batch in batches:
            rows = fill_up(batch, data.size, multiple)
            own = len(rows["input_ids"]) // data.size
            mine = {name: values[data.rank * own : (data.rank + 1) * own] for name, values in rows.items()}
            how = family_of(self.config), own, self.device, mask_fraction
            prepared = prepare(mine, *how, context=self.mesh.context)
            sums = run_forward(self.stages, prepared.micro_batches[0], self.dtype)
            if sums is not None and self.mesh.tensor.rank == 0:
                total += sums
        for stage, head in zip(self.stages, heads):
            stage.train().head = head
        return self.mesh.world.all_reduce(total).cpu()

    @torch.no_grad()
    def finish_gradients(self) -> None:
        if self.copied is not None:  # what is changed from here on
            torch.cuda.current_stream(self.device).wait_event(self.copied)
            self.copied = None
        for local in self.local_shards:
            if local.computed is not local.parameter:
                local.take_gradient()
        if self.communication_hook is not None:
            self.communication_hook.sum_gradients(self.gradients())
        else:
            for buffer in self.buffers:
                buffer.finish()
                self.communicator.count_all_reduce(buffer.flat.nbytes, buffer.axis)
        if self.partial:
            sum_gradients(_gradients(self.partial), self.mesh.tensor)
        if self._table_apart:
            self._sum_table()
        if self.offload is not None:
            self.offload.fetch([local.computed.grad for local in self.local_shards])

    def _sum_table(self) -> None:
        tables = _gradients(local for local in self.local_shards if local.name == "token_table.weight")
        if not tables:
            return
        if len(tables) == 2:  # both ends of a V
            tables[0] += tables[1]
            tables[1].copy_(tables[0])
        else:
            sum_gradients(tables, self.mesh.ends)

    @torch.no_grad()
    def _totals(self, inverse_counts: Tensor, signal: int, upcoming: StepBatch | None) -> Tensor:
        """What `accumulate` returns, float64, by one sum over all processes; every loss and element counts once."""
        terms, counted = len(self.objective.terms), len(inverse_counts)
        known = 1 + terms + len(SIGNALS) + counted
        everything = torch.zeros(known + len(self.routers.totals), dtype=torch.float64, device=self.device)
        totals, routed = everything[:known], everything[known:]
        losses, heard, counts = totals[1 : 1 + terms], totals[1 + terms : -counted], totals[-counted:]
        routed += self.routers.totals
        self.routers.totals.zero_()
        if (squares := self._squared_norm()) is not None:
            totals[0] = squares
        if self.mesh.tensor.rank == 0:
            for stage in self.stages:
                losses += sum(stage.sums, torch.zeros_like(inverse_counts))
        if signal:
            heard[SIGNALS.index(Signals(signal))].fill_(1.0)
        if upcoming is not None and self.mesh.tensor.rank == self.mesh.pipeline.rank == 0:
            counts += upcoming.counts_there
        self.mesh.world.all_reduce(everything)
        if upcoming is not None:
            upcoming.agreed = self._inverse(counts)
        largest = torch.zeros_like(totals[:1])
        for number, flag in zip(SIGNALS, heard):
            largest.masked_fill_(flag > 0, float(number))
        figures = [losses.to(self.wide) * inverse_counts, totals[:1].sqrt(), largest]
        if self.routers.names:
            figures.insert(0, self.routers.figures(routed, inverse_counts[0]))
        return torch.cat(figures)

    def _squared_norm(self) -> Tensor | None:
        """This process's share of the square of the gradient's norm, float64."""
        if self.communication_hook is not None:
            squares = self.communication_hook.squared_norm(self.gradients())
            if squares is not None:  # the same everywhere: each adds its share
                return squares / self.mesh.world.size
        if self.offload is not None:
            return self.offload.gradient_norm().double().square()
        mine = (local for local in self.local_shards if local.spec.primary and local.value.numel())
        if not (counted := _gradients(mine)):
            return None
        norms = torch._foreach_norm(counted, dtype=self.wide)
        return torch.linalg.vector_norm(torch.stack(norms)).double().square()

    @torch.no_grad()
    def update(self, optimizer: Optimizer, factor: float | Tensor, finite: Tensor | None = None) -> None:
        """Multiply the gradients by `factor` and update; with `finite` torch's fused AdamW does both, or nothing."""
        if self.offload is not None:
            assert isinstance(factor, float), "decided by the host"
            self.offload.step(optimizer, factor)
            self.discard()
            return
        if finite is not None:
            optimizer.grad_scale = torch.as_tensor(1 / factor, dtype=torch.float32)  # type: ignore[attr-defined]
            optimizer.found_inf = (~finite).to(torch.float32)  # type: ignore[attr-defined]
        elif factor != 1.0 and (gradients := self.gradients()):
            torch._foreach_mul_(gradients, factor)
        for local in self.local_shards:
            local.value.grad = local.computed.grad
        optimizer.step()
        if optimizer.param_groups[0].get("ema_decay"):
            follow(optimizer, (value for _, value in self.named_parameters()), finite)
        self.routers.move_biases(self.local_shards, finite)
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
            values = [local.value.detach() for local in masters]
            torch._foreach_copy_([local.computed.detach() for local in masters], values)

    def discard(self) -> None:
        if self.offload is not None:
            self.offload.discard()
        for local in self.local_shards:
            local.parameter.grad = local.computed.grad = None
            if self.offload is None:  # which sets and forgets those of its masters itself
                local.value.grad = None
        for buffer in self.buffers:  # whose gradients are there again, as zeros
            buffer.zero()

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
        """Names and values that hold anything and are trained: what an optimizer moves."""
        trained = (local for local in self.local_shards if local.parameter.requires_grad)
        return ((local.name, local.value) for local in trained if local.value.numel())

    def gradients(self) -> list[Tensor]:
        return _gradients(self.local_shards)

    def states(self) -> dict[str, Tensor]:
        """What else of this process must be in a checkpoint, by unique names: what compressed gradients still owe."""
        if self.communication_hook is None:
            return {}
        kept = self.communication_hook.kept
        return {f"residual.{self.mesh.rank}.{name}": error for name, error in kept.items()}

    def load_states(self, names: Iterable[str], read: Callable[[str], Tensor], same_layout: bool) -> None:
        """Go on with the saved `states`; in another layout without errors, which are those of other places."""
        if self.communication_hook is None or not same_layout:
            return
        # before there were masters, checkpoints said "owed." for "residual."
        saved = {name.removeprefix("owed.").removeprefix("residual."): name for name in names}
        mine = f"{self.mesh.rank}."
        self.communication_hook.kept = {
            short.removeprefix(mine): read(name) for short, name in saved.items() if short.startswith(mine)
        }

    def wait(self) -> None:
        """Wait for updates that are still under way, before values are read."""
        if self.offload is not None:
            self.offload.wait()


def _gradients(shards: Iterable[LocalShard]) -> list[Tensor]:
    return [local.computed.grad for local in shards if local.computed.grad is not None]
