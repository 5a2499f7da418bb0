"""Labelled records: read, split by hash, framed as rows; predictions scored as official scripts do."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import WrongUse
from ...data import records
from ...data.answers import answer_f1, answer_words
from ...data.dataset import NO_TARGET
from ...data.tokenizer import Tokenizer
from .labels import Scheme
from .squad import questions

Record = dict[str, Any]
Row = dict[str, np.ndarray]  # input_ids (S,), token_types (S,), and what the task adds
OF_CLASSES = "has_class"  # (L,): whether a text is of each class


def read_records(path: str, squad: bool = False) -> list[Record]:
    """Records of a file by `data/records.py`; with `squad` each a question, as `squad.questions` gives them."""
    if not Path(path).is_file():
        raise WrongUse("no such file of records", where=path, fix="check data.train and data.validation")
    found = [records.whole_characters(record.data) for record in records.read_records([Path(path)])]
    return questions(found, path) if squad else found


def class_names(path: str, field: str) -> tuple[str, ...]:
    """The names of classes that the `datasets` library stores in a parquet file, of this field; else none."""
    if not path.endswith(".parquet"):
        return ()
    import pyarrow.parquet

    stored = (pyarrow.parquet.read_schema(path).metadata or {}).get(b"huggingface", b"{}")
    node: Any = json.loads(stored).get("info", {}).get("features", {}).get(field)
    while isinstance(node, dict | list) and node and "names" not in node:  # a list of classes
        node = node[0] if isinstance(node, list) else node.get("feature")
    return tuple(node["names"]) if isinstance(node, dict) and node else ()


def held_out(record: Record, fields: Sequence[str], fraction: float) -> bool:
    """Whether a record is measured on: decided by its content alone, so that equal records stay on one side."""
    content = json.dumps([record.get(field) for field in fields if field], ensure_ascii=False)
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") < fraction * 2**64


# names under which data sets of each task keep what `data.text_field`, `pair_field` and `label_field` name
SYNONYMS = {
    "text_field": "text sentence sentence1 premise review content query question anchor prompt instruction input "
    "tokens words",
    "pair_field": "passage positive pair sentence2 hypothesis answer document context text",
    "label_field": "label labels score class category target sentiment tags ner_tags response completion output answer",
}


def fields_of(records: Iterable[Record], data: Any, *roles: str) -> Iterator[tuple[Any, ...]]:
    """Of each record the fields that `data` (a `RecordsSection`) names for these roles, such as `text_field`. Raises
    WrongUse, with the fields of the file and the command that names them, where a record lacks one.
    """
    fields = [getattr(data, role) for role in roles]
    for number, record in enumerate(records, 1):
        if missing := [field for field in fields if record.get(field) is None]:
            raise WrongUse(
                f"record {number} has no {missing[0]!r}",
                where="data",
                why=f"it has: {', '.join(str(name) for name in record)}",
                fix=f"name the fields: {_naming(record, dict(zip(roles, fields)))}",
            )
        yield tuple(record[field] for field in fields)


def _naming(record: Record, fields: dict[str, str]) -> str:
    """The options that name a field of this record for each role that lacks one."""
    held = {name for name, value in record.items() if value is not None}
    free = held - set(fields.values())
    options = []
    for role, field in fields.items():
        if field not in held:
            known = next((name for name in SYNONYMS[role].split() if name in free), min(free, default="NAME"))
            free.discard(known)
            options.append(f"--set data.{role}={known}")
    return " ".join(options)


def pair_row(tokenizer: Tokenizer, first: np.ndarray, second: np.ndarray | None, length: int) -> Row:
    """[CLS] A [SEP] or [CLS] A [SEP] B [SEP], with all separators, at most `length` tokens: the longer is cut first."""
    parts = [first] if second is None else [first, second]
    between = 0 if second is None else tokenizer.separators - 1  # beside the one that ends each
    room = length - 1 - len(parts) - between
    sizes = [len(part) for part in parts]
    while sum(sizes) > room:
        longest = int(np.argmax(sizes))
        sizes[longest] -= max(1, min(sum(sizes) - room, sizes[longest] - min(sizes)))
    ids, types = [np.array([tokenizer.cls_id])], [np.zeros(1, np.int64)]
    for kind, (part, size) in enumerate(zip(parts, sizes)):
        ends = 1 + between * (kind == 0)
        ids += [part[:size], np.full(ends, tokenizer.sep_id)]
        types.append(np.full(size + ends, kind))
    return {"input_ids": np.concatenate(ids).astype(np.int64), "token_types": np.concatenate(types)}


def collate(rows: Sequence[Row], pad_id: int) -> dict[str, np.ndarray]:
    """Rows padded to the longest one: `attention_mask` (B, S) bool says what is real; numbers become (B,), a label for
    each class (B, L).
    """
    sizes = np.array([len(row["input_ids"]) for row in rows])
    real = np.arange(sizes.max()) < sizes[:, None]
    batch = {"attention_mask": real}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if first.ndim == 0 or name == OF_CLASSES:
            batch[name] = np.stack(values)
        else:
            empty = {"input_ids": pad_id, "targets": NO_TARGET}.get(name, 0)
            batch[name] = np.full(real.shape, empty, np.int64)
            batch[name][real] = np.concatenate(values)
    return batch


def classification(predicted: Sequence[int], right: Sequence[int], labels: int) -> dict[str, float]:
    """Accuracy, F1 (of class 1 of two, else the mean over the classes that occur), Matthews' correlation (Gorodkin
    2004), as GLUE reports them. A right class from `labels` on is one that the model does not have.
    """
    size = max(labels, max(right, default=0) + 1)
    table = np.zeros((size, size))
    np.add.at(table, (right, predicted), 1)
    hits, said, were, count = table.diagonal(), table.sum(0), table.sum(1), table.sum()
    f1 = 2 * hits / np.maximum(said + were, 1)
    covariance = hits.sum() * count - said @ were
    spread = (count**2 - said @ said) * (count**2 - were @ were)
    return {
        "accuracy": float(hits.sum() / count),
        "f1": float(f1[1] if labels == 2 and len(table) == 2 else f1[said + were > 0].mean()),
        "matthews": float(covariance / spread**0.5) if spread > 0 else 0.0,
    }


def several_classes(predicted_NL: np.ndarray, right_NL: np.ndarray) -> dict[str, float]:
    """Of texts of several classes each, bool (N, L): F1 over all decisions and the mean of the classes' F1 (0 for one
    that neither side has, as scikit-learn's `zero_division=0`), and the share of texts with all decisions right.
    """
    hits_L = (predicted_NL & right_NL).sum(0)
    marked_L = predicted_NL.sum(0) + right_NL.sum(0)
    return {
        "micro_f1": float(2 * hits_L.sum() / max(marked_L.sum(), 1)),
        "macro_f1": float((2 * hits_L / np.maximum(marked_L, 1)).mean()),
        "accuracy": float((predicted_NL == right_NL).all(1).mean()),
    }


def regression(predicted: Sequence[float], right: Sequence[float]) -> dict[str, float]:
    """Pearson's and Spearman's correlation, 0 where one side is constant, and the mean squared error (GLUE's STS-B)."""
    ours, theirs = np.array(predicted, np.float64), np.array(right, np.float64)
    return {
        "pearson": correlation(ours, theirs),
        "spearman": correlation(mean_ranks(ours), mean_ranks(theirs)),
        "mean_squared_error": float(np.square(ours - theirs).mean()),
    }


def correlation(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Pearson's correlation; 0 where one side is constant."""
    if np.ptp(ours) == 0 or np.ptp(theirs) == 0:
        return 0.0
    return float(np.corrcoef(ours, theirs)[0, 1])


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value from 1 on; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


Entity = tuple[str, int, int]  # type, first word, after the last


def entities(tags: Sequence[str], scheme: Scheme = "IOBES", is_suffix: bool = False) -> set[Entity]:
    """The entities in the tags of a sentence, as seqeval finds them: by the letters B, I, E and S as `conlleval` (an I-
    of another type or after O begins one), by B, I, L and U as its strict mode, which leaves broken ones out. Of plain
    types each run of one is an entity, as of types that all have I-.
    """
    parts = [_letter_and_type(tag, scheme, is_suffix) for tag in tags]
    return _whole_entities(parts) if scheme == "BILOU" else _lenient_entities(parts)


def _letter_and_type(tag: str, scheme: Scheme, is_suffix: bool) -> tuple[str, str]:
    if tag == "O":
        return "O", ""
    if scheme == "plain":
        return "I", tag
    letter, kind = (tag[-1], tag[:-2]) if is_suffix else (tag[0], tag[2:])
    return letter, kind or "_"


def _lenient_entities(parts: Sequence[tuple[str, str]]) -> set[Entity]:
    found, start = set(), -1
    before, kind_before = "O", ""
    for place, (letter, kind) in enumerate([*parts, ("O", "")]):
        ends = before in ("E", "S") or letter in ("B", "S", "O") or kind != kind_before
        if start >= 0 and ends:
            found.add((kind_before, start, place))
            start = -1
        if start < 0 and letter != "O":
            start = place
        before, kind_before = letter, kind
    return found


def _whole_entities(parts: Sequence[tuple[str, str]]) -> set[Entity]:
    found, start, kind_there = set(), -1, ""
    for place, (letter, kind) in enumerate(parts):
        if letter in ("B", "U"):
            start, kind_there = place, kind
        elif letter == "O" or kind != kind_there:
            start = -1
        if letter in ("L", "U"):
            if start >= 0:
                found.add((kind, start, place + 1))
            start = -1
    return found


def tagging(
    predicted: Sequence[Sequence[str]],
    right: Sequence[Sequence[str]],
    scheme: Scheme = "IOBES",
    is_suffix: bool = False,
) -> dict[str, float]:
    """Precision, recall and F1 of whole entities over all sentences, and the accuracy of single tags."""
    ours = {(row, *one) for row, tags in enumerate(predicted) for one in entities(tags, scheme, is_suffix)}
    theirs = {(row, *one) for row, tags in enumerate(right) for one in entities(tags, scheme, is_suffix)}
    both = len(ours & theirs)
    precision, recall = both / len(ours) if ours else 0.0, both / len(theirs) if theirs else 0.0
    tags = [(a, b) for first, second in zip(predicted, right) for a, b in zip(first, second, strict=True)]
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall) if both else 0.0,
        "accuracy": sum(a == b for a, b in tags) / len(tags) if tags else 0.0,
    }


