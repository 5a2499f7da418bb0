"""`throughline show|verify|report|compare`: what is there already, looked at, checked, and held beside another."""

import os
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter

import click

from ..core import console
from ..core.artifact import Input, chain, is_artifact, read_manifest, verify_artifact
from ..core.errors import WrongUse
from .common import flag, option, throughline_command

MOST_INPUTS = 8  # files beside one another that `show` lists
Link = tuple[int, Input, bool | None]  # depth, what it was made from, whether that is unchanged


@click.command()
@click.argument("path", type=click.Path())
@flag("--inputs list_inputs", "List every file that it was made from, however many there are.")
@throughline_command
def show(path: str, list_inputs: bool) -> None:
    """Print an artifact's manifest and its provenance.

    \b
    Example:  throughline show runs/demo/tokens
    """
    manifest = read_manifest(path)
    rows = chain(path)
    total = sum(file.bytes for file in manifest.files)
    lines = [
        f"{manifest.kind}  {path}",
        f"  made      {manifest.created} by throughline {manifest.throughline_version}",
        f"  command   {manifest.command}",
        f"  hash      {manifest.hash}",
        f"  files     {len(manifest.files)}, {console.amount(total, 'B')}",
        *(f"  {name:<9} {_short(value)}" for name, value in manifest.facts.items()),
    ]
    if rows:
        lines.append("  made from")
        lines += _provenance(rows, list_inputs)
    made_from = [{"depth": depth, **asdict(item), "unchanged": same} for depth, item, same in rows]
    console.result(asdict(manifest) | {"hash": manifest.hash, "chain": made_from}, lines)


def _provenance(rows: Sequence[Link], list_inputs: bool) -> list[str]:
    """A line for each link of the chain; of many files beside one another one, and one for each that has changed."""
    lines = []
    for (depth, kind), group in groupby(rows, key=lambda row: (row[0], row[1].kind)):
        links, indent = list(group), "  " * (depth + 1)
        if kind == "foreign" and len(links) > MOST_INPUTS and not list_inputs:
            folder = os.path.commonpath([item.path for _, item, _ in links])
            lines.append(f"{indent}foreign  {len(links):,} files in {folder} (--inputs lists them)")
            links = [link for link in links if link[2] is False]
        lines += [
            f"{indent}{item.kind}  {item.path}  {item.hash[:12]}{_state(item, same)}"
            for _, item, same in links
        ]
    return lines


def _state(item: Input, same: bool | None) -> str:
    if same is None:
        return "  (too large to hash again here)" if os.path.exists(item.path) else "  (no longer there)"
    return "" if same else "  (CHANGED since)"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path())
@throughline_command
def verify(paths: tuple[str, ...]) -> None:
    """Check every file of one or more artifacts; exit 3 when one is missing, cut or changed.

    \b
    Example:  throughline verify runs/demo/tokens
    """
    lines, verified = [], []
    for path in paths:
        manifest = verify_artifact(path)
        total = console.amount(sum(file.bytes for file in manifest.files), "B")
        lines.append(f"ok  {path}  {manifest.kind}, {len(manifest.files)} files, {total}")
        verified.append({"path": path, "hash": manifest.hash})
    console.result({"verified": verified}, lines)


@click.command()
@click.argument("run", type=click.Path())
@throughline_command
def report(run: str) -> None:
    """Write RUN's report.html from its metrics, also while it trains.

    \b
    Example:  throughline report runs/gpt-shakespeare
    """
    from ..train.logs.report import write_report

    path = str(write_report(run))
    console.result({"report": path}, [path])


@click.command()
@click.argument("first", type=click.Path())
@click.argument("second", type=click.Path())
@option("--bound", float, "Largest relative difference that is accepted.", 1e-5)
@throughline_command
def compare(first: str, second: str, bound: float) -> None:
    """Compare the losses and gradient norms of two runs; exit code 3 when a difference is above the bound.

    Two scores of `throughline eval` are compared record by record with a paired test instead.

    \b
    Example:  throughline compare runs/one runs/two --bound 1e-6
    """
    if not bound >= 0:  # NaN too: no difference is within it, not even none
        fix = "a number from 0 on; 0 asks for the same to the last bit"
        raise WrongUse(f"{bound:g} is no bound", where="--bound", fix=fix)
    if is_artifact(first) and read_manifest(first).kind == "scores":
        from ..eval.compare import compare_scores

        console.result(*compare_scores(first, second))
        return
    from ..train.logs.report import check_bound, compare_runs

    comparison = compare_runs(first, second)
    header = ("figure", "steps", "in one run alone", "largest difference", "at step", "first", "second")
    shown = attrgetter("name", "steps", "alone", "difference", "step", "first", "second")
    lines = console.table(header, [shown(row) for row in comparison])
    check_bound(comparison, bound, first, second)
    payload = {"bound": bound, "figures": [asdict(row) for row in comparison]}
    console.result(payload, [*lines, f"all within the relative bound {bound:g}"])
