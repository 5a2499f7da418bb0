"""A text in the place of a recipe or of token stores: `throughline train my.txt`. No torch here.

`recipe_for_text` picks the shipped recipe that suits a text; `with_tokenizer` trains a tokenizer where none is named.
"""

import os
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from ...core.artifact import input_record, is_artifact, read_manifest
from ...core.console import amount, cell, say
from ...core.errors import Failed, WrongUse
from ...core.hardware import machine
from ...core.recipe import load_recipe, parse_override, text_override
from ...data.ingest.inputs import Source, expand_inputs
from ...data.ingest.readers import Reader, ReadOptions
from ...data.ingest.text import utf8_bytes
from ...data.tokenizer import Tokenizer
from .recipe import Recipe
from .resolved import MOST_EPOCHS, is_text, model_family

# by the text that they read: a card takes the first three as well, sooner
ON_CPU = ("gpt-15min-cpu", "gpt-2h-cpu", "gpt-night-cpu")
ON_GPU = (*ON_CPU, "gpt-15min-gpu", "gpt-2h-gpu", "gpt-night-gpu")
ENCODERS = ("bert-shakespeare",)
TOKEN_BYTES = 3.5  # of a vocabulary of 4,096 made of six English novels
VOCABULARY = 4096  # of a tokenizer whose recipe names no size
LEAST_STEPS = 20
SAMPLE_BYTES = 4 << 20  # of text, by which the share of text in its files is estimated
TOKENIZER_BYTES = 10**9  # of text at most on which a tokenizer is trained


def recipe_for_text(text: str, overrides: Sequence[str]) -> tuple[str, list[str]]:
    """The shipped recipe for this text on this machine, and the overrides by which it trains on it, the user's last.

    It is the longest that reads the text at most MOST_EPOCHS times, else the shortest with fewer steps. Raises WrongUse
    for overrides that name another shape or weights, Failed for a text that cannot be read.
    """
    user = load_recipe(ON_CPU[0], Recipe, overrides)
    _check_shape(text, user)
    size = text_bytes(expand_inputs([text]), user.data.read_options())
    if not size:
        fix = "name files that hold text, or another data.field"
        raise Failed("no text in the input", where=text, fix=fix)
    encoder = model_family(user) == "bert" or user.objective is not None
    on_gpu = bool(machine().gpus)
    names, family = (ENCODERS, "a BERT") if encoder else (ON_GPU if on_gpu else ON_CPU, "a GPT")
    place = "a GPU" if on_gpu else "a CPU"
    tokens = size / TOKEN_BYTES
    passes = {name: _passes(load_recipe(name, Recipe), tokens) for name in names}
    name = next((name for name in reversed(names) if passes[name] <= MOST_EPOCHS), names[0])
    recipe = load_recipe(name, Recipe, overrides)
    say(f"{text}: {amount(size, 'B')} of text, about {amount(tokens, '')} tokens")
    settings, reason = _settings(recipe, name, overrides, tokens)
    if not reason:
        reason = f"the longest for {family} on {place} that reads it at most {MOST_EPOCHS} times"
    say(f"recipe {name}: {reason} (throughline recipe show {name})")
    train_text = text_override("data.train", text)
    for longer in names[names.index(name) + 1 :][:1]:
        reading = [
            word for word in overrides if word.startswith("data.") and not word.startswith("data.train=")
        ]
        command = shlex.join(
            ["train", longer, *(w for one in (train_text, *reading) for w in ("--set", one))]
        )
        say(f"next longer: throughline {command}\n  it would read this text {cell(passes[longer])} times")
    return name, [train_text, *settings, *overrides]


def _passes(recipe: Recipe, tokens: float) -> float:
    """Return the number of passes that a run makes over the training part of a text of this many tokens."""
    return recipe.train.tokens / max(tokens * (1 - recipe.data.validation_fraction), 1)


def _check_shape(text: str, user: Recipe) -> None:
    if user.model.init_from:
        what, where = "a recipe is picked for new weights alone", "--init-from"
        weights = shlex.quote(user.model.init_from)
        new = f"throughline recipe new --from {weights} --data tokens --machine cpu --out my.toml"
    elif user.model.preset:
        what, where = "a bare text picks its own shape", "model.preset"
        new = f"throughline recipe new --model {user.model.preset} --data tokens --machine cpu --out my.toml"
    else:
        return
    encoder = model_family(user) == "bert"
    kind, pieces = ("--type wordpiece", " --sentences") if encoder else ("--type bpe", "")
    tokenizer = user.model.init_from or "tok"
    steps = [
        f"throughline data tokenize {shlex.quote(text)} --tokenizer {shlex.quote(tokenizer)}{pieces} --out tokens",
        new,
        "throughline train my.toml",
    ]
    if not user.model.init_from:
        steps.insert(0, f"throughline data tokenizer {shlex.quote(text)} {kind} --vocab-size 8192 --out tok")
    raise WrongUse(what, where=where, fix="\n".join(steps))


