"""`throughline report RUN`: write the run's report.html again."""

import click

from ..core import console
from .common import throughline_command


@click.command()
@click.argument("run", type=click.Path())
@throughline_command
def command(run: str) -> None:
    """Write RUN's report.html from its metrics, also while it trains.

    \b
    Example:  throughline report runs/gpt-shakespeare
    """
    from ..train.logs.report import write_report

    path = write_report(run)
    console.result({"report": str(path)}, [str(path)])
