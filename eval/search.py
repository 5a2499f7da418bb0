"""Search over a collection in BEIR's form (`beir.py`) by words (BM25), by embeddings and by both; and what else MTEB
scores of embeddings (Muennighoff et al. 2023): similarity of pairs, and classification by few texts.

Both scores of a query are brought to [0, 1] over the documents that it may find and added, the embeddings' with a
weight (Bruch et al. 2022, "An Analysis of Fusion Functions for Hybrid Retrieval") that other queries may choose. A text
longer than the model's context is several; the nearest counts.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.backend import AUTO, BackendOptions
from ..core.errors import WrongUse, extra
from ..data.records import find_files, read_records
from ..inference.serving.offline import embed_each, embed_texts, open_reader
from ..models.config import SINGLE_LABEL
from ..train.finetune.labels import inspect_labels
from .beir import (
    NDCG_AT,
    RECALL_AT,
    Collection,
    Scores,
    candidates,
    mean_metrics,
    metrics,
    ranking,
)

WEIGHTS = tuple(share / 20 for share in range(21))  # of the embeddings, that queries choose from
WORDS, VECTORS, BOTH = "words (BM25)", "embeddings", "both"
DRAWS, EXAMPLES = 10, 8  # of a classification: training sets, and texts of a label in each


def by_words(texts: Sequence[str]) -> Scores:
    """BM25 of the library bm25s, with its settings and without its English stop words. Raises MissingExtra."""
    bm25s = extra("bm25s", "search by words", "search")

    def words(text: str | Sequence[str]) -> list[list[str]]:
        return bm25s.tokenize(text, stopwords=None, return_ids=False, show_progress=False)

    words_of_texts = words(texts)
    index = bm25s.BM25()
    if any(words_of_texts):
        index.index(words_of_texts, show_progress=False)

    def scores(query: str) -> np.ndarray:
        words_of_query = words([query])[0]
        if not words_of_query or not any(words_of_texts):
            return np.zeros(len(texts), np.float32)
        return index.get_scores(words_of_query)

    return scores


def by_embeddings(
    path: Path | str,
    texts: Sequence[str],
    options: BackendOptions = AUTO,
    query_prompt: str | None = None,
    prompt: str | None = None,
) -> Scores:
    """Cosines of the BERT at `path`; a text's is that of its nearest chunk. Prompts as `embed --prompt` takes them."""
    loaded, reader = open_reader(path, options)
    sentence = loaded.sentence
    queries = dataclasses.replace(loaded, sentence=sentence.prompted(query_prompt))
    documents = dataclasses.replace(loaded, sentence=sentence.prompted(prompt))
    chunks = [reader.chunks(text, documents.sentence.prompt) for text in texts]
    rows = [chunk for each in chunks for chunk in each]
    vectors_CH, _ = embed_each(documents, reader, rows, truncate=True)  # zeros for a document without a token
    firsts = np.cumsum([0, *map(len, chunks)])[:-1]

    def scores(query: str) -> np.ndarray:
        vectors_1H, _ = embed_each(queries, reader, [query], truncate=True)
        return np.maximum.reduceat(vectors_CH @ vectors_1H[0], firsts)

    return scores


def fused(words: np.ndarray, vectors: np.ndarray, weight: float) -> np.ndarray:
    """Both scores of a query over the documents, each brought to [0, 1]; `weight` of the vectors'."""

    def level(scores: np.ndarray) -> np.ndarray:
        if not len(scores):  # the only document has the id of the query
            return scores
        return (scores - scores.min()) / max(float(np.ptp(scores)), 1e-12)

    return (1 - weight) * level(words) + weight * level(vectors)


def chosen_weight(
    collection: Collection, words: Scores, vectors: Scores, keep_identical: bool = False
) -> float:
    """The weight of the highest nDCG over the collection's queries, the smallest of equals."""
    names, totals = np.array(list(collection.documents)), np.zeros(len(WEIGHTS))
    for query, text in collection.queries.items():
        places = candidates(collection, query, keep_identical)
        word_scores, vector_scores = words(text)[places], vectors(text)[places]
        for number, weight in enumerate(WEIGHTS):
            order = ranking(names[places], fused(word_scores, vector_scores, weight), NDCG_AT)
            totals[number] += metrics(order, collection.relevant[query])[f"nDCG@{NDCG_AT}"]
    return WEIGHTS[int(totals.argmax())]


