"""`throughline generate|embed|search`: what a model makes of texts, one by one and file by file."""

import io
import json
from pathlib import Path
from typing import Any

import click

from ..core import console
from ..core.errors import EXIT_FAILED, Failed, WrongUse
from ..core.files import full_disk, json_lines, write_atomic
from .common import (
    PATH,
    backend_options,
    cache_options,
    check_is_file,
    flag,
    option,
    read_stdin,
    throughline_command,
)

FORMS = (".jsonl", ".npy", ".parquet")  # of `embed --out`
RECORDS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")  # files of records, each with a text


@click.command()
@click.argument("path", type=click.Path())
@click.argument("file", type=PATH, required=False)
@option("--prompt", None, "Text to continue (default: standard input).")
@option("--max-tokens", click.IntRange(1), "Maximum number of new tokens.", 100)
@option("--temperature", None, "Temperature of the draw. 0 always takes the most probable token.", 0.8)
@option("--top-k", None, "Number of most probable tokens to draw from. 0 means all.", 0)
@option("--top-p", None, "Draw from the most probable tokens that together have this probability.", 1.0)
@option("--min-p", None, "Draw from tokens at least this many times as probable as the best one.", 0.0)
@option("--repetition-penalty", None, "Factor by which seen tokens become less likely. 1 means none.", 1.0)
@option("--seed", click.IntRange(0), "Seed of the draw (default: a new one each time).")
@option("--stop", None, "Text before which the answer ends (default: none). Repeatable.", multiple=True)
@option("--samples", click.IntRange(1, 256), "Number of continuations.", 1)
@option(
    "--add-special-tokens/--no-add-special-tokens",
    None,
    "Put the tokens around the prompt that its tokenizer's file puts, such as Llama's BOS.",
    True,
)
@option(
    "--skip-special-tokens/--no-skip-special-tokens",
    None,
    "Leave special tokens out of the answer's text.",
    True,
)
@option("--out", PATH, "File to write the answers to; needed with FILE.")
@cache_options
@backend_options
@throughline_command
def generate(path: str, file: Path | None, prompt: str | None, out: Path | None, **asked: Any) -> None:
    """Continue a text with a GPT, printed as it is made. PATH is a run, checkpoint, model directory, ONNX artifact,
    engine or .gguf file.

    With FILE, a .jsonl with a "prompt" in every line, each line gets its "answers" in --out; a line's own
    max_tokens, temperature, seed and so on hold for it. The same command goes on after a stop.

    \b
    Example:  throughline generate runs/my-gpt --prompt "ROMEO:" --max-tokens 200 --seed 1
    """
    from ..inference.runtimes.sampling import Sampling
    from ..inference.serving.generation import NO_IDS, Job
    from ..inference.serving.offline import continue_text, generate_file

    most, stop, samples, options = map(asked.pop, ("max_tokens", "stop", "samples", "options"))
    add_special_tokens, skip_special_tokens = (
        asked.pop("add_special_tokens"),
        asked.pop("skip_special_tokens"),
    )
    if not all(stop):
        raise WrongUse("a stop text is empty", where="--stop", fix="give at least one character")
    sampling = Sampling(**asked)
    like = Job(NO_IDS, most, sampling, stop, n=samples, skip_special_tokens=skip_special_tokens)
    if file is not None:
        fix = 'give a .jsonl file with a "prompt" in every line, --out FILE, and no --prompt'
        check_is_file(file, fix)
        if out is None or prompt is not None:
            raise WrongUse("a file of prompts is answered in a file", where=file, fix=fix)
        facts = generate_file(path, file, out, like, options, add_special_tokens=add_special_tokens)
        check_answered(facts, out, 'look for "error" in that file')
        said = f"{facts['lines']} lines answered ({facts['resumed']} by an earlier run): {out}"
        console.result({"path": str(out), **facts}, [said])
        return
    if prompt is None:
        prompt = read_stdin()
    else:
        prompt = prompt.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    answers = [""] * samples
    live = samples == 1
    shown = prompt  # with the first delta: an error has its line to itself
    deltas = continue_text(path, prompt, like, options, add_special_tokens=add_special_tokens)
    for number, delta in deltas:
        answers[number] += delta.text
        if live:
            console.stream(shown + delta.text)
            shown = ""
    lines = [""] if live else [f"--- {number + 1}\n{prompt}{answer}" for number, answer in enumerate(answers)]
    console.result({"prompt": prompt, "answers": answers}, lines)


