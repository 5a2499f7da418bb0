"""GPT rows of whole documents: best-fit packing, attention kept inside each document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from ..core.errors import WrongUse
from .cache import computed_once
from .options import NO_TARGET, DatasetOptions
from .order import locate
from .packing import columns, lay_out, pack
from .pairs import split_documents
from .store import TokenStore

PIECE = np.dtype([("start", "<i8"), ("length", "<i4")])


class GPTPacked:
    """Documents cut into pieces of at most S inputs, packed best-fit into rows of S, shard by shard.

    A document of n tokens gives n - 1 inputs, each with the next token of the same document as its target; a document
    of one token gives none. The room left in a row is padding (document_ids -1, no target).
    """

    def __init__(self, store: TokenStore, options: DatasetOptions, cache: Path | None = None):
        self.store, self.options = store, options
        identity = {"what": "gpt rows", "store": store.content_identity(), "length": options.sequence_length}
        self.pieces, self.ends = computed_once(cache, identity, (PIECE, np.dtype("<i8")), self._index())
        self.rows = len(self.ends)
        if not self.rows:
            why = f"{store.tokens:,} tokens in {store.documents:,} documents, none of two tokens"
            raise WrongUse("too little text for one training row", why=why, fix="give more text")

    def _index(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        before = 0
        for first_token, part in self.store.parts():
            starts, lengths = split_documents(part.document_starts, self.options.sequence_length, spare=1)
            order, ends = pack(lengths, self.options.sequence_length)
            pieces = np.empty(len(order), PIECE)
            pieces["start"], pieces["length"] = starts[order] + first_token, lengths[order]
            yield pieces, ends + before
            before += len(pieces)

    def batch(self, position: int, count: int) -> dict[str, np.ndarray]:
        options, length = self.options, self.options.sequence_length
        _, rows = locate(position, count, self.rows, options.seed, options.order == "shuffled")
        places, owner = lay_out(self.ends, rows)
        sizes = self.pieces["length"][places].astype(np.int64)
        within = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        source = np.repeat(self.pieces["start"][places], sizes) + within
        spots = np.repeat(owner * length + columns(sizes, owner), sizes) + within
        shape = count * length
        batch: dict[str, np.ndarray] = {
            "input_ids": np.full(shape, options.pad_id, np.int64),
            "targets": np.full(shape, NO_TARGET, np.int64),
            "positions": np.zeros(shape, np.int64),
            "document_ids": np.full(shape, -1, np.int32),
        }
        batch["input_ids"][spots] = self.store.take(source)
        batch["targets"][spots] = self.store.take(source + 1)
        batch["positions"][spots] = within
        batch["document_ids"][spots] = np.repeat(np.arange(len(owner)) - np.searchsorted(owner, owner), sizes)
        return {name: values.reshape(count, length) for name, values in batch.items()}
