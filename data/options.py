"""What a dataset is, and what it is made of as plain values: the recipe fills it, nothing here reads a file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from ..core.errors import WrongUse

NO_TARGET = -100  # the value of `targets` where nothing is to be predicted

Batch = dict[str, np.ndarray]  # docs/architecture.md lists the keys


class Dataset(Protocol):
    """What training reads: `rows` in one epoch, and any rows by position."""

    @property
    def rows(self) -> int: ...

    def batch(self, position: int, count: int) -> Batch: ...


@dataclass(frozen=True)
class DatasetOptions:
    """One dataset. Sizes are in tokens; ids belong to the store's tokenizer.

    `packing`: "windows" cuts the stream every `sequence_length` tokens (GPT) or gives each pair a row of its
    own (BERT); "best_fit" (GPT) and "packed" (BERT) put whole documents or pairs together into rows with
    nothing but a remnant of padding, kept apart in attention.
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

    def validate(self) -> DatasetOptions:
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
