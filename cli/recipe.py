"""`throughline recipe list|show|check|new`."""

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from ..core import console
from ..core.errors import WrongUse
from ..core.files import write_atomic
from ..core.hardware import chips
from ..core.recipe import (
    Section,
    describe,
    dump_toml,
    find_recipe,
    load_recipe,
    read_text,
    read_toml,
    shipped_recipes,
)
from ..models.config import preset_names
from ..planner.hardware import find_cluster, shipped_clusters
from ..train.finetune import recipe as finetune
from ..train.recipes.new_recipe import new_recipe
from ..train.recipes.recipe import Recipe
from ..train.recipes.resolved import check_passes, is_text, model_config, outlook, resolve
from ..train.recipes.rules import RULES
from .common import PATH, option, recipe_options, set_option, throughline_command


@click.group()
def command() -> None:
    """List, show, check and write recipes."""


@command.command("list")
@throughline_command
def list_recipes() -> None:
    """List the shipped recipes with the first line of their comment.

    \b
    Example:  throughline recipe list
    """
    texts = {name: path.read_text(encoding="utf-8") for name, path in shipped_recipes().items()}
    notes = {name: text.splitlines()[0].lstrip("# ") for name, text in texts.items()}
    console.result({"recipes": notes}, [f"{name:<28}{note}" for name, note in notes.items()])


@command.command()
@click.argument("name", required=False)
@throughline_command
def show(name: str | None) -> None:
    """Print a shipped recipe, or without a name every field with its type, default and meaning.

    \b
    Example:  throughline recipe show gpt-shakespeare
    """
    if name:
        text = read_text(find_recipe(name))
        console.result({"recipe": name, "text": text}, text.splitlines())
        return
    rows, lines = describe(Recipe), []
    for key, kind, default, note in rows:
        lines += [f"{key}  ({kind}, default {default})", f"    {note}"]
    console.result({"fields": [dict(zip(("key", "type", "default", "help"), row)) for row in rows]}, lines)


@command.command()
@recipe_options
@throughline_command
def check(recipe: str, overrides: tuple[str, ...]) -> None:
    """Check a recipe and print it resolved; exit 2 with every problem at once.

    \b
    Example:  throughline recipe check gpt-shakespeare --set train.steps=100
    """
    _, tree = read_toml(find_recipe(recipe))
    tunes = "task" in tree  # every fine-tuning recipe names its task, no other has one
    model: type[Section] = finetune.FinetuneRecipe if tunes else Recipe
    resolved = load_recipe(recipe, model, overrides, finetune.RULES if tunes else RULES)
    text = dump_toml(resolved)
    console.result({"recipe": resolved.model_dump(mode="json")}, text.splitlines())


@command.command()
@option("--model", None, "Name of a model shape, for example gpt2-124m (asked for on a terminal).")
@option("--data", None, "Token store to train on (asked for on a terminal).")
@option(
    "--machine",
    None,
    "Kind of device or cluster, for example a100-80gb, aws-p4d.24xlarge or cpu (asked for on a terminal).",
)
@option("--gpus", click.IntRange(min=1), "Number of devices (default: 1; asked for on a terminal).")
@option("--tokens", click.FloatRange(min=1), "Number of tokens to train on (default: 20 a parameter).")
@option(
    "--from init_from",
    click.Path(),
    "Weights to train on, instead of --model: a Hugging Face directory, a run or a checkpoint.",
)
@set_option("Set a field of the new recipe to another value. Repeatable.")
@option("--out", PATH, "File to write, ending in .toml.", required=True)
@throughline_command
def new(
    out: Path,
    gpus: int | None,
    tokens: float | None,
    init_from: str | None,
    overrides: tuple[str, ...],
    **given: Any,
) -> None:
    """Write a first recipe for a model, data and a machine. What is not given is asked for on a terminal.

    \b
    Example:  throughline recipe new --model gpt2-124m --data tokens --machine a100-80gb --gpus 8 --out my.toml
              throughline recipe new --from DIRECTORY --data tokens --machine rtx4090 --out my.toml
    Batch, learning rate and length come from published tables; the file says which. How often the run reads the store,
    how long it takes and what it costs is printed.
    """
    from ..data.store import TokenStore

    if out.suffix != ".toml":
        fix = f"--out {shlex.quote(str(out))}.toml"
        raise WrongUse("a recipe's name ends in .toml", where=out, fix=fix)
    if out.exists():
        raise WrongUse("the output already exists", where=out, fix="choose another --out")
    model, data, machine = map(given.get, ("model", "data", "machine"))
    if sys.stdin.isatty():
        shapes = click.Choice(preset_names())
        asked = "Model (see models/presets.toml)"
        model = model or init_from or click.prompt(asked, type=shapes, show_choices=False)
        data = data or click.prompt("Token store")
        machine = machine or click.prompt("Machine", type=click.Choice(["cpu", *chips()]))
        if gpus is None and machine != "cpu":
            gpus = click.prompt("Number of GPUs", type=click.IntRange(min=1), default=1)
    if model and init_from and model != init_from:
        raise WrongUse("the shape is that of the weights", where="--model", fix="give --model or --from")
    needed = {"--model": model or init_from, "--data": data, "--machine": machine}
    if missing := ", ".join(name for name, value in needed.items() if not value):
        fix = "give it, or run on a terminal to be asked"
        raise WrongUse("not everything is given", where=missing, fix=fix)
    assert data and machine
    if is_text(data):
        tokenizer = init_from or "tok"
        steps = [
            f"throughline data tokenize {shlex.quote(data)} --tokenizer {shlex.quote(tokenizer)} --out tokens"
        ]
        if not init_from:
            steps.insert(0, f"throughline data tokenizer {shlex.quote(data)} --vocab-size 8192 --out tok")
        fix = "\n".join([*steps, "and then --data tokens"])
        raise WrongUse("this is text, and a recipe is made for a token store", where=data, fix=fix)
    store = TokenStore.open(data) if Path(data).exists() or Path(f"{data}.idx").exists() else None
    stored = store.tokens if store else 0
    cluster = find_cluster(machine) if machine in {*chips(), *shipped_clusters()} else None
    chip = cluster.chip.key if cluster else machine
    text = new_recipe(
        model or "",
        data,
        chip,
        gpus or 1,
        tokens,
        init_from or "",
        stored,
        has_sentences=store is None or store.sequences > store.documents,
        overrides=overrides,
    )
    write_atomic(out, text)
    recipe = resolve(load_recipe(str(out), Recipe, (), RULES))
    learnt = stored * (1 - recipe.data.validation_fraction)
    sizes = [learnt] if learnt else []
    facts, lines = outlook(recipe, model_config(recipe), cluster, sizes)
    check_passes(recipe, sizes)
    if not stored:
        lines.append(f"{data} is not there yet: train --dry-run will say how often the run reads it")
    lines = [*text.splitlines(), f"written to {out}", *lines]
    console.result({"path": str(out), "recipe": text} | facts, lines)
