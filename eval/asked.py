"""One task as questions to a model: made from its records, checked against the window, answered, scored."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..core.console import progress, say
from ..core.errors import Failed, WrongUse
from ..core.scorer import Scorer
from ..data.records import Record
from .answers import Answers
from .fewshot import Before, Draw, HarnessDraw, with_examples
from .items import Item
from .kinds.kind import Asks
from .metrics import aggregate, random_baseline
from .task import BoundTask

ANSWERS = 4  # form of the stored answers, part of their keys


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What besides tasks and model decides a score."""

    data_dir: Path | None = None
    limit: int | None = None
    shots: int | None = None  # None: as many as the task says
    seed: int | None = None  # of the draw of examples; None: 0, of the harness's own draw 1234
    draw: Literal["own", "harness"] = "own"
    overlong: Literal["truncate", "error", "skip"] = "truncate"  # a record that loses tokens to the window

    def __post_init__(self) -> None:
        if self.data_dir is not None and not self.data_dir.is_dir():
            fix = "--data-dir, or evaluation.data_dir in a recipe, names the directory that holds the tasks' files"
            raise WrongUse("no such directory", where=self.data_dir, fix=fix)


@dataclass
class TaskScores:
    """One task's scores, and every record's answer in order."""

    summary: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)


class Asked:
    """One task's records as questions with their keys."""

    def __init__(self, scorer: Scorer, bound: BoundTask, settings: Settings) -> None:
        self.scorer, self.bound, self.settings, self.kind = scorer, bound, settings, bound.kind
        shots = int(bound.member.get("shots", bound.task.shots))
        self.shots = shots if settings.shots is None else settings.shots
        self.skipped = 0
        fitting = self._fitting(self._items())
        self.items = [item for _, item, _, _ in fitting]
        self.records = [number for number, _, _, _ in fitting]
        self.lost = [lost for _, _, _, lost in fitting]
        self.asks = [ask for _, _, asks, _ in fitting for ask in asks]
        self.owners = [place for place, (_, _, asks, _) in enumerate(fitting) for _ in asks]
        asked = [f"{ANSWERS}\0{scorer.identity}\0{self.kind.key(ask)}" for ask in self.asks]
        self.keys = [hashlib.sha256(text.encode()).hexdigest()[:24] for text in asked]

    def _items(self) -> list[Item]:
        bound, settings = self.bound, self.settings
        task = bound.task
        if self.shots and (why := self.kind.no_examples):
            raise WrongUse(f"task {bound.name} takes no examples", why=why, fix="leave --shots out")
        pool = self._pool() if self.shots else []
        limit = None if pool is None else settings.limit  # the draw does not depend on --limit
        items = self.kind.items(bound.records(settings.data_dir, limit))
        if not self.shots and not task.description:
            return items
        own = Draw(bound.name, self.shots, settings.seed or 0, task.first)
        draw = HarnessDraw(own, settings.seed, task.headroom) if settings.draw == "harness" else own
        draw = self.kind.draw(self.shots) or draw
        before = Before(task.description, task.separator)
        return with_examples(bound.name, items, pool, draw, before)[: settings.limit]

    def _pool(self) -> list[Item] | None:
        """What examples are made of; None: the evaluated records themselves."""
        bound = self.bound
        if bound.task.examples:
            given = enumerate(bound.task.examples, 1)
            return self.kind.items(
                [Record(f"{bound.name}, example {i}", one) for i, one in given], example=True
            )
        if not bound.source.fewshot_files and not bound.source.fewshot_split:
            return None
        try:
            return self.kind.items(bound.records(self.settings.data_dir, None, fewshot=True), example=True)
        except WrongUse as error:
            why = error.why or error.what
            say(
                f"{bound.name}: no training records at hand ({why}); examples are drawn from the evaluated ones"
            )
            return None

    def _fitting(self, items: list[Item]) -> list[tuple[int, Item, Asks, int]]:
        """(number, item, what is asked, context tokens lost); what is too long is treated as the settings say."""
        kept = []
        window = self.scorer.window
        for number, (item, (asks, lost)) in enumerate(zip(items, self.kind.asks(items, self.scorer))):
            if self.settings.overlong == "skip" and lost:
                self.skipped += 1
                continue
            if self.settings.overlong == "error" and lost:
                where = f"{item.where} (task {self.bound.name})"
                why = f"{lost:,} tokens of the context would be lost to the window of {window:,}"
                fix = (
                    "--overlong truncate cuts contexts on their left, --overlong skip leaves such records out"
                )
                raise Failed("the record's context is too long for the model", where=where, why=why, fix=fix)
            self.kind.check(item, asks, self.scorer)
            kept.append((number, item, asks, lost))
        if not kept:
            fix = "evaluate a model with a longer window, or cut contexts with --overlong truncate"
            raise Failed(f"no record of task {self.bound.name} fits the model", where=items[0].where, fix=fix)
        return kept

    def answer(self, answers: Answers, mine: Callable[[str], bool]) -> None:
        """Ask what is not answered yet and belongs to this rank; equal questions are asked once."""
        pending = {key: number for number, key in enumerate(self.keys) if key not in answers and mine(key)}
        if not pending:
            return
        keys, numbers = list(pending), list(pending.values())
        with progress(self.bound.name, total=len(self.keys), unit="questions") as bar:
            bar.start_at(len(self.keys) - len(keys))
            asks = [self.asks[number] for number in numbers]
            where = lambda place: self.items[self.owners[numbers[place]]].where  # noqa: E731
            for batch in self.kind.answers(self.scorer, asks, where):
                answers.add({keys[place]: value for place, value in batch})
                bar.advance(len(batch))

    def scores(self, answers: Answers) -> TaskScores:
        """Aggregate the answers of all records."""
        bound, task = self.bound, self.bound.task
        given: list[list[Any]] = [[] for _ in self.items]
        for key, owner in zip(self.keys, self.owners):
            given[owner].append(answers[key])
        outcomes = [self.kind.outcome(item, found) for item, found in zip(self.items, given)]
        samples = [
            {
                "task": bound.name,
                "record": record,
                "where": item.where,
                "lost": lost,
                "answers": found,
                "metrics": {name: outcome[name] for name in self.kind.reported},
            }
            for record, item, lost, found, outcome in zip(
                self.records, self.items, self.lost, given, outcomes
            )
        ]
        metrics = {}
        for name in self.kind.reported:
            how = self.kind.metric(name)
            value, error = aggregate(how, [outcome[name] for outcome in outcomes])
            baseline = random_baseline(name, self.items)
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
            "shots": self.shots,
            "seed": self.settings.seed if self.shots else None,
            "draw": self.settings.draw,
            "groups": bound.groups,
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
