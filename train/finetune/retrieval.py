"""Embeddings for search: queries beside passages, both known by their content.

Shape letters: B rows, S positions, W width, Q queries, P passages.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..loss import Batch, Model, cross_entropy_sum, wide_dtype
from ..parallel.mesh import Axis
from .records import Record, Row, fields_of, retrieval
from .task import Task

Relevant = dict[bytes, set[bytes]]  # the passages that answer a query


def text_pairs(rows: Sequence[Row]) -> list[tuple[bytes, bytes]]:
    """Return (query hash, passage hash) of each record; equal token ids have equal hashes."""
    names = [hashlib.blake2b(row["input_ids"].tobytes(), digest_size=16).digest() for row in rows]
    return list(zip(names[0::2], names[1::2]))


def relevant_passages(pairs: Iterable[tuple[bytes, bytes]]) -> Relevant:
    """All passages of each query."""
    relevant: Relevant = {}
    for query, passage in pairs:
        relevant.setdefault(query, set()).add(passage)
    return relevant


@dataclass
class Retrieval(Task):
    """Each query against the passages of its batch by cosine, as `embed` (van den Oord et al. 2018, InfoNCE). Texts
    that are the same tokens are one text: a passage is one candidate however often it stands in a batch, and no passage
    that answers a query anywhere in the records is a wrong answer to it.
    """

    untrained: tuple[str, ...] = ("mlm_", "pooler.", "nsp.")
    rows_per_record: int = 2  # query, passage
    relevant: Relevant = field(default_factory=dict)  # of all pairs learnt from

    def inspect(self, rows: Sequence[Row]) -> None:
        pairs = text_pairs(rows)
        self.relevant = relevant_passages(pairs)
        queries, passages = ({pair[side] for pair in pairs} for side in (0, 1))
        if len(queries) < len(pairs) or len(passages) < len(pairs):
            text = f"{len(pairs):,} pairs, of which {len(pairs) - len(set(pairs)):,} repeat another; "
            text += f"{len(queries):,} different queries, {len(passages):,} different passages"
            self.notes.append((False, f"{text}: equal passages are one candidate"))

    def rows(self, records: Sequence[Record]) -> list[Row]:
        data, encode = self.recipe.data, self.tokenizer.encode
        texts = [text for pair in fields_of(records, data, "text_field", "pair_field") for text in pair]
        length, framed = self.sentence.context(self.length), self.sentence.text
        self.cut_rows = 0
        return [self.framed(encode(framed(str(text))), None, length) for text in texts]

    def collated(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """With `is_candidate` (Q, P) bool: the passages that a query is compared with."""
        batch, pairs = super().collated(rows), text_pairs(rows)
        here = relevant_passages(pairs)
        places = {passage: place for place, (_, passage) in reversed(list(enumerate(pairs)))}
        is_candidate = np.zeros((len(pairs), len(pairs)), dtype=bool)
        is_candidate[:, list(places.values())] = True
        for row, (query, _) in enumerate(pairs):
            answers = here[query] | self.relevant.get(query, set())
            is_candidate[row, [places[answer] for answer in answers & places.keys()]] = False
            is_candidate[row, row] = True
        return batch | {"is_candidate": is_candidate}

    def vectors(self, hidden_BSW: Tensor, batch: Batch) -> Tensor:
        """(B, W), each of length 1."""
        real, wide_BSW = batch["attention_mask"][..., None], hidden_BSW.to(wide_dtype(hidden_BSW.dtype))
        if self.sentence.pooling != "mean":
            place = (real.sum(1, keepdim=True) - 1) * (self.sentence.pooling == "last")
            return F.normalize(wide_BSW.take_along_dim(place, 1)[:, 0], dim=-1)
        return F.normalize((wide_BSW * real).sum(1) / real.sum(1), dim=-1)

    def sums(self, model: Model, hidden_BSW: Tensor, batch: Batch, axis: Axis) -> Tensor:
        vectors = self.vectors(hidden_BSW, batch)
        cosines = vectors[0::2] @ vectors[1::2].T / self.recipe.temperature
        cosines = cosines.masked_fill(~batch["is_candidate"], float("-inf"))
        return cross_entropy_sum(cosines, torch.arange(len(cosines), device=cosines.device)).view(1)

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        """Each different query against all different passages that were held out."""
        hidden = getattr(model, "encoder", model).hidden
        vectors = torch.cat([self.vectors(*answer) for answer in self.answers(hidden, records, device)])
        pairs = text_pairs(self.rows(records))
        here = relevant_passages(pairs)
        queries = {query: place for place, (query, _) in reversed(list(enumerate(pairs)))}
        passages = {passage: place for place, (_, passage) in reversed(list(enumerate(pairs)))}
        cosines_QP = vectors[0::2][list(queries.values())] @ vectors[1::2][list(passages.values())].T
        column_of = {passage: column for column, passage in enumerate(passages)}
        is_relevant_QP = np.zeros(cosines_QP.shape, bool)
        for row, query in enumerate(queries):
            answers = here[query] | self.relevant.get(query, set())
            is_relevant_QP[row, [column_of[answer] for answer in answers & column_of.keys()]] = True
        return retrieval(cosines_QP.cpu().numpy(), is_relevant_QP)
