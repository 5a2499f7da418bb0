"""A first recipe for a model, data and a machine (`throughline recipe new`). Arithmetic only; no torch here.

- Batch and learning rate are those of Brown et al. 2020, table 2.1, for the nearest size; a BERT has Devlin et al.'s.
  The batch is smaller for a small model and a short run.
- Length: 20 tokens a parameter (Hoffmann et al. 2022) or as given; of given weights one pass, at a tenth of the rate.
- Layout: data parallel, with as little as possible recomputed and shared out, as the planner's memory allows.
"""

import bisect
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...core.console import amount
from ...core.errors import WrongUse, did_you_mean, download_hint
from ...core.hardware import chips
from ...core.recipe import build_recipe, dump_toml, set_overrides
from ...models.config import BERTConfig, ModelConfig, family_of, preset
from ...planner.memory import capacity_bytes
from .recipe import Recipe
from .resolved import model_config, predicted_memory, resolve, shape_of
from .rules import RULES

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
# Devlin et al. 2019, appendix A.2: tokens in a batch of BERT-Base
DEVLIN_TOKENS, DEVLIN_PARAMETERS = 256 * 512, 110e6
VALIDATION_ROWS = 32  # of which the mean loss has a standard error of some 2 %
LONGEST_ROW = {"gpt": 4096, "bert": 512}  # of pretraining, in tokens, however many positions the model has
SHORTEST_ROW = 64
LEAST_BATCH_TOKENS = 4096
LEAST_STEPS = 20
USUAL_STEPS = 500  # that a run should have at least before its batch grows


