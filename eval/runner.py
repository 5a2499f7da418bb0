"""Running an evaluation: questions of the tasks, answers that survive a crash, scores with all that explains
them.

Answers are appended batch by batch to `answers-<rank>.jsonl`. The key of an answer is a hash of what was asked
and of whom: weights, tokenizer, window, versions of the programs, device. A later start reads all of these files
and asks only what is missing, so the number of ranks, the batch size and the point of a crash leave no trace in
the scores. Question i belongs to a rank by its key, not by its place.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..core.console import progress, say
from ..core.errors import Failed, WrongUse
from ..core.scorer import Question, Score, Scorer, check_question
from ..core.workspace import Workspace, read_records
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


@dataclass(frozen=True)
class Ranks:
    """The processes that share the work; `meet` waits for all of them."""

    rank: int = 0
    world: int = 1
    meet: Callable[[], None] = lambda: None


@dataclass
class TaskScores:
    """One task's scores, and every record's answer in order."""

    summary: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)


class Answers:
    """The store of answers: a dict in memory, JSON lines on disk (none without a directory)."""

    def __init__(self, directory: Path | None, rank: int = 0) -> None:
        self.directory = directory
        self._file = f"answers-{rank}.jsonl"
        self._known: dict[str, Any] = {}
        self._dates: dict[str, str] = {}
        self.reload()

    def reload(self) -> None:
        """Read what every rank has written."""
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            for file in sorted(self.directory.glob("answers-*.jsonl")):
                for line in read_records(file):
                    self._known[line["key"]], self._dates[line["key"]] = line["answer"], line.get("date", "")

    def dates(self, keys: Iterable[str]) -> list[str]:
        """The days on which those of `keys` that are known were answered, in order of time."""
        return sorted(self._dates[key] for key in keys if key in self._dates)

    def __contains__(self, key: str) -> bool:
        return key in self._known

    def __getitem__(self, key: str) -> Any:
        return self._known[key]

    def add(self, found: dict[str, Any]) -> None:
        """Keep answers and append them to this rank's file in one write."""
        self._known.update(found)
        if self.directory is not None:
            day = time.strftime("%Y-%m-%d")
            lines = ({"key": key, "answer": answer, "date": day} for key, answer in found.items())
            Workspace(self.directory).append(self._file, *lines)


def evaluate(
    scorer: Scorer,
    tasks: Sequence[BoundTask],
    settings: Settings,
    directory: Path | None = None,
    ranks: Ranks = Ranks(),
) -> list[TaskScores]:
    """Score the tasks. `directory` keeps the answers for a later start. Ranks other than 0 return an empty
    list.

    Raises WrongUse when a task has no data and Failed for a bad record, naming file, line and field.
    """
    answers = Answers(directory, ranks.rank)
    asked = prepare(scorer, tasks, settings)
    if ranks.rank == 0:
        _say_kept(answers, [key for work in asked for key in work.keys])
    for work in asked:
        work.answer(answers, lambda key: int(key, 16) % ranks.world == ranks.rank)
    ranks.meet()
    if ranks.rank:
        return []
    answers.reload()
    for work in asked:
        work.answer(answers, lambda _: True)  # what a rank that died has left
    return [work.scores(answers) for work in asked]


def _say_kept(answers: Answers, keys: Sequence[str]) -> None:
    """Say how many of the answers an earlier evaluation has given, and when."""
    if days := answers.dates(keys):
        when = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
        say(f"{len(days):,} of {len(keys):,} answers are kept from {when}; --fresh asks all of them again")


def prepare(scorer: Scorer, tasks: Sequence[BoundTask], settings: Settings) -> list["_Asked"]:
    """Every question, checked; nothing is computed. Raises as `evaluate` does."""
    return [_Asked(scorer, task, settings) for task in present(tasks, settings)]


def present(tasks: Sequence[BoundTask], settings: Settings) -> list[BoundTask]:
    """The tasks whose data are there. Raises WrongUse for one whose data are not.

    Where files of some members of a group are at hand, the others are left out (said once) and nothing is
    fetched for them, unless they were asked for by their own names.
    """
    at_hand = {task.name for task in tasks if task.files(settings.data_dir)}
    partly = {task.group for task in tasks if task.group and task.name in at_hand}
    missing = [task for task in tasks if task.group in partly and task.name not in at_hand and not task.named]
    found = [task for task in tasks if task not in missing]
    for task in found:
        task.records(settings.data_dir, 1)
    for group in sorted({task.group for task in missing}):
        names = [task.name.removeprefix(f"{group}_") for task in missing if task.group == group]
        some = ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
        say(f"{group}: {len(names)} member{'s have' if len(names) > 1 else ' has'} no data, left out: {some}")
    return found


class _Asked:
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
            yield [(place, [_packed(score) for score in scores]) for place, scores in batch]

    def scores(self, answers: Answers) -> TaskScores:
        """Aggregate the answers of all records."""
        bound, task = self.bound, self.bound.task
        given: list[list[Any]] = [[] for _ in self.items]
        for key, owner in zip(self.keys, self.owners):
            given[owner].append(answers[key])
        samples, outcomes = [], []
        for number, (item, found) in enumerate(zip(self.items, given)):
            scores = [] if self.written else [_unpacked(packed) for answer in found for packed in answer]
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


def _packed(score: Score) -> list[Any]:
    """A score as a short JSON list (numbers come back bit for bit)."""
    packed = [score.logprob, score.right, score.tokens, score.truncated, score.rank]
    return [*packed, list(score.token_logprobs)] if score.token_logprobs else packed


def _unpacked(packed: list[Any]) -> Score:
    logprob, right, tokens, truncated, rank, *kept = packed
    return Score(logprob, right, tokens, truncated, rank, tuple(kept[0]) if kept else ())


def group_means(scores: Sequence[TaskScores], groups: dict[str, bool]) -> list[dict[str, Any]]:
    """Summaries of groups that report a mean: the unweighted mean over members, its error from theirs
    (independent).
    """
    made = []
    for group, wanted in groups.items():
        members = [score.summary for score in scores if score.summary["group"] == group]
        if not wanted or len(members) < 2:
            continue
        metrics = {}
        counts = ("n", "truncated_records", "truncated_tokens", "skipped_records")
        for name, first in members[0]["metrics"].items():
            each = [member["metrics"][name] for member in members]
            errors = [value["stderr"] for value in each]
            error = None if None in errors else sum(e * e for e in errors) ** 0.5 / len(each)
            metrics[name] = first | {
                "value": sum(value["value"] for value in each) / len(each),
                "stderr": error,
            }
            if None not in (guesses := [value["random"] for value in each]):
                metrics[name]["random"] = sum(guesses) / len(each)
        made.append(
            {
                **members[0],
                "task": group,
                "group": "",
                "members": len(members),
                "metrics": metrics,
                **{key: sum(member[key] for member in members) for key in counts},
            }
        )
    return made
