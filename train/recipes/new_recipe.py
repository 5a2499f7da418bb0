"""A first recipe: for a model, data and a machine (`throughline recipe new`) or for a bare text (`throughline train
my.txt`). Arithmetic only; no torch here.

- Batch and learning rate are those of Brown et al. 2020, table 2.1, for the nearest size; a BERT has Devlin et al.'s.
- Length: 20 tokens a parameter (Hoffmann et al. 2022) or as given; of given weights one pass, at a tenth of the rate.
- Layout: data parallel, with as little as possible recomputed and shared out, as the planner's memory allows.
"""

import bisect
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from ...core.artifact import input_record, is_artifact, read_manifest
from ...core.console import amount, cell, say
from ...core.errors import WrongUse, did_you_mean, download_hint
from ...core.hardware import chips, machine
from ...core.recipe import build_recipe, dump_toml, load_recipe
from ...models.config import ModelConfig, family_of, preset
from ...planner.memory import capacity_bytes
from .recipe import Recipe
from .resolved import MOST_EPOCHS, model_config, predicted_memory, resolve, shape_of

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


# by the text that they read: a card takes the first three as well, sooner
ON_CPU = ("gpt-15min-cpu", "gpt-2h-cpu", "gpt-night-cpu")
ON_GPU = (*ON_CPU, "gpt-15min-gpu", "gpt-2h-gpu", "gpt-night-gpu")
TOKEN_BYTES = 3.5  # of a vocabulary of 4,096 made of six English novels
LEAST_STEPS = 20


def is_text(path: str) -> bool:
    """Whether this is no recipe but text: a file or a directory of files."""
    return Path(path).exists() and Path(path).suffix != ".toml" and not is_artifact(path)


def recipe_for_text(text: str, run_dir: Path, has_weights: bool) -> list[str]:
    """The shipped recipe for this text on this machine, and the overrides by which it trains on it: the longest that
    reads the text at most MOST_EPOCHS times, else the shortest with fewer steps. Its tokenizer is in the run's cache.
    """
    from ...data.ingest.inputs import expand_inputs
    from ...data.ingest.readers import ReadOptions
    from ...data.new_tokenizer import sample, train_tokenizer

    if has_weights:
        fix = "throughline recipe new --from DIRECTORY --data TOKENS"
        raise WrongUse("a recipe is picked for new weights alone", where="--init-from", fix=fix)
    size = sum(source.bytes for source in expand_inputs([text]))
    names, here = (ON_GPU, "a GPU") if machine().gpus else (ON_CPU, "a CPU")
    recipes = {name: load_recipe(name, Recipe) for name in names}
    room = MOST_EPOCHS * size / TOKEN_BYTES
    read = {name: each.train.tokens for name, each in recipes.items()}
    name = next((name for name in reversed(names) if read[name] <= room), names[0])
    train, passes = recipes[name].train, MOST_EPOCHS * read[name] / room
    given, why = [f"data.train={text}"], f"the longest for {here} that reads it at most {MOST_EPOCHS} times"
    if passes > MOST_EPOCHS:
        steps = max(round(train.steps * MOST_EPOCHS / passes), LEAST_STEPS)
        given += [f"train.steps={steps}", f"schedule.warmup_steps={min(30, steps // 10)}"]
        every = max(steps // 6, 1)
        given += [f"train.eval_every_steps={every}", f"checkpoint.save_every_steps={every}"]
        why = f"the shortest, with {steps:,} of its {train.steps:,} steps: it reads the text {MOST_EPOCHS} times"
    say(f"{text}: {amount(size, 'B')}, about {amount(size / TOKEN_BYTES, '')} tokens")
    say(f"recipe {name}: {why} (throughline recipe show {name})")
    for other in names[names.index(name) + 1 :][:1]:
        times = cell(MOST_EPOCHS * read[other] / room)
        say(f"next longer: throughline train {other}; it would read this text {times} times")
    out, record = run_dir / "cache" / "tokenizer", input_record(text)
    if not is_artifact(out) or read_manifest(out).inputs != (record,):
        texts = sample(expand_inputs([text]), ReadOptions(), 10**9, Counter())
        vocabulary = recipes[name].model.overrides["vocab_size"]
        train_tokenizer(texts, "bpe", vocabulary).save(out, [record], {"trained": True}, overwrite=True)
    return [name, *given, f"data.tokenizer={out}"]
