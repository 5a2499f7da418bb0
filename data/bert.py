"""BERT rows: [CLS] A [SEP] B [SEP], masked anew each time, a pair to a row or packed without padding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import WrongUse
from .cache import computed_once
from .masking import Masker
from .options import NO_TARGET, Batch, DatasetOptions
from .order import key, locate
from .packing import Placed, lay_out, pack
from .pairs import PAIR, check_sentences, sample_segments
from .store import TokenStore


class BERTPairs:
    """Sentence pairs (or stretches) of a store. A packed row holds whole pairs of one shard, kept apart.

    An epoch is `pair_copies` passes over the text. The rows and their pairs are fixed for a store; their
    order and their masks are drawn for (seed, epoch).
    """

    def __init__(self, store: TokenStore, options: DatasetOptions, cache: Path | None = None):
        check_sentences(store, options)
        self.store, self.options, self.mask = store, options, Masker(options)
        identity = {"what": "bert rows", "store": store.content_identity(), "length": options.sequence_length}
        identity |= {"packed": options.packing == "packed", "nsp": options.nsp}
        if options.nsp != "none":
            identity |= {"seed": options.seed, "copies": options.pair_copies, "short": options.short_fraction}
        self.pairs, self.ends = computed_once(cache, identity, (PAIR, np.dtype("<i8")), self._index())
        self.rows = len(self.ends)
        if not self.rows:
            why = f"{store.tokens:,} tokens"
            raise WrongUse("too little text for one training row", why=why, fix="give more text")

    def _index(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Per shard: its pairs row by row, and the end of each row among all pairs."""
        pairs_before, documents_before = 0, 0
        for first_token, part in self.store.parts():
            pairs = sample_segments(part, first_token, documents_before, self.options)
            ends = np.arange(1, len(pairs) + 1)
            if self.options.packing == "packed":
                order, ends = pack(_row_lengths(pairs), self.options.sequence_length)
                pairs = pairs[order]
            yield pairs, ends + pairs_before
            pairs_before, documents_before = pairs_before + len(pairs), documents_before + part.documents

    def batch(self, position: int, count: int) -> Batch:
        options, length = self.options, self.options.sequence_length
        epochs, rows = locate(position, count, self.rows, options.seed, options.order == "shuffled")
        if options.packing == "packed":
            places, owner = lay_out(self.ends, rows)
        else:
            places, owner = rows, np.arange(count)
        pairs = self.pairs[places]
        sizes = _row_lengths(pairs)
        placed = Placed(sizes, owner, count, length)
        tokens, types = _assemble(self.store, pairs, sizes, placed.within, options)
        inputs, targets = self.mask(tokens, sizes, key(options.seed, epochs[owner], places, 4))
        batch = {
            "input_ids": placed.rows(inputs, options.pad_id, np.int64),
            "targets": placed.rows(targets, NO_TARGET, np.int64),
            "token_types": placed.rows(types, 0, np.int64),
        }
        if options.packing == "packed":
            batch["positions"] = placed.rows(placed.within, 0, np.int64)
            batch["document_ids"] = placed.rows(placed.numbers, -1, np.int32)
        else:
            batch["attention_mask"] = placed.rows(True, False, bool)
        if options.nsp != "none":
            labels = pairs["label"].astype(np.int64)
            if options.packing == "packed":  # (B, S): the label stands at each [CLS]
                labels = np.where(placed.within == 0, np.repeat(labels, sizes), NO_TARGET)
                labels = placed.rows(labels, NO_TARGET, np.int64)
            batch["nsp_targets"] = labels
        return batch


def _row_lengths(pairs: np.ndarray) -> np.ndarray:
    """Tokens of each sample with its special ones."""
    return pairs["a_length"].astype(np.int64) + pairs["b_length"] + 2 + (pairs["b_length"] > 0)


def _assemble(
    store: TokenStore, pairs: np.ndarray, sizes: np.ndarray, within: np.ndarray, options: DatasetOptions
) -> Any:
    """(tokens, token types) of samples laid end to end, int64; `within`: each token's place in its own."""
    starts = np.cumsum(sizes) - sizes
    after_a = np.repeat(pairs["a_length"].astype(np.int64) + 1, sizes)  # where the first [SEP] stands
    in_b = within > after_a
    b = np.repeat(pairs["b"], sizes) - after_a - 1
    source = np.where(in_b, b, np.repeat(pairs["a"] - 1, sizes)) + within
    special = (within == 0) | (within == after_a)
    special[starts + sizes - 1] = True
    source[special] = 0
    tokens = store.take(source)
    tokens[special] = options.sep_id
    tokens[starts] = options.cls_id
    return tokens, in_b.astype(np.int64)
