"""`throughline launch -- COMMAND`: the command on several processes."""

import sys

import click

from .common import throughline_command


@click.command(context_settings={"ignore_unknown_options": True})
@click.option("--nproc", type=click.IntRange(1), help="Processes; by default as many as the recipe's layout needs.")
@click.option("--restarts", type=click.IntRange(0), default=3, show_default=True, help="Starts after a lost process, in a row.")
@click.argument("arguments", metavar="-- COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@throughline_command
def command(nproc: int | None, restarts: int, arguments: tuple[str, ...]) -> None:
    """Run COMMAND (train, with its options) on several processes of this machine.

    \b
    Example:  throughline launch --nproc 2 -- train gpt-shakespeare --set parallel.data=2
    A process that dies takes the others along; all start again from the last checkpoint. The exit code is the command's:
    75 when SIGTERM stopped it with everything saved.
    """
    from ..core.errors import WrongUse
    from ..train.parallel.launch import run_processes

    if arguments[0] != "train":
        raise WrongUse(f"{arguments[0]} runs in one process", fix="launch takes: train RECIPE")
    sys.exit(run_processes(nproc or _layout_processes(arguments), arguments, restarts))


def _layout_processes(arguments: tuple[str, ...]) -> int:
    """The processes that the layout of `train RECIPE --set ...` needs."""
    from ..core.recipe import load_recipe
    from ..train.recipe import RULES, Recipe
    from .train import command as train

    given = train.make_context("train", list(arguments[1:])).params
    return load_recipe(given["recipe"], Recipe, given["overrides"], RULES).parallel.layout().world
