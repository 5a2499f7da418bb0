"""The five tasks: how records become rows, what is minimised, and how predictions are scored.

Each is used by `run.py` in this order: `prepare` (labels, rows), `build` (the model with its head), `loss` for
each batch, `measure` over the records that were held out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core.errors import WrongUse
from ...data.tokenizer import Tokenizer
from ...models.bert import BERT
from ...models.gpt import GPT
from ...models.heads import SPAN_LABELS, Head, build_with_head
from ..loss import IGNORED, cross_entropy_sum
from . import metrics
from .recipe import FinetuneRecipe
from .records import Record, Row, collate, field_of, pair_row

Batch = dict[str, Tensor]


@dataclass
class Task:
    """What the tasks share: framing of a text and a pair, and batches for measuring."""

    recipe: FinetuneRecipe
    tokenizer: Tokenizer
    family: str = "bert"
    untrained: tuple[str, ...] = ()  # beginnings of names of parameters that the loss does not reach

    @property
    def length(self) -> int:
        return self.recipe.train.sequence_length

    def prepare(self, records: Sequence[Record]) -> None:
        """Look at all records, those held out too: the labels there are."""

    def rows(self, records: Sequence[Record]) -> list[Row]:
        raise NotImplementedError

    def build(self, base: nn.Module) -> nn.Module:
        """The model to train, from the one that was pretrained."""
        return base

    def loss(self, model: Any, batch: Batch) -> Tensor:
        raise NotImplementedError

    def mean_loss(self, model: Any, batch: Batch, inverse_counts: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, as an engine asks for it."""
        loss = self.loss(model, batch)
        return loss, loss.detach().view(1)

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        raise NotImplementedError

    def batch(self, rows: Sequence[Row], device: torch.device) -> Batch:
        pad = self.tokenizer.pad_id or 0
        return {name: torch.from_numpy(values).to(device) for name, values in collate(rows, pad).items()}

    def batches(self, rows: Sequence[Row], device: torch.device) -> Iterator[Batch]:
        size = self.recipe.train.batch_rows
        for start in range(0, len(rows), size):
            yield self.batch(rows[start : start + size], device)

    def text(self, record: Record, number: int) -> np.ndarray:
        return self.tokenizer.encode(str(field_of(record, self.recipe.data.text_field, number)))


def encoder_inputs(batch: Batch) -> dict[str, Tensor]:
    """What the encoder takes of a batch."""
    return {name: batch[name] for name in ("input_ids", "token_types", "attention_mask")}


@dataclass
class Classification(Task):
    """One label for a text or a pair of texts."""

    labels: tuple[str, ...] = ()

    def prepare(self, records: Sequence[Record]) -> None:
        field = self.recipe.data.label_field
        found = {str(field_of(record, field, number)) for number, record in enumerate(records, 1)}
        self.labels = tuple(
            sorted(
                found, key=lambda label: (not label.isdigit(), int(label) if label.isdigit() else 0, label)
            )
        )
        if len(self.labels) < 2:
            raise WrongUse("the records have one label only", where=f"data.label_field = {field!r}")

    def rows(self, records: Sequence[Record]) -> list[Row]:
        numbers, data, rows = {label: i for i, label in enumerate(self.labels)}, self.recipe.data, []
        for number, record in enumerate(records, 1):
            pair = str(field_of(record, data.pair_field, number)) if data.pair_field else None
            second = None if pair is None else self.tokenizer.encode(pair)
            row = pair_row(self.tokenizer, self.text(record, number), second, self.length)
            row["label"] = np.array(numbers[str(field_of(record, data.label_field, number))])
            rows.append(row)
        return rows

    def build(self, base: nn.Module) -> nn.Module:
        assert isinstance(base, BERT)
        return build_with_head(base, Head("sequence-classification", self.labels), self.recipe.train.seed)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        return F.cross_entropy(model(**encoder_inputs(batch)).float(), batch["label"])

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        predicted: list[int] = []
        right: list[int] = []
        for batch in self.batches(self.rows(records), device):
            predicted += model(**encoder_inputs(batch)).argmax(-1).tolist()
            right += batch["label"].tolist()
        return metrics.classification(predicted, right, len(self.labels))


