"""What a run will need in memory, before anything is allocated: named terms in bytes, and a refusal when it
cannot fit.

Activations follow Korthikanti et al. 2022 (section 4.1) for a fused attention kernel, which keeps no S x S
matrix: per token and layer 8 W + 2 F numbers (two norm inputs, two norm outputs, query, key, value, attention
output; the inputs and outputs of the activation), one mask per dropout. Full recomputation keeps one W per
layer and one layer at work.
"""

import psutil
import torch

from ..core.console import amount, warn
from ..core.errors import Failed, Refused
from ..core.hardware import memory_limit_bytes
from ..models.config import ModelConfig
from ..models.presets import preset, preset_names
from ..planner.tables import optimizer_numbers, parameter_shapes
from .offload import IN_FLIGHT_BYTES, memory_terms
from .parallel.account import per_process
from .parallel.mesh import processes_here
from .precision import HALVES, computing_dtype
from .recipe import Recipe, model_config, model_family

PROGRAM_BYTES = {
    "cpu": 370 * 2**20,
    "cuda": 500 * 2**20,
}  # interpreter, torch and buffers; CUDA's context and workspaces


def estimate(config: ModelConfig, recipe: Recipe, device: str = "cpu") -> dict[str, int]:
    """Bytes by term at the peak of a step; their sum is the prediction for the memory of `device`.

    In a layout of several processes they are those of the process that needs most.
    """
    terms = _one_process(config, recipe, device)
    return terms if recipe.parallel.layout().world == 1 else per_process(terms, config, recipe)


def _one_process(config: ModelConfig, recipe: Recipe, device: str) -> dict[str, int]:
    train = recipe.train
    number = 8 if train.precision == "fp64" else 4
    activation = 2 if train.precision in HALVES else number
    parameters = config.parameter_count()
    shapes = parameter_shapes(config).items()
    slots = sum(optimizer_numbers(recipe.optimizer.name, name, shape) for name, shape in shapes)
    tokens = train.rows_per_micro_batch * train.sequence_length
    predicted = tokens if recipe.objective is None else round(tokens * recipe.objective.mask_fraction)
    per_token = 8 * config.width + (4 if config.gated else 2) * config.feed_forward_size
    per_layer = tokens * (per_token * activation + (2 * config.width if config.dropout else 0))
    if train.recompute == "full":
        activations = config.layers * tokens * config.width * activation + per_layer
    else:
        activations = config.layers * per_layer
    terms = {
        "weights": number * parameters,
        "gradients": number * parameters,
        "optimizer": number * slots,
        "activations": activations,
        "logits": 2 * predicted * config.vocab_size * number,  # and their gradient
        "program": PROGRAM_BYTES[device],
    }
    if device == "cpu":
        terms["checkpoint copy"] = number * parameters + terms["optimizer"]  # while a save is written
    if recipe.compression.scheme != "none":
        terms["gradient residuals"] = number * parameters  # what compression lost and sends later
    if train.offload:
        return terms | _offloaded(config, recipe, device)
    if train.precision in HALVES:
        terms |= {"weights": activation * parameters, "master weights": number * parameters}
    return terms


def _offloaded(config: ModelConfig, recipe: Recipe, device: str) -> dict[str, int]:
    """The terms that differ when the update is on the host; on a CPU both sides are in the same memory."""
    train, parameters = recipe.train, config.parameter_count()
    dtype = computing_dtype(train.precision)
    if recipe.parallel.layout().world > 1:
        device_terms = {"weights": dtype.itemsize * parameters, "gradients": dtype.itemsize * parameters}
        master = 4 * parameters if dtype.itemsize < 4 else dtype.itemsize * parameters
        return device_terms | (
            {"optimizer": 0} if device == "cuda" else {"master weights": master, "host gradients": master}
        )
    unit = max(config.block_parameters(), parameters - config.layers * config.block_parameters())
    micro_batches = train.rows_per_step // train.rows_per_micro_batch
    moved = memory_terms(parameters, unit, dtype, micro_batches)
    flying = min(IN_FLIGHT_BYTES, dtype.itemsize * parameters)
    if device == "cuda":
        return moved["device"] | {"gradients": flying, "optimizer": 0}
    del moved["host"]["optimizer"]  # as without offload
    return moved["device"] | {"gradients": dtype.itemsize * unit} | moved["host"]


def check_memory(config: ModelConfig, recipe: Recipe, device: torch.device) -> dict[str, int]:
    """The estimate, when it fits. Raises Refused with the terms and the three cheapest changes when it does
    not.
    """
    terms = estimate(config, recipe, device.type)
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
        why="predicted: " + _largest_first(estimate(config, recipe, device.type)),
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
        return sum(estimate(config, changed, device).values())

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
    return sum(estimate(model_config(changed), changed, device).values())
