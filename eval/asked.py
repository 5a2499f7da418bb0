"""One task as questions to a model: made from its records, checked against the window, answered, scored."""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..core.console import progress, say
from ..core.errors import Failed, WrongUse
from ..core.scorer import Question, Score, Scorer, check_question
from .answers import Answers, packed, unpacked
from .fewshot import with_examples
from .items import Item
from .metrics import (
    METRICS,
    aggregate,
    choice_outcome,
    exact_match_outcome,
    loglikelihood_outcome,
    random_baseline,
)
from .perplexity import document_outcome, hidden, hidden_outcome, rolling, stream, stream_outcome
from .task import BoundTask

Outcome = dict[str, list[float]]
ANSWERS = 3  # form of the stored answers, part of their keys


@dataclass(frozen=True)
class Settings:
    """What besides tasks and model decides a score."""

    data_dir: Path | None = None
    limit: int | None = None
    shots: int = 0
    seed: int = 0
    overlong: Literal["truncate", "error", "skip"] = "truncate"  # a record that loses tokens to the window


@dataclass
class TaskScores:
    """One task's scores, and every record's answer in order."""

    summary: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)


class Asked:
    """One task's records as questions with their keys."""

    def __init__(self, scorer: Scorer, bound: BoundTask, settings: Settings) -> None:
        self.scorer, self.bound, self.settings = scorer, bound, settings
        self.written = bound.task.kind == "generate_until"
        self.skipped = 0
        per_item = self._fitting(self._items())
        self.items = [item for _, item, _, _ in per_item]
        self.records = [number for number, _, _, _ in per_item]
        self.lost = [lost for _, _, _, lost in per_item]
        self.questions = [question for _, _, questions, _ in per_item for question in questions]
        self.owners = [place for place, (_, _, questions, _) in enumerate(per_item) for _ in questions]
        if self.written:
            task = bound.task
            self.owners = list(range(len(self.items)))
            asked = [f"{item.context}\0{task.until}\0{task.max_tokens}" for item in self.items]
        else:
            asked = [repr(question.pairs) for question in self.questions]
        self.keys = [
            hashlib.sha256(f"{ANSWERS}\0{scorer.identity}\0{text}".encode()).hexdigest()[:24]
            for text in asked
        ]

    def _items(self) -> list[Item]:
        bound, settings = self.bound, self.settings
        if settings.shots and bound.task.kind == "cloze":
            why, fix = "a solved example would have masks too", "leave --shots out"
            raise WrongUse(f"task {bound.name} takes no examples", why=why, fix=fix)
        items = bound.items(bound.records(settings.data_dir, settings.limit))
        pool = None
        if settings.shots and (bound.source.fewshot_files or bound.source.fewshot_split):
            try:
                pool = bound.items(bound.records(settings.data_dir, None, fewshot=True))
            except WrongUse as error:
                why = error.why or error.what
                say(
                    f"{bound.name}: no training records at hand ({why}); examples are drawn from the evaluated ones"
                )
        if settings.shots and pool is None and settings.limit:
            pool_items = bound.items(
                bound.records(settings.data_dir, None)
            )  # the draw does not depend on --limit
            return with_examples(bound.name, pool_items, None, settings.shots, settings.seed)[
                : settings.limit
            ]
        return with_examples(bound.name, items, pool, settings.shots, settings.seed)

    def _fitting(self, items: list[Item]) -> list[tuple[int, Item, list[Question], int]]:
        """(number, item, its questions, context tokens they lose); what is too long is treated as the
        settings say.
        """
        kept = []
        for number, (item, questions, lost) in enumerate(zip(items, *self._asked(items))):
            where, fields = (
                f"{item.where} (task {self.bound.name})",
                answer_fields(self.bound.task.kind, item),
            )
            answer = max((len(answer) for question in questions for _, answer in question.pairs), default=0)
            if self.settings.overlong == "skip" and (lost or answer > self.scorer.window):
                self.skipped += 1
                continue
            if self.settings.overlong == "error" and lost:
                why = f"{lost:,} tokens of the context would be lost to the window of {self.scorer.window:,}"
                fix = (
                    "--overlong truncate cuts contexts on their left, --overlong skip leaves such records out"
                )
                raise Failed("the record's context is too long for the model", where=where, why=why, fix=fix)
            for question in questions:
                check_question(question, self.scorer.window, where, fields, self.scorer.mask)
            if not questions and not self.written:
                why = "the tokenizer makes no token of it that could be predicted"
                raise Failed(
                    "nothing to score: text has no tokens",
                    where=where,
                    why=why,
                    fix="mend or remove the record",
                )
            kept.append((number, item, questions, lost))
        if not kept:
            fix = "evaluate a model with a longer window, or cut contexts with --overlong truncate"
            raise Failed(f"no record of task {self.bound.name} fits the model", where=items[0].where, fix=fix)
        return kept

    def _asked(self, items: list[Item]) -> tuple[list[list[Question]], list[int]]:
        """For each item its questions (none where the model writes) and the context tokens that the window
        takes.
        """
        scorer, task = self.scorer, self.bound.task
        if self.written:
            room = scorer.window - task.max_tokens
            if scorer.mask is not None:
                why, fix = (
                    f"task {self.bound.name} asks for generated text",
                    "leave the task out, or evaluate a GPT",
                )
                raise WrongUse("a BERT cannot write answers", why=why, fix=fix)
            if room < 1:
                why = f"answers have {task.max_tokens} tokens, the window {scorer.window}"
                fix = "evaluate a model with a longer window"
                raise WrongUse(f"task {self.bound.name} leaves no room for a question", why=why, fix=fix)
            contexts = scorer.tokenize([item.context for item in items])
            return [[] for _ in items], [max(0, len(ids) - room) for ids in contexts]
        questions = list(self._questions(items))
        if task.kind in ("rolling", "stream", "masked"):  # windows of one text lose nothing
            return questions, [0] * len(items)
        return questions, [sum(map(scorer.lost, mine)) for mine in questions]

    def _questions(self, items: list[Item]) -> Iterator[list[Question]]:
        kind, scorer = self.bound.task.kind, self.scorer
        mask = scorer.mask
        if kind in ("masked", "cloze") and mask is None:
            why, fix = (
                f"task {self.bound.name} asks what stands behind a mask",
                "leave the task out, or evaluate a BERT",
            )
            raise WrongUse("a model that reads from left to right has no masks", why=why, fix=fix)
        if kind in ("last_token", "rolling", "stream", "masked"):
            for ids in scorer.tokenize([item.text for item in items]):
                if kind == "last_token":
                    yield [Question(((scorer.bos + ids[:-1] or (scorer.prefix,), ids[-1:]),))]
                elif kind == "rolling":
                    yield rolling(scorer.bos + ids, scorer.window, scorer.prefix)
                elif mask is not None and kind == "masked":
                    yield hidden(ids, scorer.window, mask, self.bound.task.hidden)
                else:
                    yield stream(ids, scorer.window, self.bound.task.stride)
        else:
            for question in scorer.encode([item.pairs for item in items]):
                yield [_of_one_length(question, mask) if kind == "cloze" and mask is not None else question]

    def answer(self, answers: Answers, mine: Callable[[str], bool]) -> None:
        """Ask what is not answered yet and belongs to this rank; equal questions are asked once."""
        pending = {key: number for number, key in enumerate(self.keys) if key not in answers and mine(key)}
        if not pending:
            return
        keys, numbers = list(pending), list(pending.values())
        with progress(self.bound.name, total=len(self.keys), unit="questions") as bar:
            bar.start_at(len(self.keys) - len(keys))
            for batch in self._batches(numbers):
                answers.add({keys[place]: value for place, value in batch})
                bar.advance(len(batch))

    def _batches(self, numbers: list[int]) -> Iterator[list[tuple[int, Any]]]:
        if self.written:
            task = self.bound.task
            yield from self.scorer.generate(
                [self.items[number].context for number in numbers], task.until, task.max_tokens
            )
            return
        for batch in self.scorer.score([self.questions[number] for number in numbers]):
            for place, scores in batch:
                if not all(math.isfinite(score.logprob) for score in scores):
                    where = self.items[self.owners[numbers[place]]].where
                    why = (
                        "a log-probability is no finite number; among such the first choice would always win"
                    )
                    fix = "look for NaN or overflow in its weights; evaluate an earlier checkpoint"
                    raise Failed("the model predicts nothing", where=where, why=why, fix=fix)
            yield [(place, [packed(score) for score in scores]) for place, scores in batch]

    def scores(self, answers: Answers) -> TaskScores:
        """Aggregate the answers of all records."""
        bound, task = self.bound, self.bound.task
        given: list[list[Any]] = [[] for _ in self.items]
        for key, owner in zip(self.keys, self.owners):
            given[owner].append(answers[key])
        samples, outcomes = [], []
        for number, (item, found) in enumerate(zip(self.items, given)):
            scores = [] if self.written else [unpacked(packed) for answer in found for packed in answer]
            outcome = self._outcome(item, scores, found)
            outcomes.append(outcome)
            sample = {
                "task": bound.name,
                "record": self.records[number],
                "where": item.where,
                "answers": found,
            }
            samples.append(sample | {"metrics": {name: outcome[name] for name in task.metrics}})
        metrics = {}
        for name in task.metrics:
            value, error = aggregate(name, [outcome[name] for outcome in outcomes])
            baseline = random_baseline(name, self.items)
            how = METRICS[name]
            metrics[name] = {
                "value": value,
                "per": how.per,
                "stderr": error,
                "random": baseline,
                "higher_is_better": how.higher,
            }
        summary = {
            "task": bound.name,
            "group": bound.group,
            "about": task.about,
            "kind": task.kind,
            "n": len(self.items),
            "metrics": metrics,
            "shots": self.settings.shots,
            "seed": self.settings.seed if self.settings.shots else None,
            "prompt_hash": bound.prompt_hash,
            "data_hash": self._data_hash(),
            "checked": task.checked,
            "stride": min(task.stride, self.scorer.window) or None,
            "truncated_records": sum(map(bool, self.lost)),
            "truncated_tokens": sum(self.lost),
            "skipped_records": self.skipped,
            "scorer": self.scorer.recipe,
        }
        return TaskScores(summary, samples)

    def _data_hash(self) -> str:
        """Identity of the records and examples as they were asked (12 hex digits)."""
        asked = repr([(item.pairs, item.gold, item.text, item.answers) for item in self.items])
        return hashlib.sha256(asked.encode()).hexdigest()[:12]

    def _outcome(self, item: Item, scores: list[Score], found: list[Any]) -> Outcome:
        kind = self.bound.task.kind
        if kind == "generate_until":
            return exact_match_outcome(item.answers, found[0])
        if kind in ("multiple_choice", "partial"):
            return choice_outcome(item, scores)
        if kind == "rolling":
            return document_outcome(item, scores)
        if kind == "stream":
            return stream_outcome(item, scores)
        if kind == "masked":
            return hidden_outcome(scores)
        if kind == "cloze":
            best = min(score.rank for score in scores)  # of the accepted answers
            return {"p_at_1": [float(best < 1)], "p_at_10": [float(best < 10)]}
        return loglikelihood_outcome(scores)


def answer_fields(kind: str, item: Item) -> list[str]:
    """What a task file calls the continuation of each pair."""
    if kind in ("multiple_choice", "cloze", "generate_until"):
        return [
            f"{'choices' if kind == 'multiple_choice' else 'answers'}[{number}]"
            for number in range(len(item.pairs))
        ]
    return ["target"] * len(item.pairs) if item.pairs else ["text"]


def _of_one_length(question: Question, mask: int) -> Question:
    """A cloze question with those of its accepted answers that its masks can spell; with all of them, to be
    refused, if none.
    """
    pairs = tuple(pair for pair in question.pairs if pair[0].count(mask) == len(pair[1]))
    return Question(pairs) if pairs else question
