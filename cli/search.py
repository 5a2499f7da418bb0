"""`throughline search FOLDER`: how well words, embeddings and both find what answers a query."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core import console
from .common import PATH, backend_options, option, throughline_command

if TYPE_CHECKING:
    from ..core.backend import BackendOptions


@click.command()
@click.argument("folder", type=PATH)
@option("--model", click.Path(), "BERT whose embeddings are searched too (default: words alone).")
@option("--split", None, "Split of the folder's qrels that is asked.", "test")
@option("--weight", click.FloatRange(0, 1), "Share of the embeddings in the score of both.", 0.2)
@option(
    "--query-prompt", None, "Prompt before every query, as `embed --prompt` takes it (default: the model's)."
)
@option("--prompt", None, "Prompt before every document (default: the model's).")
@backend_options
@throughline_command
def command(
    folder: Path,
    model: str | None,
    split: str,
    weight: float,
    query_prompt: str | None,
    prompt: str | None,
    options: "BackendOptions",
) -> None:
    """Score search over FOLDER, which has BEIR's form (corpus.jsonl, queries.jsonl, qrels/test.tsv), by BM25, by a
    BERT's embeddings and by both: nDCG at 10 and recall at 5, 10 and 100. Long documents are cut into chunks.

    \b
    Example:  throughline search my/scifact --model models/e5 --query-prompt "query: " --prompt "passage: "
    """
    from ..eval.search import by_embeddings, read_collection, score

    collection = read_collection(folder, split)
    vectors = None
    if model:
        vectors = partial(by_embeddings, model, options=options, query_prompt=query_prompt, prompt=prompt)
    found = score(collection, vectors, weight)
    counts = {"queries": len(collection.queries), "documents": len(collection.documents)}
    header, rows = next(iter(found.values())), [(way, *each.values()) for way, each in found.items()]
    said = "{queries:,} queries over {documents:,} documents".format(**counts)
    console.result({"scores": found} | counts, [*console.table(("search by", *header), rows), said])
