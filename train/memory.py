"""What a run will need in memory, before anything is allocated: named terms in bytes, and a refusal when it cannot fit.

Activations follow Korthikanti et al. 2022 (section 4.1) for a fused attention kernel, which keeps no S x S matrix: per
token and layer 8 W + 2 F numbers (two norm inputs, two norm outputs, query, key, value, attention output; the inputs and
outputs of the activation), one mask per dropout. Full recomputation keeps one W per layer and one layer at work.
"""

import psutil
import torch

from ..core.console import amount, warn
from ..core.errors import Refused
from ..core.hardware import memory_limit_bytes
from ..models.config import ModelConfig
from ..models.presets import preset, preset_names
from .precision import AUTOCAST
from .recipe import Recipe, model_config, model_family

BASE_BYTES = 300 * 2**20  # the interpreter, torch's libraries and their buffers


def estimate(config: ModelConfig, recipe: Recipe) -> dict[str, int]:
    """Bytes by term at the peak of a step; their sum is the prediction."""
    train = recipe.train
    number = 8 if train.precision == "fp64" else 4
    activation = 2 if train.precision in AUTOCAST else number
    parameters = config.parameter_count()
    matrices = config.layers * config.block_matrix_parameters()
    slots = 2 * parameters - (matrices if recipe.optimizer.name == "muon" else 0)
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
        "program": BASE_BYTES,
    }
    if train.precision in AUTOCAST:
        terms["cast weights"] = activation * matrices
    return terms


def check_memory(config: ModelConfig, recipe: Recipe, device: torch.device) -> dict[str, int]:
    """The estimate, when it fits. Raises Refused with the terms and the three cheapest changes when it does not."""
    terms = estimate(config, recipe)
    need = sum(terms.values())
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
    else:
        total = memory_limit_bytes()
        free = min(psutil.virtual_memory().available, total)
    if need > total:
        largest = sorted(terms.items(), key=lambda item: -item[1])
        raise Refused(
            f"the run needs {amount(need, 'B')} of memory, {device.type} has {amount(total, 'B')}",
            where="model, train",
            why=", ".join(f"{name} {amount(size, 'B')}" for name, size in largest),
            fix="\n".join(_cheaper(recipe, config, total)),
        )
    if need > free:
        warn(f"the run needs about {amount(need, 'B')} and {amount(free, 'B')} of {amount(total, 'B')} are free just now")
    return terms


def _cheaper(recipe: Recipe, config: ModelConfig, total: int) -> list[str]:
    """The three cheapest changes that save memory, cheapest first, each with what would then be needed."""

    def need(**changes: object) -> int:
        changed = recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})
        return sum(estimate(config, changed).values())

    now = need()
    tries = (
        ("train.micro_batch_rows = 1 (same result)", need(micro_batch_rows=1)),
        ('train.recompute = "full" (a third more time)', need(recompute="full")),
        ('both, with train.precision = "bf16"', need(micro_batch_rows=1, recompute="full", precision="bf16")),
    )
    lines = [f"{text}: {amount(size, 'B')}" for text, size in tries if size < now]
    family = model_family(recipe)
    names = [name for name in preset_names(family) if _preset_need(name, recipe) <= total]
    if names:
        largest = max(names, key=lambda name: preset(name).parameter_count())
        size = _preset_need(largest, recipe)
        lines.append(f'model.preset = "{largest}", the largest that fits: {amount(size, "B")}')
    return lines[-3:]


def _preset_need(name: str, recipe: Recipe) -> int:
    """Bytes that the recipe would need with another preset and none of its overrides."""
    model = recipe.model.model_copy(update={"preset": name, "overrides": {}})
    changed = recipe.model_copy(update={"model": model})
    return sum(estimate(model_config(changed), changed).values())
