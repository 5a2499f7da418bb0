"""GPT rows tokenised while training reads them: a first run without a token store.

Text is read in sequence, in units of about UNIT_BYTES (data/plan.py: whole documents of byte ranges). A unit's tokens are
cut into rows as in data/samples.py, the last row reaching back so that no token is left out, and given in an order drawn for
(seed, pass, unit). What is promised, beside what a store promises: the same rows for any batch size, ranks and restart
of the same text, settings and tokenizer, and every token a target once a pass. What is not: a shuffle wider than a unit,
separate documents or mixtures; and every rank tokenises all the text.

The position is still one integer. Where a row lies in the text follows from how many rows the units before it have, so
those counts are kept under `cache`; without them a restart tokenises again from the beginning.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..core.errors import WrongUse
from ..core.files import write_atomic
from .backends import Backend
from .inputs import Source
from .options import NO_TARGET
from .order import permute
from .plan import Plan, check_unchanged
from .readers import ReadOptions, read, splittable
from .tasks import Encoder
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from .samples import Batch

UNIT_BYTES = 1 << 20
MOST_WHOLE_BYTES = 64 << 20  # a compressed file cannot be read from its middle, so it is a unit, held in memory
UNITS_HELD = 4
SAVE_EVERY_UNITS = 64


class TextStream:
    """Rows of `sequence_length` inputs from text. `rows` is known after the first pass (before that 0)."""

    def __init__(
        self,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        backend: Backend,
        read_options: ReadOptions,
        sequence_length: int,
        seed: int = 0,
        cache: Path | None = None,
    ):
        for source in sources:
            if source.format == "dataset" or (not splittable(source, read_options) and source.bytes > MOST_WHOLE_BYTES):
                raise WrongUse(
                    "this input cannot be tokenised while training",
                    where=source.path,
                    why=f"it cannot be read from its middle, and is a dataset or larger than {MOST_WHOLE_BYTES >> 20} MiB",
                    fix="make a token store of it first: throughline data tokenize",
                )
        eos = tokenizer.eos_id is not None
        self._plan = Plan(tuple(sources), read_options, tokenizer.fingerprint(), eos, False, UNIT_BYTES)
        self._units = self._plan.tasks()
        self._tokenizer, self._backend = tokenizer, backend
        self._length, self._seed = sequence_length, seed
        self._file = None if cache is None else cache / f"stream-{self._plan.hash[:24]}-{sequence_length}.txt"
        self._ends = self._known_ends()  # rows in all units up to and with each one, as far as known
        self._held: OrderedDict[int, tuple[np.ndarray, int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def rows(self) -> int:
        """Rows in one pass over the text; 0 while not known."""
        return self._ends[-1] if len(self._ends) == len(self._units) else 0

    def batch(self, position: int, count: int) -> Batch:
        """Rows position .. position + count of the endless sequence of passes: `input_ids`, `targets` (count, S) int64."""
        out = np.empty((count, self._length + 1), np.int64)
        fresh = np.zeros((count, 1), np.int64)  # targets before this column were given by the row before
        filled = 0
        with self._lock:
            while filled < count:
                number, unit, row = self._locate(position + filled)
                rows, last_fresh = self._unit(unit)
                take = min(count - filled, len(rows) - row)
                chosen = permute(np.arange(row, row + take), len(rows), self._seed, number * len(self._units) + unit)
                out[filled : filled + take] = rows[chosen]
                fresh[filled : filled + take, 0] = np.where(chosen == len(rows) - 1, last_fresh, 0)
                filled += take
        targets = out[:, 1:].copy()
        targets[(targets < 0) | (np.arange(self._length) < fresh)] = NO_TARGET
        return {"input_ids": np.maximum(out[:, :-1], 0), "targets": targets}

    def place(self, position: int) -> tuple[int, str, int]:
        """(pass, file, byte) at which the unit that holds a position begins."""
        with self._lock:
            number, unit, _ = self._locate(position)
        span = self._units[unit].spans[0]
        return number, self._plan.sources[span.source].path, span.start

    def _locate(self, position: int) -> tuple[int, int, int]:
        """(pass, unit, row in it); tokenises units not seen yet on the way."""
        while len(self._ends) < len(self._units) and (not self._ends or position >= self._ends[-1]):
            rows, _ = self._unit(len(self._ends))
            self._ends.append((self._ends[-1] if self._ends else 0) + len(rows))
            if self._file and (len(self._ends) % SAVE_EVERY_UNITS == 0 or len(self._ends) == len(self._units)):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._file, "".join(f"{end}\n" for end in self._ends))
        number = 0
        if position >= self._ends[-1]:
            if not self._ends[-1]:
                paths = ", ".join(source.path for source in self._plan.sources[:3])
                raise WrongUse("too little text for one training row", where=paths, why="it gives fewer than 2 tokens")
            number, position = divmod(position, self._ends[-1])
        unit = int(np.searchsorted(self._ends, position, side="right"))
        return number, unit, position - (self._ends[unit - 1] if unit else 0)

    def _known_ends(self) -> list[int]:
        if self._file is None or not self._file.is_file():
            return []
        return [int(line) for line in self._file.read_text().split()][: len(self._units)]

    def _unit(self, index: int) -> tuple[np.ndarray, int]:
        """(rows (n, S + 1) int32, -1 where there is no token; the first target of the last row that is its own)."""
        if index in self._held:
            self._held.move_to_end(index)
            return self._held[index]
        encode = Encoder(self._tokenizer, self._backend, self._plan.append_eos, sentences=False)
        parts = [np.empty(0, np.int32)]
        for span in self._units[index].spans:
            source = self._plan.sources[span.source]
            check_unchanged(source)
            for texts in read(source, span.start, span.stop, self._plan.options, Counter()):
                parts.append(encode(texts)[0])
        made = _rows(np.concatenate(parts), self._length)
        self._held[index] = made
        if len(self._held) > UNITS_HELD:
            self._held.popitem(last=False)
        return made


def _rows(tokens: np.ndarray, length: int) -> tuple[np.ndarray, int]:
    """Rows of length + 1 tokens every `length`; the last one ends with the text and overlaps the one before."""
    targets = len(tokens) - 1
    if targets < 1:
        return np.empty((0, length + 1), np.int32), 0
    if targets < length:
        tokens = np.concatenate([tokens, np.full(length - targets, -1, np.int32)])
        targets = length
    starts = np.minimum(np.arange(-(-targets // length)) * length, targets - length)
    rows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[starts]
    return rows, int((len(starts) - 1) * length - starts[-1])
