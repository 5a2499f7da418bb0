"""The five tasks: how records become rows, what is minimised, and how predictions are scored.

Shape letters: B rows, S positions, W width, N places with a target, L outputs of a head.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.errors import WrongUse
from ...models.bert import Head
from ...models.config import MULTI_LABEL, REGRESSION, SINGLE_LABEL
from ..loss import IGNORED, Batch, Model, Words, cross_entropy_sum, head_loss_sum, wide_dtype
from ..objective import places_of
from ..parallel.mesh import ALONE, Axis
from .labels import Tags, TextLabels, check_common, inspect_labels, inspect_tags, label_notes, listed
from .records import (
    OF_CLASSES,
    Record,
    Row,
    classification,
    fields_of,
    pair_row,
    regression,
    several_classes,
    squad,
    tagging,
)
from .retrieval import Retrieval
from .squad import Located
from .task import Task


@dataclass
class Classification(Task):
    """A label for a text or a pair of texts: a class, several classes, or a number (`labels.py`)."""

    kind: TextLabels = field(default_factory=lambda: TextLabels(SINGLE_LABEL, ()))

    def prepare(self, learnt: Sequence[Record], measured: Sequence[Record]) -> Sequence[Record]:
        data = self.recipe.data
        found = [label for part in (learnt, measured) for (label,) in fields_of(part, data, "label_field")]
        self.kind = inspect_labels(found, self.recipe.problem_type, data.class_names or self.class_names)
        self.head = Head("sequence-classification", self.kind.names, self.kind.problem)
        values = [self.kind.value(label) for label in found]
        check_common(self.kind, values[: len(learnt)], values[len(learnt) :])
        self.notes += label_notes(self.kind, values[: len(learnt)], values[len(learnt) :])
        return learnt

    def rows(self, records: Sequence[Record]) -> list[Row]:
        data, rows = self.recipe.data, []
        roles = ["text_field"] + (["pair_field"] if data.pair_field else [])
        self.cut_rows = 0
        for *pair, label in fields_of(records, data, *roles, "label_field"):
            first, *second = (self.tokenizer.encode(str(text)) for text in pair)
            row = self.framed(first, second[0] if second else None)
            rows.append(row | self._target(label))
        return rows

    def _target(self, label: Any) -> Row:
        value: Any = self.kind.value(label)
        if self.kind.problem == REGRESSION:
            return {"score": np.array(value, np.float64)}
        if self.kind.problem == MULTI_LABEL:
            return {OF_CLASSES: np.array([name in value for name in self.labels])}
        return {"targets": np.array(self.labels.index(value))}

    def sums(self, model: Model, hidden_BSW: Tensor, batch: Batch, axis: Axis) -> Tensor:
        """Of cross-entropies, squared errors, or the binary cross-entropies of every class, as transformers'."""
        if self.kind.problem == SINGLE_LABEL:
            return super().sums(model, hidden_BSW, batch, axis)
        logits_BL = model.classify(hidden_BSW)
        logits_BL = logits_BL.to(wide_dtype(logits_BL.dtype))
        if self.kind.problem == REGRESSION:
            errors_B = logits_BL[:, 0] - batch["score"].to(logits_BL.dtype)
            return errors_B.square().sum().view(1)
        wanted_BL = batch[OF_CLASSES].to(logits_BL.dtype)
        return F.binary_cross_entropy_with_logits(logits_BL, wanted_BL, reduction="sum").view(1)

    def count(self, batch: Mapping[str, np.ndarray]) -> int:
        return batch[OF_CLASSES].size if OF_CLASSES in batch else super().count(batch)

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        answers = [(logits.double().cpu(), batch) for logits, batch in self.answers(model, records, device)]
        logits_NL = torch.cat([logits for logits, _ in answers]).numpy()
        name = {REGRESSION: "score", MULTI_LABEL: OF_CLASSES, SINGLE_LABEL: "targets"}[self.kind.problem]
        right = torch.cat([batch[name].cpu() for _, batch in answers]).numpy()
        if self.kind.problem == REGRESSION:
            return regression(logits_NL[:, 0].tolist(), right.tolist())
        if self.kind.problem == MULTI_LABEL:
            return several_classes(logits_NL > 0, right)  # a probability above one half
        return classification(logits_NL.argmax(-1).tolist(), right.tolist(), len(self.labels))


