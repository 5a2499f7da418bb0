"""A shipped recipe for a bare text, and a tokenizer made of it: `throughline train my.txt`."""

from collections import Counter
from pathlib import Path

from ...core.artifact import input_record, is_artifact, read_manifest
from ...core.console import amount, cell, say
from ...core.errors import WrongUse
from ...core.hardware import machine
from ...core.recipe import load_recipe
from ...data.ingest.inputs import expand_inputs
from ...data.ingest.readers import ReadOptions
from ...data.ingest.sample import sample
from ...data.train_tokenizer import train_tokenizer
from .new_recipe import MOST_EPOCHS
from .recipe import Recipe

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
    reads the text at most MOST_EPOCHS times, else the shortest with fewer steps. Its tokenizer is made in the run's
    cache, unless the weights that the run begins with have one. What is picked and why is said.
    """
    if has_weights:
        fix = "throughline recipe new --from DIRECTORY --data TOKENS"
        raise WrongUse("a recipe is picked for new weights alone", where="--init-from", fix=fix)
    size = sum(source.bytes for source in expand_inputs([text]))
    names = ON_GPU if machine().gpus else ON_CPU
    recipes = {name: load_recipe(name, Recipe) for name in names}
    room = MOST_EPOCHS * size / TOKEN_BYTES
    read = {
        name: one.train.steps * one.train.rows_per_step * one.train.sequence_length
        for name, one in recipes.items()
    }
    name = next((name for name in reversed(names) if read[name] <= room), names[0])
    train, passes = recipes[name].train, MOST_EPOCHS * read[name] / room
    given = [f"data.train={text}"]
    why = (
        f"the longest for {'a GPU' if machine().gpus else 'a CPU'} that reads it at most {MOST_EPOCHS} times"
    )
    if passes > MOST_EPOCHS:
        steps = max(round(train.steps * MOST_EPOCHS / passes), LEAST_STEPS)
        given += [f"train.steps={steps}", f"schedule.warmup_steps={min(30, steps // 10)}"]
        given += [
            f"{key}={max(steps // 6, 1)}" for key in ("train.eval_every_steps", "checkpoint.save_every_steps")
        ]
        why = f"the shortest, with {steps:,} of its {train.steps:,} steps: it reads the text {MOST_EPOCHS} times"
    say(f"{text}: {amount(size, 'B')}, about {amount(size / TOKEN_BYTES, '')} tokens")
    longer = names[names.index(name) + 1 :][:1]
    say(f"recipe {name}: {why} (throughline recipe show {name})")
    for other in longer:
        times = cell(MOST_EPOCHS * read[other] / room)
        say(f"next longer: throughline train {other}; it would read this text {times} times")
    out = run_dir / "cache" / "tokenizer"
    record = input_record(text)
    if not is_artifact(out) or read_manifest(out).inputs != (record,):
        options, counts = ReadOptions(), Counter[str]()
        texts = sample(expand_inputs([text]), options, 10**9, counts)
        vocabulary = recipes[name].model.overrides["vocab_size"]
        train_tokenizer(texts, "bpe", vocabulary).save(out, [record], {"trained": True}, overwrite=True)
    return [name, *given, f"data.tokenizer={out}"]
