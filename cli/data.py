"""`throughline data tokenizer|tokenize|inspect|dedup|export`: text to tokens, and what is in them."""

import functools
import os
import re
from collections import Counter
from typing import Any

import click

from ..core import console
from ..core.artifact import CHECK_BYTES, Input, check_free, input_record
from ..core.errors import WrongUse
from ..core.files import write_atomic
from .common import flag, is_given, option, throughline_command, together

BACKENDS = ("auto", "gigatoken", "tokie", "char-numpy", "tokenizers")
TEXT = (
    "documents",
    "field",
    "split",
    "unwrap",
    "skip_front_matter",
)  # of `text_options`, as `ReadOptions` names them


def text_options(function: Any) -> Any:
    """Adds INPUTS... and the options that say how they become documents, given to the command as `options`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        from ..data.ingest.readers import ReadOptions

        return function(*args, options=ReadOptions(**{name: kwargs.pop(name) for name in TEXT}), **kwargs)

    share, replaced = click.FloatRange(0, 1), "Largest accepted share of invalid characters."
    return together(
        click.argument("inputs", nargs=-1, required=True),
        option(
            "--documents",
            click.Choice(["file", "line", "block"]),
            "What a document of a .txt or .md file is: the file, a line, or a block between blank lines.",
            "file",
        ),
        option(
            "--field",
            None,
            "Name of the field (.jsonl) or column (.csv, .parquet, data set) of the text; doc.text is inside of doc.",
            "text",
        ),
        option("--split", None, "Split of a data set that is read.", "train"),
        flag("--unwrap", "Join the hard-wrapped lines of a paragraph with spaces."),
        flag("--skip-front-matter", "Leave out the front matter of .md files (--- to ---, or +++ to +++)."),
        option("--max-replaced", share, replaced, 0.001),
    )(wrapped)


out_options = together(
    option("--out", None, "Directory to write.", required=True),
    flag("--overwrite", "Replace the artifact that is already at --out."),
)


def found_in_text(counts: dict[str, int]) -> list[str]:
    """One line about dirty text, none about clean."""
    found = ", ".join(f"{key} {count:,}" for key, count in counts.items() if count)
    return [f"found in the text: {found}"] if found else []


def size(text: str) -> int:
    """Bytes from "512", "64M", "1.5G" (powers of 1000; KiB, MiB, GiB of 1024), as a type of an option."""
    found = re.fullmatch(r"(\d{1,15}(?:\.\d*)?|\.\d+) ?([KMG]?)(I?)B?", text.strip().upper())
    value = int(float(found[1]) * (1024 if found[3] else 1000) ** " KMG".index(found[2])) if found else 0
    if value <= 0:
        raise click.BadParameter(f"{text!r} is no size above zero; write for example 64M or 1GiB")
    return value


@click.group()
def command() -> None:
    """Tokenizers and token stores: train, tokenise, inspect, deduplicate, export."""


@command.command()
@text_options
@option(
    "--type kind",
    click.Choice(["bpe", "wordpiece", "char", "import"]),
    "Type of tokenizer to train. With `import`, INPUTS is a GPT-2 or BERT vocabulary or a tokenizer.json.",
    "bpe",
)
@option("--vocab-size", click.IntRange(3), "Entries of the vocabulary, special tokens included.", 32000)
@option(
    "--cased/--uncased", None, "WordPiece keeps capitals and accents (default: no, or an import's own).", None
)
@option(
    "--sample-bytes", size, "Maximum size of the text to train on. A larger input is sampled evenly.", "1G"
)
@out_options
@throughline_command
def tokenizer(inputs: tuple[str, ...], kind: Any, cased: bool | None, out: str, **how: Any) -> None:
    """Train a tokenizer on text, or import one.

    \b
    Example:  throughline data tokenizer corpus/ --type bpe --vocab-size 8192 --out tok
              throughline data tokenizer gpt2/ --type import --out gpt2-tok
    """
    from ..data.ingest.inputs import expand_inputs
    from ..data.ingest.text import COUNTS
    from ..data.new_tokenizer import import_tokenizer, sample, train_tokenizer

    check_free(out, how["overwrite"])
    if cased is not None and kind in ("bpe", "char"):
        fix = "leave it out, or use --type wordpiece"
        raise WrongUse(f"{kind} keeps text as it is", where="--cased/--uncased", fix=fix)
    if kind == "import":
        given = [name for name in ("vocab_size", "sample_bytes", "max_replaced", *TEXT) if is_given(name)]
        if given:
            where = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            fix = "leave it out, or train: --type bpe, wordpiece or char"
            raise WrongUse("an import trains nothing", where=where, fix=fix)
        if len(inputs) != 1:
            why, fix = f"{len(inputs)} were given", "name the directory of the vocabulary"
            raise WrongUse("an import takes one path", why=why, fix=fix)
        made, files = import_tokenizer(inputs[0], None if cased is None else not cased)
        if cased is not None and files[0].suffix != ".txt":
            what = "this tokenizer says itself what it keeps"
            raise WrongUse(what, where="--cased/--uncased", fix="leave it out")
        records = [input_record(file) for file in files]
        facts: dict[str, Any] = {"trained": False, "counts": {}}
    else:
        sources, counts = expand_inputs(list(inputs)), Counter[str]()
        texts = sample(sources, how["options"], how["sample_bytes"], counts, how["max_replaced"])
        made = train_tokenizer(texts, kind, how["vocab_size"], lowercase=not cased)
        # a sample is not worth hours of hashing what it is of
        small = sum(source.bytes for source in sources) <= CHECK_BYTES
        here = [source for source in sources if os.path.exists(source.path)]
        records = [input_record(s.path) if small else Input(s.place, "foreign", "") for s in here]
        found = {key: counts[key] for key in COUNTS}
        facts = {"trained": True, "sample_bytes": how["sample_bytes"], "counts": found}
    made.save(out, records, facts, how["overwrite"])
    lines = [f"{made.type} tokenizer of {made.vocab_size:,} entries in {out}"]
    lines += found_in_text(facts["counts"])
    console.result({"path": out, **made.facts(), "counts": facts["counts"]}, lines)


@command.command()
@text_options
@option(
    "--tokenizer tokenizer_path",
    None,
    "Path of the tokenizer: an artifact, a model directory or a tokenizer.json.",
    required=True,
)
@option(
    "--eos/--no-eos append_eos",
    None,
    "End documents with the end-of-text token (default: if there is one).",
    None,
)
@option(
    "--add-special-tokens/--no-add-special-tokens add_special_tokens",
    None,
    "Give documents the BOS and EOS that the tokenizer of a decoder adds to a text.",
    True,
)
@flag("--sentences", "Store every sentence as a sequence of its own, as the sentence pairs of a BERT need.")
@option("--workers", click.IntRange(1), "Number of worker processes (default: one per core).")
@option("--backend", click.Choice(BACKENDS), "Library that encodes; all give the same tokens.", "auto")
@option("--executor", click.Choice(["local", "ray"]), "Where tasks run: here or on a Ray cluster.", "local")
@option(
    "--shard-bytes",
    size,
    "Size of the input of one shard, for example 64M (default: 1/64 of the input, 8 MiB to 256 MiB).",
)
@option("--task-index", click.IntRange(0), "Number of this process in a job array, counted from 0.")
@option("--task-count", click.IntRange(1), "Number of processes in the job array.")
@out_options
@throughline_command
def tokenize(inputs: tuple[str, ...], workers: int | None, executor: Any, out: str, **given: Any) -> None:
    """Tokenise text into a store of Megatron-compatible shards.

    The same command continues a tokenisation that was stopped or killed. In a job array give each
    process --task-index and --task-count.

    \b
    Example:  throughline data tokenize corpus/*.jsonl.zst --tokenizer tok --out tokens --workers 8
    """
    from ..core.hardware import usable_cores
    from ..data.ingest.tokenize import Work
    from ..data.ingest.tokenize import tokenize as run

    share = given.pop("task_index"), given.pop("task_count")
    if share.count(None) == 1:
        raise WrongUse("--task-index and --task-count go together", fix="give both or neither")
    if executor == "ray" and workers is not None:
        raise WrongUse("a Ray cluster has its own workers", where="--workers", fix="leave it out")
    work = Work(workers or usable_cores(), executor, given.pop("backend"), None if None in share else share)
    manifest = run(inputs, out=out, work=work, **given)
    if manifest is None:
        console.result({"path": out, "complete": False}, [f"{out} is not complete yet"])
        return
    facts, shards = manifest.facts, len(manifest.facts["shards"])
    encoders = ", ".join(facts["made"]["backends"])
    lines = [
        f"{facts['tokens']:,} tokens in {facts['documents']:,} documents, "
        f"{shards:,} shard{'s' * (shards != 1)}, in {out}",
        f"{facts['text_bytes'] / facts['tokens']:.2f} bytes per token, {facts['dtype']}, encoded by {encoders}",
    ]
    lines += found_in_text(facts["made"]["counts"])
    flat = {key: value for key, value in facts.items() if key != "made"} | facts["made"]
    console.result({"path": out, "complete": True, "hash": manifest.hash, **flat}, lines)


@command.command()
@click.argument("store")
@option("--samples", click.IntRange(0), "Number of sample documents to show.", 3)
@option("--top", click.IntRange(0), "Number of repeated documents to show.", 3)
@option("--tokenizer tokenizer_path", None, "Path of the tokenizer of a store that another program wrote.")
@option("--html", click.Path(), "File to write the same facts to, as a page.")
@throughline_command
def inspect(store: str, samples: int, top: int, tokenizer_path: str | None, html: str | None) -> None:
    """Show what is in a token store.

    Prints document lengths, bytes per token, some documents, and the documents that are repeated most.

    \b
    Example:  throughline data inspect tokens --samples 5
    """
    from ..data.inspect import inspect_page, inspect_store

    found = inspect_store(store, samples, top, tokenizer_path)
    if html:
        write_atomic(html, inspect_page(store, found))
    ratio = found["bytes_per_token"]
    lines = [
        f"{found['tokens']:,} tokens, {found['documents']:,} documents, {found['sequences']:,} sequences, "
        f"{found['shards']:,} shards, {found['dtype']}, vocabulary {found['vocab_size']:,}",
        f"{found['tokens_per_document']:,.1f} tokens per document"
        + (f", {ratio:.2f} bytes per token" if ratio else ""),
        "",
        *console.table(("up to tokens", "documents"), list(found["lengths"].items())),
    ]
    lines += ["", *(f"document {s['document']:,}: {s['text']!r}" for s in found["samples"])]
    lines += [f"{r['times']:,} times: {r['text']!r}" for r in found["repeated"]]
    console.result({"path": store, **found}, lines)


@command.command()
@click.argument("store")
@option(
    "--to target", click.Choice(["nanogpt", "olmo", "llmc", "parquet"]), "Layout to write.", required=True
)
@option("--val-fraction", click.FloatRange(0, 0.5), "For nanogpt: last share of tokens, for val.bin.", 0.0)
@option("--out", None, "Directory to write.", required=True)
@throughline_command
def export(store: str, target: Any, val_fraction: float, out: str) -> None:
    """Write a token store in another trainer's layout.

    Megatron-LM needs no export: it reads a store as it is.

    \b
    Example:  throughline data export tokens --to nanogpt --val-fraction 0.1 --out nanogpt-data
    """
    from ..data.export import export_store

    files = export_store(store, target, out, val_fraction)
    console.result({"path": out, "files": [file.name for file in files]}, [str(file) for file in files])


@command.command()
@text_options
@flag(
    "--near",
    "Remove near duplicates too, by MinHash over 5-grams of words (characters where a script has none).",
)
@flag("--dry-run", "Count the duplicates and write nothing.")
@option(
    "--out", None, "Directory of the records that stay, as .jsonl.zst with all fields; not for --dry-run."
)
@throughline_command
def dedup(inputs: tuple[str, ...], out: str | None, dry_run: bool, **given: Any) -> None:
    """Remove duplicate documents from text.

    Of equal documents the first one is kept, with all its fields. `data tokenize` reads the output.

    \b
    Example:  throughline data dedup corpus/ --near --out clean
    """
    from ..data.ingest.dedup import dedup as run

    if not out and not dry_run:
        raise WrongUse("no output given", where="--out", fix="name a directory, or count only with --dry-run")
    found = run(list(inputs), out, dry_run=dry_run, **given)
    rows = [(row["source"], row["documents"], row["exact"], row["near"]) for row in found["sources"]]
    rows.append(("all", found["documents"], found["exact"], found["near"]))
    lines = console.table(("source", "documents", "exact duplicates", "near duplicates"), rows)
    lines += found_in_text(found["counts"])
    if found["short"]:
        lines.append(
            f"{found['short']:,} documents of fewer than 5 words have no near duplicates but equal ones"
        )
    lines.append(f"{found['kept']:,} documents stay" + ("; nothing was written" if dry_run else f" in {out}"))
    console.result({"path": out, **found}, lines)
