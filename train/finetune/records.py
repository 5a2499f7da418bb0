"""Labelled records: read from files, split by their hash, and framed as rows for a model."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import Failed, WrongUse
from ...data import records
from ...data.tokenizer import Tokenizer
from ..loss import IGNORED

Record = dict[str, Any]
Row = dict[str, np.ndarray]  # input_ids (S,), token_types (S,), and what the task adds


def read_records(path: str, squad: bool = False) -> list[Record]:
    """The records of a file, in the formats of `data/records.py`. With `squad` one for each question: id, question,
    context, answers. Raises WrongUse for a file that is not there.
    """
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
    """Whether a record belongs to the part that is measured on: decided by its content alone, so that equal
    records stay on one side.
    """
    content = json.dumps([record.get(field) for field in fields if field], ensure_ascii=False)
    digest = hashlib.sha256(content.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


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
    """[CLS] A [SEP], or [CLS] A [SEP] B [SEP] with the tokenizer's separators between, of at most `length` tokens: the
    longer one is shortened first.
    """
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
            empty = {"input_ids": pad_id, "targets": IGNORED}.get(name, 0)
            batch[name] = np.full(real.shape, empty, np.int64)
            batch[name][real] = np.concatenate(values)
    return batch
