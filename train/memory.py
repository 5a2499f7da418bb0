"""Whether a run fits into memory, by what the planner predicts, before anything is allocated: a refusal when it does
not, with the cheapest changes.
"""

import math
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from ..core.console import amount, warn
from ..core.errors import Failed, Refused
from ..core.hardware import memory_limit_bytes
from ..models.config import ModelConfig
from ..models.presets import preset, preset_names
from ..planner.memory import IN_A_STEP
from .parallel.mesh import processes_here
from .recipes.predict import predicted_memory
from .recipes.recipe import Recipe, model_config, model_family
from .recipes.rules import RULES

FEWER_ROWS = "train.micro_batch_rows = 1 (same result)"
RECOMPUTE = 'train.recompute = "full" (a third more time)'
OF_PHASE = {  # the moments that an allocation of a phase adds to
    "forward": ("loss",),
    "backward": ("loss", "backward of a layer"),
    "the optimizer": ("update",),
}


def check_memory(config: ModelConfig, recipe: Recipe, device: torch.device) -> dict[str, int]:
    """The estimate. Raises Refused, with its terms and the three cheapest changes, when it does not fit."""
    terms = predicted_memory(config, recipe, device.type)
    need = sum(terms.values())
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        total = memory_limit_bytes() // processes_here()  # which all need as much
        free = min(psutil.virtual_memory().available // processes_here(), total)
    if need > total:
        raise Refused(
            f"the run needs {amount(need, 'B')} of memory, {device.type} has {amount(total, 'B')}",
            where="model, train",
            why=_largest_first(terms),
            fix="\n".join(_cheaper(recipe, config, device.type, total)),
        )
    if need > free:
        left = f"{amount(free, 'B')} of {amount(total, 'B')} are free just now"
        warn(f"the run needs about {amount(need, 'B')} and {left}")
    return terms


def beside(terms: dict[str, int], device: torch.device, measured: int) -> dict[str, int]:
    """The prediction and what a run measured, of the same things: on a GPU that is what torch's allocator gave out,
    without the context and the libraries, which `check_memory` counts too; on a processor the whole process.
    """
    predicted = sum(terms.values()) - (terms.get("runtime", 0) if device.type == "cuda" else 0)
    return {"predicted": predicted, "measured": measured}


def out_of_memory(config: ModelConfig, recipe: Recipe, device: torch.device, phase: str) -> Failed:
    """The error of an allocation in a step: the phase, the largest consumers and the cheapest changes."""
    cuda = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if cuda else memory_limit_bytes()
    return Failed(
        f"out of memory in {phase}",
        where=f"{device.type}, {amount(total, 'B')}",
        why="predicted: " + _largest_first(predicted_memory(config, recipe, device.type, IN_A_STEP)),
        fix="\n".join(_followable(recipe, config, device.type, OF_PHASE.get(phase, IN_A_STEP))),
    )


def _largest_first(terms: dict[str, int]) -> str:
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {amount(size, 'B')}" for name, size in ordered)


def _changed(recipe: Recipe, train: dict[str, Any], parallel: dict[str, Any] | None = None) -> Recipe:
    sections = {
        "train": recipe.train.model_copy(update=train),
        "parallel": recipe.parallel.model_copy(update=parallel or {}),
    }
    return recipe.model_copy(update=sections)


def _cheaper(recipe: Recipe, config: ModelConfig, device: str, total: int) -> list[str]:
    """The three cheapest changes that save memory, cheapest first, each with what would then be needed."""

    def need(**changes: object) -> int:
        return sum(predicted_memory(config, _changed(recipe, changes), device).values())

    tries = (
        (FEWER_ROWS, need(micro_batch_rows=1)),
        (RECOMPUTE, need(recompute="full")),
        ('both, with train.precision = "bf16"', need(micro_batch_rows=1, recompute="full", precision="bf16")),
    )
    lines = [f"{text}: {amount(size, 'B')}" for text, size in tries if size < need()]
    if all(size > total for _, size in tries):  # then only a smaller model helps
        needs = {name: _preset_need(name, recipe, device) for name in preset_names(model_family(recipe))}
        if fitting := [name for name, size in needs.items() if size <= total]:
            largest = max(fitting, key=lambda name: preset(name).parameter_count())
            lines.insert(
                2, f'model.preset = "{largest}", the largest that fits: {amount(needs[largest], "B")}'
            )
    return lines[:3]


def _followable(recipe: Recipe, config: ModelConfig, device: str, moments: Sequence[str]) -> list[str]:
    """The changes with which the directory of a run that has started can go on and which save memory at these moments,
    cheapest first, each with what would then be needed there.

    Offload, the dearest, comes with those that cost less and help.
    """
    layout = recipe.parallel.layout()
    sharding = "full" if layout.pipeline == 1 else "zero1"
    more: dict[str, Any] = {}
    fewer: dict[str, Any] = {}
    shared = f'parallel.sharding = "{sharding}"'
    if layout.data == 1:
        more = {"data": 2}
        train = recipe.train
        fewer = {"micro_batch_rows": math.gcd(train.rows_per_step // 2, train.rows_per_micro_batch)}
        shared = f"parallel.data = 2, {shared} (on {2 * layout.world} processes: throughline launch)"
    lines: list[str] = []
    helping: dict[str, Any] = {}

    def need(changed: Recipe) -> int:
        return sum(predicted_memory(config, changed, device, moments).values())

    for text, changes, parallel in (
        (FEWER_ROWS, {"micro_batch_rows": 1}, {}),
        (RECOMPUTE, {"recompute": "full"}, {}),
        (shared, fewer, {"sharding": sharding} | more),
        ("train.offload = true (the update on the host)", {"offload": True}, {}),
    ):
        offload = "offload" in changes
        changed = _changed(recipe, (helping | changes) if offload else changes, parallel)
        if any(list(rule(changed)) for rule in RULES) or (offload and recipe.train.offload):
            continue
        if (size := need(changed)) < need(recipe):
            beside = " with the first changes of train" if offload and helping else ""
            lines.append(f"{text}{beside}: {amount(size, 'B')}")
            helping |= changes if not parallel else {}
    nothing = "more memory, or a smaller model in another directory: nothing that may change here saves any"
    return lines or [nothing]


def _preset_need(name: str, recipe: Recipe, device: str) -> int:
    """Bytes that the recipe would need with another preset and none of its overrides."""
    model = recipe.model.model_copy(update={"preset": name, "overrides": {}})
    changed = recipe.model_copy(update={"model": model})
    return sum(predicted_memory(model_config(changed), changed, device).values())