def score(
    collection: Collection,
    words: Scores,
    vectors: Scores | None,
    weight: float,
    keep_identical: bool = False,
) -> dict[str, dict[str, float]]:
    """The mean metrics over the queries by words, and with embeddings by these and by both. The document with the id
    of a query is no hit of it, unless `keep_identical`.
    """
    names = np.array(list(collection.documents))
    graded: dict[str, list[dict[str, float]]] = {}
    for query, text in collection.queries.items():
        places = candidates(collection, query, keep_identical)
        scores_by_way = {WORDS: words(text)[places]}
        if vectors is not None:
            scores_by_way[VECTORS] = vectors(text)[places]
            scores_by_way[BOTH] = fused(scores_by_way[WORDS], scores_by_way[VECTORS], weight)
        for way, scores_D in scores_by_way.items():
            order = ranking(names[places], scores_D, max(RECALL_AT))
            graded.setdefault(way, []).append(metrics(order, collection.relevant[query]))
    return {way: mean_metrics(rows) for way, rows in graded.items()}


def of_embeddings(path: Any, folder: Path, options: BackendOptions) -> dict[str, Any]:
    """MTEB's score of the model at `path` on a folder whose `test` has pairs of sentences, or whose `test` and `train`
    have labelled texts: Spearman's correlation of cosines and scores, or accuracy. Raises WrongUse for neither.
    """

    def have(rows: list[dict[str, Any]], *names: str) -> bool:
        return bool(rows) and all(isinstance(row.get(name), str) for row in rows for name in names)

    found = [find_files([f"{split}[.-]*"], folder) for split in ("train", "test")]
    train, test = ([record.data for record in read_records(files)] if files else [] for files in found)
    rows = [*train, *test]
    given = {str(row.get("score")) for row in test}
    numbers = len(given) > 1 and all(re.fullmatch(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", one) for one in given)
    if numbers and have(test, "sentence1", "sentence2"):
        texts = [row[key] for key in ("sentence1", "sentence2") for row in test]
        first, second = np.split(embed_texts(path, texts, options, truncate=True), 2)
        cosines, scores = (first * second).sum(axis=1), [float(row["score"]) for row in test]
        ranked = extra("scipy.stats", "--embeddings", "search").spearmanr(cosines, scores)
        return {"spearman": float(ranked.statistic), "n": len(test)}
    several = len({str(row.get("label")) for row in train}) > 1 and all("label" in row for row in rows)
    if several and have(train, "text") and have(test, "text"):
        labels = inspect_labels([row["label"] for row in rows], SINGLE_LABEL)
        classes = [str(labels.value(row["label"])) for row in rows]  # 1, 1.0 and "1" are one
        numbers_of = {name: number for number, name in enumerate(sorted(set(classes[: len(train)])))}
        vectors = embed_texts(path, [row["text"] for row in rows], options, truncate=True)
        numbered = np.array([numbers_of.get(name, -1) for name in classes])
        return {"accuracy": classified(vectors, numbered, len(train)), "n": len(test)}
    fix = "give test.jsonl of sentence1, sentence2, scores that differ, or train.jsonl and test.jsonl of text, labels"
    raise WrongUse("no folder in MTEB's form", where=folder, fix=fix)


def classified(vectors_NH: np.ndarray, labels_N: np.ndarray, known: int) -> float:
    """Mean accuracy behind the first `known` rows over DRAWS training sets of them, drawn as MTEB draws."""
    regression = extra("sklearn.linear_model", "classification by embeddings", "search").LogisticRegression
    order, found = np.arange(known), []
    for _ in range(DRAWS):
        np.random.RandomState(42).shuffle(order)  # one permutation, again and again
        drawn = [order[labels_N[order] == label][:EXAMPLES] for label in range(labels_N.max() + 1)]
        picked = np.concatenate(drawn)
        fitted = regression(max_iter=100).fit(vectors_NH[picked], labels_N[picked])
        found.append((fitted.predict(vectors_NH[known:]) == labels_N[known:]).mean())
    return float(np.mean(found))