def new_recipe(
    model: str,
    data: str,
    machine: str = "cpu",
    gpus: int = 1,
    tokens: float | None = None,
    init_from: str = "",
    stored: int = 0,
    *,
    has_sentences: bool = True,
    overrides: Sequence[str] = (),
) -> str:
    """The text of a recipe. `machine` is a name in core/chips.toml or "cpu"; `tokens` is the length of the run,
    `stored` that of the token store where it is known, `has_sentences` whether it keeps sentences apart; with
    `init_from` the shape is that of these weights; the user's `overrides` are put in last.

    Raises WrongUse for an unknown model or machine, one that does not hold it, a store too small to validate on, and
    for what the rules of a recipe refuse.
    """
    shape = shape_of(init_from) if init_from else preset(model)
    if shape is None:
        fix = f"give a Hugging Face directory, a run or a checkpoint{download_hint(Path(init_from))}"
        raise WrongUse("no shape lies beside these weights", where=init_from, fix=fix)
    if machine != "cpu" and machine not in chips():
        fix = did_you_mean(machine, chips(), f"one of cpu, {', '.join(chips())}", limit=3)
        raise WrongUse(f"unknown machine {machine!r}", where="--machine", fix=fix)
    count, length = shape.parameter_count(), _row_length(shape, stored)
    precision = "fp32" if machine == "cpu" else "bf16" if "bf16" in chips()[machine].tflops else "fp16"
    first = {"batch_rows": gpus, "micro_batch_rows": 1}
    tree: dict[str, Any] = {
        "version": 1,
        "data": {"train": data, "validation_fraction": _validation(stored, length)},
        "model": {"init_from": init_from} if init_from else {"preset": model},
        "train": {"steps": LEAST_STEPS, "sequence_length": length, "precision": precision} | first,
        "parallel": {"data": gpus, "sharding": "replicated"},
    }
    if isinstance(shape, BERTConfig) and not (shape.nsp and shape.token_types >= 2 and has_sentences):
        tree["objective"] = {"sentences": "none"}
    if machine != "cpu":
        tree = fitted(tree, machine)
    total = tokens or (stored if init_from and stored else 20 * count)
    most_micro = (
        tree["train"]["micro_batch_rows"] if machine != "cpu" else max(LEAST_BATCH_TOKENS // length, 1)
    )
    rows, micro = _batch(shape, total, length, gpus, most_micro)
    steps = max(_rounded(total / (rows * length)), LEAST_STEPS)
    sections = usual_sections(shape, rows, length, steps)
    batch = {"steps": steps, "batch_rows": rows, "micro_batch_rows": micro}
    tree |= sections | {"train": tree["train"] | batch | sections["train"]}
    if init_from:
        tree["optimizer"]["learning_rate"] = float(f"{tree['optimizer']['learning_rate'] / 10:.3g}")
    is_encoder = family_of(shape) == "bert"
    source = (
        "Devlin et al. 2019, appendix A.2" if is_encoder else "Brown et al. 2020, table 2.1 (nearest size)"
    )
    where = f"{gpus} x {chips()[machine].name}" if machine != "cpu" else "a CPU"
    overridden = set_overrides(tree, overrides)
    recipe = build_recipe(tree, Recipe, RULES, where="the new recipe", overridden=overridden)
    size, length_text = amount(count, "").strip(), amount(recipe.train.tokens, "").strip()
    return f"""\
# {init_from or model} ({size} parameters) on {where}: {length_text} tokens. Knob: train.steps
# Batch and learning rate: {source}. Rows at once and layout: memory arithmetic of `throughline recipe new`.
{dump_toml(recipe, given=True)}"""


def _row_length(shape: ModelConfig, stored: int) -> int:
    """Tokens of a row: the model's positions, at most a usual row, and a fortieth of a small store."""
    longest = min(shape.sequence_length, LONGEST_ROW[family_of(shape)])
    suited = max(stored // 40, SHORTEST_ROW) if stored else longest
    return longest if suited >= longest else _power_of_two(suited)


def _batch(shape: ModelConfig, total: float, length: int, gpus: int, most_micro: int) -> tuple[int, int]:
    """Rows of a batch and of a micro-batch, powers of two on each device.

    The published batch, smaller for a smaller model, and so small that the run's `total` tokens make USUAL_STEPS.
    """
    count = shape.parameter_count()
    published: float
    if family_of(shape) == "bert":
        published, smallest = DEVLIN_TOKENS, DEVLIN_PARAMETERS
    else:
        published, smallest = GPT3[min(GPT3, key=lambda size: abs(size - count))][0], min(GPT3)
    for_model = max(published * min(count / smallest, 1.0), LEAST_BATCH_TOKENS)
    for_run = max(total / USUAL_STEPS, min(LEAST_BATCH_TOKENS, total / LEAST_STEPS))
    nearest = min(for_model, for_run) * 2**0.5  # its power of two below is the nearest, by ratio
    rows = _power_of_two(min(nearest, total / LEAST_STEPS) / length / gpus)
    return rows * gpus, min(rows, _power_of_two(most_micro))


def _power_of_two(limit: float) -> int:
    """The largest one that is not above the limit."""
    return 1 << int(math.log2(max(limit, 1)))


def _rounded(value: float) -> int:
    """To two significant digits."""
    return round(float(f"{value:.2g}"))


def usual_sections(config: ModelConfig, rows: int, length: int, steps: int) -> dict[str, dict[str, Any]]:
    """What every run should have: a published rate with its warm-up, figures on held-out text, checkpoints."""
    bert = family_of(config) == "bert"
    every = max(steps // 20, min(steps // 4, 25), 1)
    rate = 1e-4 if bert else GPT3[min(GPT3, key=lambda size: abs(size - config.parameter_count()))][1]
    warmup = steps // 100 if bert else min(max(round(WARMUP_TOKENS / (rows * length)), 1), steps // 10)
    usual = {"beta2": 0.999, "weight_decay": 0.01} if bert else {"beta2": 0.95, "weight_decay": 0.1}
    decay = {"kind": "linear", "final_fraction": 0.0} if bert else {"kind": "cosine", "final_fraction": 0.1}
    return {
        "train": {"eval_every_steps": every, "eval_rows": min(max(rows, VALIDATION_ROWS), 256)},
        "optimizer": {"learning_rate": rate} | usual,
        "schedule": {"warmup_steps": max(warmup, min(steps // 10, 10))} | decay,
        "checkpoint": {"save_every_steps": every},
    }


def _validation(stored: int, length: int) -> float:
    """The share of a store that is held out: a thousandth, or what makes VALIDATION_ROWS, at most a tenth."""
    if not stored:
        return 0.001
    share = min(max(0.001, VALIDATION_ROWS * (length + 1) / stored), 0.1)
    if share * stored < length + 1:
        why = f"a tenth of its {stored:,} tokens is less than a row of {length:,}"
        fix = f"give more text: at least {10 * (length + 1):,} tokens"
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
