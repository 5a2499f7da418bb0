"""`throughline generate PATH`: continue a text with a GPT."""

import click

from ..core import console
from ..core.errors import WrongUse
from .common import read_stdin, throughline_command


@click.command()
@click.argument("path", type=click.Path())
@click.option("--prompt", help="Text to continue. Default: standard input.")
@click.option("--max-tokens", default=100, show_default=True, type=click.IntRange(1))
@click.option("--temperature", default=0.8, show_default=True, help="0 = always the most probable token.")
@click.option("--top-k", default=0, show_default=True, help="Keep the k most probable tokens; 0 = all.")
@click.option(
    "--top-p", default=1.0, show_default=True, help="Keep the most probable tokens up to this share."
)
@click.option(
    "--min-p", default=0.0, show_default=True, help="Keep tokens at least this share as probable as the best."
)
@click.option(
    "--repetition-penalty",
    default=1.0,
    show_default=True,
    help="Above 1: tokens seen before become less likely.",
)
@click.option("--seed", type=click.IntRange(0), help="The same seed gives the same text.")
@click.option("--stop", multiple=True, help="End before this text. Repeatable.")
@click.option(
    "--samples", default=1, show_default=True, type=click.IntRange(1, 256), help="Continuations to make."
)
@throughline_command
def command(
    path: str, prompt: str | None, max_tokens: int, temperature: float, top_k: int, top_p: float, min_p: float,
    repetition_penalty: float, seed: int | None, stop: tuple[str, ...], samples: int,
) -> None:  # fmt: skip
    """Continue a text with a run, checkpoint, model directory or ONNX artifact of a GPT, printed as it is made.

    \b
    Example:  throughline generate runs/my-gpt --prompt "ROMEO:" --max-tokens 200 --seed 1
    """
    from ..inference.sampling import Sampling
    from ..inference.texts import continue_text

    prompt = (
        read_stdin()
        if prompt is None
        else prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    )
    seeds = [None if seed is None else seed + number for number in range(samples)]
    settings = [Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed) for seed in seeds]
    if not all(stop):
        raise WrongUse("a stop text is empty", where="--stop", fix="give at least one character")
    answers = [""] * samples
    live = samples == 1
    shown = prompt  # with the first piece: an error has its line to itself
    for number, piece in continue_text(path, prompt, settings, max_tokens, stop):
        answers[number] += piece.text
        if live:
            console.stream(shown + piece.text)
            shown = ""
    lines = [""] if live else [f"--- {number + 1}\n{prompt}{answer}" for number, answer in enumerate(answers)]
    console.result({"prompt": prompt, "answers": answers}, lines)
