"""`throughline bench latency PATH`, `bench serve URL`, `doctor`: how fast your artifact, server and machine are."""

import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, replace
from importlib import metadata
from pathlib import Path
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import click

from ..core import console, hardware
from ..core.artifact import installed, version
from ..core.files import write_atomic
from ..core.page import Bar, Chart, Part, made_here, page
from .common import FILE, PATH, backend_options, flag, option, throughline_command

if TYPE_CHECKING:
    from ..core.backend import BackendOptions
    from ..train.parallel.rates import Rates

MADE = (16, 256)  # words of a made prompt, and tokens of its answer
WORTH = 1.1  # times the speed from which another file to keep and a longer start pay
DEVELOPERS = ("test", "docs", "bench")  # extras that no user needs


def span(text: str) -> tuple[int, int]:
    """`16-256` or `16` as the least and the most, as a type of an option."""
    low, _, high = text.strip().partition("-")
    if not (low.isdigit() and (high or low).isdigit() and 0 < int(low) <= int(high or low)):
        raise click.BadParameter(f"{text!r} is not a number or a range; write 16-256")
    return int(low), int(high or low)


def numbers(text: str) -> list[int]:
    """`1,8,32`, as a type of an option."""
    return [span(part)[0] for part in text.split(",")]


@click.group()
def command() -> None:
    """Measure your own artifact or server.

    \b
    Example:  throughline bench latency my/bert-onnx
    Or:       throughline bench serve http://127.0.0.1:8000
    """


@command.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path())
@option("--seconds", None, "Seconds of measurement for each line of the table.", 1.0)
@flag("--every-backend", "Measure every backend that runs the model here (default: that of --backend).")
@option("--plot", PATH, "HTML file for medians and table (default: none).")
@backend_options
@throughline_command
def latency(
    paths: tuple[str, ...], seconds: float, every_backend: bool, plot: Path | None, options: "BackendOptions"
) -> None:
    """Median and tail latency per batch and length, of one or more models or .gguf files, beside each other.

    On a GPU the least time that its memory and arithmetic allow stands beside it, and of a BERT-Base or -Large
    what NVIDIA reported for TensorRT on a T4. Below the table each is compared with the first.

    \b
    Example:  throughline bench latency runs/my-gpt my/gpt-onnx
    """
    from ..inference.runtimes.backends import open_backend, runtimes_of
    from ..inference.runtimes.bench import latency_table

    rows = []
    for path in paths:
        names = runtimes_of(Path(path), options) if every_backend else [options.runtime]
        for name in names:
            loaded = open_backend(path, replace(options, runtime=name))
            rows += [{"model": path} | row for row in latency_table(loaded, seconds)]
    if plot is not None:
        write_atomic(plot, latency_page(rows))
    said = verdicts(rows)
    console.result({"latency": rows, "verdicts": said}, [*console.table(*latency_lines(rows)), *said])


def latency_page(rows: list[dict[str, Any]]) -> str:
    """The medians as bars, and the whole table, as an HTML page."""
    longest = max(row["p50_ms"] for row in rows)
    header, cells = latency_lines(rows)
    bars = []
    for row in rows:
        model = f"{row['model']}: " if "model" in header else ""
        name = f"{model}{row['backend']} {row['what']} {row['batch']} x {row['tokens']}"
        bars.append(Bar(name, row["p50_ms"] / longest, text=f"{row['p50_ms']:.2f} ms"))
    parts = [Part("Medians", bars=bars), Part("All figures", header=header, rows=cells)]
    return page("Latency", parts, made_here())


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each further model or backend: its speed beside the first one's, by the geometric mean of medians."""
    timed: dict[tuple[str, str], dict[tuple[Any, ...], float]] = {}
    for row in rows:
        case = (row["what"], row["batch"], row["tokens"])
        timed.setdefault((row.get("model", ""), row["backend"]), {})[case] = row["p50_ms"]
    (first, before), *others = timed.items()
    lines = []
    for one, now in others:
        if both := [case for case in before if case in now]:
            speed = geometric_mean(before[case] / now[case] for case in both)
            name = one[1] if one[1] != first[1] else one[0]
            verdict = "" if speed >= WORTH else ": not worth it here"
            lines.append(f"{name} has {speed:.2f} times the speed of {first[1]}{verdict}")
    return lines


