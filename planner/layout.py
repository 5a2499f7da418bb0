"""How a run is spread over processes: the degrees of the axes, what is legal, and what is nearest when it is
not.

No torch here: a recipe's layout is checked on a machine that cannot run it. Axes, outermost first: pipeline
(stages of consecutive layers), data (replicas or shards of the model, each with its rows), context (parts of
each sequence) and tensor (parts of each matrix). The product of the degrees is the number of processes.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..models.config import BERTConfig, ModelConfig

Sharding = Literal["replicated", "zero1", "zero2", "full"]
Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble-v", "interleaved-zero-bubble"]

AXES = ("pipeline", "data", "context", "tensor")
# stages each process may hold: V places stages r and 2p-1-r on process r (Qi et al. 2023, section 6)
STAGES_PER_PROCESS = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "interleaved-1f1b": (2, 64),
    "zero-bubble-v": (2, 2),
    "interleaved-zero-bubble": (2, 64),
}
ZERO_BUBBLE = ("zero-bubble-v", "interleaved-zero-bubble")


@dataclass(frozen=True)
class LayoutProblem:
    """One thing wrong with a layout: the field of `[parallel]` (or of `[train]`), what is wrong, and a fix."""

    field: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Layout:
    """The degrees of the axes and how each of them is used."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    sharding: Sharding = (
        "replicated"  # what the data processes share: nothing, optimizer states, + gradients, + weights
    )
    replicas: int = 1  # hybrid sharding: groups of data processes that each hold a whole copy
    schedule: Schedule = "1f1b"
    stages_per_process: int = 1
    layers_per_stage: tuple[int, ...] = ()  # () = as even as possible

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pipeline * self.stages_per_process

    @property
    def shards(self) -> int:
        """Processes among which one copy of the model is sharded; those of one context group share it too."""
        return 1 if self.sharding == "replicated" else self.data // self.replicas * self.context

    def facts(self) -> dict[str, Any]:
        """The layout for a checkpoint's state and for comparing two: its world and what differs from one
        process.
        """
        differing = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }
        split = (
            {"layers_per_stage": list(self.layers_per_stage)} if self.layers_per_stage else {}
        )  # as JSON gives it back
        return {"world": self.world} | differing | split

    def product(self) -> str:
        """The whole product, for messages: `pipeline 2 x data 2 x context 1 x tensor 2 = 8`."""
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES) + f" = {self.world}"

    def describe(self) -> str:
        """One line: the axes in use and how."""
        parts = []
        if self.pipeline > 1:
            stages = f", {self.stages_per_process} stages each" if self.stages_per_process > 1 else ""
            parts.append(f"pipeline {self.pipeline} ({self.schedule}{stages})")
        if self.data > 1:
            hybrid = (
                f", {self.replicas} copies" if self.replicas > 1 and self.sharding != "replicated" else ""
            )
            parts.append(f"data {self.data} ({self.sharding}{hybrid})")
        if self.context > 1:
            parts.append(f"context {self.context}" + (f" ({self.sharding})" if self.data == 1 else ""))
        if self.tensor > 1:
            parts.append(f"tensor {self.tensor}")
        return " x ".join(parts) or "one process"

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """The stages that a pipeline rank holds, in order: every p-th one, or the two arms of the V."""
        if self.schedule == "zero-bubble-v" and self.pipeline > 1:
            return [pipeline_rank, self.stages - 1 - pipeline_rank]
        return [pipeline_rank + turn * self.pipeline for turn in range(self.stages_per_process)]

    def layers_of(self, stage: int, layers: int) -> range:
        """The layers of a stage; without a given split the first stages take what is left over (the last one
        has the head).
        """
        split = self.layers_per_stage or tuple(
            layers // self.stages + (index < layers % self.stages) for index in range(self.stages)
        )
        start = sum(split[:stage])
        return range(start, start + split[stage])


Allowed = Callable[[Layout, int], bool]  # of a layout and the rows of its micro-batches


