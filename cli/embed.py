"""`throughline embed PATH FILE`: embeddings of texts with a BERT."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..core import console
from ..core.errors import Failed, WrongUse
from ..core.files import full_disk, json_lines, write_atomic
from .common import backend_options, flag, option, read_stdin, throughline_command

if TYPE_CHECKING:
    from ..core.backend import BackendOptions

FORMS = (".jsonl", ".npy", ".parquet")  # of --out
RECORDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")  # files of records, each with a text


@click.command()
@click.argument("path", type=click.Path())
@click.argument("file", type=click.Path())
@option(
    "--out",
    click.Path(),
    "File to write: .jsonl, .npy (the vectors alone) or .parquet (default: JSON lines on standard output).",
)
@flag(
    "--truncate",
    "Embed the beginning of texts that are longer than the model's context (default: refuse them).",
)
@flag("--chunk", "Cut longer texts of a file of records into overlapping rows.")
@option(
    "--prompt", None, "Text before every text, or the name of one of the model's (default: the model's own)."
)
@option("--field", None, "Field or column of a file of records that holds the text.", "text")
@backend_options
@throughline_command
def command(
    path: str,
    file: str,
    out: str | None,
    truncate: bool,
    chunk: bool,
    prompt: str | None,
    field: str,
    options: "BackendOptions",
) -> None:
    """Embed every line of FILE (- = standard input) with the BERT at PATH, which is a run, checkpoint, model
    directory, ONNX artifact, engine or .gguf file. The result is one JSON object per line, {"text", "embedding"}.

    Of a file of records (.jsonl, .json, .csv, .tsv, .parquet) the --field of each is embedded and the other fields are
    kept; the same command continues a run that was stopped. The embedding is what the directory's modules.json says,
    without one the mean over the tokens, scaled to length 1: the dot product of two is their cosine. A record that
    cannot be embedded gets an "error", and the exit code is 1.

    \b
    Example:  throughline embed runs/my-bert my/sentences.txt --out my/embeddings.jsonl
    """
    from ..data.ingest.inputs import check_no_markup
    from ..inference.serving.texts import embed_texts

    if file != "-" and not Path(file).is_file():
        fix = "give a text file with one text per line, or - for standard input"
        raise WrongUse("no such file", where=file, fix=fix)
    form = Path(out).suffix if out else ".jsonl"
    if form not in FORMS:
        raise WrongUse(
            "embeddings are not written in this form", where=out, fix=f"name it {', '.join(FORMS)}"
        )
    check_no_markup(file)
    how: Any = {"truncate": truncate, "prompt": prompt}
    if (suffix := Path(file).suffix) in RECORDS:
        if out is None:
            raise WrongUse(f"a {suffix} file is answered in a file", where=file, fix="give --out FILE")
        from ..inference.serving.offline import embed_file

        lines = Path(out if form == ".jsonl" else f"{out}.jsonl")
        facts = embed_file(path, Path(file), lines, options, **how, chunk=chunk, field=field)
        check_answered(facts, lines)
        if form != ".jsonl":
            _write(Path(out), [row for _, row in json_lines(lines)])
            lines.unlink()
        said = "{lines} lines embedded ({resumed} by an earlier run)".format(**facts)
        console.result({"path": out, **facts}, [f"{said}: {out}"])
        return
    text = read_stdin() if file == "-" else Path(file).read_bytes().decode("utf-8-sig", "replace")
    # not splitlines(), which cuts at form feeds and at Unicode's line separators too
    texts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not texts:
        raise WrongUse("there is no text to embed", where=file, fix="give a file with one text per line")
    rows = [
        {"text": line, "embedding": vector.tolist()}
        for line, vector in zip(texts, embed_texts(path, texts, options, **how))
    ]
    if out is not None:
        _write(Path(out), rows)
        console.result({"path": out, "texts": len(texts)}, [f"{len(texts)} embeddings written: {out}"])
    else:
        console.result({"embeddings": rows}, [json.dumps(row, ensure_ascii=False) for row in rows])


def check_answered(facts: dict[str, Any], out: Path) -> None:
    """Raise Failed where lines of a file were refused: their errors are in the answers."""
    if facts["errors"]:
        what = f"{facts['errors']:,} of {facts['lines']:,} lines were refused"
        fix = 'look for "error" in that file; of texts that are too long --truncate embeds the beginning'
        raise Failed(what, where=out, why=facts["first_error"], fix=fix)


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    """Texts with their vectors, in the form that the file's name asks for."""
    import io

    import numpy as np

    data = io.BytesIO()
    if out.suffix == ".npy":
        np.save(data, np.array([row["embedding"] for row in rows], np.float32))
    elif out.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet

        table = pa.Table.from_pylist(rows)
        vectors = table["embedding"].cast(pa.list_(pa.float32()))
        place = table.schema.get_field_index("embedding")
        pa.parquet.write_table(table.set_column(place, "embedding", vectors), data)
    else:
        data.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    with full_disk(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, data.getvalue())
