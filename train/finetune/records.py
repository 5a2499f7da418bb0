"""Labelled records: read, split by hash, framed as rows; predictions scored as official scripts do."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import Failed, WrongUse
from ...data import records
from ...data.answers import answer_f1, answer_words
from ...data.dataset import NO_TARGET
from ...data.tokenizer import Tokenizer

Record = dict[str, Any]
Row = dict[str, np.ndarray]  # input_ids (S,), token_types (S,), and what the task adds


def read_records(path: str, squad: bool = False) -> list[Record]:
    """Records of a file by `data/records.py`; with `squad` each a question (id, question, context, answers)."""
    if not Path(path).is_file():
        raise WrongUse("no such file of records", where=path, fix="check data.train and data.validation")
    found = [record.data for record in records.read_records([Path(path)])]
    if not squad:
        return found
    try:
        return [
            {
                "id": str(question["id"]),
                "question": question["question"],
                "context": paragraph["context"],
                "answers": [(answer["answer_start"], answer["text"]) for answer in question["answers"]],
            }
            for article in found
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
            if question["answers"]
        ]
    except (KeyError, TypeError) as error:
        raise Failed("not a file in SQuAD's format", where=path, why=f"no {error}") from error


def held_out(record: Record, fields: Sequence[str], fraction: float) -> bool:
    """Whether a record is measured on: decided by its content alone, so that equal records stay on one side."""
    content = json.dumps([record.get(field) for field in fields if field], ensure_ascii=False)
    return int.from_bytes(hashlib.sha256(content.encode()).digest()[:8], "big") < fraction * 2**64


def fields_of(records: Iterable[Record], *fields: str) -> Iterator[tuple[Any, ...]]:
    """These fields of each record, which must be there."""
    for number, record in enumerate(records, 1):
        for field in fields:
            if record.get(field) is None:
                why = f"it has: {', '.join(str(name) for name in record)}"
                fix = "name the fields by data.text_field, data.pair_field and data.label_field"
                raise WrongUse(f"record {number} has no {field!r}", where="data", why=why, fix=fix)
        yield tuple(record[field] for field in fields)


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
    """Rows padded to the longest one: `attention_mask` (B, S) bool says what is real; numbers become (B,)."""
    sizes = np.array([len(row["input_ids"]) for row in rows])
    real = np.arange(sizes.max()) < sizes[:, None]
    batch = {"attention_mask": real}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if first.ndim == 0:
            batch[name] = np.array(values)
        else:
            empty = {"input_ids": pad_id, "targets": NO_TARGET}.get(name, 0)
            batch[name] = np.full(real.shape, empty, np.int64)
            batch[name][real] = np.concatenate(values)
    return batch


def classification(predicted: Sequence[int], right: Sequence[int], labels: int) -> dict[str, float]:
    """Accuracy, F1 (of class 1 of two, else the mean), Matthews' correlation (Gorodkin 2004), as GLUE reports them."""
    table = np.zeros((labels, labels))
    np.add.at(table, (right, predicted), 1)
    hits, said, were, count = table.diagonal(), table.sum(0), table.sum(1), table.sum()
    f1 = 2 * hits / np.maximum(said + were, 1)
    covariance = hits.sum() * count - said @ were
    spread = (count**2 - said @ said) * (count**2 - were @ were)
    return {
        "accuracy": float(hits.sum() / count),
        "f1": float(f1[1] if labels == 2 else f1[said + were > 0].mean()),
        "matthews": float(covariance / spread**0.5) if spread > 0 else 0.0,
    }


def entities(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """(type, first, after last) of entities in BIO tags, as conlleval: an I- of another type or after O begins one."""
    found, kind, start = set(), "", 0
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, name = tag.partition("-")
        name = name or ("" if prefix == "O" else "_")
        if kind and (prefix != "I" or name != kind):
            found.add((kind, start, place))
            kind = ""
        if prefix != "O" and not kind:
            kind, start = name, place
    return found


def tagging(predicted: Sequence[Sequence[str]], right: Sequence[Sequence[str]]) -> dict[str, float]:
    """Precision, recall and F1 of whole entities over all sentences, and the accuracy of single tags."""
    ours = {(row, *entity) for row, tags in enumerate(predicted) for entity in entities(tags)}
    theirs = {(row, *entity) for row, tags in enumerate(right) for entity in entities(tags)}
    both = len(ours & theirs)
    precision, recall = both / len(ours) if ours else 0.0, both / len(theirs) if theirs else 0.0
    tags = [(a, b) for first, second in zip(predicted, right) for a, b in zip(first, second, strict=True)]
    return {
        "precision": precision,
        "recall": recall,
        "f1": 2 * precision * recall / (precision + recall) if both else 0.0,
        "accuracy": sum(a == b for a, b in tags) / len(tags) if tags else 0.0,
    }


def squad(predicted: Sequence[str], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    """Exact match and F1 in percent, each question with the best of its answers (Rajpurkar et al. 2016)."""
    pairs = list(zip(predicted, answers, strict=True))
    exact = [max(answer_words(text) == answer_words(one) for one in given) for text, given in pairs]
    f1 = [max(answer_f1(text, one) for one in given) for text, given in pairs]
    return {"exact_match": 100 * sum(exact) / len(exact), "f1": 100 * sum(f1) / len(f1)}
