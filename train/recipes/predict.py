"""A recipe as the planner takes it, and what the planner says of it on this machine. No torch."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from ...models.config import ModelConfig
from ...planner.constants import Constants, constants_here
from ...planner.cost import kernel_totals, step_seconds
from ...planner.hardware import Cluster, read_calibration, this_machine
from ...planner.layout import ZERO_BUBBLE
from ...planner.layout_report import layout_report
from ...planner.memory import MOMENTS, device_terms, host_terms, worst_terms
from ...planner.software import (
    LARGE_VOCABULARY,
    PROCESSOR_RUNTIME_BYTES,
    Software,
    find_software,
    on_processor,
)
from ...planner.tables import optimizer_numbers, parameter_shapes
from ...planner.traffic import StepShape, prepared_places, with_compression
from ...planner.work import Layouts, Work, layouts_of
from .recipe import Recipe

# a CPU has its activations in cache at 4096 (15 % faster than 16384)
EVALUATED_TOKENS = {"cpu": 4096, "cuda": 65536}
EVALUATED_LOGITS = {"cpu": 2**26, "cuda": 2**29}  # numbers on one process: 2**26 are 256 MB in fp32


def evaluated_rows(device: str, vocab_size: int, length: int) -> int:
    """Rows that one process evaluates at once."""
    return max(min(EVALUATED_TOKENS[device], EVALUATED_LOGITS[device] // vocab_size) // length, 1)


def described(config: ModelConfig, recipe: Recipe, device: str = "cuda") -> tuple[Work, Layouts, Software]:
    """A resolved recipe as the planner takes it. Times do not depend on `device`, memory does."""
    train = recipe.train
    shape = step_shape(recipe)
    places = shape.rows * shape.length // recipe.parallel.context
    predicted = shape.predicted / places if recipe.objective else 1.0
    work = Work(config, train.rows_per_step, train.sequence_length, predicted)
    layout, software = recipe.parallel.layout(), find_software("throughline", train.precision)
    if layout.schedule in ZERO_BUBBLE and layout.pipeline > 1:  # by its own lists, and not compiled
        stages = tuple(len(layout.layers_of(stage, config.layers)) for stage in range(layout.stages))
        layout = dataclasses.replace(layout, layers_per_stage=stages)
        software = dataclasses.replace(software, fused_norms=False, fused_activation=False)
    layouts = layouts_of(layout, train.rows_per_micro_batch, train.recompute, train.offload)
    shapes = parameter_shapes(config).items()
    slots = sum(optimizer_numbers(recipe.optimizer.name, name, shape) for name, shape in shapes)
    moments = software.precision.gradient * slots / config.parameter_count()
    numbers = dataclasses.replace(software.precision, moments=moments)
    software = dataclasses.replace(software, precision=numbers)
    software = with_compression(software, config, recipe.compression.scheme, recipe.compression.rank)
    if device == "cpu":
        measured = read_calibration().get("runtime_bytes", PROCESSOR_RUNTIME_BYTES)
        software = on_processor(software, measured)
    evaluated = train.sequence_length * evaluated_rows(device, config.vocab_size, train.sequence_length)
    software = dataclasses.replace(
        software,
        loss_bytes=12 if config.vocab_size < LARGE_VOCABULARY else software.loss_bytes,
        dropout=config.dropout > 0,
        forwards_first=recipe.parallel.schedule == "gpipe",
        evaluated_tokens=evaluated if recipe.data.validation_fraction or recipe.data.validation else 0,
        saves_between=recipe.checkpoint.save_every_steps > 0,
    )
    return work, layouts, software


def predicted_memory(
    config: ModelConfig, recipe: Recipe, device: str = "cpu", moments: Sequence[str] = tuple(MOMENTS)
) -> dict[str, int]:
    """Bytes by term of the process that needs most, at the worst of these moments; their sum is the prediction."""
    return worst_terms(*described(config, recipe, device), moments)


def host_memory(config: ModelConfig, recipe: Recipe) -> dict[str, int]:
    """Bytes by term that a process of a run on a GPU takes on the host: offload's, a checkpoint's copy, its own."""
    work, layouts, software = described(config, recipe, "cuda")
    saved = device_terms(work, layouts, dataclasses.replace(software, on_host=True))
    terms = host_terms(work, layouts, software) | {
        "checkpoint copy": saved["checkpoint copy"] + saved["last checkpoint"],
        "runtime": PROCESSOR_RUNTIME_BYTES,
    }
    return {name: round(float(size)) for name, size in terms.items() if size}


def predicted_step_seconds(
    config: ModelConfig, recipe: Recipe, cluster: Cluster | None = None, constants: Constants | None = None
) -> float:
    """Seconds of one step here, or on another cluster; by the datasheet until `study` has measured this machine."""
    work, layouts, software = described(config, recipe)
    cluster = cluster or this_machine(layouts.world)
    return step_seconds(work, layouts, cluster, software, constants or constants_here(read_calibration()))


def predicted_kernels(config: ModelConfig, recipe: Recipe) -> dict[str, dict[str, float]]:
    """What the planner's kernels come to in one step on the first process, by kind: what a profile should show."""
    work, layouts, software = described(config, recipe)
    constants = constants_here(read_calibration())
    return kernel_totals(work, layouts, this_machine(layouts.world), software, constants)


def step_shape(recipe: Recipe) -> StepShape:
    """The shape of a resolved recipe's step."""
    train = recipe.train
    micro = train.rows_per_micro_batch
    fraction = recipe.mask_fraction
    length = train.sequence_length // recipe.parallel.context
    predicted = prepared_places(micro, length, fraction)[1] if fraction else 0
    return StepShape(
        train.rows_per_step // (recipe.parallel.data * micro),
        micro,
        train.sequence_length,
        predicted,
        train.precision,
        train.recompute,
        halves=train.offload,
        scheme=recipe.compression.scheme,
        rank=recipe.compression.rank,
    )


def layout_facts(recipe: Recipe, config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """The layout of a resolved recipe for a script and for a person: what each process holds and sends."""
    return layout_report(config, recipe.parallel.layout(), step_shape(recipe), recipe.optimizer.name)