@dataclass
class TokenClassification(Task):
    """One label for every word of a text."""

    kind: Tags = field(default_factory=lambda: Tags((), "plain"))

    def prepare(self, learnt: Sequence[Record], measured: Sequence[Record]) -> Sequence[Record]:
        data = self.recipe.data
        parts = [[tags for _, tags in self._sentences(part)] for part in (learnt, measured)]
        found = (tag for part in parts for tags in part for tag in tags)
        self.kind = inspect_tags(found, data.class_names or self.class_names)
        self.head = Head("token-classification", self.kind.names)
        counts, others = (Counter(self.kind.value(tag) for tags in part for tag in tags) for part in parts)
        shown = ", ".join(f"{name} ({counts[name]:,})" for name in self.labels[:20])
        self.notes.append((False, f"{len(self.labels)} tags, read as {self.kind.scheme}: {shown}"))
        if missing := [f"{name!r} ({others[name]:,})" for name in others if not counts[name]]:
            self.notes.append(
                (True, f"tags of the validation records in no training record: {', '.join(missing)}")
            )
        return learnt

    def _sentences(self, records: Sequence[Record]) -> Iterator[tuple[list[str], list[Any]]]:
        """Words and tags of each record; of a table's cell a list in JSON, or parts at white space."""
        pairs = fields_of(records, self.recipe.data, "text_field", "label_field")
        for number, pair in enumerate(pairs, 1):
            parts = [listed(part) for part in pair]
            words, tags = (part.split() if isinstance(part, str) else list(part) for part in parts)
            if len(words) != len(tags):
                raise WrongUse(f"record {number} has {len(words)} words and {len(tags)} tags", where="data")
            yield [str(word) for word in words], tags

    def rows(self, records: Sequence[Record]) -> list[Row]:
        """The first piece of each word has its tag, the others none."""
        rows = []
        self.cut_rows = 0
        number_of = {name: number for number, name in enumerate(self.labels)}
        for words, tags in self._sentences(records):
            ids, sizes = self.tokenizer.encode_batch(words)
            row = self.framed(ids)
            targets = np.full(len(ids) + 2, IGNORED)  # [CLS] and [SEP] have none
            for place, size, tag in zip(np.cumsum(sizes) - sizes, sizes, tags):
                if size:
                    targets[1 + place] = number_of[self.kind.value(tag)]
            row["targets"] = targets[: len(row["input_ids"])]
            row["targets"][-1] = IGNORED
            rows.append(row)
        return rows

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        """Of every word: one beyond the row, or without a token, is predicted to be outside."""
        choices = (
            (row, places)
            for logits, batch in self.answers(model, records, device)
            for row, places in zip(
                logits.argmax(-1).cpu().numpy(), (batch["targets"] != IGNORED).cpu().numpy()
            )
        )
        predicted, right = list[list[str]](), list[list[str]]()
        for (choice, has_tag), (words, tags) in zip(choices, self._sentences(records), strict=True):
            named = iter([self.labels[number] for number in choice[has_tag].tolist()])
            _, sizes = self.tokenizer.encode_batch(words)
            predicted.append([next(named, "O") if size else "O" for size in sizes])
            right.append([self.kind.value(tag) for tag in tags])
        return tagging(predicted, right, self.kind.scheme, self.kind.is_suffix)