@click.command()
@click.argument("path", type=click.Path())
@click.argument("file", type=click.Path())
@option(
    "--out",
    click.Path(),
    "File to write: .jsonl, .npy (the vectors alone) or .parquet (default: JSON lines on standard output).",
)
@flag("--truncate", "Embed the beginning of texts longer than the model's context (default: refuse them).")
@flag("--chunk", "Cut longer texts of a file of records into overlapping rows.")
@option("--prompt", None, "Text before every text, or the name of one of the model's (default: its own).")
@option("--field", None, "Field or column of a file of records that holds the text.", "text")
@backend_options
@throughline_command
def embed(path: str, file: str, out: str | None, chunk: bool, field: str, **how: Any) -> None:
    """Embed every line of FILE (- = standard input) with the model at PATH: a BERT, which is a run, checkpoint, model
    directory, ONNX artifact, engine or .gguf file, or a decoder whose directory has a modules.json. The result is
    one JSON object per line, {"text", "embedding"}.

    Of a file of records (.jsonl, .json, .csv, .tsv, .parquet) the --field of each is embedded and the other fields are
    kept; the same command continues a run that was stopped. The embedding is what the directory's modules.json says,
    without one the mean over the tokens, scaled to length 1: the dot product of two is their cosine.

    The result has a row for every line or record. One that cannot be embedded (blank, too long) gets an "error" and no
    "embedding", in .npy a row of zeros, and the exit code is 1.

    \b
    Example:  throughline embed runs/my-bert my/sentences.txt --out my/embeddings.jsonl
    """
    from ..data.ingest.inputs import check_no_markup

    if file != "-":
        check_is_file(Path(file), "give a text file with one text per line, or - for standard input")
    form = Path(out).suffix if out else ".jsonl"
    if form not in FORMS:
        raise WrongUse("embeddings are not written so", where=out, fix=f"name it {', '.join(FORMS)}")
    check_no_markup(file)
    suffix = Path(file).suffix
    if suffix not in RECORDS:
        if chunk:
            fix = 'write the texts as .jsonl, {"text": "..."} a line: each piece gets its number as "chunk"'
            raise WrongUse("--chunk makes several rows of a line", where=file, fix=fix)
        _embed_text_file(path, file, out, **how)
        return
    if out is None:
        raise WrongUse(f"a {suffix} file is answered in a file", where=file, fix="give --out FILE")
    if chunk and form == ".npy":
        why = "the array has no place for the number of a piece and its text"
        raise WrongUse(
            "--chunk makes several rows of a text", where=out, why=why, fix="write .jsonl or .parquet"
        )
    _embed_records(path, Path(file), Path(out), chunk=chunk, field=field, **how)


def _embed_records(path: str, file: Path, out: Path, **how: Any) -> None:
    """Embed a file of records into a file, which is written whole too when this raises Failed for refused records."""
    from ..inference.serving.offline import embed_file

    lines = out if out.suffix == ".jsonl" else Path(f"{out}.jsonl")
    facts = embed_file(path, file, lines, **how)
    if out != lines and facts["errors"] < facts["lines"]:
        _write(out, [row for _, row in json_lines(lines)])
        if not facts["errors"]:
            lines.unlink()
    fix = f'each refused one has its "error" in {lines}'
    if "longer than the model's context" in facts["first_error"]:
        fix = f"--truncate embeds the beginning of longer texts, --chunk their pieces, into another --out\n{fix}"
    check_answered(facts, out, fix)
    said = f"{facts['lines']} lines embedded ({facts['resumed']} by an earlier run): {out}"
    console.result({"path": str(out), **facts}, [said])


def _embed_text_file(path: str, file: str, out: str | None, **how: Any) -> None:
    """Embed the lines of a text file, or of standard input. Raises Failed when a line was refused."""
    from ..inference.serving.offline import embed_lines

    text = read_stdin() if file == "-" else Path(file).read_bytes().decode("utf-8-sig", "replace")
    texts = _lines_of(text)
    if not any(line.strip() for line in texts):
        raise WrongUse("there is no text to embed", where=file, fix="give a file with one text per line")
    vectors, errors = embed_lines(path, texts, **how)
    rows: list[dict[str, Any]] = [
        {"text": line, "embedding": vector.tolist()} for line, vector in zip(texts, vectors)
    ]
    for place, error in errors.items():
        rows[place] = {"text": texts[place], "error": error}
    facts: dict[str, Any] = {"lines": len(texts), "errors": len(errors), "first_error": ""}
    if errors:
        first = min(errors)
        facts["first_error"] = f"line {first + 1}: {errors[first]}"
    fix = 'they keep their rows: zeros in .npy, an "error" in .jsonl and .parquet; remove lines that are no texts'
    if any("longer than the model's context" in error for error in errors.values()):
        fix = "--truncate embeds the beginning of longer lines"
    if len(errors) == len(texts):
        check_answered(facts, file, fix)
    if out is not None:
        _write(Path(out), rows)
        check_answered(facts, out, fix)
        console.result({"path": out, "texts": len(texts)}, [f"{len(texts)} embeddings written: {out}"])
        return
    console.result({"embeddings": rows}, [json.dumps(row, ensure_ascii=False) for row in rows])
    if errors:  # the result is complete, with an "error" in these rows: no second object with --json
        console.warn(f"{_refused(facts)}; {facts['first_error']}")
        raise click.exceptions.Exit(EXIT_FAILED)