def retrieval(scores_QP: np.ndarray, is_relevant_QP: np.ndarray) -> dict[str, float]:
    """Of the scores of every passage for every query: how many queries have a relevant passage first and among the
    first ten, the mean share of their relevant passages among the first ten, and the mean of 1 / rank of the first
    relevant one. A passage with the score of another does not stand behind it.
    """
    at_1, at_10, recalls, reciprocals = [], [], [], []
    for scores_P, is_relevant_P in zip(scores_QP, is_relevant_QP):
        ranks = 1 + (scores_P[None, :] > scores_P[is_relevant_P][:, None]).sum(1)
        at_1.append(ranks.min() == 1)
        at_10.append(ranks.min() <= 10)
        recalls.append((ranks <= 10).mean())
        reciprocals.append(1 / ranks.min())
    return {
        "accuracy_at_1": float(np.mean(at_1)),
        "accuracy_at_10": float(np.mean(at_10)),
        "recall_at_10": float(np.mean(recalls)),
        "mean_reciprocal_rank": float(np.mean(reciprocals)),
        "queries": scores_QP.shape[0],
        "passages": scores_QP.shape[1],
    }


def squad(predicted: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 in percent, each question with the best of its answers (Rajpurkar et al. 2016). The right
    answer to a question without one is no text (Rajpurkar et al. 2018); where there are such, the figures of both kinds
    are given too.
    """
    golds = [[text for text in given if answer_words(text)] for given in answers]
    scored = [
        (
            100.0 * max(answer_words(text) == answer_words(one) for one in gold or [""]),
            100.0 * max(answer_f1(text, one) for one in gold or [""]),
            bool(gold),
        )
        for text, gold in zip(predicted, golds, strict=True)
    ]
    figures = _mean_scores(scored, "")
    if not all(golds):
        figures |= _mean_scores([one for one in scored if one[2]], "answered_")
        figures |= _mean_scores([one for one in scored if not one[2]], "unanswerable_")
    return figures


def _mean_scores(scored: Sequence[tuple[float, float, bool]], prefix: str) -> dict[str, float]:
    if not scored:
        return {}
    exact, f1, _ = np.mean(np.array(scored), axis=0).tolist()
    return {f"{prefix}exact_match": exact, f"{prefix}f1": f1}
