"""Rows tokenised while training reads them: a first run without a token store.

Text is read in sequence, in units of about a megabyte (data/task_plan.py: whole documents of byte ranges). A unit
becomes a token store in memory, and its rows are those that data/samples.py makes of a store, in an order
drawn for (seed, pass, unit). Promised, as by a store: the same rows for any batch size, ranks and restart of
the same text, settings and tokenizer. Not promised: a shuffle wider than a unit, a random next sentence from
beyond it, mixtures; the tokens after the last whole row are left out in every unit, where a store leaves them
out once; and every process tokenises all the text.

The position is still one integer. Where a row lies in the text follows from how many rows the units before it
have, so those counts are kept under `cache`; without them a restart tokenises again from the beginning.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..core.console import warn
from ..core.errors import WrongUse
from ..core.files import sha256_json, write_atomic
from .backends import open_backend
from .inputs import expand_inputs
from .options import Batch, Dataset, DatasetOptions
from .order import key
from .readers import ReadOptions, splittable
from .samples import open_dataset
from .store import TokenStore
from .task_plan import Task, read_unchanged
from .tasks import Encoder
from .text import MAX_REPLACED, check_replaced
from .tokenize import make_plan
from .tokenizer import Tokenizer

UNIT_BYTES = 1 << 20
ROWS_IN_UNIT = 256  # at least about so many, so that what a unit leaves out at its end is little
BYTES_PER_TOKEN = 4
MOST_WHOLE_BYTES = (
    64 << 20
)  # a compressed file cannot be read from its middle, so it is a unit, held in memory
MOST_HELD_OUT_BYTES = 64 << 20
UNITS_HELD = 4
SAVE_EVERY_UNITS = 64


class Text:
    """Text to train on as it is: files, directories, globs. `tasks` are the units of what is trained on.

    The last `held_out` of its bytes, at most MOST_HELD_OUT_BYTES, is kept out of them. `sentences` as a
    BERT's pairs need them. Raises WrongUse for inputs that are missing or cannot be read in parts.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        tokenizer: Tokenizer,
        options: ReadOptions,
        *,
        sequence_length: int,
        sentences: bool = False,
        held_out: float = 0.0,
    ):
        unit_bytes = max(UNIT_BYTES, ROWS_IN_UNIT * sequence_length * BYTES_PER_TOKEN)
        self.tokenizer = tokenizer
        for source in expand_inputs(list(inputs)):
            if source.format == "dataset" or (
                not splittable(source, options) and source.bytes > MOST_WHOLE_BYTES
            ):
                raise WrongUse(
                    "this input cannot be tokenised while training",
                    where=source.path,
                    why=f"it cannot be read from its middle, and is a dataset "
                    f"or larger than {MOST_WHOLE_BYTES >> 20} MiB",
                    fix="make a token store of it first: throughline data tokenize",
                )
        self.plan = make_plan(list(inputs), tokenizer, options, None, sentences, unit_bytes)
        self.cut = self.plan.bytes - min(held_out * self.plan.bytes, MOST_HELD_OUT_BYTES)
        self.tasks = self.plan.tasks(last=self.cut) if held_out else self.plan.tasks()
        self.backend = open_backend(tokenizer)
        self._said = False

    @property
    def bytes(self) -> int:
        """Of what is trained on."""
        return sum(task.bytes for task in self.tasks)

    @property
    def facts(self) -> dict[str, Any]:
        """What a store of this text would say of its tokens."""
        size = self.tokenizer.vocab_size
        return {"vocab_size": size, "largest_id": size - 1, "tokenizer": self.tokenizer.fingerprint()}

    def held_out(self) -> TokenStore:
        """The end of the text that is not trained on. Raises WrongUse when there is none."""
        store = self.store(self.plan.tasks(first=self.cut)) if self.tasks else None
        if store is None or not store.tokens:
            raise WrongUse(
                "no part of the text can be held out for validation",
                where=self.plan.sources[-1].path,
                why="a part is whole documents, and there are too few",
                fix="name other text in data.validation, or set data.validation_fraction = 0",
            )
        return store

    def beginning(self) -> TokenStore:
        """The first MOST_HELD_OUT_BYTES of the text, to validate on."""
        store = self.store(self.plan.tasks(last=MOST_HELD_OUT_BYTES))
        if not store.tokens:
            raise WrongUse(
                "no text in the input", where=self.plan.sources[0].path, fix="name inputs that hold text"
            )
        return store

    def store(self, tasks: Sequence[Task]) -> TokenStore:
        """The documents of some tasks. Raises Refused for a file that has changed and Failed for one that is
        bad.
        """
        encode = Encoder(self.tokenizer, self.backend, self.plan.append_eos, self.plan.sentences)
        parts = [(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))]
        counts: Counter[str] = Counter()
        characters = 0
        spans = [span for task in tasks for span in task.spans]
        for span in spans:
            source = self.plan.sources[span.source]
            for batch in read_unchanged(source, span.start, span.stop, self.plan.options, counts):
                characters += sum(map(len, batch.texts))
                parts.append(encode(batch))
        if counts["replaced"]:
            path = self.plan.sources[spans[0].source].path
            check_replaced(
                counts["replaced"], characters, MAX_REPLACED, f"{path}, from byte {spans[0].start:,}"
            )
            if not self._said:
                self._said = True
                warn(
                    f"{path}: {counts['replaced']:,} invalid characters replaced by U+FFFD; there may be more"
                )
        ids, lengths, documents = (np.concatenate(column) for column in zip(*parts))
        place = sha256_json([asdict(span) for span in spans])
        return TokenStore.held(ids, lengths, documents, self.facts, f"text:{self.plan.hash}:{place}")


