"""`throughline bench latency PATH`: how fast your own artifact answers on this machine."""

import click

from ..core import console
from .common import throughline_command


@click.group()
def command() -> None:
    """Measure your own artifact.

    \b
    Example:  throughline bench latency my/bert-onnx
    """


@command.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path())
@click.option("--seconds", default=1.0, show_default=True, help="Measured per line of the table.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads of ONNX Runtime. Default: one per core.")
@throughline_command
def latency(paths: tuple[str, ...], seconds: float, threads: int | None) -> None:
    """Median and tail latency per batch and length, of one or more models, beside each other.

    \b
    Example:  throughline bench latency runs/my-gpt my/gpt-onnx
    """
    from ..inference.backends import open_backend
    from ..inference.bench import latency_lines, latency_table

    rows = [
        {"model": path} | row for path in paths for row in latency_table(open_backend(path, threads), seconds)
    ]
    header, cells = latency_lines(rows)
    if len(paths) > 1:
        header, cells = ["model", *header], [[row["model"], *line] for row, line in zip(rows, cells)]
    console.result({"latency": rows}, console.table(header, cells))
