"""`throughline eval PATH`: zero-shot and few-shot scores of anything that predicts tokens."""

from pathlib import Path
from typing import Any

import click

from ..core import console
from .common import PATH, device_option, dtype_option, throughline_command


@click.command()
@click.argument("path", type=click.Path(), required=False)
@click.option(
    "--tasks",
    multiple=True,
    help="Names of tasks or groups, or task files, separated by commas; see --list. Repeatable.",
)
@click.option("--list", "listing", is_flag=True, help="List the tasks and the files they look for.")
@click.option(
    "--data-dir",
    type=PATH,
    help="Directory that holds the tasks' files. Neither the shipped samples nor the network are then used.",
)
@click.option(
    "--limit", type=click.IntRange(min=1), help="Maximum number of records per task (default: all)."
)
@click.option(
    "--shots",
    "--num-fewshot",
    "shots",
    type=click.IntRange(min=0),
    default=0,
    help="Number of solved examples before each question.",
)
@click.option("--seed", type=int, default=0, help="Seed of the draw of the solved examples.")
@device_option
@dtype_option
@click.option(
    "--bos/--no-bos",
    "--add-bos/--no-add-bos",
    "bos",
    default=None,
    help="Put the BOS token before every text (default: as the tokenizer's file says).",
)
@click.option(
    "--window",
    "--max-length",
    "window",
    type=click.IntRange(min=2),
    help="Maximum number of tokens in an input (default: the model's context).",
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    help="Number of tokens in a batch. It bounds memory and changes no score.",
)
@click.option(
    "--pll",
    type=click.Choice(["within_word_l2r", "original"]),
    default="within_word_l2r",
    help="For a BERT: which tokens of a word are masked while one of them is scored.",
)
@click.option(
    "--overlong",
    type=click.Choice(["truncate", "error", "skip"]),
    default="truncate",
    help="What to do with a record whose context is longer than the model's: cut it on its left and count it, "
    "stop with an error, or leave it out and count it.",
)
@click.option(
    "--all-checkpoints",
    is_flag=True,
    help="Evaluate every checkpoint of the run and plot the scores against the steps.",
)
@click.option(
    "--against",
    type=click.Path(),
    help="Path of another form of the same model, scored too. Token probabilities that differ by more than "
    "--bound are an error.",
)
@click.option(
    "--bound",
    type=click.FloatRange(min=0),
    default=1e-3,
    help="Largest difference of a token's log-probability that --against accepts, in nats.",
)
@click.option(
    "--contamination",
    type=click.Path(),
    help="Path of a token store. Scores are reported with and without the records found in it.",
)
@click.option("--out", type=PATH, help="Directory of the scores (default: PATH.scores).")
@click.option(
    "--fresh", is_flag=True, help="Discard the stored answers to these questions of this model and ask again."
)
@throughline_command
def command(
    path: str | None, tasks: tuple[str, ...], listing: bool, all_checkpoints: bool, **given: Any
) -> None:
    """Score a run (its latest checkpoint), a checkpoint, a model directory or an ONNX artifact.

    \b
    Example:  throughline eval runs/gpt --tasks lambada_openai,blimp --limit 200
    For a run, its validation figures are printed first. The same command continues a stopped evaluation.
    """
    from ..eval.request import Request
    from ..eval.session import evaluate_checkpoints, evaluate_one
    from ..eval.task import task_listing

    if listing:
        console.result(*task_listing())
        return
    if path is None:
        raise click.UsageError("give the PATH of a model, or --list")
    request = Request(Path(path), ",".join(tasks), **given)
    found = evaluate_checkpoints(request) if all_checkpoints else evaluate_one(request)
    if found is not None:
        console.result(*found)
