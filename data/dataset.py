"""What a dataset is: its options as plain values, mixtures of several, and batches made ahead of the training step.

Weights of a mixture become whole numbers out of PERIOD (or their exact ratio, when it needs a smaller period), so any
position is found at once. The next sample comes from the dataset whose share is most urgent (Tijdeman 1980, the
chairman assignment problem), which keeps every prefix within one sample of its share: simple rounding does not.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from typing import Literal, Protocol, Self

import numpy as np

from ..core.console import warn
from ..core.errors import WrongUse

NO_TARGET = -100  # the value of `targets` where nothing is to be predicted

Batch = dict[str, np.ndarray]  # docs/architecture.md lists the keys


class Dataset(Protocol):
    """What training reads: `rows` in one epoch, the `tokens` in them without padding, and any rows by position."""

    @property
    def rows(self) -> int: ...

    @property
    def tokens(self) -> int: ...

    def batch(self, position: int, count: int) -> Batch: ...


@dataclass(frozen=True)
class DatasetOptions:
    """One dataset. Sizes are in tokens; ids belong to the store's tokenizer.

    `packing`: "windows" cuts the stream every `sequence_length` tokens (GPT) or gives each pair a row (BERT);
    "best_fit" (GPT) and "packed" (BERT) put whole documents or pairs together, kept apart in attention, with little
    padding.
    """

    family: Literal["gpt", "bert"]
    sequence_length: int
    seed: int = 0
    order: Literal["shuffled", "sequential"] = "shuffled"
    packing: Literal["windows", "best_fit", "packed"] = "windows"
    separate_documents: bool = False  # GPT windows: attention, positions and targets stay inside a document
    random_offsets: bool = False  # GPT windows: every epoch cuts the stream at another phase
    nsp: Literal["nsp", "sop", "none"] = "nsp"
    pair_copies: int = 1  # BERT: how many differently drawn passes over the text make one epoch
    short_fraction: float = 0.1  # BERT: documents whose pairs aim at a shorter length
    mask_rate: float = 0.15
    whole_word: bool = False
    continuation_ids: tuple[int, ...] = field(default=(), repr=False)  # of "##…" entries, for whole_word
    vocab_size: int = 0
    special_ids: tuple[int, ...] = field(default=(), repr=False)  # never masked, never drawn as a replacement
    pad_id: int = 0
    cls_id: int | None = None
    sep_id: int | None = None
    mask_id: int | None = None

    def validate(self) -> Self:
        """Itself. Raises WrongUse naming every problem."""
        problems = []
        if self.sequence_length < (1 if self.family == "gpt" else 8):
            problems.append(f"sequence_length = {self.sequence_length} is too short")
        if self.packing == ("packed" if self.family == "gpt" else "best_fit"):
            problems.append(f'packing = "{self.packing}" does not exist for family "{self.family}"')
        if self.random_offsets and (self.packing != "windows" or self.order == "sequential"):
            problems.append("random_offsets needs shuffled windows")
        if self.family == "bert":
            ids = ("cls_id", "sep_id", "mask_id")
            problems += [f"{name} is missing" for name in ids if getattr(self, name) is None]
            if self.vocab_size < 1:
                problems.append("vocab_size is missing")
            if not 0 < self.mask_rate < 1:
                problems.append(f"mask_rate = {self.mask_rate} is not between 0 and 1")
            if self.whole_word and not self.continuation_ids:
                what = "whole_word needs the ids that continue a word"
                problems.append(f"{what}; this tokenizer has none (no ## entries)")
            if self.pair_copies < 1:
                problems.append(f"pair_copies = {self.pair_copies} is less than 1")
        if problems:
            raise WrongUse("the dataset's options do not fit together", why="; ".join(problems))
        return self


PERIOD = 10_000


class Mixture:
    """Rows of several `datasets` of one kind in proportion to `weights`; `shares` are the proportions after rounding.
    An epoch has as many rows as all datasets together. A dataset whose rows are used up begins its next epoch.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float]):
        if len(weights) != len(datasets) or any(not weight > 0 or math.isinf(weight) for weight in weights):
            why = f"{len(datasets)} stores, weights {list(weights)}"
            raise WrongUse("a mixture needs one positive weight for each store", why=why)
        self.datasets = list(datasets)
        self._counts = _whole(weights)
        self._table = _schedule(self._counts)
        self.shares = [count / sum(self._counts) for count in self._counts]
        asked = [weight / sum(weights) for weight in weights]
        if far := [(a, b) for a, b in zip(asked, self.shares) if abs(a - b) > 0.01 * a]:
            rounded = f"a share of {far[0][0]:.3g} in the mixture is rounded to {far[0][1]:.3g}"
            warn(f"{rounded}: shares are whole parts of {PERIOD:,}")
        self.rows = sum(dataset.rows for dataset in datasets)

    @property
    def tokens(self) -> int:
        return sum(dataset.tokens for dataset in self.datasets)

    def taken(self, position: int) -> np.ndarray:
        """How many of the first `position` samples come from each dataset, int64 (datasets,)."""
        period = len(self._table)
        counts = np.bincount(self._table[: position % period], minlength=len(self.datasets))
        return counts + np.array(self._counts) * (position // period)

    def batch(self, position: int, count: int) -> Batch:
        sources = self._table[np.arange(position, position + count) % len(self._table)]
        before = self.taken(position)
        out: Batch = {}
        for index in np.unique(sources):
            rows = np.flatnonzero(sources == index)
            part = self.datasets[index].batch(int(before[index]), len(rows))
            for name, values in part.items():
                if name not in out:
                    out[name] = np.empty((count, *values.shape[1:]), values.dtype)
                out[name][rows] = values
        return out


def _whole(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole numbers in their exact ratio, or (each at least 1) out of PERIOD if it needs more."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    whole = [number // math.gcd(*whole) for number in whole]
    if sum(whole) <= PERIOD:
        return tuple(whole)
    ideal = [fraction / sum(exact) * PERIOD for fraction in exact]
    rounded = [max(1, int(number)) for number in ideal]
    by_rest = sorted(range(len(ideal)), key=lambda i: int(ideal[i]) - ideal[i])
    for step in range(max(0, PERIOD - sum(rounded))):
        rounded[by_rest[step % len(ideal)]] += 1
    return tuple(rounded)


@lru_cache(maxsize=16)
def _schedule(counts: tuple[int, ...]) -> np.ndarray:
    """The dataset of each sample of one period, int64: an earliest-deadline schedule in exact arithmetic."""
    period, kinds = sum(counts), len(counts)
    given = [0] * kinds
    table = np.empty(period, np.int64)
    scale = 2 * kinds - 2 or 1
    for step in range(1, period + 1):
        best, deadline = -1, 0.0
        for kind, count in enumerate(counts):
            owed = count * step - given[kind] * period  # its share so far less what it gave, times the period
            if kinds == 1 or owed * scale >= period:
                due = (period * (scale - 1) / scale - owed) / count
                if best < 0 or due < deadline:
                    best, deadline = kind, due
        given[best] += 1
        table[step - 1] = best
    return table


class Loader:
    """An endless iterator of batches; `position`, its only state: samples consumed by all ranks, that batch included.

    Batch k of rank r is rows position + (k * world + r) * batch_size onward: a pure function, as it is where the size
    follows from the position, so any number of workers, ranks and restarts reads the same rows. Workers are threads:
    NumPy's large loops and the tokenizer release Python's lock, and a process would copy each batch once more.

    `batch_size`: rows of one rank's batch, or how many they are at a position. `workers` threads keep `ahead` batches
    each ready; with 0 a batch is made when it is asked for. `waited` counts the batches that were not ready, after the
    first. Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int | Callable[[int], int],
        *,
        position: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int = 1,
        ahead: int = 4,
    ):
        self._rows: Callable[[int], int] = batch_size if callable(batch_size) else lambda _: batch_size
        if self._rows(position) < 1 or not 0 <= rank < world or position < 0:
            why = f"batch_size {batch_size}, rank {rank} of {world}, position {position}"
            raise WrongUse("bad loader", why=why)
        self.dataset, self.position = dataset, position
        self.rank, self.world, self.waited = rank, world, 0
        self._ahead = workers * ahead
        self._asked = position  # where the next batch that nobody works on begins
        self._pending: deque[Future[Batch]] = deque()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="loader") if workers else None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch of this rank. An error of a worker is raised here, in its turn."""
        rows = self._rows(self.position)
        if self._pool is None:
            batch = self.dataset.batch(self.position + self.rank * rows, rows)
        else:
            self.waited += bool(self._pending) and not self._pending[0].done()
            while len(self._pending) <= self._ahead:
                asked = self._rows(self._asked)
                start = self._asked + self.rank * asked
                self._pending.append(self._pool.submit(self.dataset.batch, start, asked))
                self._asked += asked * self.world
            batch = self._pending.popleft().result()
        self.position += rows * self.world
        return batch

    def close(self) -> None:
        """Drop what was made ahead and end the workers."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pending.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
