"""A model spread over processes: built, run forward and backward, its gradients finished.

After backward the rest of a step is local: `leaves` are plain tensors, each this process's box of a parameter, and one sum over
all processes gives the gradient norm. The optimizer, clipping and checkpoints see leaves only.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...models.config import ModelConfig, family_of
from ...models.init import initial_values
from ..objective import IGNORED, StepBatch, prepare
from ..precision import weight_dtype
from ..recompute import recompute
from .compression import Exchange, Wire
from .context import cut_rows
from .heads import bert_figures, gpt_figures
from .mesh import Mesh
from .pipeline import Pipeline, run_forward
from .plan import Box, Piece, Place, is_tied, make_piece, parameter_shapes
from .sharding import before_backward, local_part, shard_stage, sum_gradients
from .stage import Stage, make_stage

Values = Callable[[str, Box], Tensor]  # a part of the parameter of a name, on the host


@dataclass
class Leaf:
    """This process's box of one parameter. `value` shares its memory with the module's `parameter`, which may be sharded."""

    piece: Piece
    parameter: nn.Parameter
    value: nn.Parameter

    @property
    def name(self) -> str:
        return self.piece.name


class Engine:
    """The stages of this process in their layout.

    `dtype` of the weights, by default that of the precision. `memory` is entered where they get theirs: a simulation gives none.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        precision: str,
        seed: int = 0,
        recomputing: str = "none",
        *,
        dtype: torch.dtype | None = None,
        memory: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.config, self.mesh, self.layout, self.seed = config, mesh, mesh.layout, seed
        self.dtype = dtype or weight_dtype(precision)
        self.exchange: Exchange | None = None  # a compressed sum over the copies
        self.wire = Wire(
            mesh.gradient
        )  # counts what copies send for gradients; `fully_shard` sends by itself, uncounted
        self.stages: list[Stage] = []
        self.leaves: list[Leaf] = []
        self._pipelines: dict[tuple[int, int, int], Pipeline] = {}
        shapes = parameter_shapes(config)
        place = Place(mesh.pipeline.rank, mesh.tensor.rank, mesh.replica.rank, mesh.shard.rank)
        for index in self.layout.stages_of(mesh.pipeline.rank):
            stage = make_stage(config, index, mesh, precision, self.dtype)
            recompute(stage.model, config, recomputing)
            shard_stage(stage, mesh)
            with memory or nullcontext():
                stage.to_empty(device=mesh.device)
            self.stages.append(stage.train())
            self.leaves += self._leaves(stage, place, shapes)

    def _leaves(self, stage: Stage, place: Place, shapes: dict[str, tuple[int, ...]]) -> list[Leaf]:
        leaves = []
        for name, parameter in stage.model.named_parameters():
            piece = make_piece(name, shapes[name], self.config, stage.index, self.layout, place)
            value = (
                nn.Parameter(local_part(parameter.detach())) if isinstance(parameter, DTensor) else parameter
            )
            assert tuple(value.shape) == piece.box.size, (name, tuple(value.shape), piece.box)
            leaves.append(Leaf(piece, parameter, value))
        return leaves

    @torch.no_grad()
    def fill(self, values: Values | None = None, into: Sequence[Leaf] | None = None) -> None:
        """Give every leaf its values, by default the initial ones of the seed, as every layout has them.

        `into`: copies of the leaves that get them instead.
        """
        for leaf in self.leaves if into is None else into:
            piece = leaf.piece
            if values is None:
                whole = initial_values(piece.name, torch.Size(piece.shape), self.config, self.seed)
                leaf.value.copy_(whole[piece.box.slices()])
            else:
                leaf.value.copy_(values(piece.name, piece.box))

    def accumulate(self, batch: StepBatch, step: int, loss_scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Forward and backward of all micro-batches: mean losses (terms,) of the whole batch, and the global gradient norm.

        `batch` has this process's rows and their counts. The gradients of the leaves are complete afterwards.
        """
        if self.config.dropout:
            self._seed_dropout(step)
        inverse_counts = self._inverse_counts(batch)
        for stage in self.stages:
            stage.load(batch.micro_batches, inverse_counts, loss_scale)
        if self.layout.pipeline > 1:
            self._pipeline(batch).run()
        else:
            self._accumulate_alone(len(batch.micro_batches))
        self.finish_gradients()
        return self._totals(inverse_counts)

    def cut(self, rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This process's part of each row."""
        return cut_rows(rows, self.mesh.context)

    @torch.no_grad()
    def evaluate(self, rows: dict[str, np.ndarray], mask_fraction: float) -> Tensor:
        """Sums of a validation batch over all processes, (5,) float64 on the host: see `heads.gpt_figures` and `bert_figures`.

        Every process gives the whole batch and computes its part of the rows. Shorter rows and missing ones are filled up without
        targets.
        """
        data, context, tensor = self.mesh.data, self.mesh.context.size, self.mesh.tensor.size
        # what a whole row is a multiple of, so that none is filled up beyond it: a table of positions has no more
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
            stage.head = gpt_figures if family == "gpt" else bert_figures
        sums = run_forward(self.stages, batch, self.layout, self.dtype)
        for stage, head in zip(self.stages, heads):
            stage.train()
            stage.head = head
        if sums is None or self.mesh.tensor.rank:
            sums = torch.zeros(5, dtype=torch.float64, device=self.mesh.device)
        return self.mesh.world.all_reduce(sums).cpu()

    def _inverse_counts(self, batch: StepBatch) -> Tensor:
        """1 / target count (terms,) over the rows of all processes; 0 for a term without targets."""
        counts = torch.tensor(batch.counts, dtype=torch.float64, device=self.mesh.device)
        counts = self.mesh.gradient.all_reduce(counts)
        return torch.where(counts > 0, 1 / counts, 0).to(torch.promote_types(self.dtype, torch.float32))

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
            self._pipelines[shape] = Pipeline(self.stages, self.layout, *shape, self.dtype)
        return self._pipelines[shape]

    def finish_gradients(self) -> None:
        """Hand the gradients to the leaves and sum what was computed in parts."""
        for leaf in self.leaves:
            if leaf.value is not leaf.parameter and leaf.parameter.grad is not None:
                leaf.value.grad = local_part(leaf.parameter.grad)
        if self.exchange is not None:
            self.exchange.sum_gradients(self.gradients())
        elif self.mesh.shard.group is None:
            sum_gradients(self.gradients(), self.mesh.gradient)
            self.wire.count_all_reduce(sum(gradient.nbytes for gradient in self.gradients()))
        partial = [
            leaf.value.grad
            for leaf in self.leaves
            if leaf.piece.placement == "partial" and leaf.value.grad is not None
        ]
        sum_gradients(partial, self.mesh.tensor)
        self._sum_tied()

    def _sum_tied(self) -> None:
        """The token table of the first and of the last stage get the sum of both gradients."""
        tables = [
            leaf.value.grad
            for leaf in self.leaves
            if leaf.name == "token_table.weight" and leaf.value.grad is not None
        ]
        if self.layout.stages == 1 or not tables or not is_tied(self.config):
            return
        if len(tables) == 2:  # both ends of a V
            tables[0] += tables[1]
            tables[1].copy_(tables[0])
        else:
            sum_gradients(tables, self.mesh.ends)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The leaves that hold anything, by the names of the model: what an optimizer moves."""
        return ((leaf.name, leaf.value) for leaf in self.leaves if leaf.value.numel())

    def gradients(self) -> list[Tensor]:
        """The gradients of the leaves, those without any left out."""
        return [leaf.value.grad for leaf in self.leaves if leaf.value.grad is not None]

    @torch.no_grad()
    def _totals(self, inverse_counts: Tensor) -> tuple[Tensor, Tensor]:
        """Mean losses and gradient norm, float64, by one sum over all processes.

        Every loss and every element of the model counts once.
        """
        totals = torch.zeros(1 + len(inverse_counts), dtype=torch.float64, device=self.mesh.device)
        mine = [leaf.value for leaf in self.leaves if leaf.piece.primary and leaf.value.numel()]
        counted = [value.grad for value in mine if value.grad is not None]
        squares = None if self.exchange is None else self.exchange.squared_norm(self.gradients())
        if squares is not None:  # the same on every process: each adds its share
            totals[0] = squares / self.mesh.world.size
        elif counted:
            norms = torch._foreach_norm(counted, dtype=torch.promote_types(self.dtype, torch.float32))
            totals[0] = torch.stack(norms).double().square().sum()
        if self.mesh.tensor.rank == 0:
            for stage in self.stages:
                for sums in stage.sums:
                    totals[1:] += sums
        self.mesh.world.all_reduce(totals)
        return totals[1:] * inverse_counts, totals[0].sqrt()

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for leaf in self.leaves:
            leaf.value.grad = leaf.parameter.grad = None

    def _seed_dropout(self, step: int) -> None:
        """Start this process's dropout stream of a step.

        With sequence parallelism no two processes compute the same dropout, so each has a stream of its own: a function of
        (seed, step, rank). Masks are therefore those of the layout; with dropout 0 every layout computes the same.
        """
        digest = hashlib.sha256(f"dropout:{self.seed}:{step}:{self.mesh.rank}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def fill_up(rows: dict[str, np.ndarray], row_multiple: int, length_multiple: int) -> dict[str, np.ndarray]:
    """Rows filled up to a multiple of each by copies of the last row, and of tokens 0, none of which are targets."""
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
