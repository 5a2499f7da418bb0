"""`throughline finetune RECIPE`: a trained model learns a task from labelled records."""

from pathlib import Path

import click

from ..core import console
from .common import flag, init_from_option, option, recipe_options, throughline_command, with_weights


@click.command()
@recipe_options
@init_from_option
@option("--out", click.Path(), "Directory of the model (default: models/<name of the recipe>).")
@flag("--overwrite", "Replace the model that is already at --out.")
@throughline_command
def command(
    recipe: str, overrides: tuple[str, ...], init_from: str | None, out: str | None, overwrite: bool
) -> None:
    """Fine-tune a model by RECIPE (a file or the name of a shipped one); the result is a model artifact.

    Tasks: classification, token-classification, question-answering and retrieval with a BERT, instruction with
    a GPT. Without validation records a part of the training records is held out by hash, and its scores are a
    learning check.

    \b
    Example:  throughline finetune finetune-classification --init-from runs/my-bert --set data.train=my/labels.tsv
              throughline export models/finetune-classification --to onnx --out onnx/classifier
    """
    from ..core.recipe import find_recipe, load_recipe
    from ..train.finetune.recipe import RULES, FinetuneRecipe, resolve

    resolved = resolve(load_recipe(recipe, FinetuneRecipe, with_weights(overrides, init_from), RULES))
    target = Path(out) if out else Path("models") / find_recipe(recipe).stem
    from ..train.finetune.run import figures_text, finetune

    facts = finetune(resolved, target, overwrite)
    if facts is None:
        return  # the first process says it
    lines = [
        figures_text(facts["validation"]),
        f"measured on {facts['records']['validation']:,} records: {facts['measured_on']}",
        f"model in {target}",
    ]
    console.result({"model": str(target)} | facts, lines)
