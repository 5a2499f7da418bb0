"""The five tasks: how records become rows, what is minimised, and how predictions are scored.

Shape letters: B rows, S positions, W width, N places with a target, L outputs of a head.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.errors import WrongUse
from ...data.tokenizer import Tokenizer
from ...models.bert import Head
from ...models.config import MULTI_LABEL, REGRESSION, SINGLE_LABEL, BERTConfig, ModelConfig
from ...models.init import empty_model, empty_with_head
from ...models.sentence import MEAN, Sentence
from ..loss import IGNORED, Batch, Model, Words, cross_entropy_sum, head_loss_sum, wide_dtype
from ..objective import Objective, bound_documents, places_of
from ..parallel.mesh import ALONE, Axis
from .labels import Tags, TextLabels, inspect_labels, inspect_tags, label_notes
from .recipe import FinetuneRecipe
from .records import (
    OF_CLASSES,
    Record,
    Row,
    classification,
    collate,
    fields_of,
    pair_row,
    regression,
    retrieval,
    several_classes,
    squad,
    tagging,
)
from .squad import Located

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
        """What an encoder, or its head, says of all rows of the records, a batch at a time."""
        for batch in self.batches(self.rows(records), device):
            inputs = {name: batch[name] for name in ("input_ids", "token_types", "attention_mask")}
            yield model(**inputs), batch


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
        """Words and tags of each record; a text is parted at white space."""
        pairs = fields_of(records, self.recipe.data, "text_field", "label_field")
        for number, pair in enumerate(pairs, 1):
            words, tags = (part.split() if isinstance(part, str) else list(part) for part in pair)
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
            raise WrongUse(
                "no question has its answer in its context", where="data.train", fix="see `answer_start`"
            )
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


Relevant = dict[bytes, set[bytes]]  # the passages that answer a query


def text_pairs(rows: Sequence[Row]) -> list[tuple[bytes, bytes]]:
    """What identifies query and passage of each record: a hash of the tokens that the model reads."""
    names = [hashlib.blake2b(row["input_ids"].tobytes(), digest_size=16).digest() for row in rows]
    return list(zip(names[0::2], names[1::2]))


def relevant_passages(pairs: Iterable[tuple[bytes, bytes]]) -> Relevant:
    """All passages of each query."""
    relevant: Relevant = {}
    for query, passage in pairs:
        relevant.setdefault(query, set()).add(passage)
    return relevant


@dataclass
class Retrieval(Task):
    """Each query against the passages of its batch by cosine, as `embed` (van den Oord et al. 2018, InfoNCE). Texts
    that are the same tokens are one text: a passage is one candidate however often it stands in a batch, and no passage
    that answers a query anywhere in the records is a wrong answer to it.
    """

    untrained: tuple[str, ...] = ("mlm_", "pooler.", "nsp.")
    rows_per_record: int = 2  # query, passage
    relevant: Relevant = field(default_factory=dict)  # of all pairs learnt from

    def inspect(self, rows: Sequence[Row]) -> None:
        pairs = text_pairs(rows)
        self.relevant = relevant_passages(pairs)
        queries, passages = ({pair[side] for pair in pairs} for side in (0, 1))
        if len(queries) < len(pairs) or len(passages) < len(pairs):
            text = f"{len(pairs):,} pairs, of which {len(pairs) - len(set(pairs)):,} repeat another; "
            text += f"{len(queries):,} different queries, {len(passages):,} different passages"
            self.notes.append((False, f"{text}: equal passages are one candidate"))

    def rows(self, records: Sequence[Record]) -> list[Row]:
        data, encode = self.recipe.data, self.tokenizer.encode
        texts = [text for pair in fields_of(records, data, "text_field", "pair_field") for text in pair]
        length, framed = self.sentence.context(self.length), self.sentence.text
        self.cut_rows = 0
        return [self.framed(encode(framed(str(text))), None, length) for text in texts]

    def collated(self, rows: Sequence[Row]) -> dict[str, np.ndarray]:
        """With `is_candidate` (Q, P) bool: the passages that a query is compared with."""
        batch, pairs = super().collated(rows), text_pairs(rows)
        here = relevant_passages(pairs)
        places = {passage: place for place, (_, passage) in reversed(list(enumerate(pairs)))}
        is_candidate = np.eye(len(pairs), dtype=bool)
        for row, (query, _) in enumerate(pairs):
            answers = here[query] | self.relevant.get(query, set())
            is_candidate[row, [place for passage, place in places.items() if passage not in answers]] = True
        return batch | {"is_candidate": is_candidate}

    def vectors(self, hidden_BSW: Tensor, batch: Batch) -> Tensor:
        """(B, W), each of length 1."""
        real, wide_BSW = batch["attention_mask"][..., None], hidden_BSW.to(wide_dtype(hidden_BSW.dtype))
        if self.sentence.pooling != "mean":
            place = (real.sum(1, keepdim=True) - 1) * (self.sentence.pooling == "last")
            return F.normalize(wide_BSW.take_along_dim(place, 1)[:, 0], dim=-1)
        return F.normalize((wide_BSW * real).sum(1) / real.sum(1), dim=-1)

    def sums(self, model: Model, hidden_BSW: Tensor, batch: Batch, axis: Axis) -> Tensor:
        vectors = self.vectors(hidden_BSW, batch)
        cosines = vectors[0::2] @ vectors[1::2].T / self.recipe.temperature
        cosines = cosines.masked_fill(~batch["is_candidate"], float("-inf"))
        return cross_entropy_sum(cosines, torch.arange(len(cosines), device=cosines.device)).view(1)

    def measure(self, model: Any, records: Sequence[Record], device: torch.device) -> dict[str, float]:
        """Each different query against all different passages that were held out."""
        hidden = getattr(model, "encoder", model).hidden
        vectors = torch.cat([self.vectors(*answer) for answer in self.answers(hidden, records, device)])
        pairs = text_pairs(self.rows(records))
        here = relevant_passages(pairs)
        queries = {query: place for place, (query, _) in reversed(list(enumerate(pairs)))}
        passages = {passage: place for place, (_, passage) in reversed(list(enumerate(pairs)))}
        cosines_QP = vectors[0::2][list(queries.values())] @ vectors[1::2][list(passages.values())].T
        is_relevant_QP = np.zeros(cosines_QP.shape, bool)
        for row, query in enumerate(queries):
            answers = here[query] | self.relevant.get(query, set())
            is_relevant_QP[row] = [passage in answers for passage in passages]
        return retrieval(cosines_QP.cpu().numpy(), is_relevant_QP)


@dataclass
class Instruction(Task):
    """Responses to prompts: the loss is on the response and the end of text alone."""

    family: str = "gpt"

    def rows(self, records: Sequence[Record]) -> list[Row]:
        rows, end = [], self.tokenizer.eos_id
        self.cut_rows = 0
        for pair in fields_of(records, self.recipe.data, "text_field", "label_field"):
            prompt, response = (self.tokenizer.encode(str(text)) for text in pair)
            if end is not None:
                response = np.append(response, end)
            self.cut_rows += len(prompt) + len(response) > self.length
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
