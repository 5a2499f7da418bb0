"""`throughline embed PATH FILE`: embeddings of texts with a BERT."""

import json
from pathlib import Path

import click

from ..core import console
from ..core.errors import WrongUse
from ..core.files import full_disk, write_atomic
from .common import read_stdin, throughline_command


@click.command()
@click.argument("path", type=click.Path())
@click.argument("file", type=click.Path())
@click.option("--out", type=click.Path(), help="Write here instead of standard output.")
@throughline_command
def command(path: str, file: str, out: str | None) -> None:
    """Embed every line of FILE (- = standard input): one JSON object per line, {"text", "embedding"}.

    The embedding is the mean over the tokens, scaled to length 1: the dot product of two is their cosine.

    \b
    Example:  throughline embed runs/my-bert my/sentences.txt --out my/embeddings.jsonl
    """
    from ..inference.texts import embed_texts

    if file != "-" and not Path(file).is_file():
        raise WrongUse(
            "no such file", where=file, fix="give a text file with one text per line, or - for standard input"
        )
    text = read_stdin() if file == "-" else Path(file).read_bytes().decode("utf-8-sig", "replace")
    # not splitlines(), which cuts at form feeds and at Unicode's line separators too
    texts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not texts:
        raise WrongUse("there is no text to embed", where=file, fix="give a file with one text per line")
    rows = [
        {"text": line, "embedding": vector.tolist()} for line, vector in zip(texts, embed_texts(path, texts))
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    if out is not None:
        with full_disk(out):
            Path(out).parent.mkdir(parents=True, exist_ok=True)
        write_atomic(out, "\n".join(lines) + "\n")
        console.result({"path": out, "texts": len(texts)}, [f"{len(texts)} embeddings written: {out}"])
    else:
        console.result({"embeddings": rows}, lines)
