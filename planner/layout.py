"""How a run is spread over processes: the degrees of the axes, what is legal, and what is nearest when it is not.

Without torch: a recipe is checked on a machine that cannot run it. Axes, outermost first: pipeline (stages of layers),
data (replicas or shards of the model, each with its rows), context (parts of each sequence), tensor (of matrices).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..core.errors import WrongUse
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
    """The field of `[parallel]` (or of `[train]`), what is wrong with it, and a fix."""

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
    # what the data processes share: nothing, optimizer states, + gradients, + weights
    sharding: Sharding = "replicated"
    replicas: int = 1  # hybrid sharding: groups of data processes that each hold a whole copy
    schedule: Schedule = "1f1b"
    stages_per_process: int = 1
    layers_per_stage: tuple[int, ...] = ()  # () = as even as possible
    expert: int = 1  # neighbouring data processes that share the experts; no factor of the world's product

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
        """Its world and what differs from one process, for a checkpoint's state and for comparing two."""
        usual = vars(Layout())
        differing = {name: value for name, value in vars(self).items() if value != usual[name]}
        if self.layers_per_stage:  # as JSON gives it back
            differing["layers_per_stage"] = list(self.layers_per_stage)
        return {"world": self.world} | differing

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
            copies = self.replicas > 1 and self.sharding != "replicated"
            hybrid = f", {self.replicas} copies" if copies else ""
            parts.append(f"data {self.data} ({self.sharding}{hybrid})")
        if self.context > 1:
            parts.append(f"context {self.context}" + (f" ({self.sharding})" if self.data == 1 else ""))
        if self.tensor > 1:
            parts.append(f"tensor {self.tensor}")
        if self.expert > 1:
            parts.append(f"expert {self.expert}")
        return " x ".join(parts) or "one process"

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """The stages that a pipeline rank holds, in order: every p-th one, or the two arms of the V."""
        if self.schedule == "zero-bubble-v" and self.pipeline > 1:
            return [pipeline_rank, self.stages - 1 - pipeline_rank]
        return [pipeline_rank + turn * self.pipeline for turn in range(self.stages_per_process)]

    def layers_of(self, stage: int, layers: int) -> range:
        """Without a given split the first stages take what is left over (the last one has the head)."""
        base, extra = divmod(layers, self.stages)
        split = self.layers_per_stage or tuple(base + (index < extra) for index in range(self.stages))
        start = sum(split[:stage])
        return range(start, start + split[stage])


