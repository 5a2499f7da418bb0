"""What every task of fine-tuning has: rows of records, a model with its head, losses, and predictions.

Shape letters: B rows, S positions, W width, L outputs of a head.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.tokenizer import Tokenizer
from ...models.bert import Head
from ...models.config import BERTConfig, ModelConfig
from ...models.init import empty_model, empty_with_head
from ...models.sentence import MEAN, Sentence
from ..loss import IGNORED, Batch, Model, cross_entropy_sum
from ..objective import Objective, bound_documents
from ..parallel.mesh import Axis
from .recipe import FinetuneRecipe
from .records import Record, Row, collate, pair_row

Note = tuple[bool, str]  # whether it is a warning, text


@dataclass
class Task:
    """Used in this order: `prepare` (labels), `rows`, `objective` (the model with its head, and `sums` of the losses of
    a micro-batch, divided by the `count` of the whole batch), `measure` over the records that were held out. `notes`
    are for the user who starts the run.
    """

    recipe: FinetuneRecipe
    tokenizer: Tokenizer
    family: str = "bert"
    untrained: tuple[str, ...] = ()  # beginnings of names of parameters that the loss does not reach
    rows_per_record: int = 1
    head: Head | None = None  # the new one of the model
    sentence: Sentence = MEAN  # how the model's directory embeds
    class_names: tuple[str, ...] = ()  # of labels that are numbers
    notes: list[Note] = field(default_factory=list)
    cut_rows: int = 0  # of which the last call of `rows` left something out

    @property
    def length(self) -> int:
        return self.recipe.train.sequence_length

    @property
    def labels(self) -> tuple[str, ...]:
        return self.head.labels if self.head else ()

    def prepare(self, learnt: Sequence[Record], measured: Sequence[Record]) -> Sequence[Record]:
        """Look at all records, those held out too: a head has the labels there are. Returns the records to learn
        from, without those that cannot be learnt.
        """
        return learnt

    def inspect(self, rows: Sequence[Row]) -> None:
        """Look at the rows to learn from."""

    def framed(self, first: np.ndarray, second: np.ndarray | None = None, length: int = 0) -> Row:
        """`pair_row`; one that had to be cut is counted."""
        row = pair_row(self.tokenizer, first, second, length or self.length)
        sizes = len(first) if second is None else len(first) + len(second) + self.tokenizer.separators
        self.cut_rows += len(row["input_ids"]) < sizes + 2
        return row

    def rows(self, records: Sequence[Record]) -> list[Row]:
        raise NotImplementedError

    def objective(self, config: ModelConfig) -> Objective:
        def empty(dtype: torch.dtype) -> Model:
            model: Any = empty_model(config, dtype=dtype)
            if self.head is not None:
                assert isinstance(config, BERTConfig)
                model = empty_with_head(config, self.head, dtype=dtype)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not name.startswith(self.untrained))
            return model

        return Objective(empty, self.sums)

    def sums(self, model: Model, hidden_BSW: Tensor, batch: Batch, axis: Axis) -> Tensor:
        """The sum of the losses of a micro-batch, (1,): of what the head says of every target."""
        logits_BL, targets = model.classify(hidden_BSW), batch["targets"]
        return cross_entropy_sum(logits_BL.flatten(0, -2), targets.flatten()).view(1)

    def count(self, batch: Mapping[str, np.ndarray]) -> int:
        """By what the sum over a whole batch is divided: targets, or records where no row has any."""
        targets = batch.get("predicted_targets", batch.get("targets"))
        if targets is not None:
            return int(np.count_nonzero(targets != IGNORED))
        return len(batch["input_ids"]) // self.rows_per_record

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        raise NotImplementedError

    def collated(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """Rows of one length; an encoder's padding is a document of its own."""
        batch = collate(rows, self.tokenizer.pad_id or 0)
        if self.family == "bert":
            batch |= bound_documents({name: batch[name] for name in ("input_ids", "attention_mask")})
        return batch

    def batches(self, rows: Sequence[Row], device: torch.device) -> Iterator[Batch]:
        size = self.recipe.train.batch_rows * self.rows_per_record
        for start in range(0, len(rows), size):
            batch = self.collated(rows[start : start + size])
            yield {name: torch.from_numpy(values).to(device) for name, values in batch.items()}

    def answers(
        self, model: Any, records: Sequence[Record], device: torch.device
    ) -> Iterator[tuple[Tensor, Batch]]:
        """Yield the outputs of an encoder, or of its head, for all rows of the records, one batch at a time."""
        for batch in self.batches(self.rows(records), device):
            inputs = {name: batch[name] for name in ("input_ids", "token_types", "attention_mask")}
            yield model(**inputs), batch
