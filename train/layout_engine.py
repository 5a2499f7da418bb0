"""The engine of a layout: this process's stages of a model, run forward and backward, their gradients finished.

After backward the rest of a step is local: every local shard is a plain tensor, this process's box of a
parameter, and one sum over all processes gives the gradient norm.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from signal import SIGINT, SIGTERM, Signals
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..models.config import ModelConfig, family_of
from ..planner.tables import Coordinates, is_tied, make_shard_spec, parameter_shapes
from .compile import compile_blocks
from .engine import Engine, LocalShard, Mark, make_master, no_mark
from .float8 import convert_products
from .heads import FIGURES
from .objective import IGNORED, StepBatch, prepare
from .offload import HostOffload
from .parallel.compression import CommunicationHook, Communicator
from .parallel.context import cut_rows, run_ring_eagerly
from .parallel.gradients import GradientBuffer
from .parallel.mesh import Mesh
from .parallel.pipeline import Pipeline, run_forward
from .parallel.sharding import before_backward, local_part, shard_stage, sum_gradients
from .parallel.tensor import run_products_eagerly
from .precision import computing_dtype
from .recompute import recompute
from .stage import Stage, make_stage

SIGNALS = (SIGINT, SIGTERM)  # that stop a run, the weaker first


class LayoutEngine(Engine):
    """The stages of this process in their layout.

    With `offload` the masters are on the host; blocks are compiled unless `compiling` is "off". `memory` is
    entered where tensors get theirs: a simulation gives none.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        precision: str,
        seed: int = 0,
        recomputing: str = "none",
        *,
        offload: bool = False,
        compiling: str = "off",
        matmul: str = "same",
        memory: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.config, self.mesh, self.seed = config, mesh, seed
        self.dtype = computing_dtype(precision)
        self.wide = torch.promote_types(self.dtype, torch.float32)
        self.communicator = Communicator(
            mesh.gradient
        )  # counts what copies send for gradients; `fully_shard` sends by itself, uncounted
        self.communication_hook: CommunicationHook | None = None  # a compressed sum over the copies
        self.stages: list[Stage] = []
        self.local_shards: list[LocalShard] = []
        self._pipelines: dict[tuple[int, int, int], Pipeline] = {}  # of the shape that the batch has now
        shapes = parameter_shapes(config)
        place = Coordinates(mesh.pipeline.rank, mesh.tensor.rank, mesh.replica.rank, mesh.shard.rank)
        # the shards of `fully_shard` are masters; without it, and with offload, weights have the products' dtype
        sharded = mesh.shard.group is not None
        held = self.wide if sharded and not offload else self.dtype
        if compiling != "off":
            run_products_eagerly()
            run_ring_eagerly()
        for index in self.layout.stages_of(mesh.pipeline.rank):
            stage = make_stage(config, index, mesh, held)
            convert_products(stage.model, matmul)
            if compiling != "off":
                compile_blocks(stage.model, compiling)
            recompute(stage.model, config, recomputing)
            shard_stage(stage, stage.model.blocks.values(), mesh, self.dtype)
            with memory or nullcontext():
                stage.to_empty(device=mesh.device)
            self.stages.append(stage.train())
            self.local_shards += self._local_shards(stage, place, shapes)
        with memory or nullcontext():
            if offload:
                computed = [(local.name, local.computed) for local in self.local_shards]
                self.offload = HostOffload(computed)
                for local, (_, master) in zip(self.local_shards, self.offload.named_parameters()):
                    local.value = master
            elif held != self.wide:
                for local in self.local_shards:
                    local.value = make_master(local.computed)
            parameters = [local.parameter for local in self.local_shards]
            summed = self.dtype if offload else self.wide
            self.buffer = None if sharded else GradientBuffer(parameters, summed, mesh.gradient)

    def _local_shards(
        self, stage: Stage, place: Coordinates, shapes: dict[str, tuple[int, ...]]
    ) -> list[LocalShard]:
        local_shards = []
        for name, parameter in stage.model.named_parameters():
            spec = make_shard_spec(name, shapes[name], self.config, stage.index, self.layout, place)
            computed = (
                nn.Parameter(local_part(parameter.detach())) if isinstance(parameter, DTensor) else parameter
            )
            assert tuple(computed.shape) == spec.box.size, (name, tuple(computed.shape), spec.box)
            local_shards.append(LocalShard(spec, parameter, computed, computed))
        return local_shards

    def accumulate(
        self,
        batch: StepBatch,
        step: int,
        loss_scale: float = 1.0,
        mark: Mark = no_mark,
        signal: int = 0,
        upcoming: StepBatch | None = None,
    ) -> Tensor:
        """As `Engine.accumulate`; `batch` has this process's rows and their counts. The gradients of the
        local shards are complete afterwards.
        """
        if self.config.dropout:
            self._seed_dropout(step)
        inverse_counts = self._inverse_counts(batch) if batch.agreed is None else batch.agreed
        for stage in self.stages:
            stage.load(batch.micro_batches, inverse_counts, loss_scale)
        if self.buffer is not None and self.communication_hook is None:
            self.buffer.expect(len(batch.micro_batches))
        if self.layout.pipeline > 1:
            self._pipeline(batch).run()
        else:
            self._accumulate_alone(len(batch.micro_batches))
        self.finish_gradients()
        mark("backward")
        return self._totals(inverse_counts, signal, upcoming)

    def cut(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This process's part of each row."""
        return cut_rows(rows, self.mesh.context)

    @torch.no_grad()
    def evaluate(self, rows: dict[str, np.ndarray], mask_fraction: float) -> Tensor:
        """Sums of a validation batch over all processes, (5,) float64 on the host: see `heads.gpt_figures`
        and `bert_figures`.

        Every process gives the whole batch and computes its part of the rows. Shorter rows and missing ones
        are filled up without targets.
        """
        data, context, tensor = self.mesh.data, self.mesh.context.size, self.mesh.tensor.size
        # what a whole row is a multiple of, so that none is filled up beyond it: a table of positions has no
        # more
        rows = fill_up(rows, data.size, tensor if context == 1 else math.lcm(2 * context, context * tensor))
        own = len(rows["input_ids"]) // data.size
        mine = {name: values[data.rank * own : (data.rank + 1) * own] for name, values in rows.items()}
        family = family_of(self.config)
        (batch,) = prepare(
            self.cut(mine), family, own, self.mesh.device, self.dtype, mask_fraction
        ).micro_batches
        heads = [stage.head for stage in self.stages]
        for stage in self.stages:
            stage.eval()
            stage.head = FIGURES[family]
        sums = run_forward(self.stages, batch, self.layout, self.dtype)
        for stage, head in zip(self.stages, heads):
            stage.train()
            stage.head = head
        if sums is None or self.mesh.tensor.rank:
            sums = torch.zeros(5, dtype=torch.float64, device=self.mesh.device)
        return self.mesh.world.all_reduce(sums).cpu()

    def _inverse_counts(self, batch: StepBatch) -> Tensor:
        """1 / target count (terms,) over the rows of all processes; 0 for a term without targets."""
        return self._inverse(self.mesh.gradient.all_reduce(batch.counts_there.clone()))

    def _inverse(self, counts: Tensor) -> Tensor:
        return torch.where(counts > 0, 1 / counts, 0).to(self.wide)

    def _accumulate_alone(self, micro_batches: int) -> None:
        (stage,) = self.stages
        nothing = torch.empty(0)
        for index in range(micro_batches):
            before_backward(stage, self.layout, index == micro_batches - 1)
            stage(nothing).backward()

    def _pipeline(self, batch: StepBatch) -> Pipeline:
        rows, part = batch.micro_batches[0]["input_ids"].shape
        shape = (len(batch.micro_batches), rows, part * self.mesh.context.size)
        if shape not in self._pipelines:  # a schedule is for one shape: another one would abort the processes
            self._pipelines.clear()
            self._pipelines[shape] = Pipeline(self.stages, self.layout, *shape, self.dtype)
        return self._pipelines[shape]

    @torch.no_grad()
    def finish_gradients(self) -> None:
        """Hand the gradients to the local shards and sum what was computed in parts."""
        for local in self.local_shards:
            if local.computed is not local.parameter and local.parameter.grad is not None:
                local.computed.grad = local_part(local.parameter.grad)
        if self.communication_hook is not None:
            self.communication_hook.sum_gradients(self.gradients())
        elif self.buffer is not None:
            self.buffer.finish()
            self.communicator.count_all_reduce(self.buffer.flat.nbytes)
        partial = [
            local.computed.grad
            for local in self.local_shards
            if local.spec.placement == "partial" and local.computed.grad is not None
        ]
        sum_gradients(partial, self.mesh.tensor)
        self._sum_tied()

    def _sum_tied(self) -> None:
        """The token table of the first and of the last stage get the sum of both gradients."""
        tables = [
            local.computed.grad
            for local in self.local_shards
            if local.name == "token_table.weight" and local.computed.grad is not None
        ]
        if self.layout.stages == 1 or not tables or not is_tied(self.config):
            return
        if len(tables) == 2:  # both ends of a V
            tables[0] += tables[1]
            tables[1].copy_(tables[0])
        else:
            sum_gradients(tables, self.mesh.ends)

    @torch.no_grad()
    def _totals(self, inverse_counts: Tensor, signal: int, upcoming: StepBatch | None) -> Tensor:
        """What `accumulate` returns, float64, by one sum over all processes.

        Every loss and every element of the model counts once.
        """
        terms = len(inverse_counts)
        totals = torch.zeros(1 + 2 * terms + len(SIGNALS), dtype=torch.float64, device=self.mesh.device)
        losses, heard, counts = totals[1 : 1 + terms], totals[1 + terms : -terms], totals[-terms:]
        mine = [local.computed for local in self.local_shards if local.spec.primary and local.value.numel()]
        counted = [computed.grad for computed in mine if computed.grad is not None]
        squares = (
            None
            if self.communication_hook is None
            else self.communication_hook.squared_norm(self.gradients())
        )
        if squares is not None:  # the same on every process: each adds its share
            totals[0] = squares / self.mesh.world.size
        elif counted:
            norms = torch._foreach_norm(counted, dtype=self.wide)
            totals[0] = torch.stack(norms).double().square().sum()
        if self.mesh.tensor.rank == 0:
            for stage in self.stages:
                for sums in stage.sums:
                    losses += sums
        if signal:
            heard[SIGNALS.index(Signals(signal))].fill_(1.0)
        if upcoming is not None and self.mesh.tensor.rank == self.mesh.pipeline.rank == 0:
            counts += upcoming.counts_there
        self.mesh.world.all_reduce(totals)
        if upcoming is not None:
            upcoming.agreed = self._inverse(counts)
        largest = torch.zeros_like(totals[:1])
        for number, flag in zip(SIGNALS, heard):
            largest.masked_fill_(flag > 0, float(number))
        return torch.cat((losses * inverse_counts, totals[:1].sqrt(), largest))

    def update(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        if self.offload is not None:
            self.offload.fetch([local.computed.grad for local in self.local_shards])
        super().update(optimizer, factor)
        self.wait()  # the hooks that would wait for a block's weights are those of one process
        self.discard()

    def discard(self) -> None:
        for local in self.local_shards:
            if self.buffer is None:
                local.parameter.grad = None
            local.computed.grad = local.value.grad = None
        if self.buffer is not None:
            self.buffer.zero()

    def states(self) -> dict[str, Tensor]:
        """What compressed gradients of this process still owe; dropout starts each step from its number."""
        if self.communication_hook is None:
            return {}
        errors = self.communication_hook.errors()
        return {f"residual.{self.mesh.rank}.{name}": error for name, error in errors.items()}

    def load_states(self, names: Iterable[str], read: Callable[[str], Tensor], same_layout: bool) -> None:
        """In another layout all begin without errors: some would find those of a place that is no longer
        theirs, others none.
        """
        if self.communication_hook is None or not same_layout:
            return
        # before there were masters, checkpoints said "owed." for "residual."
        saved = {name.removeprefix("owed.").removeprefix("residual."): name for name in names}
        mine = f"{self.mesh.rank}."
        self.communication_hook.load_errors(
            {short.removeprefix(mine): read(name) for short, name in saved.items() if short.startswith(mine)}
        )

    def rescale(self, factor: float) -> None:
        if self.communication_hook is not None:
            self.communication_hook.rescale(factor)

    @property
    def bytes_sent(self) -> float:
        return self.communicator.bytes_sent

    def _seed_dropout(self, step: int) -> None:
        """Start this process's dropout stream of a step.

        With sequence parallelism no two processes compute the same dropout, so each has a stream of its own:
        a function of (seed, step, rank). Masks are therefore those of the layout; with dropout 0 every layout
        computes the same.
        """
        digest = hashlib.sha256(f"dropout:{self.seed}:{step}:{self.mesh.rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def fill_up(rows: dict[str, np.ndarray], row_multiple: int, length_multiple: int) -> dict[str, np.ndarray]:
    """Rows filled up to a multiple of each by copies of the last row, and of tokens 0, none of which are
    targets.
    """
    total, length = rows["input_ids"].shape
    more_rows, more_length = -total % row_multiple, -length % length_multiple
    if not more_rows and not more_length:
        return rows
    filled = {}
    for name, values in rows.items():
        values = np.concatenate([values, np.repeat(values[-1:], more_rows, axis=0)])
        if name in ("targets", "nsp_targets"):
            values[total:] = IGNORED
        if values.ndim == 2:
            empty = {"targets": IGNORED, "nsp_targets": IGNORED, "document_ids": -1}.get(name, 0)
            values = np.pad(values, ((0, 0), (0, more_length)), constant_values=empty)
        filled[name] = values
    return filled