def divisors(count: int) -> list[int]:
    """Of a number, ascending."""
    small = [n for n in range(1, math.isqrt(count) + 1) if count % n == 0]
    return sorted({*small, *(count // n for n in small)})


# of a layout and the rows of its micro-batches: whether the rest of a recipe, such as its optimizer, can be had in it
Allowed = Callable[[Layout, int], bool]


def layout_problems(
    layout: Layout, config: ModelConfig, sequence_length: int, rows: int, micro_rows: int
) -> list[LayoutProblem]:
    """What is against this model and batch in this layout: `rows` a step, `micro_rows` at once in one process."""
    degrees = {axis: getattr(layout, axis) for axis in AXES}
    wrong = [LayoutProblem(axis, f"{n} processes", "at least 1") for axis, n in degrees.items() if n < 1]
    return wrong or [
        LayoutProblem(*said)
        for broken, *said in (
            *_tensor_rules(layout, config, sequence_length),
            *_context_rules(layout, config, sequence_length),
            *_data_rules(layout, rows, micro_rows),
            *_expert_rules(layout, config),
            *_pipeline_rules(layout, config),
            *_micro_batch_rules(layout, rows, micro_rows),
        )
        if broken
    ]


Rule = tuple[Any, str, str, str]  # whether it is broken; then the problem: field, text and fix


def _tensor_rules(layout: Layout, config: ModelConfig, sequence_length: int) -> Iterator[Rule]:
    tensor, tokens = layout.tensor, sequence_length // layout.context
    if tensor == 1:
        return
    keys = config.key_value_heads if config.key_value_heads > 1 else tensor  # a single one is held by all
    for name, size in (("heads", config.heads), ("kv_heads", keys), ("mlp_width", config.feed_forward_size)):
        text = f"{size} {name} cannot be shared by {tensor} processes"
        yield size % tensor, "tensor", text, f"a divisor of {size}"
    shared = 0 if isinstance(config, BERTConfig) else config.shared_experts * config.expert_size
    text = f"shared experts of {shared} cannot be shared by {tensor} processes"
    yield shared % tensor, "tensor", text, f"a divisor of {shared}"
    if getattr(config, "qk_norm", "") == "whole":
        yield getattr(config, "norm_from_one", False), "tensor", "no whole qk_norm is from one", "tensor = 1"
    text = "positions = alibi are a bias with a slope for each of all heads"
    yield config.positions == "alibi", "tensor", text, "tensor = 1"
    text = f"{tensor} processes for a vocabulary of {config.vocab_size}: some would hold no row"
    yield config.vocab_size < tensor, "tensor", text, ""
    text = f"{tokens} tokens of a row cannot be shared by {tensor} processes"
    fix = "sequence parallelism cuts each row into equal parts: choose train.sequence_length accordingly"
    yield tokens % tensor, "tensor", text, fix


def _context_rules(layout: Layout, config: ModelConfig, sequence_length: int) -> Iterator[Rule]:
    context, parts = layout.context, 2 * layout.context
    if context == 1:
        return
    text = f"a row of {sequence_length} tokens cannot be cut into 2 x {context} equal parts (two for each process)"
    yield sequence_length % parts, "context", text, f"a train.sequence_length that is a multiple of {parts}"
    text = f"dropout {config.dropout:g} of attention needs the whole row in one kernel"
    yield config.dropout, "context", text, "context = 1, or dropout = 0"
    text = "a pattern of attention but a decoder's window needs whole sequences"
    pattern = config.attention_pattern
    unlike = pattern is not None and (isinstance(config, BERTConfig) or not pattern.is_band)
    yield unlike, "context", text, "context = 1, or attention_window = 0"
    yield config.positions == "alibi", "context", "positions = alibi are a bias of whole rows", "context = 1"
    text = "no kernel merges parts of a row under attention_softcap"
    yield getattr(config, "attention_softcap", 0), "context", text, "context = 1"
    text = "the relative position bias needs whole sequences"
    yield getattr(config, "relative_buckets", 0), "context", text, "context = 1, or relative_buckets = 0"


def _data_rules(layout: Layout, rows: int, micro_rows: int) -> Iterator[Rule]:
    data, replicas, fix = layout.data, layout.replicas, ""
    if rows % data == 0:
        fix = f" or train.micro_batch_rows = {math.gcd(rows // data, micro_rows)}"
    text = f"{rows} rows are no whole number of micro-batches of {micro_rows} rows on each of {data} data processes"
    fix = f"train.batch_rows a multiple of {data * micro_rows}{fix}"
    yield rows % (data * micro_rows), "data", text, fix
    if layout.sharding == "replicated":
        text = "every data process holds a whole copy already"
        yield replicas not in (1, data), "replicas", text, 'parallel.sharding = "full", or replicas = 1'
    else:
        text = f"{data} data processes cannot be {replicas} groups that shard among themselves"
        fix = 'a proper divisor of parallel.data, or parallel.sharding = "replicated"'
        yield data % replicas or data == replicas > 1, "replicas", text, fix


def _expert_rules(layout: Layout, config: ModelConfig) -> Iterator[Rule]:
    expert, experts = layout.expert, getattr(config, "experts", 0)
    if expert == 1:
        return
    text = f"{experts} experts cannot be shared by {expert} processes"
    yield expert < 1 or experts < expert or experts % expert, "expert", text, f"a divisor of {experts or 1}"
    data = layout.data if layout.sharding == "replicated" else layout.data // layout.replicas
    text = f"{expert} processes that share experts are no part of {data} data processes"
    if data < layout.data:
        text += " that shard one copy"
    yield data % max(expert, 1), "expert", text, f"a divisor of {data}"


def _pipeline_rules(layout: Layout, config: ModelConfig) -> Iterator[Rule]:
    schedule, stages, held = layout.schedule, layout.stages, layout.stages_per_process
    split = layout.layers_per_stage
    if layout.pipeline == 1:
        fix = "set parallel.pipeline, or leave the stages out"
        staged = held > 1 or split not in ((), (config.layers,))
        yield staged, "pipeline", "one pipeline process holds all layers", fix
        return
    fewest, most = STAGES_PER_PROCESS[schedule]
    text = f"{schedule} needs {fewest if fewest == most else f'at least {fewest}'}, not {held}"
    yield not fewest <= held <= most, "stages_per_process", text, ""
    text = f"{config.layers} layers cannot fill {stages} stages"
    yield config.layers < stages, "pipeline", text, f"at most {config.layers} stages"
    if split:
        text = f"{list(split)} are {len(split)} stages with {sum(split)} layers, not {stages} with {config.layers}"
        yield len(split) != stages or sum(split) != config.layers, "layers_per_stage", text, ""
        text = f"{list(split)} has a stage of {min(split)} layers"
        yield min(split) < 1, "layers_per_stage", text, "at least 1 in each"
    text = "the relative position bias is shared by all layers"
    yield getattr(config, "relative_buckets", 0), "pipeline", text, "pipeline = 1, or relative_buckets = 0"
    # the split backward of torch 2.13 frees gathered weights before their gradient is taken, which is lost silently
    text = f"full with {schedule}: weights freed after each forward lose gradients of the split backward"
    fix = 'sharding = "zero2" (a pipeline keeps the weights of a step gathered in any case)'
    yield schedule in ZERO_BUBBLE and layout.sharding == "full", "sharding", text, fix
    # the last stage then uses its token table several times, whose graph the split backward frees after the first
    further, tied = config.blocks_ahead, getattr(config, "tied", True)
    text = (
        f"{schedule} takes gradients of weights apart, and the last stage uses the token table more than once"
    )
    fix = "model.overrides.predict_ahead = 1 with model.overrides.tied = false"
    several = further > 1 or (further == 1 and tied)
    yield (
        schedule in ZERO_BUBBLE and several,
        "schedule",
        text,
        f'schedule = "1f1b" with one stage each, or {fix}',
    )


def _micro_batch_rules(layout: Layout, rows: int, micro_rows: int) -> Iterator[Rule]:
    pipeline, schedule, own_rows = layout.pipeline, layout.schedule, rows // layout.data
    if pipeline == 1 or rows % (layout.data * micro_rows):
        return
    micro_batches = own_rows // micro_rows
    if micro_batches < pipeline and schedule != "gpipe":
        text = f"{micro_batches} micro-batches for {pipeline} stages of {schedule}"
        if own_rows < pipeline:  # no micro-batch is small enough
            yield True, "pipeline", text, f"train.batch_rows of at least {layout.data * pipeline}"
        else:
            fix = f"at most {own_rows // pipeline}, a divisor of {own_rows}"
            yield True, "train.micro_batch_rows", text, fix
    elif schedule.startswith("interleaved"):
        text = f"{micro_batches} micro-batches on {pipeline} processes make no whole rounds of {schedule}"
        uneven = micro_batches % max(1, micro_batches // pipeline)
        yield uneven, "train.micro_batch_rows", text, f"a multiple of {pipeline} micro-batches"


def default_micro_rows(layout: Layout, rows: int) -> int:
    """Rows of a micro-batch by default: all of a process; in a pipeline four micro-batches a stage where rows allow."""
    own = max(rows // layout.data, 1)
    if layout.pipeline == 1:
        return own
    # with four a bubble of at most a fifth (Narayanan et al. 2021, section 2.2)
    counts = (turns * layout.pipeline for turns in (4, 3, 2, 1))
    return next((own // count for count in counts if own % count == 0), 1)


def wrong_world(
    layout: Layout,
    world: int,
    config: ModelConfig,
    sequence_length: int,
    rows: int,
    micro_rows: int,
    allowed: Allowed = lambda layout, micro_rows: True,
) -> WrongUse:
    """The error of a world of processes that is not the layout's, with the nearest legal layouts."""
    near = nearest_layouts(layout, world, config, sequence_length, rows, micro_rows, allowed)
    launch = f"throughline launch --nproc {layout.world} -- train RECIPE"
    fix = f"{launch}; no layout of this recipe fits {world}"
    if near:
        others = [f"{found.product()}: {set_options(layout, found)}" for found in near]
        fix = "\n".join([f"{launch}, or one of the nearest layouts for {world}:", *others])
    what = f"the layout needs {layout.world} process{'es' * (layout.world != 1)}, not {world}"
    return WrongUse(what, where="parallel", why=layout.product(), fix=fix)


def set_options(layout: Layout, other: Layout) -> str:
    """The options that turn one layout into another."""
    return " ".join(
        f"--set parallel.{name}={list(value) if isinstance(value, tuple) else value}"
        for name, value in vars(other).items()
        if value != getattr(layout, name)
    )


def nearest_layouts(
    layout: Layout,
    world: int,
    config: ModelConfig,
    sequence_length: int,
    rows: int,
    micro_rows: int,
    allowed: Allowed = lambda layout, micro_rows: True,
) -> list[Layout]:
    """The three legal layouts of `world` processes that change least: a factor of two on one axis is one step."""
    found, usual = [], micro_rows == default_micro_rows(layout, rows)  # then usual in the others too
    for tensor, context, pipeline in itertools.product(divisors(world), repeat=3):
        data, odd = divmod(world, tensor * context * pipeline)
        if odd:
            continue
        near = dataclasses.replace(layout, data=data, tensor=tensor, pipeline=pipeline, context=context)
        near = dataclasses.replace(
            near,
            replicas=layout.replicas if data % layout.replicas == 0 and data > layout.replicas else 1,
            expert=math.gcd(layout.expert, data),
            stages_per_process=layout.stages_per_process if pipeline > 1 else 1,
            layers_per_stage=layout.layers_per_stage if pipeline == layout.pipeline else (),
        )
        near_rows = default_micro_rows(near, rows) if usual else micro_rows
        if not layout_problems(near, config, sequence_length, rows, near_rows) and allowed(near, near_rows):
            distance = sum(abs(math.log2(getattr(near, axis) / getattr(layout, axis))) for axis in AXES)
            # between equally near layouts the cheaper axis grows first: data, then pipeline, tensor and context
            found.append((distance, abs(tensor - layout.tensor), context, tensor, pipeline, near))
    return [near for *_, near in sorted(found, key=lambda item: item[:-1])[:3]]
