"""`throughline generate PATH`: continue a text with a GPT."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core import console
from ..core.errors import WrongUse
from .common import PATH, backend_options, cache_options, option, read_stdin, throughline_command

if TYPE_CHECKING:
    from ..core.backend import BackendOptions


@click.command()
@click.argument("path", type=click.Path())
@click.argument("file", type=PATH, required=False)
@option("--prompt", None, "Text to continue (default: standard input).")
@option("--max-tokens", click.IntRange(1), "Maximum number of new tokens.", 100)
@option("--temperature", None, "Temperature of the draw. 0 always takes the most probable token.", 0.8)
@option("--top-k", None, "Number of most probable tokens to draw from. 0 means all.", 0)
@option("--top-p", None, "Draw from the most probable tokens that together have this probability.", 1.0)
@option("--min-p", None, "Draw from tokens at least this many times as probable as the best one.", 0.0)
@option(
    "--repetition-penalty",
    None,
    "Factor by which tokens seen before become less likely. 1 changes nothing.",
    1.0,
)
@option("--seed", click.IntRange(0), "Seed of the draw (default: a new one each time).")
@option("--stop", None, "Text before which the answer ends (default: none). Repeatable.", multiple=True)
@option("--samples", click.IntRange(1, 256), "Number of continuations.", 1)
@option("--out", PATH, "File to write the answers to; needed with FILE.")
@cache_options
@backend_options
@throughline_command
def command(
    path: str,
    file: Path | None,
    prompt: str | None,
    max_tokens: int,
    stop: tuple[str, ...],
    samples: int,
    out: Path | None,
    options: "BackendOptions",
    **draw: Any,
) -> None:
    """Continue a text with a GPT, printed as it is made. PATH is a run, checkpoint, model directory, ONNX artifact,
    engine or .gguf file.

    With FILE, a .jsonl with a "prompt" in every line, each line gets its "answers" in --out; a line's own
    max_tokens, temperature, seed and so on hold for it. The same command goes on after a stop.

    \b
    Example:  throughline generate runs/my-gpt --prompt "ROMEO:" --max-tokens 200 --seed 1
    """
    from ..inference.runtimes.sampling import Sampling
    from ..inference.serving.generation import NO_IDS, Job
    from ..inference.serving.offline import generate_file
    from ..inference.serving.texts import continue_text
    from .embed import check_answered

    if not all(stop):
        raise WrongUse("a stop text is empty", where="--stop", fix="give at least one character")
    like = Job(NO_IDS, max_tokens, Sampling(**draw), stop, n=samples)
    if file is not None:
        if out is None or prompt is not None or not file.is_file():
            fix = 'give a .jsonl file with a "prompt" in every line, --out FILE, and no --prompt'
            raise WrongUse("a file of prompts is answered in a file", where=file, fix=fix)
        facts = generate_file(path, file, out, like, options)
        check_answered(facts, out)
        said = "{lines} lines answered ({resumed} by an earlier run)".format(**facts)
        console.result({"path": str(out), **facts}, [f"{said}: {out}"])
        return
    if prompt is None:
        prompt = read_stdin()
    else:
        prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    answers = [""] * samples
    live = samples == 1
    shown = prompt  # with the first delta: an error has its line to itself
    for number, delta in continue_text(path, prompt, like, options):
        answers[number] += delta.text
        if live:
            console.stream(shown + delta.text)
            shown = ""
    lines = [""] if live else [f"--- {number + 1}\n{prompt}{answer}" for number, answer in enumerate(answers)]
    console.result({"prompt": prompt, "answers": answers}, lines)
