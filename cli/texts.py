"""`throughline generate|embed|search`: what a model makes of texts, one by one and file by file."""

import io
import json
from pathlib import Path
from typing import Any

import click

from ..core import console
from ..core.errors import Failed, WrongUse
from ..core.files import full_disk, json_lines, write_atomic
from .common import PATH, backend_options, cache_options, flag, option, read_stdin, throughline_command

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
    if not all(stop):
        raise WrongUse("a stop text is empty", where="--stop", fix="give at least one character")
    like = Job(NO_IDS, most, Sampling(**asked), stop, n=samples)
    if file is not None:
        if out is None or prompt is not None or not file.is_file():
            fix = 'give a .jsonl file with a "prompt" in every line, --out FILE, and no --prompt'
            raise WrongUse("a file of prompts is answered in a file", where=file, fix=fix)
        facts = generate_file(path, file, out, like, options)
        check_answered(facts, out)
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
    for number, delta in continue_text(path, prompt, like, options):
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
    without one the mean over the tokens, scaled to length 1: the dot product of two is their cosine. A record that
    cannot be embedded gets an "error", and the exit code is 1.

    \b
    Example:  throughline embed runs/my-bert my/sentences.txt --out my/embeddings.jsonl
    """
    from ..data.ingest.inputs import check_no_markup
    from ..inference.serving.offline import embed_file, embed_texts

    if file != "-" and not Path(file).is_file():
        fix = "give a text file with one text per line, or - for standard input"
        raise WrongUse("no such file", where=file, fix=fix)
    form = Path(out).suffix if out else ".jsonl"
    if form not in FORMS:
        raise WrongUse("embeddings are not written so", where=out, fix=f"name it {', '.join(FORMS)}")
    check_no_markup(file)
    if (suffix := Path(file).suffix) in RECORDS:
        if out is None:
            raise WrongUse(f"a {suffix} file is answered in a file", where=file, fix="give --out FILE")
        lines = Path(out if form == ".jsonl" else f"{out}.jsonl")
        facts = embed_file(path, Path(file), lines, **how, chunk=chunk, field=field)
        check_answered(facts, lines)
        if form != ".jsonl":
            _write(Path(out), [row for _, row in json_lines(lines)])
            lines.unlink()
        said = f"{facts['lines']} lines embedded ({facts['resumed']} by an earlier run): {out}"
        console.result({"path": out, **facts}, [said])
        return
    text = read_stdin() if file == "-" else Path(file).read_bytes().decode("utf-8-sig", "replace")
    # not splitlines(), which cuts at form feeds and at Unicode's line separators too
    texts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not texts:
        raise WrongUse("there is no text to embed", where=file, fix="give a file with one text per line")
    vectors = embed_texts(path, texts, **how)
    rows = [{"text": line, "embedding": vector.tolist()} for line, vector in zip(texts, vectors)]
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
    import numpy as np

    data = io.BytesIO()
    if out.suffix == ".npy":
        np.save(data, np.array([row["embedding"] for row in rows], np.float32))
    elif out.suffix == ".parquet":
        import pyarrow.parquet

        rows = [row | {"embedding": np.array(row["embedding"], np.float32)} for row in rows]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), data)
    else:
        data.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    with full_disk(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(out, data.getvalue())


@click.command()
@click.argument("folder", type=PATH)
@option("--model", click.Path(), "BERT whose embeddings are searched too (default: words alone).")
@option("--split", None, "Split of the folder's qrels that is asked.", "test")
@option("--weight", click.FloatRange(0, 1), "Share of the embeddings in the score of both.", 0.2)
@option("--tune", None, "Split whose queries choose the weight instead: not the one that is asked.")
@option("--query-prompt", None, "Prompt before every query, as for `embed` (default: the model's).")
@option("--prompt", None, "Prompt before every document (default: the model's).")
@backend_options
@throughline_command
def search(folder: Path, model: str | None, split: str, weight: float, tune: str | None, **how: Any) -> None:
    """Score search over FOLDER, which has BEIR's form (corpus.jsonl, queries.jsonl, qrels/test.tsv), by BM25, by a
    BERT's embeddings and by both: nDCG at 10 and recall at 5, 10 and 100. Long documents are cut into chunks.

    \b
    Example:  throughline search my/scifact --model models/e5 --query-prompt "query: " --prompt "passage: "
    """
    from ..eval.search import by_embeddings, by_words, chosen_weight, read_collection, score

    if tune == split or (tune and not model):
        why = "queries that choose the weight cannot test it" if model else "the weight is that of a model"
        raise WrongUse("no weight to choose", where="--tune", why=why, fix="another split, and --model")
    collection, other = read_collection(folder, split), read_collection(folder, tune) if tune else None
    texts = list(collection.documents.values())
    words = by_words(texts)
    vectors = by_embeddings(model, texts, **how) if model else None
    if other and vectors:
        weight = chosen_weight(other, words, vectors)
    found = score(collection, words, vectors, weight)
    queries, documents = len(collection.queries), len(collection.documents)
    said = f"{queries:,} queries over {documents:,} documents"
    said += f", embeddings weighed {weight:g}" + f" as {tune} chose" * bool(tune) if model else ""
    header, rows = next(iter(found.values())), [(way, *each.values()) for way, each in found.items()]
    facts = {"scores": found, "weight": weight, "queries": queries, "documents": documents}
    console.result(facts, [*console.table(("search by", *header), rows), said])
