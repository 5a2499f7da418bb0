"""`throughline bench latency PATH` and `bench serve URL`: how fast your own artifact and server answer."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core import console
from ..core.errors import WrongUse
from ..core.files import write_atomic
from .common import PATH, backend_options, flag, option, throughline_command

if TYPE_CHECKING:
    from ..core.backend import BackendOptions

MADE = (16, 256)  # words of a made prompt, and tokens of its answer


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
@flag(
    "--every-backend",
    "Measure every backend that runs the model here (default: the one that --backend names).",
)
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
    from ..inference.runtimes.bench import latency_lines, latency_page, latency_table, verdicts

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


@command.command()
@click.argument("url")
@option("--model", None, "Name of the model (default: the first that the server lists).")
@option(
    "--endpoint",
    click.Choice(["completions", "embeddings"]),
    "Endpoint that is asked; completions are streamed.",
    "completions",
)
@option("--clients", None, "Numbers of clients that ask at once, with one run for each.", "1,8,32")
@option("--requests count", click.IntRange(1), "Number of requests per run.", 200)
@option(
    "--input file",
    click.Path(exists=True, dir_okay=False, path_type=Path),
    "File with one request body a line, sent in order and repeated (default: made from the seed).",
)
@option(
    "--prompt-words",
    None,
    "Range of the number of words in a made prompt (default: 16-256, at most a quarter of the model's context).",
)
@option(
    "--max-tokens",
    None,
    "Range of the number of tokens to generate (default: 16-256, at most a quarter of the model's context).",
)
@option("--seed", None, "Seed of the made requests.", 0)
@option("--api-key-variable", None, "Environment variable that holds the API key.", "OPENAI_API_KEY")
@option("--plot", PATH, "HTML file for the curves over clients (default: none).")
@throughline_command
def serve(
    url: str,
    model: str | None,
    endpoint: str,
    clients: str,
    count: int,
    file: Path | None,
    prompt_words: str | None,
    max_tokens: str | None,
    seed: int,
    api_key_variable: str,
    plot: Path | None,
) -> None:
    """Ask a server from many clients at once: time to the first token, time between tokens, throughput.

    Works against any server that speaks OpenAI's completions or embeddings. A percentile is over all requests
    of a run; the first run of a fresh server warms it up.

    \b
    Example:  throughline bench serve http://127.0.0.1:8000 --clients 1,8,32 --plot load.html
    """
    from ..inference.serving import load as loads

    numbers = [_range(part, "--clients")[0] for part in clients.split(",")]
    words = None if prompt_words is None else _range(prompt_words, "--prompt-words")
    tokens = None if max_tokens is None else _range(max_tokens, "--max-tokens")
    read = loads.read_asks(file) if file else None
    target = loads.Target(url, endpoint, model, os.environ.get(api_key_variable))
    room = loads.fitting(MADE, target.context)
    asks = read or loads.seeded(endpoint, count, seed, words or room, tokens or room)
    asks = (asks * (count // len(asks) + 1))[:count]
    rows = []
    for number in numbers:
        with console.progress(f"{number} clients", total=len(asks), unit="requests") as bar:
            seen, took_s = loads.load(target, asks, number, lambda: bar.advance(1))
        rows.append(loads.summary(seen, took_s, number))
        if rows[-1]["first_error"]:
            failed = f"{sum(rows[-1]['not'].values())} of {len(asks)} requests failed"
            console.warn(f"{number} clients: {failed}, the first with: {rows[-1]['first_error']}")
    if plot is not None:
        write_atomic(plot, loads.plotted(rows, f"{target.model} at {url}"))
    console.result({"load": rows, "model": target.model}, console.table(*loads.load_lines(rows)))


def _range(text: str, where: str) -> tuple[int, int]:
    """`16-256` or `16` as the least and the most. Raises WrongUse."""
    low, _, high = text.strip().partition("-")
    if not (low.isdigit() and (high or low).isdigit() and 0 < int(low) <= int(high or low)):
        raise WrongUse("not a number or a range", where=where, why=f"it is {text!r}", fix="write 16-256")
    return int(low), int(high or low)
