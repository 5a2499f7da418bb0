"""A search collection in BEIR's form, and the rules by which BEIR scores it.

    corpus.jsonl        {"_id", "title", "text"}
    queries.jsonl       {"_id", "text"}
    qrels/<split>.tsv   query-id, corpus-id, score, with a header

The form is that of Thakur et al. 2021, "BEIR"; the metrics are trec_eval's, as BEIR and MTEB report them. MTEB's
collections are read too: any of the three as .jsonl or .parquet, or in a directory of its name, and `id` for `_id`.
BEIR's rules:

| found                                         | done                                                                |
|-----------------------------------------------|---------------------------------------------------------------------|
| a judged document that is not in the corpus   | it cannot be found, and counts in recall's and nDCG's denominators  |
| a judged query that is not among the queries  | left out                                                            |
| an id twice                                   | the last one counts                                                 |
| a document with the id of the query           | left out of the query's hits, unless `keep_identical`               |
| documents with equal scores                   | ordered by id, the largest first, as trec_eval does                 |
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean

import numpy as np

from ..core.errors import WrongUse
from ..data.records import find_files, iter_records, whole_characters

NDCG_AT, RECALL_AT = 10, (5, 10, 100)
QRELS = ("query-id", "corpus-id", "score")
SHOWN_IDS = 3  # in a warning
Scores = Callable[[str], np.ndarray]  # of a query, over the documents
_WHOLE_NUMBER = re.compile(r"[-+]?\d+(?:\.0*)?")


@dataclass(frozen=True)
class Collection:
    """Documents by id, queries by id, and by query the grades of its judged documents."""

    documents: dict[str, str]
    queries: dict[str, str]
    relevant: dict[str, dict[str, int]]
    missing_documents: tuple[str, ...] = ()  # judged, and not in the corpus
    missing_queries: tuple[str, ...] = ()  # judged, and not among the queries
    warnings: tuple[str, ...] = ()

    @cached_property
    def places(self) -> dict[str, int]:
        """The place of every document by its id."""
        return {name: place for place, name in enumerate(self.documents)}

    @property
    def identical_ids(self) -> int:
        """The number of queries whose id is a document's too."""
        return len(self.queries.keys() & self.documents.keys())

    @property
    def own_answers(self) -> int:
        """The number of queries that have the document with their own id as an answer."""
        return sum(grades.get(query, 0) > 0 for query, grades in self.relevant.items())


def read_collection(folder: Path, split: str = "test") -> Collection:
    """Return the corpus of a folder and the queries of a split. Raises WrongUse for a file that is not there or lacks a
    field, and where no judged query has a text.
    """
    corpus_files = _files(folder, "corpus")
    query_files = _files(folder, "queries")
    qrels_files = _files(folder / "qrels", split)
    documents, repeated_documents = _read_texts(corpus_files)
    queries, repeated_queries = _read_texts(query_files)
    judged = _read_qrels(qrels_files)
    judged_documents = dict.fromkeys(name for grades in judged.values() for name in grades)
    missing_documents = tuple(name for name in judged_documents if name not in documents)
    missing_queries = tuple(name for name in judged if name not in queries)
    warnings = [
        *_repeats(corpus_files[0], "documents", repeated_documents),
        *_equal_texts(documents),
        *_repeats(query_files[0], "queries", repeated_queries),
    ]
    if missing_documents:
        count = f"{len(missing_documents):,} of {len(judged_documents):,} judged documents"
        where = f"{count} of {qrels_files[0]} are not in {corpus_files[0].name} ({_shown(missing_documents)})"
        warnings.append(f"{where}: they count as not found")
    if missing_queries:
        count = f"{len(missing_queries):,} of {len(judged):,} queries"
        where = f"{count} of {qrels_files[0]} are not in {query_files[0].name} ({_shown(missing_queries)})"
        warnings.append(f"{where}: they are left out")
    relevant = {query: grades for query, grades in judged.items() if query in queries}
    if not relevant:
        why = f"none of its {len(judged):,} queries is in {query_files[0]}" if judged else ""
        fix = f"a header and lines of {', '.join(QRELS)}; a query-id is an `_id` of {query_files[0].name}"
        raise WrongUse("no query is asked", where=qrels_files[0], why=why, fix=fix)
    texts = {query: queries[query] for query in relevant}
    return Collection(documents, texts, relevant, missing_documents, missing_queries, tuple(warnings))


