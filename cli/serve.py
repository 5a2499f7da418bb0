"""`throughline serve PATH...`: models behind an OpenAI-compatible HTTP endpoint."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click import FloatRange, IntRange

from ..core.console import LEVELS, configure_log
from ..core.errors import WrongUse
from .common import FILE, PATH, backend_options, cache_options, flag, option, throughline_command

if TYPE_CHECKING:
    from ..inference.serving.keys import Key

KEYS_VARIABLE = "THROUGHLINE_API_KEYS"
DRAFTED = 4  # tokens that a draft model guesses at a time

# Name, field of ServerLimits, default, range and help of what a server holds at once, and how long.
LIMITS: tuple[tuple[str, str, float | None, Any, str], ...] = (
    ("--slots", "slots", 8, IntRange(1, 256), "Maximum number of sequences that a GPT decodes together."),
    ("--speculate", "speculate", 0, IntRange(0, 64), "Maximum number of tokens of an answer that are guessed by what "
     "the text so far had before and checked in one step; pays where answers repeat their prompts."),
    ("--draft", "draft", None, PATH, "Smaller GPT of the same vocabulary that guesses instead, 4 tokens at a time "
     "unless --speculate says how many (default: the text so far guesses)."),
    ("--queue", "queue", 256, IntRange(1), "Maximum number of answers that wait per model, for an encoder times 4,096 "
     "tokens; beyond it a request gets 429 with Retry-After."),
    ("--max-tokens", "max_tokens", None, IntRange(1), "Maximum number of new tokens per answer (default: what fits the "
     "context)."),
    ("--max-n", "max_n", 128, IntRange(1), "Maximum number of answers to one prompt."),
    ("--max-body", "body_bytes", 4_000_000, IntRange(1000), "Maximum size of a request in bytes."),
    ("--max-bodies", "bodies_bytes", 64_000_000, IntRange(1000), "Maximum size of all requests that are held at once, "
     "in bytes; beyond it a request gets 503."),
    ("--request-timeout", "request_s", 600.0, FloatRange(1), "Seconds after which an answer that is not complete is "
     "given up."),
    ("--load-timeout", "load_s", 1800.0, FloatRange(1), "Seconds after which a model that is not open, or a single "
     "step of one, is given up."),
    ("--hang-timeout", "hang_s", 60.0, FloatRange(2), "Seconds without a heartbeat after which the process of a model "
     "is replaced. A long step is no silence: it may take as long as --load-timeout."),
    ("--drain-wait", "drain_s", 5.0, FloatRange(0), "Seconds between SIGTERM, when /ready turns 503, and the closing "
     "of the port."),
)  # fmt: skip


def _limits(function: Callable[..., Any]) -> Callable[..., Any]:
    for name, of, default, kind, text in reversed(LIMITS):
        function = option(f"{name} {of}", kind, text, default)(function)
    return function


@click.command()
@click.argument("paths", nargs=-1, metavar="[NAME=]PATH[@DEVICE,...]...")
@option("--host", None, "Address to listen on; 0.0.0.0 is every interface.", "127.0.0.1")
@option("--port", click.IntRange(0, 65535), "Port to listen on; 0 is any free port.", 8000)
@flag(
    "--watch",
    "Serve what a PATH holds whenever that changes: a run's newest checkpoint, another target of a link, another "
    "content of a directory or file; no request is lost.",
)
@option("--follow", None, "", is_flag=True, hidden=True)
@option(
    "--models-dir",
    click.Path(exists=True, file_okay=False, path_type=Path),
    "Directory whose models POST /models/load and /models/unload may open, replace and end, as those of PATH; "
    "needs API keys, one of them with scopes=admin, on other addresses than loopback (default: models stay as given).",
)
@_limits
@option(
    "--generation-config",
    click.Choice(["auto", "none"]),
    "Where the sampling defaults of requests come from: auto = generation_config.json of the model, none = OpenAI's.",
    "auto",
)
@option(
    "--api-key-file",
    PATH,
    "File with one API key a line, and behind it name=, scopes= (inference, metrics, admin; default: inference), "
    "priority= (-10 to 10), places= (answers at once) and per_minute= (inference requests); read again when it changes "
    f"and on SIGHUP. {KEYS_VARIABLE} takes keys too, with commas between (default: no key).",
)
@flag("--open-metrics", "Answer /metrics without a key.")
@flag(
    "--share-prefixes",
    "Let prompts of different keys begin with each other's kept beginnings (default: each with its own).",
)
@option(
    "--allow-host hosts",
    None,
    "Further name in Host by which a server without keys on a loopback address may be called. Repeatable.",
    multiple=True,
    metavar="NAME",
)
@option(
    "--cors",
    None,
    "Origin of web pages that may call the server, * for any (default: none). Repeatable.",
    multiple=True,
    metavar="ORIGIN",
)
@option(
    "--tls-cert",
    FILE,
    "Certificate chain in PEM; serves https (default: plain http). Read again when it changes and on SIGHUP.",
)
@option("--tls-key", FILE, "Private key of the certificate in PEM; needed with --tls-cert.")
@option(
    "--access-log/--no-access-log",
    None,
    "Write a line per request to stderr: ids, tokens, times, why it was refused, never text.",
    True,
)
@option(
    "--log-format",
    click.Choice(["json", "text"]),
    "Format of stderr: JSON lines or text (default: text on a terminal, else json).",
)
@option(
    "--log-level",
    click.Choice(LEVELS),
    "Least level of the lines on stderr; a request is info, one that ends with 500 or 504 a warning.",
    "info",
)
@cache_options
@option(
    "--otlp-traces-endpoint otlp",
    None,
    "URL of an OpenTelemetry collector that gets a span per request, such as http://localhost:4318/v1/traces: times "
    "and counts, never text.",
    metavar="URL",
)
@backend_options
@throughline_command
def command(
    paths: tuple[str, ...], host: str, port: int, models_dir: Path | None, options: Any, **given: Any
) -> None:
    """Serve runs, checkpoints, Hugging Face directories, ONNX or GGUF artifacts, .gguf files or engines.

    A model's name is the last part of its path unless NAME= says another; requests pick a model by its name.
    gpt=PATH@cuda:0,cuda:1 serves it by a process on each of these devices; a request goes to the one with the
    least to do.

    GPT: /v1/completions and, with a chat template, /v1/chat/completions. BERT: /v1/embeddings, /v1/fill-mask
    and, with a classification head, /v1/classify and /v1/rerank. A decoder whose modules.json says how it embeds:
    /v1/embeddings alone. Also /v1/models, /tokenize, /detokenize, /health, /ready, /metrics, /openapi.json, and a
    page to try them at /. SIGTERM answers what was accepted and ends; SIGHUP reads keys and certificates again.

    \b
    Example:  throughline serve gpt=my/gpt-onnx bert=my/bert-onnx
    Then:     curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
                -d '{"model": "gpt", "prompt": "To be", "max_tokens": 40}'
    """
    from ..core.console import log, warn
    from ..inference.serving.accounts import ServerLimits, Telemetry, Traces
    from ..inference.serving.catalogue import Catalogue
    from ..inference.serving.keys import read_keys, replace_keys
    from ..inference.serving.listen import LOOPBACK, bind, run
    from ..inference.serving.reload import ReloadedFile
    from ..inference.serving.server import Server, build_app

    if given["follow"]:
        what, why = "no such option: --follow", "it is called --watch now, and takes any kind of model"
        raise WrongUse(what, why=why, fix="give --watch")
    if not (paths or models_dir):
        raise WrongUse("there is no model to serve", fix="give the path of one, or --models-dir")
    tls = given["tls_cert"], given["tls_key"]
    if tls.count(None) == 1:
        raise WrongUse("TLS needs a certificate and its key", where="--tls-cert, --tls-key", fix="give both")
    given["speculate"] = given["speculate"] or (DRAFTED if given["draft"] else 0)
    limits = {name: given[name] for _, name, *_ in LIMITS}
    limits["generation_config"] = given["generation_config"] == "auto"
    bounds = ServerLimits(**limits, share_prefixes=given["share_prefixes"])
    key_file = given["api_key_file"]

    def read() -> "list[Key]":
        return read_keys(key_file, os.environ.get(KEYS_VARIABLE), bounds.slots + bounds.queue)

    keys = read()
    if models_dir and not keys and host not in LOOPBACK:
        fix = "give --api-key-file, or listen on 127.0.0.1"
        raise WrongUse("models may not be loaded by everybody", where="--models-dir", fix=fix)
    if models_dir and keys and not any("admin" in key.scopes for key in keys):
        warn("no API key may load or unload models: add scopes=inference,admin to a line of --api-key-file")
    if not keys and host not in LOOPBACK:
        warn(f"whoever reaches {host}:{port} may use the models: give --api-key-file, or listen on 127.0.0.1")
    # A web page whose name its owner points at this machine would otherwise reach a server that asks for no key.
    known = (*LOOPBACK, *map(str.lower, given["hosts"])) if host in LOOPBACK and not keys else ()
    traces = Traces(given["otlp"]).note if given["otlp"] else None
    telemetry = Telemetry(log if given["access_log"] else None, traces)
    catalogue = Catalogue(paths, bounds, options, given["watch"], models_dir)
    listener = bind(host, port)  # before the models: a taken port is known at once
    configure_log(given["log_format"] or ("text" if sys.stderr.isatty() else "json"), given["log_level"])
    server = Server(catalogue, bounds, telemetry)
    app = build_app(server, keys, given["cors"], known, given["open_metrics"])
    key_files = (
        [ReloadedFile("the API keys", [key_file], lambda: replace_keys(keys, read()))] if key_file else []
    )
    run(app, server, listener, tls, key_files)
