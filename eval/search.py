"""Search over a folder in BEIR's form by words (BM25), by embeddings and by both: nDCG and recall.

    corpus.jsonl        {"_id", "title", "text"}
    queries.jsonl       {"_id", "text"}
    qrels/<split>.tsv   query-id, corpus-id, score, with a header

The form is that of Thakur et al. 2021, "BEIR"; the metrics are trec_eval's, as BEIR reports them. Both scores of a
query are brought to [0, 1] over the corpus and added, the embeddings' with a weight (Bruch et al. 2022, "An Analysis of
Fusion Functions for Hybrid Retrieval"). A text longer than the model's context is several; the nearest counts.
"""

import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..core.backend import AUTO, BackendOptions
from ..core.errors import MissingExtra, WrongUse
from ..core.files import json_lines
from ..inference.serving.encoding import Reader, embed
from ..inference.serving.texts import open_text_model

NDCG_AT, RECALL_AT = 10, (5, 10, 100)
WORDS, VECTORS, BOTH = "words (BM25)", "embeddings", "both"
Scores = Callable[[str], np.ndarray]  # of a query, over the documents


@dataclass(frozen=True)
class Collection:
    """Documents by id, queries by id, and by query the documents that answer it with their grades."""

    documents: dict[str, str]
    queries: dict[str, str]
    relevant: dict[str, dict[str, int]]


def read_collection(folder: Path, split: str = "test") -> Collection:
    """The folder's corpus, and the queries of a split. Raises WrongUse for what is missing or names no document."""
    corpus, file = folder / "corpus.jsonl", folder / "qrels" / f"{split}.tsv"
    for path in (corpus, folder / "queries.jsonl", file):
        if not path.is_file():
            fix = (
                "a folder has corpus.jsonl, queries.jsonl and qrels/<split>.tsv; --split names another split"
            )
            raise WrongUse("no folder in BEIR's form", where=path, why="it is not there", fix=fix)
    documents = {
        str(row["_id"]): f"{row.get('title', '')} {row['text']}".strip() for _, row in json_lines(corpus)
    }
    queries = {str(row["_id"]): row["text"] for _, row in json_lines(folder / "queries.jsonl")}
    relevant: dict[str, dict[str, int]] = {}
    with open(file, encoding="utf-8", newline="") as lines:
        for query, document, grade in list(csv.reader(lines, delimiter="\t"))[1:]:
            if document not in documents or query not in queries:
                raise WrongUse(
                    f"{document} or {query} is in no line of the corpus or the queries", where=file
                )
            relevant.setdefault(query, {})[document] = int(grade)
    return Collection(documents, {query: queries[query] for query in relevant}, relevant)


def by_words(texts: Sequence[str]) -> Scores:
    """BM25 of the library bm25s, with its settings and without its English stop words. Raises MissingExtra."""
    try:
        import bm25s
    except ImportError:
        raise MissingExtra("bm25s", "search by words", "throughline[search]") from None

    def words(text: str | Sequence[str]) -> list[list[str]]:
        return bm25s.tokenize(text, stopwords=None, return_ids=False, show_progress=False)

    index = bm25s.BM25()
    index.index(words(texts), show_progress=False)
    return lambda query: index.get_scores(words([query])[0])


def by_embeddings(
    path: Path | str,
    texts: Sequence[str],
    options: BackendOptions = AUTO,
    query_prompt: str | None = None,
    prompt: str | None = None,
) -> Scores:
    """Cosines of the BERT at `path`; a text's is that of its nearest chunk. Prompts as `embed --prompt` takes them."""
    loaded, tokenizer = open_text_model(path, "bert", options)
    encoder, own = loaded.encoder, loaded.sentence
    assert encoder is not None
    reader = Reader(tokenizer, own.context(encoder.context), encoder.vocab_size)
    asked, told = own.prompted(query_prompt), own.prompted(prompt)
    chunks = [reader.chunks(text, told.prompt) for text in texts]
    rows = [reader.frame({"text": told.text(chunk)}, truncate=True) for each in chunks for chunk in each]
    vectors_CH = embed(encoder, rows, tokenizer.pad_id or 0, own.output())
    firsts = np.cumsum([0, *map(len, chunks)])[:-1]

    def scores(query: str) -> np.ndarray:
        row = reader.frame({"query": asked.text(query)}, truncate=True)
        (vector_H,) = embed(encoder, [row], tokenizer.pad_id or 0, own.output())
        return np.maximum.reduceat(vectors_CH @ vector_H, firsts)

    return scores


def fused(words: np.ndarray, vectors: np.ndarray, weight: float) -> np.ndarray:
    """Both scores of a query over the documents, each brought to [0, 1]; `weight` of the vectors'."""

    def level(scores: np.ndarray) -> np.ndarray:
        return (scores - scores.min()) / max(float(np.ptp(scores)), 1e-12)

    return (1 - weight) * level(words) + weight * level(vectors)


def metrics(order: Sequence[str], grades: dict[str, int]) -> dict[str, float]:
    """nDCG and recall of documents in their order, best first, as trec_eval has them."""
    answers = {document: grade for document, grade in grades.items() if grade > 0}

    def gain(found: Iterable[int]) -> float:
        return sum(grade / np.log2(place + 2) for place, grade in enumerate(found))

    best = gain(sorted(answers.values(), reverse=True)[:NDCG_AT])
    named = {f"nDCG@{NDCG_AT}": gain(answers.get(one, 0) for one in order[:NDCG_AT]) / best if best else 0.0}
    for most in RECALL_AT:
        named[f"recall@{most}"] = len(answers.keys() & set(order[:most])) / max(len(answers), 1)
    return named


def score(
    collection: Collection, model: Callable[[Sequence[str]], Scores] | None, weight: float
) -> dict[str, dict[str, float]]:
    """The mean metrics over the queries by words, and with a model by its embeddings and by both."""
    names, texts = np.array(list(collection.documents)), list(collection.documents.values())
    words, vectors = by_words(texts), model(texts) if model else None
    totals: dict[str, dict[str, float]] = {}
    for query, text in collection.queries.items():
        found = {WORDS: words(text)}
        if vectors is not None:
            found[VECTORS] = vectors(text)
            found[BOTH] = fused(found[WORDS], found[VECTORS], weight)
        for way, scores_D in found.items():
            order = names[np.argsort(-scores_D, kind="stable")[: max(RECALL_AT)]]
            total = totals.setdefault(way, {})
            for name, value in metrics(order.tolist(), collection.relevant[query]).items():
                total[name] = total.get(name, 0.0) + value / len(collection.queries)
    return totals