def _files(folder: Path, name: str) -> list[Path]:
    """The files that hold one part of a collection. Raises WrongUse without any."""
    forms = ("jsonl", "tsv", "parquet")
    patterns = [f"{name}.{form}" for form in forms]
    patterns += [f"{name}.{form}.*" for form in forms]
    patterns += [f"{name}-*.parquet", f"{name}/*"]  # as the hub's converter names files
    files = find_files(patterns, folder)
    if not files:
        suffix = "tsv" if folder.name == "qrels" else "jsonl"
        fix = "a folder has corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv; --split names another split"
        where = folder / f"{name}.{suffix}"
        raise WrongUse("no folder in BEIR's form", where=where, why="it is not there", fix=fix)
    return files


def _read_texts(files: Sequence[Path]) -> tuple[dict[str, str], Counter[str]]:
    """Return the title and text of every line by its id, and how often an id comes again. Raises WrongUse for a line
    without an id or a text.
    """
    texts: dict[str, str] = {}
    repeated: Counter[str] = Counter()
    for record in iter_records(files):
        row = record.data
        name = row.get("_id", row.get("id"))
        if name is None or not isinstance(row.get("text"), str):
            raise WrongUse("no `_id` or no `text`", where=record.where, why=f"it has {', '.join(row)}")
        if str(name) in texts:
            repeated[str(name)] += 1
        texts[str(name)] = whole_characters(f"{row.get('title') or ''} {row['text']}".strip())
    return texts, repeated


def _read_qrels(files: Sequence[Path]) -> dict[str, dict[str, int]]:
    """Return the grades by query and document. Raises WrongUse for a line without one of the three columns, and for a
    grade that is no whole number.
    """
    grades: dict[str, dict[str, int]] = {}
    for record in iter_records(files):
        query, document, grade = (str(record.data.get(name, "")) for name in QRELS)
        if not all(name in record.data for name in QRELS) or not _WHOLE_NUMBER.fullmatch(grade):
            why = f"it has {', '.join(record.data)}; the score {grade!r} is no whole number"
            raise WrongUse("no line of qrels", where=record.where, why=why, fix=f"columns {', '.join(QRELS)}")
        grades.setdefault(query, {})[document] = int(float(grade))
    return grades


def _shown(names: Sequence[str]) -> str:
    rest = ", …" if len(names) > SHOWN_IDS else ""
    return ", ".join(names[:SHOWN_IDS]) + rest


def _repeats(file: Path, kind: str, repeated: Counter[str]) -> list[str]:
    if not repeated:
        return []
    count = f"{repeated.total():,} {kind} of {file} have the `_id` of an earlier one"
    return [f"{count} ({_shown(list(repeated))}): the last one counts"]


def _equal_texts(documents: dict[str, str]) -> list[str]:
    """Return a warning about documents with equal title and text: the search may rank any of them first."""
    first_by_text: dict[str, str] = {}
    copies = [name for name, text in documents.items() if first_by_text.setdefault(text, name) != name]
    if not copies:
        return []
    return [
        f"{len(copies):,} documents have the title and text of another ({_shown(copies)}): all are ranked"
    ]


def ranking(names: Sequence[str], scores_D: np.ndarray, most: int) -> list[str]:
    """The `most` best documents, best first; of equal scores the one with the largest id, as trec_eval ranks them."""
    count = len(names)
    if count > most:  # all that reach the score of the last place: equal scores are ordered by id among them
        least = np.partition(scores_D, count - most)[count - most]
        places = np.flatnonzero(scores_D >= least)
    else:
        places = np.arange(count)
    by_id = sorted(places.tolist(), key=lambda place: names[place], reverse=True)
    best = sorted(by_id, key=lambda place: -scores_D[place])
    return [names[place] for place in best[:most]]


def candidates(collection: Collection, query: str, keep_identical: bool) -> np.ndarray:
    """The places of the documents that a query may find: all but the one with its own id."""
    places = np.arange(len(collection.documents))
    own = collection.places.get(query)
    return places if keep_identical or own is None else np.delete(places, own)


def metrics(order: Sequence[str], grades: dict[str, int]) -> dict[str, float]:
    """nDCG and recall of documents in their order, best first, as trec_eval has them: a grade below 1 is no answer."""
    answers = {document: grade for document, grade in grades.items() if grade > 0}

    def gain(grades_in_order: Iterable[int]) -> float:
        return sum(grade / math.log2(place + 2) for place, grade in enumerate(grades_in_order))

    best = gain(sorted(answers.values(), reverse=True)[:NDCG_AT])
    reached = gain(answers.get(document, 0) for document in order[:NDCG_AT])
    values = {f"nDCG@{NDCG_AT}": reached / best if best else 0.0}
    for most in RECALL_AT:
        values[f"recall@{most}"] = len(answers.keys() & set(order[:most])) / max(len(answers), 1)
    return values


def mean_metrics(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The mean of each metric over the queries."""
    return {name: fmean(row[name] for row in rows) for name in rows[0]}
