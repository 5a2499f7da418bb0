"""GPT rows, and `open_dataset`: from token stores and plain options to a dataset.

A dataset is a pure function of (seed, epoch, row): `batch(position, count)` gives rows position .. position + count of
the endless sequence of epochs, whatever the batch size, ranks or restarts.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from ..core.errors import WrongUse
from .bert import BERTPairs
from .dataset import NO_TARGET, Batch, Dataset, DatasetOptions, Mixture
from .order import below, key, locate
from .packing import Placed, computed_once, lay_out, pack, split_documents
from .store import TokenStore

PIECE = np.dtype([("start", "<i8"), ("length", "<i4")])


class GPTWindows:
    """Window i covers tokens [i*S, i*S + S + 1): S inputs, and the same shifted by one as targets.

    With `random_offsets` the windows of epoch e begin at a phase drawn from [0, S) for (seed, e); an epoch then has one
    row less and leaves out up to S tokens at either end. With `separate_documents` the batch says where documents
    begin, and no target lies in another document than its input.
    """

    def __init__(self, store: TokenStore, options: DatasetOptions, cache: Path | None = None):
        self.store, self.options = store, options  # nothing to keep in a cache
        length = options.sequence_length
        self.rows = store.tokens // length - 1 if options.random_offsets else (store.tokens - 1) // length
        if self.rows < 1:
            why = f"{store.tokens:,} tokens, rows of {length:,} (+ 1 for the last target)"
            fix = "give more text, a larger part of it, or a smaller sequence_length"
            raise WrongUse("too little text for one training row", where=store.place, why=why, fix=fix)

    @property
    def tokens(self) -> int:
        return self.rows * self.options.sequence_length

    def batch(self, position: int, count: int) -> Batch:
        options, length = self.options, self.options.sequence_length
        epochs, rows = locate(position, count, self.rows, options.seed, options.order == "shuffled")
        starts = rows * length
        if options.random_offsets:
            starts += below(key(options.seed, epochs, 2), length)
        window = self.store.windows(starts, length + 1)
        batch = {"input_ids": window[:, :-1].copy(), "targets": window[:, 1:].copy()}
        if options.separate_documents:
            begins = _document_begins(self.store, starts, length + 1)
            batch["targets"][begins[:, 1:] > 0] = NO_TARGET
            begins, columns = begins[:, :-1], np.arange(length, dtype=np.int64)
            latest = np.maximum.accumulate(np.where(begins > 0, columns, 0), axis=1)
            batch["document_ids"] = np.cumsum(begins, axis=1, dtype=np.int32)
            batch["positions"] = columns - latest
        return batch


def _document_begins(store: TokenStore, starts: np.ndarray, length: int) -> np.ndarray:
    """How many documents begin at each token of each window after column 0: (rows, length) int32."""
    first, last = store.document_at(starts), store.document_at(starts + length - 1)
    counts = last - first
    row = np.repeat(np.arange(len(starts)), counts)
    inside = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = store.document_start(first[row] + 1 + inside) - starts[row]
    begins = np.zeros((len(starts), length), np.int32)
    np.add.at(begins, (row, columns), 1)
    return begins


class GPTPacked:
    """Documents cut into pieces of at most S inputs, packed best-fit into rows of S, shard by shard. A document of n
    tokens gives n - 1 inputs. The room left in a row is padding (document_ids -1, no target).
    """

    def __init__(self, store: TokenStore, options: DatasetOptions, cache: Path | None = None):
        self.store, self.options = store, options
        identity = {"what": "gpt rows", "store": store.content_identity(), "length": options.sequence_length}
        self.pieces, self.ends = computed_once(cache, identity, (PIECE, np.dtype("<i8")), self._index())
        self.rows = len(self.ends)
        if not self.rows:
            why = f"{store.tokens:,} tokens in {store.documents:,} documents, none of two tokens"
            raise WrongUse(
                "too little text for one training row", where=store.place, why=why, fix="give more text"
            )

    @cached_property
    def tokens(self) -> int:
        return int(self.pieces["length"].sum(dtype=np.int64))

    def _index(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        before = 0
        for first_token, part in self.store.parts():
            starts, lengths = split_documents(part.document_starts, self.options.sequence_length, spare=1)
            order, ends = pack(lengths, self.options.sequence_length)
            pieces = np.empty(len(order), PIECE)
            pieces["start"], pieces["length"] = starts[order] + first_token, lengths[order]
            yield pieces, ends + before
            before += len(pieces)

    def batch(self, position: int, count: int) -> Batch:
        options, length = self.options, self.options.sequence_length
        _, rows = locate(position, count, self.rows, options.seed, options.order == "shuffled")
        places, owner = lay_out(self.ends, rows)
        sizes = self.pieces["length"][places].astype(np.int64)
        placed = Placed(sizes, owner, count, length)
        source = np.repeat(self.pieces["start"][places], sizes) + placed.within
        return {
            "input_ids": placed.rows(self.store.take(source), options.pad_id, np.int64),
            "targets": placed.rows(self.store.take(source + 1), NO_TARGET, np.int64),
            "positions": placed.rows(placed.within, 0, np.int64),
            "document_ids": placed.rows(placed.numbers, -1, np.int32),
        }


def open_dataset(
    stores: TokenStore | Sequence[TokenStore],
    options: DatasetOptions,
    weights: Sequence[float] | None = None,
    cache: str | Path | None = None,
) -> Dataset:
    """The dataset of one store, or the mixture of several. `weights` are shares of the tokens; without weights every
    store is read equally often, so that its size is its share. What is computed once per store (packing, sentence
    pairs) is kept in the directory `cache`, without one in memory. Raises WrongUse when the options contradict each
    other or the store holds less than one row.
    """
    options.validate()
    make: Callable[..., Dataset] = GPTPacked if options.packing == "best_fit" else GPTWindows
    make = BERTPairs if options.family == "bert" else make
    stores = [stores] if isinstance(stores, TokenStore) else stores
    datasets = [make(store, options, None if cache is None else Path(cache)) for store in stores]
    if len(datasets) == 1:
        return datasets[0]
    if weights is None:
        return Mixture(datasets, [dataset.rows for dataset in datasets])
    tokens_per_row = [dataset.tokens / dataset.rows for dataset in datasets]
    if len(set(tokens_per_row)) > 1:  # rows with padding, or of sentence pairs
        weights = [weight / mean for weight, mean in zip(weights, tokens_per_row, strict=True)]
    return Mixture(datasets, weights)
