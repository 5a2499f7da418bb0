"""`throughline serve PATH...`: models behind an OpenAI-compatible HTTP endpoint."""

import click

from .common import throughline_command


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="[NAME=]PATH...")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 = every interface."
)
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 = any free port."
)
@click.option(
    "--slots",
    default=8,
    show_default=True,
    type=click.IntRange(1, 256),
    help="Sequences a GPT decodes together.",
)
@click.option(
    "--queue",
    default=256,
    show_default=True,
    type=click.IntRange(1),
    help="Waiting texts per model; then 429.",
)
@click.option(
    "--threads", type=click.IntRange(1), help="CPU threads of ONNX Runtime per model. Default: one per core."
)
@throughline_command
def command(
    paths: tuple[str, ...], host: str, port: int, slots: int, queue: int, threads: int | None
) -> None:
    """Serve runs, checkpoints, model directories or ONNX artifacts, several by name.

    GPT: /v1/completions (streaming). BERT: /v1/embeddings and /v1/fill-mask. Also /v1/models, /health, /ready,
    /openapi.json, and a page to try them at /. SIGTERM answers what was accepted and ends.

    \b
    Example:  throughline serve gpt=my/gpt-onnx bert=my/bert-onnx
    Then:     curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
                -d '{"model": "gpt", "prompt": "To be", "max_tokens": 40}'
    """
    from ..inference.served import Limits, load_served
    from ..inference.server import bind, run

    listener = bind(host, port)  # before the models: a taken port is known at once
    limits = Limits(slots=slots, queue=queue)
    run(load_served(paths, limits, threads), limits, listener)