@dataclass
class TokenClassification(Task):
    """One label for every word of a text."""

    labels: tuple[str, ...] = ()

    def prepare(self, records: Sequence[Record]) -> None:
        field = self.recipe.data.label_field
        every = (field_of(record, field, number) for number, record in enumerate(records, 1))
        self.labels = tuple(
            sorted({str(tag) for tags in every for tag in tags}, key=lambda tag: (tag != "O", tag))
        )

    def rows(self, records: Sequence[Record]) -> list[Row]:
        """The first piece of each word has its tag, the others none."""
        numbers, data, rows = {label: i for i, label in enumerate(self.labels)}, self.recipe.data, []
        for number, record in enumerate(records, 1):
            words, tags = (field_of(record, name, number) for name in (data.text_field, data.label_field))
            if len(words) != len(tags):
                raise WrongUse(f"record {number} has {len(words)} words and {len(tags)} tags", where="data")
            ids, sizes = self.tokenizer.encode_batch([str(word) for word in words])
            row = pair_row(self.tokenizer, ids, None, self.length)
            targets = np.full(len(ids), IGNORED)
            starts = np.cumsum(sizes) - sizes
            for start, size, tag in zip(starts, sizes, tags):
                if size:
                    targets[start] = numbers[str(tag)]
            row["targets"] = np.full(len(row["input_ids"]), IGNORED)
            row["targets"][1:-1] = targets[: len(row["input_ids"]) - 2]
            rows.append(row)
        return rows

    def build(self, base: nn.Module) -> nn.Module:
        assert isinstance(base, BERT)
        return build_with_head(base, Head("token-classification", self.labels), self.recipe.train.seed)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        logits = model(**encoder_inputs(batch)).float()
        return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), ignore_index=IGNORED)

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        predicted: list[list[str]] = []
        right: list[list[str]] = []
        for batch in self.batches(self.rows(records), device):
            best = model(**encoder_inputs(batch)).argmax(-1)
            for said, were in zip(best.tolist(), batch["targets"].tolist()):
                kept = [place for place, target in enumerate(were) if target != IGNORED]
                predicted.append([self.labels[said[place]] for place in kept])
                right.append([self.labels[were[place]] for place in kept])
        return metrics.tagging(predicted, right)