def anything(layout: Layout, micro_rows: int) -> bool:
    """No more is asked of a layout than that it fits the model and the batch."""
    return True


def layout_problems(
    layout: Layout, config: ModelConfig, sequence_length: int, rows: int, micro_rows: int
) -> list[LayoutProblem]:
    """Everything that keeps this model and batch from being trained in this layout; empty when it is legal.

    `rows` are those of one optimizer step, `micro_rows` those that one process computes at once.
    """
    problems = [
        LayoutProblem(axis, f"{getattr(layout, axis)} processes", "at least 1")
        for axis in AXES
        if getattr(layout, axis) < 1
    ]
    if problems:
        return problems
    return [
        *_tensor_problems(layout, config, sequence_length),
        *_context_problems(layout, config, sequence_length),
        *_data_problems(layout, rows, micro_rows),
        *_pipeline_problems(layout, config, rows, micro_rows),
    ]


def _tensor_problems(layout: Layout, config: ModelConfig, sequence_length: int) -> Iterator[LayoutProblem]:
    tensor = layout.tensor
    if tensor == 1:
        return
    for name, size in (
        ("heads", config.heads),
        (
            "kv_heads",
            config.key_value_heads if config.key_value_heads > 1 else tensor,
        ),  # a single one is held by all
        ("mlp_width", config.feed_forward_size),
    ):
        if size % tensor:
            yield LayoutProblem(
                "tensor", f"{size} {name} cannot be shared by {tensor} processes", f"a divisor of {size}"
            )
    if config.vocab_size < tensor:
        yield LayoutProblem(
            "tensor", f"{tensor} processes for a vocabulary of {config.vocab_size}: some would hold no row"
        )
    if sequence_length // layout.context % tensor:
        yield LayoutProblem(
            "tensor",
            f"{sequence_length // layout.context} tokens of a row cannot be shared by {tensor} processes",
            "sequence parallelism cuts each row into equal parts: choose train.sequence_length accordingly",
        )


def _context_problems(layout: Layout, config: ModelConfig, sequence_length: int) -> Iterator[LayoutProblem]:
    context = layout.context
    if context == 1:
        return
    if sequence_length % (2 * context):
        yield LayoutProblem(
            "context",
            f"a row of {sequence_length} tokens cannot be cut into 2 x {context} equal parts (two for each process)",
            f"a train.sequence_length that is a multiple of {2 * context}",
        )
    if config.dropout:
        yield LayoutProblem(
            "context",
            f"dropout {config.dropout:g} of attention needs the whole row in one kernel",
            "context = 1, or dropout = 0",
        )
    if config.attention_pattern is not None:
        yield LayoutProblem(
            "context", "a pattern of attention needs whole sequences", "context = 1, or attention_window = 0"
        )
    if isinstance(config, BERTConfig) and config.relative_buckets:
        yield LayoutProblem(
            "context",
            "the relative position bias needs whole sequences",
            "context = 1, or relative_buckets = 0",
        )


def _data_problems(layout: Layout, rows: int, micro_rows: int) -> Iterator[LayoutProblem]:
    if rows % (layout.data * micro_rows):
        fitting = (
            f" or train.micro_batch_rows = {math.gcd(rows // layout.data, micro_rows)}"
            if rows % layout.data == 0
            else ""
        )
        yield LayoutProblem(
            "data",
            f"{rows} rows are no whole number of micro-batches of {micro_rows} rows on each of {layout.data} "
            "data processes",
            f"train.batch_rows a multiple of {layout.data * micro_rows}{fitting}",
        )
    if layout.sharding == "replicated" and layout.replicas not in (1, layout.data):
        yield LayoutProblem(
            "replicas",
            "every data process holds a whole copy already",
            'parallel.sharding = "full", or replicas = 1',
        )
    elif layout.sharding != "replicated" and (
        layout.data % layout.replicas or layout.data == layout.replicas > 1
    ):
        yield LayoutProblem(
            "replicas",
            f"{layout.data} data processes cannot be {layout.replicas} groups that shard among themselves",
            'a proper divisor of parallel.data, or parallel.sharding = "replicated"',
        )


