"""A recipe's layout shrunk until one machine can prove it: `throughline prove`.

The twin keeps what decides the arithmetic of a layout: its axes, schedule, sharding and stages, the precision, the
optimizer, recomputation, the family and every switch of the model. It is smaller in width, vocabulary, length and
layers, and in degrees where there are more than PROCESSES; what was shrunk is said.
"""

import dataclasses
import math
from typing import Any

from ..core.errors import WrongUse
from ..models.config import BERTConfig, ModelConfig, family_of
from ..planner.layout import AXES, Layout, layout_problems
from ..train.recipes.recipe import Recipe
from ..train.recipes.resolved import model_config
from .proof import SHAPE, Case

PROCESSES = 64
SIZES = {*SHAPE, "kv_heads", "head_width", "mlp_width", "expert_width", "dropout"}
HEAD_WIDTH = 8


def twin(recipe: Recipe) -> tuple[Case, list[str]]:
    """The case to prove for a resolved recipe, and what is smaller in it. Raises WrongUse when it is not legal."""
    config, whole = model_config(recipe), recipe.parallel.layout()
    layout, notes = _fewer_processes(whole)
    length = 2 * math.lcm(2 * layout.context, layout.context * layout.tensor, 16)
    model = _small_model(config, layout, length)
    if model.get("expert_capacity_factor") and max(layout.tensor, layout.context) > 1:
        model["expert_capacity_factor"] = 0.0
        notes.append("no token is dropped: a process of a part of a row drops among its own")
    if config.dropout:
        notes.append("dropout is off: its masks are those of a layout")
    if recipe.compression.scheme != "none":
        notes.append(f"gradients are summed whole, not by {recipe.compression.scheme}")
    if recipe.train.matmul != "same":
        notes.append("the products are computed in the weights' precision, not in fp8")
    if recipe.train.offload:
        notes.append("the masters stay on the device")
    micro_batches = 2 * layout.pipeline if layout.pipeline > 1 else 2
    case = Case(
        name="",
        layout=layout,
        family=family_of(config),
        precision={"tf32": "fp32"}.get(recipe.train.precision, recipe.train.precision),
        micro_rows=1,
        documents=recipe.data.separate_documents or recipe.data.packing == "best_fit",
        recompute=recipe.train.recompute,
        steps=4,
        model=model,
        optimizer=recipe.optimizer.name,
        z_loss=recipe.train.z_loss,
        ema_decay=recipe.optimizer.ema_decay,
        rows=layout.data * micro_batches,
        length=length,
    )
    if problems := layout_problems(layout, case.config, length, case.rows, case.micro_rows):
        what, first = "the small twin of this layout cannot be made", problems[0]
        fix = "prove a layout with smaller degrees: --set parallel.tensor=... and the like"
        raise WrongUse(what, where=first.field, why=first.text, fix=fix)
    small = case.config.parameter_count()
    size = f"a twin of {small:,} parameters for {config.parameter_count():,}, rows of {length} tokens"
    return case, [size, *notes]


def _fewer_processes(given: Layout) -> tuple[Layout, list[str]]:
    """Degrees halved, the largest first, until all processes fit; layers are split evenly again."""
    layout = dataclasses.replace(given, layers_per_stage=())
    while layout.world > PROCESSES:
        axis = max(AXES, key=lambda name: getattr(layout, name))
        degrees = {axis: max(getattr(layout, axis) // 2, 2)}
        if axis == "data" and (degrees["data"] % layout.replicas or degrees["data"] == layout.replicas):
            degrees["replicas"] = 1
        if axis == "data":
            degrees["expert"] = math.gcd(layout.expert, degrees["data"])
        layout = dataclasses.replace(layout, **degrees)
    degrees = {axis: (getattr(layout, axis), getattr(given, axis)) for axis in (*AXES, "replicas", "expert")}
    fewer = {axis: pair for axis, pair in degrees.items() if pair[0] != pair[1]}
    return layout, [f"parallel.{axis} = {now} for {was}" for axis, (now, was) in fewer.items()]


def _small_model(config: ModelConfig, layout: Layout, length: int) -> dict[str, Any]:
    heads = math.lcm(layout.tensor, 2)
    model = {name: value for name, value in config.to_dict().items() if name not in SIZES}
    keys = config.key_value_heads
    grouped = {"kv_heads": 1 if keys == 1 else layout.tensor} if keys < config.heads else {}
    if 1 < keys < config.heads:
        heads = 2 * layout.tensor
    if config.attention_window:
        block = max(length // 8, 1)
        model |= {"attention_block": block, "attention_window": 2 * block}
    if isinstance(config, BERTConfig) and config.relative_buckets:
        model |= {"relative_buckets": 8, "relative_distance": 16}
    if config.rope_scaling != "none":  # the same share of the row is beyond the trained length
        trained = config.rope_original_length or config.sequence_length
        model["rope_original_length"] = max(trained * length // config.sequence_length, 1)
    sizes = {"vocab_size": 64 * layout.tensor + 1, "layers": max(2, layout.stages), "heads": heads}
    return model | sizes | grouped | {"width": heads * HEAD_WIDTH, "sequence_length": length, "dropout": 0.0}
