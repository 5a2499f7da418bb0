"""Search over a folder in BEIR's form by words (BM25), by embeddings and by both: nDCG and recall; and what else MTEB
scores of embeddings (Muennighoff et al. 2023): similarity of pairs, and classification by few texts.

    corpus.jsonl        {"_id", "title", "text"}
    queries.jsonl       {"_id", "text"}
    qrels/<split>.tsv   query-id, corpus-id, score, with a header

The form is that of Thakur et al. 2021, "BEIR"; the metrics are trec_eval's, as BEIR reports them. Both scores of a
query are brought to [0, 1] over the corpus and added, the embeddings' with a weight (Bruch et al. 2022, "An Analysis of
Fusion Functions for Hybrid Retrieval") that other queries may choose. A text longer than the model's context is
several; the nearest counts.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from ..core.backend import AUTO, BackendOptions
from ..core.errors import WrongUse, extra
from ..core.files import json_lines
from ..data.records import find_files, read_records, table
from ..inference.serving.encoding import embed
from ..inference.serving.offline import embed_texts, open_reader

NDCG_AT, RECALL_AT = 10, (5, 10, 100)
QRELS = ("query-id", "corpus-id", "score")
WEIGHTS = tuple(share / 20 for share in range(21))  # of the embeddings, that queries choose from
WORDS, VECTORS, BOTH = "words (BM25)", "embeddings", "both"
DRAWS, EXAMPLES = 10, 8  # of a classification: training sets, and texts of a label in each
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
            fix = "a folder has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv; --split names another split"
            raise WrongUse("no folder in BEIR's form", where=path, why="it is not there", fix=fix)
    documents, queries = _texts(corpus), _texts(folder / "queries.jsonl")
    relevant: dict[str, dict[str, int]] = {}
    with open(file, encoding="utf-8", newline="") as lines:
        for place, row in ((record.where, record.data) for record in table(lines, file, "\t")):
            query, document, grade = (row.get(name, "") for name in QRELS)
            if not grade.removeprefix("-").isdecimal():
                why = f"it has {', '.join(row)}; the score {grade!r} is no whole number"
                raise WrongUse("no line of qrels", where=place, why=why, fix=f"columns {', '.join(QRELS)}")
            if document not in documents or query not in queries:
                fix = "ids are those of `_id` in corpus.jsonl and queries.jsonl"
                raise WrongUse(f"no document {document!r} or no query {query!r}", where=place, fix=fix)
            relevant.setdefault(query, {})[document] = int(grade)
    if not relevant:
        raise WrongUse("no query is asked", where=file, fix=f"a header and lines of {', '.join(QRELS)}")
    return Collection(documents, {query: queries[query] for query in relevant}, relevant)


def _texts(path: Path) -> dict[str, str]:
    """The title and text of every line by its id. Raises WrongUse for a line without an id or a text."""
    texts = {}
    for place, row in json_lines(path):
        if "_id" not in row or not isinstance(row.get("text"), str):
            raise WrongUse("no `_id` or no `text`", where=place, why=f"it has {', '.join(row)}")
        texts[str(row["_id"])] = f"{row.get('title') or ''} {row['text']}".strip()
    return texts


def by_words(texts: Sequence[str]) -> Scores:
    """BM25 of the library bm25s, with its settings and without its English stop words. Raises MissingExtra."""
    bm25s = extra("bm25s", "search by words", "search")

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
    loaded, reader = open_reader(path, options)
    encoder, own, pad_id = loaded.backend, loaded.sentence, reader.tokenizer.pad_id or 0
    asked, told = own.prompted(query_prompt), own.prompted(prompt)
    chunks = [reader.chunks(text, told.prompt) for text in texts]
    rows = [reader.frame({"text": told.text(chunk)}, truncate=True) for each in chunks for chunk in each]
    vectors_CH = embed(encoder, rows, pad_id, own.output())
    firsts = np.cumsum([0, *map(len, chunks)])[:-1]

    def scores(query: str) -> np.ndarray:
        row = reader.frame({"query": asked.text(query)}, truncate=True)
        (vector_H,) = embed(encoder, [row], pad_id, own.output())
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
        return sum(grade / math.log2(place + 2) for place, grade in enumerate(found))

    best = gain(sorted(answers.values(), reverse=True)[:NDCG_AT])
    named = {f"nDCG@{NDCG_AT}": gain(answers.get(one, 0) for one in order[:NDCG_AT]) / best if best else 0.0}
    for most in RECALL_AT:
        named[f"recall@{most}"] = len(answers.keys() & set(order[:most])) / max(len(answers), 1)
    return named


def chosen_weight(collection: Collection, words: Scores, vectors: Scores) -> float:
    """The weight of the highest nDCG over the collection's queries, the smallest of equals."""
    names, totals = np.array(list(collection.documents)), np.zeros(len(WEIGHTS))
    for query, text in collection.queries.items():
        found = words(text), vectors(text)
        orders = (np.argsort(-fused(*found, weight), kind="stable")[:NDCG_AT] for weight in WEIGHTS)
        graded = [metrics(names[order].tolist(), collection.relevant[query]) for order in orders]
        totals += [each[f"nDCG@{NDCG_AT}"] for each in graded]
    return WEIGHTS[int(totals.argmax())]


def score(
    collection: Collection, words: Scores, vectors: Scores | None, weight: float
) -> dict[str, dict[str, float]]:
    """The mean metrics over the queries by words, and with embeddings by these and by both."""
    names = np.array(list(collection.documents))
    graded: dict[str, list[dict[str, float]]] = {}
    for query, text in collection.queries.items():
        found = {WORDS: words(text)}
        if vectors is not None:
            found[VECTORS] = vectors(text)
            found[BOTH] = fused(found[WORDS], found[VECTORS], weight)
        for way, scores_D in found.items():
            order = names[np.argsort(-scores_D, kind="stable")[: max(RECALL_AT)]]
            graded.setdefault(way, []).append(metrics(order.tolist(), collection.relevant[query]))
    return {way: {name: fmean(one[name] for one in each) for name in each[0]} for way, each in graded.items()}


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
        names = {name: number for number, name in enumerate(sorted({str(row["label"]) for row in train}))}
        vectors = embed_texts(path, [row["text"] for row in rows], options, truncate=True)
        labels = np.array([names.get(str(row["label"]), -1) for row in rows])
        return {"accuracy": classified(vectors, labels, len(train)), "n": len(test)}
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
