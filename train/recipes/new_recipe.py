"""A first recipe for a model, data and a machine: `throughline recipe new`. Arithmetic only; no torch here.

- Batch and learning rate are those of Brown et al. 2020, table 2.1, for the nearest size; a BERT has Devlin et al.'s.
- Length: 20 tokens a parameter (Hoffmann et al. 2022) unless it is given.
- Layout: data parallel, with as little as possible recomputed and shared out ("full"), as the planner's memory of the
  run allows (`predict.predicted_memory`, which also refuses a run that does not fit).
"""

import bisect
from functools import partial
from typing import Any

from ...core.errors import WrongUse, did_you_mean
from ...core.hardware import chips
from ...core.recipe import build_recipe, dump_toml
from ...models.config import family_of
from ...models.presets import preset
from ...planner.memory import capacity_bytes
from .predict import predicted_memory
from .recipe import Recipe, model_config, resolve

# parameters -> (tokens in a batch, learning rate): Brown et al. 2020, table 2.1
GPT3 = {
    125e6: (0.5e6, 6e-4),
    350e6: (0.5e6, 3e-4),
    760e6: (0.5e6, 2.5e-4),
    1.3e9: (1e6, 2e-4),
    2.7e9: (1e6, 1.6e-4),
    6.7e9: (2e6, 1.2e-4),
    13e9: (2e6, 1e-4),
    175e9: (3.2e6, 0.6e-4),
}
WARMUP_TOKENS = 375e6  # Brown et al. 2020, appendix B


def new_recipe(
    model: str, data: str, machine: str = "cpu", gpus: int = 1, tokens: float | None = None
) -> str:
    """The text of a recipe. `machine` is a name in core/chips.toml or "cpu"; `tokens` is the length of the run.

    Raises WrongUse for an unknown model or machine, and for a model that the machine does not hold.
    """
    config = preset(model)
    if machine != "cpu" and machine not in chips():
        fix = did_you_mean(machine, chips(), f"one of cpu, {', '.join(chips())}", limit=3)
        raise WrongUse(f"unknown machine {machine!r}", where="--machine", fix=fix)
    count, length = config.parameter_count(), config.sequence_length
    bert = family_of(config) == "bert"
    batch, rate = GPT3[min(GPT3, key=lambda size: abs(size - count))] if not bert else (256 * 512, 1e-4)
    precision = "fp32" if machine == "cpu" else "bf16" if "bf16" in chips()[machine].tflops else "fp16"
    tree: dict[str, Any] = {
        "version": 1,
        "data": {"train": data, "validation_fraction": 0.001},
        "model": {"preset": model},
        "train": {"steps": 20, "sequence_length": length, "precision": precision} | _rows(1, gpus),
        "parallel": {"data": gpus, "sharding": "replicated"},
    }
    if machine != "cpu":
        tree = fitted(tree, machine)
    train, least = tree["train"], tree["train"]["batch_rows"]
    rows = max(round(batch / length / least), 1) * least
    total = tokens or 20 * count
    steps = max(round(total / (rows * length)), 20)
    warmup = min(max(round(WARMUP_TOKENS / (rows * length)), 1), steps // 10) if not bert else steps // 100
    every = max(steps // 20, 1)
    train |= {"steps": steps, "batch_rows": rows, "eval_every_steps": every, "eval_rows": min(rows, 256)}
    usual = {"beta2": 0.999, "weight_decay": 0.01} if bert else {"beta2": 0.95, "weight_decay": 0.1}
    tree["optimizer"] = {"learning_rate": rate} | usual
    decay = {"kind": "linear", "final_fraction": 0.0} if bert else {"kind": "cosine", "final_fraction": 0.1}
    tree["schedule"] = {"warmup_steps": warmup} | decay
    tree["checkpoint"] = {"save_every_steps": every}
    source = "Devlin et al. 2019, appendix A.2" if bert else "Brown et al. 2020, table 2.1 (nearest size)"
    where = f"{gpus} x {chips()[machine].name}" if machine != "cpu" else "a CPU"
    return f"""\
# {model} ({count / 1e6:,.0f} M parameters) on {where}: {total / 1e9:,.3g} G tokens. Knob: train.steps
# Batch and learning rate: {source}. Rows at once and layout: memory arithmetic of `throughline recipe new`.
{dump_toml(build_recipe(tree, Recipe), given=True)}"""


def _rows(micro: int, gpus: int) -> dict[str, int]:
    return {"batch_rows": micro * gpus, "micro_batch_rows": micro}


def fitted(tree: dict[str, Any], machine: str) -> dict[str, Any]:
    """The recipe with the largest micro-batch (a power of two, at most 64 rows) that fits, with as little as possible
    shared out and recomputed. Raises WrongUse when not even one row fits, naming how many devices would hold the model.
    """
    room, gpus = capacity_bytes(chips()[machine].memory_gib), tree["parallel"]["data"]

    def spread(rows: int, sharding: str, recompute: str, gpus: int = gpus) -> dict[str, Any]:
        parallel = {"data": gpus, "sharding": sharding if gpus > 1 else "replicated"}
        return tree | {
            "train": tree["train"] | _rows(rows, gpus) | {"recompute": recompute},
            "parallel": parallel,
        }

    for recompute in ("none", "full"):
        for sharding in ("replicated", "full")[:gpus]:
            for rows in (64, 32, 16, 8, 4, 2, 1):
                if needed(found := spread(rows, sharding, recompute)) <= room:
                    return found
    least, counts = partial(spread, 1, "full", "full"), range(2, 1 << 16)
    enough = bisect.bisect_left(counts, True, key=lambda n: needed(least(n)) <= room)
    size = needed(least(gpus)) / 2**30
    why = f"one row takes {size:,.0f} GiB on each of {gpus} x {machine}, which has {room / 2**30:,.0f} GiB for it"
    fix = "choose a smaller model: a row of it fits on no number of these"
    if enough < len(counts):
        fix = f"about {counts[enough]:,} of these would hold it with full sharding; or choose a smaller model"
    raise WrongUse("the model does not fit", where="--gpus", why=why, fix=fix)


def needed(tree: dict[str, Any]) -> int:
    """Bytes that the planner predicts for the fullest device of a run."""
    recipe = resolve(build_recipe(tree, Recipe))
    return sum(predicted_memory(model_config(recipe), recipe, "cuda").values())