@dataclass
class QuestionAnswering(Task):
    """Contexts longer than a row become windows that share `window_stride` tokens; an answer outside a window
    is its [CLS] (Devlin et al. 2018, section 4.2).
    """

    windows: list[tuple[int, int, np.ndarray]] = field(default_factory=list)  # record, first place, offsets

    def rows(self, records: Sequence[Record]) -> list[Row]:
        rows: list[Row] = []
        self.windows = []
        for number, record in enumerate(records):
            question = self.tokenizer.encode(record["question"])[: self.length // 2]
            ids, offsets = self.tokenizer.encode_with_offsets(record["context"])
            start, text = record["answers"][0]
            inside = np.flatnonzero((offsets[:, 1] > start) & (offsets[:, 0] < start + len(text)))
            room = self.length - len(question) - 3
            step = max(room - self.recipe.window_stride, 1)
            for first in range(0, max(len(ids) - self.recipe.window_stride, 1), step):
                part = ids[first : first + room]
                row = pair_row(self.tokenizer, question, part, self.length)
                span = inside - first
                answered = len(span) and span[0] >= 0 and span[-1] < len(part)
                shift = len(question) + 2
                row["start"] = np.array(span[0] + shift if answered else 0)
                row["end"] = np.array(span[-1] + shift if answered else 0)
                rows.append(row)
                self.windows.append((number, shift, offsets[first : first + room]))
        return rows

    def build(self, base: nn.Module) -> nn.Module:
        assert isinstance(base, BERT)
        return build_with_head(base, Head("question-answering", SPAN_LABELS), self.recipe.train.seed)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        logits = model(**encoder_inputs(batch)).float()
        logits = logits.masked_fill(~batch["attention_mask"][..., None], float("-inf"))
        start, end = logits.unbind(-1)
        return (F.cross_entropy(start, batch["start"]) + F.cross_entropy(end, batch["end"])) / 2

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        """The span of the largest sum of logits over all windows of a question."""
        rows, best = self.rows(records), [(-np.inf, "")] * len(records)
        place = 0
        for batch in self.batches(rows, device):
            for logits in model(**encoder_inputs(batch)).float().cpu().numpy():
                number, shift, offsets = self.windows[place]
                inner = logits[shift : shift + len(offsets)]
                score, first, last = best_span(inner[:, 0], inner[:, 1], self.recipe.max_answer_tokens)
                if score > best[number][0]:
                    context = records[number]["context"]
                    best[number] = (score, context[offsets[first, 0] : offsets[last, 1]])
                place += 1
        answers = [[text for _, text in record["answers"]] for record in records]
        return metrics.squad([text for _, text in best], answers)


def best_span(start: np.ndarray, end: np.ndarray, longest: int) -> tuple[float, int, int]:
    """(score, first, last) of the span of at most `longest` tokens with the largest sum of logits."""
    scores = start[:, None] + end[None, :]
    allowed = np.triu(np.ones_like(scores, bool)) & ~np.triu(np.ones_like(scores, bool), longest)
    place = int(np.where(allowed, scores, -np.inf).argmax())
    first, last = divmod(place, len(end))
    return float(scores[first, last]), first, last


@dataclass
class Retrieval(Task):
    """Contrastive pairs: each query against every passage of its batch (van den Oord et al. 2018, InfoNCE), by
    the cosine of the mean over tokens, which is what `throughline embed` gives.
    """

    untrained: tuple[str, ...] = ("mlm_", "pooler.", "nsp.")

    def rows(self, records: Sequence[Record]) -> list[Row]:
        """Two for each record: query, passage."""
        rows, data = [], self.recipe.data
        for number, record in enumerate(records, 1):
            passage = self.tokenizer.encode(str(field_of(record, data.pair_field, number)))
            both = (self.text(record, number), passage)
            rows += [pair_row(self.tokenizer, ids, None, self.length) for ids in both]
        return rows

    def vectors(self, model: BERT, batch: Batch) -> Tensor:
        """(B, W), each of length 1."""
        hidden_BSW = model.hidden(**encoder_inputs(batch)).float()
        real = batch["attention_mask"][..., None]
        return F.normalize((hidden_BSW * real).sum(1) / real.sum(1), dim=-1)

    def loss(self, model: Any, batch: Batch) -> Tensor:
        vectors = self.vectors(model, batch)
        cosines = vectors[0::2] @ vectors[1::2].T / self.recipe.temperature
        return F.cross_entropy(cosines, torch.arange(len(cosines), device=cosines.device))

    def batches(self, rows: Sequence[Row], device: torch.device) -> Iterator[Batch]:
        size = 2 * self.recipe.train.batch_rows
        for start in range(0, len(rows), size):
            yield self.batch(rows[start : start + size], device)

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        """Each query against all different passages that were held out: rank of its own."""
        vectors = torch.cat(
            [self.vectors(model, batch) for batch in self.batches(self.rows(records), device)]
        )
        passages = [str(record[self.recipe.data.pair_field]) for record in records]
        kept = {text: place for place, text in reversed(list(enumerate(passages)))}
        order = list(kept)
        cosines = vectors[0::2] @ vectors[1::2][[kept[text] for text in order]].T
        own = torch.tensor([order.index(text) for text in passages], device=cosines.device)
        ranks = (cosines > cosines.gather(1, own[:, None])).sum(1) + 1
        return {
            "accuracy_at_1": (ranks == 1).float().mean().item(),
            "accuracy_at_10": (ranks <= 10).float().mean().item(),
            "mean_reciprocal_rank": (1 / ranks).mean().item(),
            "passages": len(order),
        }


@dataclass
class Instruction(Task):
    """Responses to prompts: the loss is on the response and the end of text alone."""

    family: str = "gpt"

    def rows(self, records: Sequence[Record]) -> list[Row]:
        rows, data, end = [], self.recipe.data, self.tokenizer.eos_id
        for number, record in enumerate(records, 1):
            response = self.tokenizer.encode(str(field_of(record, data.label_field, number)))
            if end is not None:
                response = np.append(response, end)
            response = response[: self.length]
            prompt = self.text(record, number)
            prompt = prompt[
                max(len(prompt) + len(response) - self.length, 0) :
            ]  # its end is nearest the answer
            ids = np.concatenate((prompt, response)).astype(np.int64)
            targets = np.append(ids[1:], IGNORED)
            targets[: max(len(prompt) - 1, 0)] = IGNORED
            rows.append({"input_ids": ids, "targets": targets})
        return rows

    def sums(self, model: GPT, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Sum of losses, right tokens, count; padding is to the right, where causal attention does not look."""
        targets = batch["targets"].flatten()
        places = (targets != IGNORED).nonzero().squeeze(1)
        hidden = model.hidden(batch["input_ids"]).flatten(0, 1).index_select(0, places)
        logits, right = model.head(hidden), targets[places]
        return cross_entropy_sum(logits, right), (logits.argmax(-1) == right).sum(), torch.tensor(len(places))

    def loss(self, model: Any, batch: Batch) -> Tensor:
        total, _, count = self.sums(model, batch)
        return total / count.clamp(min=1).to(total.device)

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        sums = np.zeros(3)
        for batch in self.batches(self.rows(records), device):
            sums += [float(number) for number in self.sums(model, batch)]
        total, right, count = sums.tolist()
        return {
            "response_loss": total / count,
            "response_token_accuracy": right / count,
            "response_tokens": int(count),
        }


TASKS: dict[str, type[Task]] = {
    "classification": Classification,
    "token-classification": TokenClassification,
    "question-answering": QuestionAnswering,
    "retrieval": Retrieval,
    "instruction": Instruction,
}
