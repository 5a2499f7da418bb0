"""`throughline search FOLDER`: how well words, embeddings and both find what answers a query."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..core import console
from ..core.errors import WrongUse
from .common import PATH, backend_options, option, throughline_command

if TYPE_CHECKING:
    from ..core.backend import BackendOptions


@click.command()
@click.argument("folder", type=PATH)
@option("--model", click.Path(), "BERT whose embeddings are searched too (default: words alone).")
@option("--split", None, "Split of the folder's qrels that is asked.", "test")
@option("--weight", click.FloatRange(0, 1), "Share of the embeddings in the score of both.", 0.2)
@option("--tune", None, "Split whose queries choose the weight instead: not the one that is asked.")
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
    tune: str | None,
    query_prompt: str | None,
    prompt: str | None,
    options: "BackendOptions",
) -> None:
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
    vectors = by_embeddings(model, texts, options, query_prompt, prompt) if model else None
    if other and vectors:
        weight = chosen_weight(other, words, vectors)
    found = score(collection, words, vectors, weight)
    counts = {"queries": len(collection.queries), "documents": len(collection.documents)}
    header, rows = next(iter(found.values())), [(way, *each.values()) for way, each in found.items()]
    said = "{queries:,} queries over {documents:,} documents".format(**counts)
    said += f", embeddings weighed {weight:g}" + f" as {tune} chose" * bool(tune) if model else ""
    console.result(
        {"scores": found, "weight": weight} | counts, [*console.table(("search by", *header), rows), said]
    )
