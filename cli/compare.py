"""`throughline compare A B`: two runs step by step against a stated bound, or two scores by a paired test."""

from dataclasses import asdict
from operator import attrgetter

import click

from ..core import console
from .common import option, throughline_command


@click.command()
@click.argument("first", type=click.Path())
@click.argument("second", type=click.Path())
@option("--bound", float, "Largest relative difference that is accepted.", 1e-5)
@throughline_command
def command(first: str, second: str, bound: float) -> None:
    """Compare the losses and gradient norms of two runs; exit code 3 when a difference is above the bound.

    Two scores of `throughline eval` are compared record by record with a paired test instead.

    \b
    Example:  throughline compare runs/one runs/two --bound 1e-6
    """
    from ..core.artifact import is_artifact, read_manifest
    from ..core.errors import WrongUse

    if not bound >= 0:  # NaN too: no difference is within it, not even none
        fix = "a number from 0 on; 0 asks for the same to the last bit"
        raise WrongUse(f"{bound:g} is no bound", where="--bound", fix=fix)
    if is_artifact(first) and read_manifest(first).kind == "scores":
        from ..eval.compare import compare_scores

        console.result(*compare_scores(first, second))
        return
    from ..train.logs.compare import check_bound, compare_runs

    comparison = compare_runs(first, second)
    header = ("figure", "steps", "in one run alone", "largest difference", "at step", "first", "second")
    shown = attrgetter("name", "steps", "alone", "difference", "step", "first", "second")
    lines = console.table(header, [shown(row) for row in comparison])
    check_bound(comparison, bound, first, second)
    payload = {"bound": bound, "figures": [asdict(row) for row in comparison]}
    console.result(payload, [*lines, f"all within the relative bound {bound:g}"])
