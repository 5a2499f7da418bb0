"""Whether a run fits into memory, by what the planner predicts, before anything is allocated: a refusal when it does
not, with the cheapest changes.
"""

import psutil
import torch

from ..core.console import amount, warn
from ..core.errors import Failed, Refused
from ..core.hardware import memory_limit_bytes
from ..models.config import ModelConfig
from ..models.presets import preset, preset_names
from ..planner.memory import IN_A_STEP, MOMENTS
from .parallel.mesh import processes_here
from .predict import predicted_memory
from .recipe import Recipe, model_config, model_family


def check_memory(config: ModelConfig, recipe: Recipe, device: torch.device) -> dict[str, int]:
    """The estimate, when it fits. Raises Refused with the terms and the three cheapest changes when it does
    not.
    """
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
        warn(
            f"the run needs about {amount(need, 'B')} and {amount(free, 'B')} of {amount(total, 'B')} are free just now"
        )
    return terms


def out_of_memory(config: ModelConfig, recipe: Recipe, device: torch.device, phase: str) -> Failed:
    """The error for an allocation that failed in a step, with the phase, the largest consumers and the
    cheapest changes.
    """
    total = (
        torch.cuda.get_device_properties(device).total_memory
        if device.type == "cuda"
        else memory_limit_bytes()
    )
    return Failed(
        f"out of memory in {phase}",
        where=f"{device.type}, {amount(total, 'B')}",
        why="predicted: " + _largest_first(predicted_memory(config, recipe, device.type, IN_A_STEP)),
        fix="\n".join(_cheaper(recipe, config, device.type, total, started=True)),
    )


def _largest_first(terms: dict[str, int]) -> str:
    return ", ".join(
        f"{name} {amount(size, 'B')}" for name, size in sorted(terms.items(), key=lambda item: -item[1])
    )


def _cheaper(
    recipe: Recipe, config: ModelConfig, device: str, total: int, started: bool = False
) -> list[str]:
    """The three cheapest changes that save memory, cheapest first, each with what would then be needed.

    Of a run that has started, those with which its directory can go on.
    """

    def need(**changes: object) -> int:
        changed = recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})
        return sum(
            predicted_memory(config, changed, device, IN_A_STEP if started else tuple(MOMENTS)).values()
        )

    now = need()
    tries: tuple[tuple[str, int], ...] = (
        ("train.micro_batch_rows = 1 (same result)", need(micro_batch_rows=1)),
        ('train.recompute = "full" (a third more time)', need(recompute="full")),
        ('both, with train.precision = "bf16"', need(micro_batch_rows=1, recompute="full", precision="bf16")),
    )
    if started:
        alone = recipe.parallel.layout().world == 1  # what offload asks of a layout is in the recipe's rules
        tries = tries[:2]
        if alone and not recipe.train.offload:
            moved = need(micro_batch_rows=1, recompute="full", offload=True)
            tries = (*tries, ("both, with train.offload = true", moved))
    lines = [f"{text}: {amount(size, 'B')}" for text, size in tries if size < now]
    if not started and all(size > total for _, size in tries):  # then only a smaller model helps
        names = [
            name for name in preset_names(model_family(recipe)) if _preset_need(name, recipe, device) <= total
        ]
        if names:
            largest = max(names, key=lambda name: preset(name).parameter_count())
            size = _preset_need(largest, recipe, device)
            lines.insert(2, f'model.preset = "{largest}", the largest that fits: {amount(size, "B")}')
    return lines[:3]


def _preset_need(name: str, recipe: Recipe, device: str) -> int:
    """Bytes that the recipe would need with another preset and none of its overrides."""
    model = recipe.model.model_copy(update={"preset": name, "overrides": {}})
    changed = recipe.model_copy(update={"model": model})
    return sum(predicted_memory(model_config(changed), changed, device).values())