def latency_lines(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Header and cells of the table for people."""
    titles = {key: key for key in ("backend", "what", "batch", "tokens")}
    titles |= {f"p{share}_ms": f"p{share} ms" for share in (50, 95, 99)} | {"tokens_per_s": "tokens/s"}
    for key, title in (("floor_ms", "floor ms"), ("t4_tensorrt_fp16_ms", "T4 TensorRT ms")):
        if any(row.get(key) for row in rows):
            titles[key] = title
    if len({row.get("model") for row in rows}) > 1:
        titles = {"model": "model"} | titles
    return list(titles.values()), [[row.get(key) for key in titles] for row in rows]


@command.command()
@click.argument("url")
@option("--model", None, "Name of the model (default: the first that the server lists).")
@option(
    "--endpoint",
    click.Choice(["completions", "embeddings"]),
    "Endpoint that is asked; completions are streamed.",
    "completions",
)
@option("--clients", numbers, "Numbers of clients that ask at once, with one run for each.", "1,8,32")
@option("--requests count", click.IntRange(1), "Number of requests per run.", 200)
@option(
    "--input file",
    FILE,
    "File with one request body a line, sent in order and repeated (default: made from the seed).",
)
@option(
    "--prompt-words",
    span,
    "Range of the number of words in a made prompt (default: 16-256, at most a quarter of the model's context).",
)
@option(
    "--max-tokens",
    span,
    "Range of the number of tokens to generate (default: 16-256, at most a quarter of the model's context).",
)
@option("--seed", None, "Seed of the made requests.", 0)
@option("--api-key-variable", None, "Environment variable that holds the API key.", "OPENAI_API_KEY")
@option("--plot", PATH, "HTML file for the curves over clients (default: none).")
@throughline_command
def serve(url: str, model: str | None, endpoint: str, clients: list[int], count: int, **asked: Any) -> None:
    """Ask a server from many clients at once: time to the first token, time between tokens, throughput.

    Works against any server that speaks OpenAI's completions or embeddings. A percentile is over all requests
    of a run; the first run of a fresh server warms it up.

    \b
    Example:  throughline bench serve http://127.0.0.1:8000 --clients 1,8,32 --plot load.html
    """
    from ..inference.serving import load as loads

    read = loads.read_asks(asked["file"]) if asked["file"] else None
    target = loads.Target(url, endpoint, model, os.environ.get(asked["api_key_variable"]))
    # Words are one to three tokens, and the answer takes its part.
    most = max(target.context // 4, 1) if target.context else MADE[1]
    room = (min(MADE[0], most), min(MADE[1], most))
    sizes = asked["prompt_words"] or room, asked["max_tokens"] or room
    asks = read or loads.seeded(endpoint, count, asked["seed"], *sizes)
    asks = (asks * (count // len(asks) + 1))[:count]
    rows = []
    for number in clients:
        with console.progress(f"{number} clients", total=len(asks), unit="requests") as bar:
            seen, took_s = loads.load(target, asks, number, lambda: bar.advance(1))
        rows.append(loads.summary(seen, took_s, number))
        if rows[-1]["first_error"]:
            failed = f"{sum(rows[-1]['not'].values())} of {len(asks)} requests failed"
            console.warn(f"{number} clients: {failed}, the first with: {rows[-1]['first_error']}")
    if (plot := asked["plot"]) is not None:
        write_atomic(plot, plotted(rows, f"{target.model} at {url}"))
    console.result({"load": rows, "model": target.model}, console.table(*load_lines(rows)))


def load_lines(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Header and cells of the table for people."""
    titles = {"clients": "clients", "answered": "answered", "refused": "failed"}
    titles |= {"requests_per_s": "requests/s", "tokens_per_s": "tokens/s", "generated_per_s": "made/s"}
    for key, title in (("first", "first"), ("gap", "between"), ("total", "whole")):
        titles |= {f"{key}_p{share}_ms": f"{title} p{share} ms" for share in (50, 99)}
    cells = []
    for row in rows:
        refused = ", ".join(f"{count} x {status}" for status, count in row["not"].items()) or "0"
        cells.append([(row | {"refused": refused})[key] for key in titles])
    return list(titles.values()), cells


def plotted(rows: Sequence[dict[str, Any]], title: str) -> str:
    """The table and the curves over the number of clients as one HTML page."""

    def curve(name: str, key: str) -> tuple[str, list[tuple[float, float]]]:
        return name, [(row["clients"], row[key]) for row in rows if row[key] is not None]

    drawn = {
        "tokens per second": [curve("read and made", "tokens_per_s"), curve("made", "generated_per_s")],
        "ms to the first token": [curve("p50", "first_p50_ms"), curve("p99", "first_p99_ms")],
        "ms between tokens": [curve("p50", "gap_p50_ms"), curve("p99", "gap_p99_ms")],
        "ms of an answer": [curve("p50", "total_p50_ms"), curve("p99", "total_p99_ms")],
    }
    charts = [Chart(name, curves, "clients") for name, curves in drawn.items()]
    header, cells = load_lines(rows)
    return page(title, [Part(charts=charts), Part("All figures", header=header, rows=cells)], made_here())


@click.command()
@throughline_command
def doctor() -> None:
    """Print versions, hardware, free disk, which optional packages are installed, and measured rates.

    \b
    Example:  throughline doctor
              throughline launch --nproc 8 -- doctor
    Under launch every process multiplies, copies and adds up with the others, and the slowest is named.
    """
    rates, slow = _rates()
    if int(os.environ.get("RANK", 0)) > 0:
        return  # the first process says it
    from ..train.parallel.launch import numa_nodes

    machine = hardware.machine()
    wanted = _wanted()
    packages = {name: installed(name) for name in wanted}
    compiler = shutil.which("g++") or shutil.which("clang++")
    gpus = []
    for gpu in machine.gpus:
        memory = console.amount(gpu.memory_bytes, "B")
        gpus.append(f"GPU {gpu.index} {gpu.name}, capability {gpu.capability}, {memory}, driver {gpu.driver}")
    network = {key: value for key, value in sorted(os.environ.items()) if key.startswith(("NCCL_", "GLOO_"))}
    shown = " ".join(f"{name}={value}" for name, value in network.items())
    nodes = [sorted(cores) for cores in numa_nodes()]
    bound = ": launch binds its processes to them" if len(nodes) > 1 else ""
    lines = [
        f"throughline {version()}, Python {platform.python_version()}, {platform.platform()}",
        f"CPU   {machine.cpu.name}, {machine.cpu.cores} cores, {console.amount(machine.cpu.memory_bytes, 'B')}, "
        f"native {' '.join(machine.cpu.dtypes)}",
        *(gpus or ["GPU   none (training, export and serving run on the CPU)"]),
        f"NUMA  memory nodes: {len(nodes) or 'unknown'}{bound}",
        f"net   {shown or 'no NCCL_ or GLOO_ variable is set'}",
        f"disk  {console.amount(shutil.disk_usage('.').free, 'B')} free here",
        f"C++   {compiler or 'no compiler: torch.compile is off, steps run eagerly'}",
    ]
    for name, extra in wanted.items():
        missing = f"not installed (optional: pip install '.[{extra}]' in the clone)" if extra else "MISSING"
        lines.append(f"  {name:<28}{packages[name] or missing}")
    if rates:
        header = ("process", "product GFLOP/s", "copy GB/s", "all-reduce GB/s")
        reached = [astuple(each) for each in rates]
        rows = [(rank, *(rate and rate / 1e9 for rate in found)) for rank, *found in reached]
        lines += ["", *console.table(header, rows), *([slow] if slow else [])]
    facts: dict[str, Any] = {"version": version(), "machine": asdict(machine), "packages": packages}
    facts |= {"compiler": compiler, "numa_nodes": nodes, "network": network}
    console.result(facts | {"rates": [asdict(each) for each in rates], "slowest": slow}, lines)


def _rates() -> "tuple[list[Rates], str]":
    """The rates of every process, and the slowest in words; none without torch."""
    if importlib.util.find_spec("torch") is None:
        return [], ""
    import torch

    from ..planner.layout import Layout
    from ..train.parallel.mesh import own_device, running_processes
    from ..train.parallel.ranks import Ranks
    from ..train.parallel.rates import measure, slowest

    device = own_device(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    with Ranks.start(Layout(data=running_processes()[1]), device) as ranks:
        rates = measure(device, ranks.mesh.world)
    return rates, slowest(rates)


def _wanted() -> dict[str, str]:
    """Package -> the extra that installs it ("" where it must be there), as the installed program states them."""
    with suppress(metadata.PackageNotFoundError):  # a checkout that was never installed states none
        texts = metadata.requires("throughline") or []
        found = {re.split(r"[^\w-]", text)[0]: text.partition("extra ==")[2].strip(" '\"") for text in texts}
        return {name: extra for name, extra in found.items() if extra not in DEVELOPERS}
    return {}
