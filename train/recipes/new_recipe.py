"""A first recipe for a model, data and a machine (`throughline recipe new`). Arithmetic only; no torch here.

- Batch and learning rate are those of Brown et al. 2020, table 2.1, for the nearest size; a BERT has Devlin et al.'s.
- Length: 20 tokens a parameter (Hoffmann et al. 2022) or as given; of given weights one pass, at a tenth of the rate.
- Layout: data parallel, with as little as possible recomputed and shared out, as the planner's memory allows.
"""

import bisect
from functools import partial
from pathlib import Path
from typing import Any

from ...core.errors import WrongUse, did_you_mean, download_hint
from ...core.hardware import chips
from ...core.recipe import build_recipe, dump_toml
from ...models.config import ModelConfig, family_of, preset
from ...planner.memory import capacity_bytes
from .recipe import Recipe
from .resolved import model_config, predicted_memory, resolve, shape_of

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
VALIDATION_ROWS = 32  # of which the mean loss has a standard error of some 2 %


def new_recipe(
    model: str,
    data: str,
    machine: str = "cpu",
    gpus: int = 1,
    tokens: float | None = None,
    init_from: str = "",
    stored: int = 0,
) -> str:
    """The text of a recipe. `machine` is a name in core/chips.toml or "cpu"; `tokens` is the length of the run,
    `stored` that of the token store where it is known; with `init_from` the shape is that of these weights. Raises
    WrongUse for an unknown model or machine, one that does not hold it, and a store too small to validate on.
    """
    shape = shape_of(init_from) if init_from else preset(model)
    if shape is None:
        fix = f"give a Hugging Face directory, a run or a checkpoint{download_hint(Path(init_from))}"
        raise WrongUse("no shape lies beside these weights", where=init_from, fix=fix)
    if machine != "cpu" and machine not in chips():
        fix = did_you_mean(machine, chips(), f"one of cpu, {', '.join(chips())}", limit=3)
        raise WrongUse(f"unknown machine {machine!r}", where="--machine", fix=fix)
    count, length, bert = shape.parameter_count(), shape.sequence_length, family_of(shape) == "bert"
    batch = GPT3[min(GPT3, key=lambda size: abs(size - count))][0] if not bert else 256 * 512
    precision = "fp32" if machine == "cpu" else "bf16" if "bf16" in chips()[machine].tflops else "fp16"
    first = {"batch_rows": gpus, "micro_batch_rows": 1}
    tree: dict[str, Any] = {
        "version": 1,
        "data": {"train": data, "validation_fraction": _validation(stored, length)},
        "model": {"init_from": init_from} if init_from else {"preset": model},
        "train": {"steps": 20, "sequence_length": length, "precision": precision} | first,
        "parallel": {"data": gpus, "sharding": "replicated"},
    }
    if machine != "cpu":
        tree = fitted(tree, machine)
    train, least = tree["train"], tree["train"]["batch_rows"]
    rows = max(round(batch / length / least), 1) * least
    total = tokens or (stored if init_from and stored else 20 * count)
    steps = max(round(total / (rows * length)), 20)
    sections = usual_sections(shape, rows, length, steps)
    tree |= sections | {"train": train | {"steps": steps, "batch_rows": rows} | sections["train"]}
    if init_from:
        tree["optimizer"]["learning_rate"] /= 10
    source = "Devlin et al. 2019, appendix A.2" if bert else "Brown et al. 2020, table 2.1 (nearest size)"
    where = f"{gpus} x {chips()[machine].name}" if machine != "cpu" else "a CPU"
    return f"""\
# {init_from or model} ({count / 1e6:,.0f} M parameters) on {where}: {total / 1e9:,.3g} G tokens. Knob: train.steps
# Batch and learning rate: {source}. Rows at once and layout: memory arithmetic of `throughline recipe new`.
{dump_toml(build_recipe(tree, Recipe), given=True)}"""


def usual_sections(config: ModelConfig, rows: int, length: int, steps: int) -> dict[str, dict[str, Any]]:
    """What every run should have: a published rate with its warm-up, figures on held-out text, checkpoints."""
    bert, every = family_of(config) == "bert", max(steps // 20, 1)
    rate = 1e-4 if bert else GPT3[min(GPT3, key=lambda size: abs(size - config.parameter_count()))][1]
    warmup = steps // 100 if bert else min(max(round(WARMUP_TOKENS / (rows * length)), 1), steps // 10)
    usual = {"beta2": 0.999, "weight_decay": 0.01} if bert else {"beta2": 0.95, "weight_decay": 0.1}
    decay = {"kind": "linear", "final_fraction": 0.0} if bert else {"kind": "cosine", "final_fraction": 0.1}
    return {
        "train": {"eval_every_steps": every, "eval_rows": min(rows, 256)},
        "optimizer": {"learning_rate": rate} | usual,
        "schedule": {"warmup_steps": warmup} | decay,
        "checkpoint": {"save_every_steps": every},
    }


def _validation(stored: int, length: int) -> float:
    """The share of a store that is held out: a thousandth, or what makes VALIDATION_ROWS, at most a tenth."""
    if not stored:
        return 0.001
    share = min(max(0.001, VALIDATION_ROWS * (length + 1) / stored), 0.1)
    if share * stored < length + 1:
        why = f"a tenth of its {stored:,} tokens is less than a row of {length:,}"
        fix = "give more text, or a model with a shorter context"
        raise WrongUse("the store is too small to validate on", where="--data", why=why, fix=fix)
    return float(f"{share:.2g}")


def fitted(tree: dict[str, Any], machine: str) -> dict[str, Any]:
    """The recipe with the largest micro-batch, least shared out and recomputed, that fits. Raises WrongUse for none."""
    room, gpus = capacity_bytes(chips()[machine].memory_gib), tree["parallel"]["data"]

    def spread(rows: int, sharding: str, recompute: str, gpus: int = gpus) -> dict[str, Any]:
        parallel = {"data": gpus, "sharding": sharding if gpus > 1 else "replicated"}
        train = {"batch_rows": rows * gpus, "micro_batch_rows": rows, "recompute": recompute}
        return tree | {"train": tree["train"] | train, "parallel": parallel}

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
