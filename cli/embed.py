"""`throughline embed PATH FILE`: embeddings of texts with a BERT."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core import console
from ..core.errors import WrongUse
from ..core.files import full_disk, write_atomic
from .common import backend_options, read_stdin, throughline_command

if TYPE_CHECKING:
    from ..core.backend import BackendOptions


@click.command()
@click.argument("path", type=click.Path())
@click.argument("file", type=click.Path())
@click.option("--out", type=click.Path(), help="File to write (default: standard output).")
@click.option(
    "--truncate",
    is_flag=True,
    help="Embed the beginning of texts that are longer than the model's context (default: refuse them).",
)
@backend_options
@throughline_command
def command(path: str, file: str, out: str | None, truncate: bool, options: "BackendOptions") -> None:
    """Embed every line of FILE (- = standard input) with the BERT at PATH, which is a run, checkpoint, model
    directory, ONNX artifact, engine or .gguf file. The result is one JSON object per line, {"text", "embedding"}.

    In a .jsonl file the "text" of every line is embedded and the other fields are kept; the same command
    continues a run that was stopped. The embedding is the mean over the tokens, scaled to length 1: the dot
    product of two is their cosine.

    \b
    Example:  throughline embed runs/my-bert my/sentences.txt --out my/embeddings.jsonl
    """
    from ..inference.serving.texts import embed_texts

    if file != "-" and not Path(file).is_file():
        fix = "give a text file with one text per line, or - for standard input"
        raise WrongUse("no such file", where=file, fix=fix)
    if file.endswith(".jsonl"):
        if out is None:
            raise WrongUse("a .jsonl file is answered in a file", where=file, fix="give --out FILE")
        from ..inference.serving.offline import embed_file

        facts = embed_file(path, Path(file), Path(out), options, truncate=truncate)
        said = "{lines} lines embedded ({resumed} by an earlier run, {errors} refused)".format(**facts)
        console.result({"path": out, **facts}, [f"{said}: {out}"])
        return
    text = read_stdin() if file == "-" else Path(file).read_bytes().decode("utf-8-sig", "replace")
    # not splitlines(), which cuts at form feeds and at Unicode's line separators too
    texts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not texts:
        raise WrongUse("there is no text to embed", where=file, fix="give a file with one text per line")
    rows = [
        {"text": line, "embedding": vector.tolist()}
        for line, vector in zip(texts, embed_texts(path, texts, options, truncate=truncate))
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    if out is not None:
        with full_disk(out):
            Path(out).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, "\n".join(lines) + "\n")
        console.result({"path": out, "texts": len(texts)}, [f"{len(texts)} embeddings written: {out}"])
    else:
        console.result({"embeddings": rows}, lines)