@dataclass
class QuestionAnswering(Task):
    """Long contexts become windows; an answer outside a window is its [CLS], and so is that of a question without one
    (Devlin et al. 2018, sections 4.2 and 4.3).
    """

    head: Head | None = field(default_factory=lambda: Head("question-answering"))
    windows: list[tuple[int, int, np.ndarray]] = field(default_factory=list)  # record, first place, offsets
    has_unanswerable: bool = False  # of the questions learnt from

    def prepare(self, learnt: Sequence[Record], measured: Sequence[Record]) -> Sequence[Record]:
        located = Located()
        kept = located.take(learnt)
        self.notes += located.notes()
        self.has_unanswerable = bool(located.unanswerable)
        if not kept:
            why = "; ".join(text for _, text in located.notes())
            fix = 'give every answer as the context spells it, and its first character as "answer_start"'
            raise WrongUse("no question has its answer in its context", where="data.train", why=why, fix=fix)
        return kept

    def rows(self, records: Sequence[Record]) -> list[Row]:
        rows: list[Row] = []
        self.windows = []
        for number, record in enumerate(records):
            question = self.tokenizer.encode(record["question"])[: self.length // 2]
            ids, offsets = self.tokenizer.encode_with_offsets(record["context"])
            first_character, last_character = record.get("span") or (0, 0)
            inside = np.flatnonzero((offsets[:, 1] > first_character) & (offsets[:, 0] < last_character))
            room = self.length - len(question) - 3
            stride = self.recipe.window_stride
            shared = stride if stride < room else room // 2  # beside a long question, or in short rows
            for first in range(0, max(len(ids) - shared, 1), max(room - shared, 1)):
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
        """The span of the largest sum of logits over all windows of a question. A model that has learnt from questions
        without an answer gives none where the sum at [CLS] is larger in every window.
        """
        best = [(-np.inf, "")] * len(records)
        none = [np.inf] * len(records)
        rows = (row for x, _ in self.answers(model, records, device) for row in x.float().cpu().numpy())
        for place, logits in enumerate(rows):
            number, shift, offsets = self.windows[place]
            none[number] = min(none[number], float(logits[0].sum()))
            inner = logits[shift : shift + len(offsets)]
            if not len(inner):
                continue
            score, first, last = best_span(inner[:, 0], inner[:, 1], self.recipe.max_answer_tokens)
            if score > best[number][0]:
                best[number] = (score, records[number]["context"][offsets[first, 0] : offsets[last, 1]])
        predicted = [
            "" if self.has_unanswerable and none[number] > score else text
            for number, (score, text) in enumerate(best)
        ]
        return squad(predicted, [[text for _, text in record["answers"]] for record in records])


def best_span(start: np.ndarray, end: np.ndarray, longest: int) -> tuple[float, int, int]:
    """(score, first, last) of the span of at most `longest` tokens with the largest sum of logits."""
    scores = start[:, None] + end[None, :]
    allowed = np.triu(np.ones_like(scores, bool)) & ~np.triu(np.ones_like(scores, bool), longest)
    first, last = divmod(int(np.where(allowed, scores, -np.inf).argmax()), len(end))
    return float(scores[first, last]), first, last


@dataclass
class Instruction(Task):
    """Responses to prompts: the loss is on the response and the end of text alone."""

    family: str = "gpt"

    def rows(self, records: Sequence[Record]) -> list[Row]:
        """Rows of prompt, response and end of text, with the BOS that a prompt of the model begins with.

        Special tokens that the texts spell are those tokens, as in the prompt of a request.
        """
        tokenizer = self.tokenizer
        before, behind = tokenizer.document_framing
        end = list(behind)
        if tokenizer.eos_id is not None and tokenizer.eos_id not in end:
            end.append(tokenizer.eos_id)
        rows = []
        self.cut_rows = 0
        for pair in fields_of(records, self.recipe.data, "text_field", "label_field"):
            prompt, response = (tokenizer.parse(str(text)) for text in pair)
            if before and prompt[: len(before)] == before:  # the text brings its own
                prompt = prompt[len(before) :]
            if response[len(response) - len(end) :] != end:
                response = response + end
            room = self.length - len(before)
            self.cut_rows += len(prompt) + len(response) > room
            response = response[:room]
            # the end of a prompt is nearest the answer
            prompt = before + prompt[max(len(prompt) + len(response) - room, 0) :]
            ids = np.array(prompt + response, np.int64)
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