def _lines_of(text: str) -> list[str]:
    """The lines of a text without their ends: LF, CRLF or CR alone (not form feeds and Unicode's separators)."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def check_answered(facts: dict[str, Any], out: Path | str, fix: str) -> None:
    """Raise Failed where lines of a file were refused: their errors are in the answers."""
    if facts["errors"]:
        raise Failed(_refused(facts), where=out, why=facts["first_error"], fix=fix)


def _refused(facts: dict[str, Any]) -> str:
    return f"{facts['errors']:,} of {facts['lines']:,} lines were refused"


def _write(out: Path, rows: list[dict[str, Any]]) -> None:
    """A row for every text, with or without a vector, in the form that the file's name asks for."""
    import numpy as np

    data = io.BytesIO()
    if out.suffix == ".npy":
        np.save(data, _array(rows))
    elif out.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        names = dict.fromkeys(name for row in rows for name in row)  # a refused row has other fields
        columns: dict[str, list[Any]] = {name: [row.get(name) for row in rows] for name in names}
        vectors = columns.pop("embedding", [None] * len(rows))
        table = pyarrow.table(columns)
        array = pyarrow.array(vectors, pyarrow.list_(pyarrow.float32()))
        pyarrow.parquet.write_table(table.append_column("embedding", array), data)
    else:
        data.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    with full_disk(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, data.getvalue())


def _array(rows: list[dict[str, Any]]) -> Any:
    """The vectors as float32 (rows, width); zeros for a row without one."""
    import numpy as np

    width = next(len(row["embedding"]) for row in rows if "embedding" in row)
    array = np.zeros((len(rows), width), np.float32)
    for place, row in enumerate(rows):
        if "embedding" in row:
            array[place] = row["embedding"]
    return array


@click.command()
@click.argument("folder", type=PATH)
@option("--model", click.Path(), "BERT whose embeddings are searched too (default: words alone).")
@option("--split", None, "Split of the folder's qrels that is asked.", "test")
@option("--weight", click.FloatRange(0, 1), "Share of the embeddings in the score of both.", 0.2)
@option("--tune", None, "Split whose queries choose the weight instead: not the one that is asked.")
@flag("--keep-identical-ids", "Keep a document with the id of the query among its hits (BEIR leaves it out).")
@option("--query-prompt", None, "Prompt before every query, as for `embed` (default: the model's).")
@option("--prompt", None, "Prompt before every document (default: the model's).")
@backend_options
@throughline_command
def search(
    folder: Path,
    model: str | None,
    split: str,
    weight: float,
    tune: str | None,
    keep_identical_ids: bool,
    **how: Any,
) -> None:
    """Score search over FOLDER, which has BEIR's form (corpus.jsonl, queries.jsonl, qrels/test.tsv), by BM25, by a
    BERT's embeddings and by both: nDCG at 10 and recall at 5, 10 and 100. Long documents are cut into chunks.

    \b
    Example:  throughline search my/scifact --model models/e5 --query-prompt "query: " --prompt "passage: "
    """
    from ..eval.beir import read_collection
    from ..eval.search import by_embeddings, by_words, chosen_weight, score

    if tune == split or (tune and not model):
        why = "queries that choose the weight cannot test it" if model else "the weight is that of a model"
        raise WrongUse("no weight to choose", where="--tune", why=why, fix="another split, and --model")
    collection = read_collection(folder, split)
    for warning in collection.warnings:
        console.warn(warning)
    if collection.own_answers and not keep_identical_ids:
        count = f"{collection.own_answers:,} queries have the document with their own id as an answer"
        fix = "give queries and documents different ids, or pass --keep-identical-ids"
        console.warn(f"{count}, which is left out of their hits: {fix}")
    texts = list(collection.documents.values())
    words = by_words(texts)
    vectors = by_embeddings(model, texts, **how) if model else None
    if tune and vectors:
        other = read_collection(folder, tune)
        for warning in other.warnings:
            if warning not in collection.warnings:
                console.warn(warning)
        weight = chosen_weight(other, words, vectors, keep_identical_ids)
    scores = score(collection, words, vectors, weight, keep_identical_ids)
    header = ("search by", *next(iter(scores.values())))
    rows = [(way, *values.values()) for way, values in scores.items()]
    facts = {
        "scores": scores,
        "weight": weight,
        "queries": len(collection.queries),
        "documents": len(collection.documents),
        "identical_ids": collection.identical_ids,
        "identical_ids_kept": keep_identical_ids,
        "missing_documents": len(collection.missing_documents),
        "missing_queries": len(collection.missing_queries),
    }
    said = f"{facts['queries']:,} queries over {facts['documents']:,} documents"
    if model:
        chosen = f" as {tune} chose" if tune else ""
        said += f", embeddings weighed {weight:g}{chosen}"
    lines = [*console.table(header, rows), said]
    if collection.identical_ids:
        kept = "kept among its hits" if keep_identical_ids else "left out of its hits, as BEIR does"
        count = f"{collection.identical_ids:,} queries have the id of a document"
        option_hint = "" if keep_identical_ids else " (--keep-identical-ids keeps it)"
        lines.append(f"{count}: it is {kept}{option_hint}")
    console.result(facts, lines)
