"""`throughline eval PATH`: zero-shot and few-shot scores of anything that predicts tokens."""

from pathlib import Path
from typing import Any

import click

from ..core import console
from .common import throughline_command


@click.command()
@click.argument("path", type=click.Path(), required=False)
@click.option(
    "--tasks", multiple=True, help="Tasks, groups or task files, comma-separated; see --list. Repeatable."
)
@click.option("--list", "listing", is_flag=True, help="List the tasks and the files they look for.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Directory with the tasks' files; nothing is then fetched.",
)
@click.option("--limit", type=click.IntRange(min=1), help="Records a task; by default all.")
@click.option(
    "--shots",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Solved examples before each question.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the examples' draw.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option(
    "--bos/--no-bos", default=None, help="Put BOS before every text; by default as the tokenizer's file says."
)
@click.option("--window", type=click.IntRange(min=2), help="Longest input in tokens; by default the model's.")
@click.option(
    "--batch-tokens", type=click.IntRange(min=1), help="Tokens in a batch: bounds memory, changes no score."
)
@click.option(
    "--pll", type=click.Choice(["within_word_l2r", "original"]), default="within_word_l2r", show_default=True,
    help="BERT: which tokens of a word are masked while one of them is scored.",
)  # fmt: skip
@click.option(
    "--overlong", type=click.Choice(["truncate", "error", "skip"]), default="truncate", show_default=True,
    help="A record whose context does not fit: cut on its left and counted, refused, or left out and counted.",
)  # fmt: skip
@click.option(
    "--all-checkpoints",
    is_flag=True,
    help="Evaluate every checkpoint of a run and plot scores against steps.",
)
@click.option(
    "--against",
    type=click.Path(),
    help="Score another form of the model too; refuse when token probabilities differ.",
)
@click.option(
    "--bound", type=click.FloatRange(min=0), default=1e-3, show_default=True,
    help="--against: largest difference in nats per token.",
)  # fmt: skip
@click.option(
    "--contamination",
    type=click.Path(),
    help="A token store: report scores with and without records found in it.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Directory of the scores; by default PATH.scores."
)
@throughline_command
def command(
    path: str | None, tasks: tuple[str, ...], listing: bool, all_checkpoints: bool, **given: Any
) -> None:
    """Score a run (its latest checkpoint), a checkpoint, a model directory or an ONNX artifact.

    \b
    Example:  throughline eval runs/gpt --tasks lambada_openai,blimp --limit 200
    Of a run the validation figures come first. A stopped evaluation goes on with the same command.
    """
    from ..eval.session import Request, evaluate_checkpoints, evaluate_one, task_listing

    if listing:
        console.result(*task_listing())
        return
    if path is None:
        raise click.UsageError("give the PATH of a model, or --list")
    request = Request(Path(path), ",".join(tasks), **given)
    found = evaluate_checkpoints(request) if all_checkpoints else evaluate_one(request)
    if found is not None:
        console.result(*found)
