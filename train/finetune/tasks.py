"""The five tasks: how records become rows, what is minimised, and how predictions are scored.

Shape letters: B rows, S positions, W width, N places with a target.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.errors import WrongUse
from ...data.tokenizer import Tokenizer
from ...models.bert import Head
from ...models.config import BERTConfig, ModelConfig
from ...models.init import empty_model, empty_with_head
from ...models.sentence import MEAN, Sentence
from ..loss import IGNORED, Batch, Model, Words, cross_entropy_sum, head_loss_sum
from ..objective import Objective, bound_documents, places_of
from ..parallel.mesh import ALONE, Axis
from .recipe import FinetuneRecipe
from .records import Record, Row, classification, collate, fields_of, pair_row, squad, tagging


@dataclass
class Task:
    """Used in this order: `prepare` (labels), `rows`, `objective` (the model with its head, and `sums` of the losses of
    a micro-batch, divided by the `count` of the whole batch), `measure` over the records that were held out.
    """

    recipe: FinetuneRecipe
    tokenizer: Tokenizer
    family: str = "bert"
    untrained: tuple[str, ...] = ()  # beginnings of names of parameters that the loss does not reach
    rows_per_record: int = 1
    head: Head | None = None  # the new one of the model
    sentence: Sentence = MEAN  # how the model's directory embeds

    @property
    def length(self) -> int:
        return self.recipe.train.sequence_length

    @property
    def labels(self) -> tuple[str, ...]:
        return self.head.labels if self.head else ()

    def prepare(self, records: Sequence[Record]) -> None:
        """Look at all records, those held out too: a head has the labels there are."""

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
        """What an encoder, or its head, says of all rows of the records, a batch at a time."""
        for batch in self.batches(self.rows(records), device):
            inputs = {name: batch[name] for name in ("input_ids", "token_types", "attention_mask")}
            yield model(**inputs), batch


@dataclass
class Classification(Task):
    """One label for a text or a pair of texts."""

    def prepare(self, records: Sequence[Record]) -> None:
        field = self.recipe.data.label_field
        found = {str(label) for (label,) in fields_of(records, field)}
        if len(found) < 2:
            raise WrongUse("the records have one label only", where=f"data.label_field = {field!r}")
        # numbers first, by their size
        labels = sorted(found, key=lambda x: (0, int(x), x) if x.isdigit() else (1, 0, x))
        self.head = Head("sequence-classification", tuple(labels))

    def rows(self, records: Sequence[Record]) -> list[Row]:
        data, rows = self.recipe.data, []
        texts = [data.text_field] + ([data.pair_field] if data.pair_field else [])
        for label, *pair in fields_of(records, data.label_field, *texts):
            first, *second = (self.tokenizer.encode(str(text)) for text in pair)
            row = pair_row(self.tokenizer, first, second[0] if second else None, self.length)
            rows.append(row | {"targets": np.array(self.labels.index(str(label)))})
        return rows

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        predicted, right = list[int](), list[int]()
        for logits, batch in self.answers(model, records, device):
            predicted += logits.argmax(-1).tolist()
            right += batch["targets"].tolist()
        return classification(predicted, right, len(self.labels))


@dataclass
class TokenClassification(Task):
    """One label for every word of a text."""

    def prepare(self, records: Sequence[Record]) -> None:
        found = {str(tag) for (tags,) in fields_of(records, self.recipe.data.label_field) for tag in tags}
        self.head = Head("token-classification", tuple(sorted(found, key=lambda tag: (tag != "O", tag))))

    def rows(self, records: Sequence[Record]) -> list[Row]:
        """The first piece of each word has its tag, the others none."""
        data, rows = self.recipe.data, []
        for number, (words, tags) in enumerate(fields_of(records, data.text_field, data.label_field), 1):
            if len(words) != len(tags):
                raise WrongUse(f"record {number} has {len(words)} words and {len(tags)} tags", where="data")
            ids, sizes = self.tokenizer.encode_batch([str(word) for word in words])
            row = pair_row(self.tokenizer, ids, None, self.length)
            targets = np.full(len(ids) + 2, IGNORED)  # [CLS] and [SEP] have none
            for place, size, tag in zip(np.cumsum(sizes) - sizes, sizes, tags):
                if size:
                    targets[1 + place] = self.labels.index(str(tag))
            row["targets"] = targets[: len(row["input_ids"])]
            row["targets"][-1] = IGNORED
            rows.append(row)
        return rows

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        predicted, right = list[list[str]](), list[list[str]]()
        for logits, batch in self.answers(model, records, device):
            for said, were in zip(logits.argmax(-1).tolist(), batch["targets"].tolist()):
                kept = [place for place, target in enumerate(were) if target != IGNORED]
                predicted.append([self.labels[said[place]] for place in kept])
                right.append([self.labels[were[place]] for place in kept])
        return tagging(predicted, right)


@dataclass
class QuestionAnswering(Task):
    """Long contexts become windows; an answer outside a window is its [CLS] (Devlin et al. 2018, section 4.2)."""

    head: Head | None = field(default_factory=lambda: Head("question-answering"))
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
                span, shift = inside - first, len(question) + 2
                answered = len(span) and span[0] >= 0 and span[-1] < len(part)
                for name, place in (("start", 0), ("end", -1)):
                    row[name] = np.array(span[place] + shift if answered else 0)
                rows.append(row)
                self.windows.append((number, shift, offsets[first : first + room]))
        return rows

    def sums(self, model: Model, hidden_BSW: Tensor, batch: Batch, axis: Axis) -> Tensor:
        logits = model.classify(hidden_BSW).masked_fill(~batch["attention_mask"][..., None], float("-inf"))
        start, end = logits.unbind(-1)
        return (cross_entropy_sum(start, batch["start"]) + cross_entropy_sum(end, batch["end"])).view(1) / 2

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        """The span of the largest sum of logits over all windows of a question."""
        best = [(-np.inf, "")] * len(records)
        rows = (row for x, _ in self.answers(model, records, device) for row in x.float().cpu().numpy())
        for place, logits in enumerate(rows):
            number, shift, offsets = self.windows[place]
            inner = logits[shift : shift + len(offsets)]
            score, first, last = best_span(inner[:, 0], inner[:, 1], self.recipe.max_answer_tokens)
            if score > best[number][0]:
                best[number] = (score, records[number]["context"][offsets[first, 0] : offsets[last, 1]])
        answers = [[text for _, text in record["answers"]] for record in records]
        return squad([text for _, text in best], answers)


def best_span(start: np.ndarray, end: np.ndarray, longest: int) -> tuple[float, int, int]:
    """(score, first, last) of the span of at most `longest` tokens with the largest sum of logits."""
    scores = start[:, None] + end[None, :]
    allowed = np.triu(np.ones_like(scores, bool)) & ~np.triu(np.ones_like(scores, bool), longest)
    first, last = divmod(int(np.where(allowed, scores, -np.inf).argmax()), len(end))
    return float(scores[first, last]), first, last


@dataclass
class Retrieval(Task):
    """Each query against every passage of its batch by cosine, as `embed` (van den Oord et al. 2018, InfoNCE)."""

    untrained: tuple[str, ...] = ("mlm_", "pooler.", "nsp.")
    rows_per_record: int = 2  # query, passage

    def rows(self, records: Sequence[Record]) -> list[Row]:
        data, encode = self.recipe.data, self.tokenizer.encode
        texts = [text for pair in fields_of(records, data.text_field, data.pair_field) for text in pair]
        length, framed = self.sentence.context(self.length), self.sentence.text
        return [pair_row(self.tokenizer, encode(framed(str(text))), None, length) for text in texts]

    def vectors(self, hidden_BSW: Tensor, batch: Batch) -> Tensor:
        """(B, W), each of length 1."""
        real = batch["attention_mask"][..., None]
        if self.sentence.pooling != "mean":
            place = (real.sum(1, keepdim=True) - 1) * (self.sentence.pooling == "last")
            return F.normalize(hidden_BSW.take_along_dim(place, 1)[:, 0].float(), dim=-1)
        return F.normalize((hidden_BSW.float() * real).sum(1) / real.sum(1), dim=-1)

    def sums(self, model: Model, hidden_BSW: Tensor, batch: Batch, axis: Axis) -> Tensor:
        vectors = self.vectors(hidden_BSW, batch)
        cosines = vectors[0::2] @ vectors[1::2].T / self.recipe.temperature
        return cross_entropy_sum(cosines, torch.arange(len(cosines), device=cosines.device)).view(1)

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        """Each query against all different passages that were held out: rank of its own."""
        hidden = getattr(model, "encoder", model).hidden
        vectors = torch.cat([self.vectors(*answer) for answer in self.answers(hidden, records, device)])
        passages = [str(record[self.recipe.data.pair_field]) for record in records]
        first = {text: place for place, text in reversed(list(enumerate(passages)))}
        column = {text: number for number, text in enumerate(first)}
        cosines = vectors[0::2] @ vectors[1::2][list(first.values())].T
        own = torch.tensor([column[text] for text in passages], device=cosines.device)
        ranks = (cosines > cosines.gather(1, own[:, None])).sum(1) + 1
        return {
            "accuracy_at_1": (ranks == 1).float().mean().item(),
            "accuracy_at_10": (ranks <= 10).float().mean().item(),
            "mean_reciprocal_rank": (1 / ranks).mean().item(),
            "passages": len(column),
        }


@dataclass
class Instruction(Task):
    """Responses to prompts: the loss is on the response and the end of text alone."""

    family: str = "gpt"

    def rows(self, records: Sequence[Record]) -> list[Row]:
        rows, data, end = [], self.recipe.data, self.tokenizer.eos_id
        for pair in fields_of(records, data.text_field, data.label_field):
            prompt, response = (self.tokenizer.encode(str(text)) for text in pair)
            if end is not None:
                response = np.append(response, end)
            response = response[: self.length]
            # the end of a prompt is nearest the answer
            prompt = prompt[max(len(prompt) + len(response) - self.length, 0) :]
            ids = np.concatenate((prompt, response)).astype(np.int64)
            targets = np.append(ids[1:], IGNORED)
            targets[: max(len(prompt) - 1, 0)] = IGNORED
            rows.append({"input_ids": ids, "targets": targets})
        return rows

    def collated(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """Padding is to the right, where causal attention does not look."""
        batch = super().collated(rows)
        batch["predicted"], batch["predicted_targets"] = places_of(batch.pop("targets"), 1)
        return batch

    def sums(self, model: Model, hidden_BSW: Tensor, batch: Batch, axis: Axis) -> Tensor:
        hidden_NW = hidden_BSW.flatten(0, 1).index_select(0, batch["predicted"])
        targets_N, words = batch["predicted_targets"], Words(model.config.vocab_size, ALONE)
        head, softcap = (model.output_weight(), model.output_bias()), model.config.logit_softcap
        return head_loss_sum(hidden_NW, *head, targets_N, words, softcap=softcap)

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        sums = np.zeros(3)
        for batch in self.batches(self.rows(records), device):
            hidden_NW = model.hidden(batch["input_ids"]).flatten(0, 1).index_select(0, batch["predicted"])
            logits_NV, targets_N = model.head(hidden_NW), batch["predicted_targets"]
            hits, places = (logits_NV.argmax(-1) == targets_N).sum(), (targets_N != IGNORED).sum()
            sums += [float(cross_entropy_sum(logits_NV, targets_N)), int(hits), int(places)]
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
