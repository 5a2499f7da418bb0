"""Whether a run fits into memory, by what the planner predicts, before anything is allocated."""

import math
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from ..core.console import amount, warn
from ..core.errors import Failed, Refused
from ..core.hardware import memory_limit_bytes
from ..models.config import ModelConfig, preset, preset_names
from ..planner.memory import IN_A_STEP, MOMENTS, terms_beside_gpu
from .parallel.mesh import processes_here
from .recipes.recipe import Recipe
from .recipes.resolved import described, model_config, model_family, predicted_memory
from .recipes.rules import RULES

Change = tuple[str, dict[str, Any], dict[str, Any], bool]  # its text, fields of train and of parallel, joined
RECOMPUTE: Change = 'train.recompute = "full" (a third more time)', {"recompute": "full"}, {}, False
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
        what = f"the run needs {amount(need, 'B')} of memory, {device.type} has {amount(total, 'B')}"
        fix = "\n".join(_cheaper(recipe, config, device.type, total))
        raise Refused(what, where="model, train", why=_largest_first(terms), fix=fix)
    host = terms_beside_gpu(*described(config, recipe)) if device.type == "cuda" else {}
    if sum(host.values()) > (here := memory_limit_bytes() // processes_here()):
        most, key = amount(sum(host.values()), "B"), "train.offload" if recipe.train.offload else "checkpoint"
        what = f"a process needs {most} of the host, which has {amount(here, 'B')} for it"
        fix = "fewer processes on a machine, or more shards: parallel.sharding and parallel.data"
        raise Refused(what, where=key, why=_largest_first(host), fix=fix)
    if need > free:
        left = f"{amount(free, 'B')} of {amount(total, 'B')} are free just now"
        warn(f"the run needs about {amount(need, 'B')} and {left}")
    return terms


def beside(terms: dict[str, int], device: torch.device, measured: int) -> dict[str, int]:
    """The prediction and what a run measured: on a GPU what torch's allocator gave out, else the whole process."""
    predicted = sum(terms.values()) - (terms.get("runtime", 0) if device.type == "cuda" else 0)
    return {"predicted": predicted, "measured": measured}


def out_of_memory(config: ModelConfig, recipe: Recipe, device: torch.device, phase: str) -> Failed:
    """The error of an allocation in a step: the phase, the largest consumers and the cheapest changes."""
    cuda = device.type == "cuda"
    total = torch.cuda.get_device_properties(device).total_memory if cuda else memory_limit_bytes()
    where = f"{device.type}, {amount(total, 'B')}"
    why = "predicted: " + _largest_first(predicted_memory(config, recipe, device.type, IN_A_STEP))
    fix = "\n".join(_followable(recipe, config, device.type, OF_PHASE.get(phase, IN_A_STEP)))
    return Failed(f"out of memory in {phase}", where=where, why=why, fix=fix)


def _largest_first(terms: dict[str, int]) -> str:
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    return ", ".join(f"{name} {amount(size, 'B')}" for name, size in ordered)


def _saving(
    recipe: Recipe, config: ModelConfig, device: str, tries: Sequence[Change], moments: Sequence[str]
) -> list[tuple[str, int]]:
    """The legal changes that save memory at these moments, cheapest first, and what is then needed."""

    def need(changed: Recipe) -> int:
        return sum(predicted_memory(config, changed, device, moments).values())

    found: list[tuple[str, int]] = []
    helping: dict[str, Any] = {}
    for text, train, parallel, joined in tries:
        more = (helping | train) if joined else train
        sections = recipe.train.model_copy(update=more), recipe.parallel.model_copy(update=parallel)
        changed = recipe.model_copy(update=dict(zip(("train", "parallel"), sections)))
        if not any(list(rule(changed)) for rule in RULES) and (size := need(changed)) < need(recipe):
            beside = " with the first changes of train" if joined and helping else ""
            found.append((f"{text}{beside}: {amount(size, 'B')}", size))
            helping |= train if not parallel else {}
    return found


def micro_batch_change(rows: int) -> Change:
    """The change to a micro-batch of so many rows."""
    return f"train.micro_batch_rows = {rows} (same result)", {"micro_batch_rows": rows}, {}, False


def _largest_micro_batch(recipe: Recipe, config: ModelConfig, device: str, total: int) -> int:
    """The largest legal micro-batch below the recipe's that fits into `total` bytes; 1 where none does."""
    now = recipe.train.rows_per_micro_batch
    for rows in range(now - 1, 1, -1):
        if recipe.train.rows_per_step % rows:
            continue
        changed = recipe.model_copy(
            update={"train": recipe.train.model_copy(update={"micro_batch_rows": rows})}
        )
        if not any(list(rule(changed)) for rule in RULES) and _need(config, changed, device) <= total:
            return rows
    return 1


def _need(config: ModelConfig, recipe: Recipe, device: str) -> int:
    return sum(predicted_memory(config, recipe, device).values())


def _cheaper(recipe: Recipe, config: ModelConfig, device: str, total: int) -> list[str]:
    """The three cheapest changes of a run that has not started."""
    fewer = micro_batch_change(_largest_micro_batch(recipe, config, device, total))
    bf16: Change = 'train.precision = "bf16"', {"precision": "bf16"}, {}, True
    found = _saving(recipe, config, device, (fewer, RECOMPUTE, bf16), tuple(MOMENTS))
    lines = [line for line, _ in found]
    if all(size > total for _, size in found):  # then only a smaller model helps
        needs = {}
        for name in preset_names(model_family(recipe)):
            model = recipe.model.model_copy(update={"preset": name, "overrides": {}})
            other = recipe.model_copy(update={"model": model})
            needs[name] = _need(model_config(other), other, device)
        if fitting := [name for name, size in needs.items() if size <= total]:
            largest = max(fitting, key=lambda name: preset(name).parameter_count())
            fits = f'model.preset = "{largest}", the largest that fits: {amount(needs[largest], "B")}'
            lines.insert(2, fits)
    return lines[:3]


def _followable(recipe: Recipe, config: ModelConfig, device: str, moments: Sequence[str]) -> list[str]:
    """The changes with which the directory of a run that has started can go on."""
    layout, train = recipe.parallel.layout(), recipe.train
    sharding = "full" if layout.pipeline == 1 else "zero1"
    text, fewer, more = f'parallel.sharding = "{sharding}"', dict[str, Any](), dict[str, Any]()
    if layout.data == 1:
        text = f"parallel.data = 2, {text} (on {2 * layout.world} processes: throughline launch)"
        fewer = {"micro_batch_rows": math.gcd(train.rows_per_step // 2, train.rows_per_micro_batch)}
        more = {"data": 2}
    tries = [micro_batch_change(1), RECOMPUTE, (text, fewer, {"sharding": sharding} | more, False)]
    if not train.offload:
        tries.append(("train.offload = true (the update on the host)", {"offload": True}, {}, True))
    nothing = "more memory, or a smaller model in another directory: nothing that may change here saves any"
    return [line for line, _ in _saving(recipe, config, device, tries, moments)] or [nothing]
