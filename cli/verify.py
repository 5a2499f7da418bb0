"""`throughline verify PATH`: re-hash an artifact against its manifest."""

import click

from ..core import console
from ..core.artifact import verify_artifact
from .common import throughline_command


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path())
@throughline_command
def command(paths: tuple[str, ...]) -> None:
    """Check every file of one or more artifacts; exit 3 when one is missing, cut or changed.

    \b
    Example:  throughline verify runs/demo/tokens
    """
    manifests = [verify_artifact(path) for path in paths]
    lines = [
        f"ok  {path}  {manifest.kind}, {len(manifest.files)} files, "
        f"{console.amount(sum(file.bytes for file in manifest.files), 'B')}"
        for path, manifest in zip(paths, manifests)
    ]
    console.result({"verified": [{"path": path, "hash": m.hash} for path, m in zip(paths, manifests)]}, lines)
