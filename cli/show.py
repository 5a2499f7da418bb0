"""`throughline show PATH`: what an artifact is, what it was made with, and its chain back to the text."""

import os
from dataclasses import asdict

import click

from ..core import console
from ..core.artifact import chain, read_manifest
from .common import throughline_command


@click.command()
@click.argument("path", type=click.Path())
@throughline_command
def command(path: str) -> None:
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
        state = {True: "", False: "  (CHANGED since)"}
        lines += [
            f"  {'  ' * depth}{item.kind}  {item.path}  {item.hash[:12]}"
            f"{_unknown(item.path) if same is None else state[same]}"
            for depth, item, same in rows
        ]
    payload = asdict(manifest) | {
        "hash": manifest.hash,
        "chain": [{"depth": depth, **asdict(item), "unchanged": same} for depth, item, same in rows],
    }
    console.result(payload, lines)


def _unknown(path: str) -> str:
    return "  (too large to hash again here)" if os.path.exists(path) else "  (no longer there)"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 100 else text[:97] + "..."