def _pipeline_problems(
    layout: Layout, config: ModelConfig, rows: int, micro_rows: int
) -> Iterator[LayoutProblem]:
    pipeline, schedule = layout.pipeline, layout.schedule
    if pipeline == 1:
        if layout.stages_per_process > 1 or layout.layers_per_stage not in ((), (config.layers,)):
            yield LayoutProblem(
                "pipeline",
                "one pipeline process holds all layers",
                "set parallel.pipeline, or leave the stages out",
            )
        return
    fewest, most = STAGES_PER_PROCESS[schedule]
    if not fewest <= layout.stages_per_process <= most:
        wanted = str(fewest) if fewest == most else f"at least {fewest}"
        yield LayoutProblem(
            "stages_per_process", f"{schedule} needs {wanted}, not {layout.stages_per_process}"
        )
    if config.layers < layout.stages:
        yield LayoutProblem(
            "pipeline",
            f"{config.layers} layers cannot fill {layout.stages} stages",
            f"at most {config.layers} stages",
        )
    split = layout.layers_per_stage
    if split and (len(split) != layout.stages or sum(split) != config.layers):
        yield LayoutProblem(
            "layers_per_stage",
            f"{list(split)} are {len(split)} stages with {sum(split)} layers, not {layout.stages} with {config.layers}",
        )
    if split and min(split) < 1:
        yield LayoutProblem(
            "layers_per_stage", f"{list(split)} has a stage of {min(split)} layers", "at least 1 in each"
        )
    if isinstance(config, BERTConfig) and config.relative_buckets:
        yield LayoutProblem(
            "pipeline",
            "the relative position bias is shared by all layers",
            "pipeline = 1, or relative_buckets = 0",
        )
    if schedule in ZERO_BUBBLE and layout.sharding == "full":
        # the split backward of torch 2.13 frees gathered weights before their gradient is taken: gradients
        # would be lost silently
        yield LayoutProblem(
            "sharding",
            f"full with {schedule}: weights freed after each forward lose gradients of the split backward",
            'sharding = "zero2" (a pipeline keeps the weights of a step gathered in any case)',
        )
    if rows % (layout.data * micro_rows) == 0:
        yield from _micro_batch_problems(layout, rows // layout.data, micro_rows)


def _micro_batch_problems(layout: Layout, own_rows: int, micro_rows: int) -> Iterator[LayoutProblem]:
    pipeline, schedule = layout.pipeline, layout.schedule
    micro_batches = own_rows // micro_rows
    if micro_batches < pipeline and schedule != "gpipe":
        text = f"{micro_batches} micro-batches for {pipeline} stages of {schedule}"
        if own_rows < pipeline:  # no micro-batch is small enough
            yield LayoutProblem("pipeline", text, f"train.batch_rows of at least {layout.data * pipeline}")
        else:
            yield LayoutProblem(
                "train.micro_batch_rows", text, f"at most {own_rows // pipeline}, a divisor of {own_rows}"
            )
    elif schedule.startswith("interleaved") and micro_batches % max(1, micro_batches // pipeline):
        yield LayoutProblem(
            "train.micro_batch_rows",
            f"{schedule} goes in rounds: {micro_batches} micro-batches on {pipeline} pipeline processes "
            "make no whole rounds",
            f"a multiple of {pipeline} micro-batches",
        )


def default_micro_rows(layout: Layout, rows: int) -> int:
    """Rows that one process computes at once when the recipe does not say: all of its own, or a pipeline's
    worth.

    A pipeline gets four micro-batches per stage where the rows allow: a bubble of at most a fifth (Narayanan
    et al. 2021, section 2.2).
    """
    own = max(rows // layout.data, 1)
    if layout.pipeline == 1:
        return own
    for turns in (4, 3, 2, 1):
        if own % (turns * layout.pipeline) == 0:
            return own // (turns * layout.pipeline)
    return 1
