"""Pipeline schedules: torch's, over our stages. Every process reads the same micro-batches, so only activations travel.

Shapes are given, not inferred: torch would otherwise run one extra forward that advances the random numbers.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Stage = Any  # a module of the floor above (train/stage.py), which knows the loss

SCHEDULES = {  # torch's classes
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "zero-bubble-v": "ScheduleZBVZeroBubble",
    "interleaved-zero-bubble": "ScheduleInterleavedZeroBubble",
}
# a failing schedule prints its whole table, hundreds of lines on every process; the error itself says what failed
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


class Pipeline:
    """The stages of this process in a schedule for `micro_batches` of one shape, (rows, sequence_length)."""

    def __init__(
        self, stages: Sequence[Stage], micro_batches: int, rows: int, sequence_length: int, dtype: torch.dtype
    ) -> None:
        from torch.distributed import pipelining  # takes a second to import

        self.stages, self.micro_batches, layout = stages, micro_batches, stages[0].mesh.layout
        device, group = stages[0].mesh.device, stages[0].mesh.pipeline.group
        there: dict[str, Any] = {"dtype": dtype, "device": "meta", "requires_grad": True}
        activation = torch.empty(stages[0].activation_shape(rows, sequence_length), **there)
        nothing, loss = torch.empty(1, device="meta"), torch.empty((), **there)
        parts = []
        for stage in stages:
            taken, given = nothing if stage.is_first else activation, loss if stage.is_last else activation
            where = stage.index, layout.stages, device, taken, given
            parts.append(pipelining.PipelineStage(stage, *where, group=group))
        # of a growing batch, which torch's refuses
        few = layout.schedule == "1f1b" and micro_batches < layout.stages
        schedule = getattr(pipelining, SCHEDULES["gpipe" if few else layout.schedule])
        self.schedule = schedule(
            parts if layout.stages_per_process > 1 else parts[0],
            micro_batches,
            loss_fn=lambda loss, _: loss,  # the last stage returns it
            scale_grads=False,
        )

    def run(self) -> None:
        # one element for each micro-batch; on the device, for a sharded stage would wait for its way there
        empty = torch.empty(self.micro_batches, device=self.stages[0].mesh.device)
        inputs = (empty,) if any(stage.is_first for stage in self.stages) else ()
        target = empty if any(stage.is_last for stage in self.stages) else None
        self.schedule.step(*inputs, target=target, return_outputs=False)


@torch.no_grad()
def run_forward(stages: Sequence[Stage], batch: dict[str, Tensor], dtype: torch.dtype) -> Tensor | None:
    """Sums of one micro-batch on the last stage, without gradients; torch has no evaluation for a V of zero-bubble."""
    by_index = {stage.index: stage for stage in stages}
    mesh, layout = stages[0].mesh, stages[0].mesh.layout
    holders = {index: rank for rank in range(layout.pipeline) for index in layout.stages_of(rank)}
    rows, part = batch["input_ids"].shape
    shape = stages[0].activation_shape(rows, part * mesh.context.size)
    x, sums = torch.empty(0), None
    for index in sorted(by_index):
        stage = by_index[index]
        stage.load([batch], torch.zeros(1, dtype=dtype, device=mesh.device), 1.0)
        if index > 0 and index - 1 not in by_index:
            x = torch.empty(shape, dtype=dtype, device=mesh.device)
            dist.recv(x, mesh.pipeline.ranks[holders[index - 1]], group=mesh.pipeline.group)
        x = stage(x)
        if stage.is_last:
            sums = stage.sums[0]
        elif index + 1 not in by_index:
            dist.send(x.contiguous(), mesh.pipeline.ranks[holders[index + 1]], group=mesh.pipeline.group)
    return sums