def _settings(recipe: Recipe, name: str, overrides: Sequence[str], tokens: float) -> tuple[list[str], str]:
    """Overrides that fit a recipe to a text of `tokens`, and why it got fewer steps."""
    train, shipped = recipe.train, load_recipe(name, Recipe)
    keys = {parse_override(item)[0] for item in overrides}
    steps, settings, reason = train.steps, list[str](), ""
    held_out, row = recipe.data.validation_fraction, train.sequence_length + 1
    if held_out and recipe.objective is None and tokens * held_out < 2 * row:
        held_out = float(f"{min(2 * row / max(tokens, 1), 0.5):.2g}")
        settings.append(f"data.validation_fraction={held_out}")
    room = MOST_EPOCHS * tokens * (1 - held_out)
    if "train.steps" not in keys and train.tokens > room:
        steps = max(int(train.steps * room / train.tokens), LEAST_STEPS)
        settings.append(f"train.steps={steps}")
        passes = steps * train.rows_per_step * train.sequence_length * MOST_EPOCHS / room
        fewer = f"the shortest, with {steps:,} of its {train.steps:,} steps"
        reason = f"{fewer}: it reads the text {cell(float(f'{passes:.2g}'))} times"
    if steps != shipped.train.steps:
        every = max(steps // 6, 1)
        settings.append(f"schedule.warmup_steps={min(shipped.schedule.warmup_steps, steps // 10)}")
        settings += [f"train.eval_every_steps={every}", f"checkpoint.save_every_steps={every}"]
    return settings, reason


def here(sources: Sequence[Source]) -> list[Source]:
    """Without those that would be downloaded to be read."""
    return [source for source in sources if not source.streamed]


def text_bytes(sources: Sequence[Source], options: ReadOptions) -> float:
    """Bytes of text in these files: their size, times the share of text in what SAMPLE_BYTES of it are read from."""
    taken = found = 0

    def count(size: int) -> None:
        nonlocal taken
        taken += size

    for source in here(sources):
        for batch in Reader(options, Counter(), count).read(source):
            found += utf8_bytes(batch.texts)
            if found >= SAMPLE_BYTES:
                break
        if found >= SAMPLE_BYTES:
            break
    size = sum(source.bytes for source in sources)
    return size * found / taken if taken else float(size)


def token_bytes(sources: Sequence[Source], options: ReadOptions, tokenizer: Tokenizer | None) -> float:
    """Bytes of text in a token, measured on the first documents, or TOKEN_BYTES without a tokenizer."""
    if tokenizer is None:
        return TOKEN_BYTES
    for source in here(sources):
        for batch in Reader(options, Counter()).read(source):
            texts = [text[:10_000] for text in batch.texts[:100]]
            _, lengths = tokenizer.encode_batch(texts)
            return utf8_bytes(texts) / max(int(lengths.sum()), 1)
    return TOKEN_BYTES


def with_tokenizer(recipe: Recipe, cache: Path) -> Recipe:
    """The recipe, with a tokenizer that is trained on its text in `cache` where it names none.

    It is used again while the text, how it is read and the size of the vocabulary stay.
    """
    texts = [source.path for source in recipe.data.sources() if is_text(source.path)]
    if recipe.data.tokenizer or recipe.model.init_from or not texts:
        return recipe
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        fix = f"throughline data tokenizer {shlex.join(texts)} --out tok, and then --set data.tokenizer=tok"
        raise WrongUse("several processes train no tokenizer", where=", ".join(texts), fix=fix)
    from ...data.new_tokenizer import sample, train_tokenizer

    options = recipe.data.read_options()
    kind: Literal["wordpiece", "bpe"] = "wordpiece" if model_family(recipe) == "bert" else "bpe"
    vocabulary = recipe.model.overrides.get("vocab_size", VOCABULARY)
    settings = {"kind": kind, "vocab_size": vocabulary, "read": asdict(options)}
    out, records = cache / "tokenizer", tuple(input_record(path) for path in texts)
    before = read_manifest(out) if is_artifact(out) else None
    if before is None or before.inputs != records or before.facts.get("settings") != settings:
        another = "--set data.tokenizer=PATH takes another"
        say(f"tokenizer: {kind} of {vocabulary:,} entries, trained on the text ({another})")
        sampled = sample(expand_inputs(texts), options, TOKENIZER_BYTES, Counter())
        tokenizer = train_tokenizer(sampled, kind, vocabulary)
        tokenizer.save(out, list(records), {"trained": True, "settings": settings}, overwrite=True)
    data = recipe.data.model_copy(update={"tokenizer": str(out.resolve())})
    return recipe.model_copy(update={"data": data})