class TextStream:
    """The endless sequence of passes over a text, by position. `rows` of a pass is known after the first
    (before that 0).
    """

    def __init__(self, text: Text, options: DatasetOptions, cache: Path | None = None):
        self._text, self._options = text, options.validate()
        identity = [text.plan.hash, text.bytes, asdict(options)]
        self._file = None if cache is None else cache / f"text-{sha256_json(identity)[:24]}.txt"
        self._ends = self._known_ends()  # rows in all units up to and with each one, as far as known
        self._held: OrderedDict[int, Dataset | None] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def rows(self) -> int:
        """Rows in one pass over the text; 0 while not known."""
        return self._ends[-1] if len(self._ends) == len(self._text.tasks) else 0

    def batch(self, position: int, count: int) -> Batch:
        """Rows position .. position + count of the endless sequence of passes."""
        parts: list[Batch] = []
        with self._lock:
            while count:
                number, unit, row = self._locate(position)
                dataset = self._unit(unit)
                assert dataset is not None, "a unit with rows has a dataset"
                take = min(count, dataset.rows - row)
                parts.append(dataset.batch(number * dataset.rows + row, take))
                position, count = position + take, count - take
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _locate(self, position: int) -> tuple[int, int, int]:
        """(pass, unit, row in it); tokenises units not seen yet on the way."""
        units = len(self._text.tasks)
        while len(self._ends) < units and (not self._ends or position >= self._ends[-1]):
            dataset = self._unit(len(self._ends))
            self._ends.append((self._ends[-1] if self._ends else 0) + (dataset.rows if dataset else 0))
            if self._file and (len(self._ends) % SAVE_EVERY_UNITS == 0 or len(self._ends) == units):
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._file, "".join(f"{end}\n" for end in self._ends))
        number = 0
        if position >= self._ends[-1]:
            if not self._ends[-1]:
                paths = ", ".join(source.path for source in self._text.plan.sources[:3])
                raise WrongUse(
                    "too little text for one training row", where=paths, fix="give more text, or shorter rows"
                )
            number, position = divmod(position, self._ends[-1])
        unit = int(np.searchsorted(self._ends, position, side="right"))
        return number, unit, position - (self._ends[unit - 1] if unit else 0)

    def _known_ends(self) -> list[int]:
        if self._file is None or not self._file.is_file():
            return []
        return [int(line) for line in self._file.read_text().split()]

    def _unit(self, index: int) -> Dataset | None:
        """The rows of a unit; None when it has too little text for one."""
        if index in self._held:
            self._held.move_to_end(index)
            return self._held[index]
        task = self._text.tasks[index]
        store = self._text.store([task])
        dataset: Dataset | None = None
        if store.tokens:
            seed = int(key(self._options.seed, index, 5)[0]) >> 1
            try:
                dataset = open_dataset(store, replace(self._options, seed=seed))
            except (
                WrongUse
            ):  # no row or no pairs: the user's fault in a whole first unit; in a later one little may begin
                if index == 0 and (task.bytes >= self._text.plan.shard_bytes or len(self._text.tasks) == 1):
                    raise
        self._held[index] = dataset
        if len(self._held) > UNITS_HELD:
            self._held.popitem(last=False)
        return dataset
