"""`throughline export PATH --to ...`: hand a model over, compared with the original."""

import shlex
from pathlib import Path
from typing import Any, get_args

import click
from click import Choice

from ..core import console
from ..core.errors import WrongUse
from ..inference.graphs.graph_options import OPSETS, GraphOptions, Names, Outputs, Pooling, Precision
from .common import PATH, flag, is_given, option, throughline_command

_JUDGED = "precision text tasks limit bench device"
_ENGINE = f"{_JUDGED} calibration pooling batches lengths"
USED = {  # of the options below by each target; another one that is given is refused
    "onnx": f"{_JUDGED} calibration variant opset names pooling outputs",
    "huggingface": f"{_JUDGED} pooling",
    "gguf": _JUDGED,
    "tensorrt": f"{_ENGINE} timing_cache",
    "tensorrt-rtx": f"{_ENGINE} capability",
    "triton": f"{_JUDGED} calibration variant opset pooling outputs",
    "triton --for tensorrt": f"{_ENGINE} outputs variant timing_cache",
    "calibration": "text device",
}
ON_CPU = {
    "calibration": "torch reads the text there",
    "gguf": "llama.cpp's side of the comparison is on the CPU",
}
SAID = {  # of a part of the report
    "greedy_tokens": "greedy tokens equal to torch's: {equal} of {asked}",
    "text": "on {tokens:,} tokens of {source}: mean KL {kl:.2g} nats (bound {kl_bound:g}), top-1 agreement "
    "{top1_agreement:.2%}",
    "engine": "{standing}: {kernels} kernels, {kernels_per_layer:g} a layer, {fused_attention} fused attention, "
    "for compute capability {compute_capability}",
}
PRECISIONS = {"huggingface": ("fp32", "fp16", "bf16"), "gguf": ("fp32", "fp16", "int8", "int4")}


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of `1,8`, as a type of an option."""
    parts = text.split(",")
    found = tuple(int(part) for part in parts if part.isdecimal())
    if len(found) < len(parts) or any(later <= one for one, later in zip((0, *found), found)):
        raise click.BadParameter(f"{text!r} is no list of numbers from 1 on that grow; write for example 1,8")
    return found


@click.command()
@click.argument("path", type=click.Path())
@option("--to target", Choice([each for each in USED if " " not in each]), "What to write.", required=True)
@option("--out", click.Path(), "Directory to write.", required=True)
@flag("--overwrite", "Replace the artifact that is already at --out.")
@option(
    "--precision",
    Choice((*get_args(Precision), "bf16")),
    "Precision of the products; norms, softmax and outputs stay fp32. int8 and int4 need --text; "
    "in GGUF they are q8_0 and q4_0. (default: fp32, of an engine fp16, for Hugging Face as the model was trained)",
)
@option(
    "--for --variant variant",
    Choice(("portable", "cpu", "onnxruntime", "cuda", "tensorrt")),
    "What the ONNX graph is written for: portable has standard operators alone, cpu (or onnxruntime) those of "
    "ONNX Runtime's CPU, cuda those that it has CUDA kernels for; --to triton --for tensorrt builds a plan.",
    "portable",
)
@option(
    "--opset",
    click.IntRange(OPSETS[0], OPSETS[-1]),
    "ONNX opset; below 24 the cache, below 23 attention is written in older operators. (default: 24, and 17 under "
    "optimum's names and for Triton, whose containers lag)",
)
@option(
    "--names",
    Choice(get_args(Names)),
    "Names of inputs and outputs; optimum: as optimum and onnxruntime-genai look for them.",
    "throughline",
)
@option(
    "--pooling",
    Choice(get_args(Pooling)),
    "How a BERT's sentence embedding is made of its tokens (default: as the directory's modules.json says, else "
    "the mean).",
)
@option(
    "--outputs",
    Choice(get_args(Outputs)),
    "Outputs of a BERT's graph: all, or embedding, without the logits of its heads (default: all; of a pretrained "
    "BERT for Triton embedding).",
)
@option("--text", click.Path(), "Plain text that the export is judged on; int8 is calibrated on half of it.")
@option("--calibration", click.Path(), "Calibration artifact, instead of one made from --text.")
@option(
    "--capability",
    None,
    "Compute capability that --to tensorrt-rtx compiles for; TensorRT builds for the GPU that is there.",
    "7.5",
)
@option("--batches", numbers, "Batch sizes that an engine is built for, separated by commas.", "1,8")
@option(
    "--lengths", numbers, "Lengths in tokens that an engine is built for, separated by commas.", "128,512"
)
@option("--timing-cache", PATH, "File of TensorRT's kernel timings, read and written.")
@option("--tasks", None, "Tasks whose scores may not fall, as `throughline eval` takes them.")
@option("--limit", click.IntRange(1), "Maximum number of records per task (default: all).")
@option("--bench/--no-bench", None, "Measure latency.", True)
@option("--device", None, "Device of comparison and latency table: cpu, cuda or cuda:N.", "cpu")
@throughline_command
def command(
    path: str, target: str, out: str, overwrite: bool, tasks: str | None, limit: int | None, **given: Any
) -> None:
    """Write a run, checkpoint or model directory in a form that other programs run.

    Every output is compared with the torch model over a sweep of shapes, and with --text on real text; above
    the bound nothing is written (exit 3).

    \b
    Example:  throughline export runs/my-gpt --to onnx --out my/gpt-onnx
              throughline export runs/my-bert --to onnx --variant onnxruntime --precision int8 \\
                  --text my.txt --out my/bert-int8
    """
    from ..inference.exports.export import Judging, export_onnx

    plan = target == "triton" and given["variant"] == "tensorrt"
    _check_used("triton --for tensorrt" if plan else target)
    text, calibration, bench, device = map(given.pop, ("text", "calibration", "bench", "device"))
    if device != "cpu" and target in ON_CPU:
        where, fix = f"--device {device}", "--device cpu"
        raise WrongUse(f"--to {target} runs on the CPU", where=where, why=ON_CPU[target], fix=fix)
    if target == "calibration":
        from ..inference.graphs.real_text import write_calibration

        if text is None:
            raise WrongUse("a calibration needs text", where="--text", fix="give a plain text file")
        facts = write_calibration(path, out, text, overwrite)
        said = f"{facts['layers']} layers on {facts['tokens']:,} tokens"
        console.result(facts | {"path": str(out)}, [said, out])
        return
    score = None
    if limit is not None and tasks is None:
        raise WrongUse("--limit is for the records of tasks", where="--limit", fix="give --tasks too")
    if tasks is not None:
        from ..eval.opening import task_scorer

        score = task_scorer(tasks, limit)
    judging = Judging(text, calibration, score, bench, device=device)
    how: dict[str, Any] = {"judging": judging, "overwrite": overwrite}
    capability, precision = given.pop("capability"), given.pop("precision")
    engine = {name: given.pop(name) for name in ("batches", "lengths", "timing_cache")}
    writes = PRECISIONS.get(target, get_args(Precision))
    if precision not in (None, *writes):
        what = f"--to {target} does not write {precision}"
        raise WrongUse(what, where="--precision", fix=f"one of {', '.join(writes)}")
    given["precision"] = precision or ("fp16" if plan or target.startswith("tensorrt") else "fp32")
    given["opset"] = given["opset"] or 0
    given["variant"] = "onnxruntime" if given["variant"] == "cpu" else given["variant"]
    report: dict[str, Any]
    if target == "gguf":
        from ..inference.exports.gguf_export import export_gguf

        named: dict[str, Any] = {"fp32": "f32", "fp16": "f16", "int8": "q8_0", "int4": "q4_0"}
        report = export_gguf(path, out, named[given["precision"]], **how)
    elif target == "huggingface":
        from ..inference.exports.handover import export_huggingface

        report = export_huggingface(path, out, given["pooling"], precision or "", **how)
    elif target == "triton":
        from ..inference.exports.handover import export_triton

        options = GraphOptions(**given | {"names": "optimum"})  # no input whose length is not the text's
        report = export_triton(path, out, options, **how, **(engine if plan else {}))
    elif target == "onnx":
        report = export_onnx(path, out, GraphOptions(**given), **how)
    else:
        from ..inference.exports.export_engine import export_engine

        options, library = GraphOptions(**given | {"variant": "tensorrt"}), target.replace("-", "_")
        report = export_engine(path, out, library, options, **how, capability=capability, **engine)
    lines = [*_lines(report), f"written: {out}"]
    # another program's (optimum's graphs of a GPT too), and for a GPU that may not be here
    if target not in ("triton", "tensorrt-rtx") and not Path(out, "genai_config.json").exists():
        lines.append(f"try it:  throughline serve {shlex.quote(out)}")
    console.result({"path": str(out), "to": target, **report}, lines)


def _check_used(target: str) -> None:
    """Refuse an option that was given and that this target has no use for."""
    for each in click.get_current_context().command.params:
        users = [one for one, names in USED.items() if each.name in names.split()]
        if users and target not in users and is_given(str(each.name)):
            fix = f"leave it out; it is for --to {', '.join(users)}"
            raise WrongUse(f"--to {target} does not use {each.opts[0]}", where=each.opts[0], fix=fix)


def _lines(report: dict[str, Any]) -> list[str]:
    from .bench import latency_lines

    if not report:  # nothing here could run it
        return []
    header = ["output", "max error", "mean error", "largest value", "top-1 agreement"]
    shown = ("max_abs", "mean_abs", "scale", "top1_agreement")
    rows = [[name, *map(line.get, shown)] for name, line in report["outputs"].items()]
    lines = [*console.table(header, rows), f"bound: {report['bound']:g} of {report['bound_of']}"]
    if layers := report.get("layers"):
        worst = max(layers, key=lambda row: row["max_abs"] / max(row["scale"], 1.0))
        said = "largest error of a layer: {max_abs:.2g} of {scale:.2g}, in layer {layer}"
        lines.append(said.format(**worst))
    lines += [said.format(**report[part]) for part, said in SAID.items() if part in report]
    for name, change in report.get("scores", {}).get("difference", {}).items():
        lines.append(f"{name}: {change:+.4f}")
    for name, counts in report.get("fused", {}).items():
        lines.append(f"fused by ONNX Runtime: {counts['found']} x {name}")
    return [*lines, "", *console.table(*latency_lines(report["latency"])), ""] if report["latency"] else lines
