"""`throughline export PATH --to onnx|huggingface`: hand a model over, compared with the original."""

import shlex

import click

from ..core import console
from .common import throughline_command


@click.command()
@click.argument("path", type=click.Path())
@click.option(
    "--to", "target", type=click.Choice(["onnx", "huggingface"]), required=True, help="What to write."
)
@click.option("--out", required=True, type=click.Path(), help="Directory to write.")
@click.option("--overwrite", is_flag=True, help="Replace an artifact that is already there.")
@throughline_command
def command(path: str, target: str, out: str, overwrite: bool) -> None:
    """Write a run, checkpoint or model directory as ONNX or as a Hugging Face directory.

    Every output is compared with the torch model over a sweep of shapes; above the bound nothing is written (exit 3).

    \b
    Example:  throughline export runs/my-gpt --to onnx --out my/gpt-onnx
    """
    from ..inference.bench import latency_lines
    from ..inference.export import export_huggingface, export_onnx

    write = export_onnx if target == "onnx" else export_huggingface
    report = write(path, out, overwrite)
    header = ["output", "max error", "mean error", "largest value", "top-1 agreement"]
    rows = [
        [name, line["max_abs"], line["mean_abs"], line["scale"], line.get("top1_agreement")]
        for name, line in report["outputs"].items()
    ]
    lines = [*console.table(header, rows), f"bound: {report['bound']:g} of {report['bound_of']}"]
    if "greedy_tokens" in report:
        lines.append("greedy tokens equal to torch's: {equal} of {asked}".format(**report["greedy_tokens"]))
    lines += ["", *console.table(*latency_lines(report["latency"]))]
    lines += ["", f"written: {out}", f"try it:  throughline serve {shlex.quote(out)}"]
    console.result({"path": str(out), "to": target, **report}, lines)
