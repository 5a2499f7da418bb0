"""One task as questions to a model, checked, answered and scored; and the store of answers, JSON lines on disk."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..core.console import progress, say
from ..core.errors import Failed, WrongUse
from ..core.files import write_atomic
from ..core.scorer import Scorer
from ..core.workspace import Workspace, read_records
from ..data.records import Record
from .items import Chat, Draw, HarnessDraw, Item, with_examples
from .kinds.kind import Asks
from .metrics import aggregate, random_baseline
from .task import BoundTask

ANSWERS = 4  # form of the stored answers, part of their keys
DRAWS = {"own": Draw, "harness": HarnessDraw}


class Answers(dict[str, Any]):
    """The store of answers by key, in memory and in JSON lines on disk (none without a directory)."""

    def __init__(self, directory: Path | None, rank: int = 0) -> None:
        self.directory = directory
        self._file = f"answers-{rank}.jsonl"
        self._dates: dict[str, str] = {}
        self.reload()

    def reload(self) -> None:
        """Read what every rank has written."""
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            for file in sorted(self.directory.glob("answers-*.jsonl")):
                for line in read_records(file):
                    self[line["key"]], self._dates[line["key"]] = line["answer"], line.get("date", "")

    def dates(self, keys: Iterable[str]) -> list[str]:
        """The days on which those of `keys` that are known were answered, in order of time."""
        return sorted(self._dates[key] for key in keys if key in self._dates)

    def add(self, found: dict[str, Any]) -> None:
        """Keep answers and append them to this rank's file in one write."""
        self.update(found)
        if self.directory is not None:
            day = time.strftime("%Y-%m-%d")
            lines = ({"key": key, "answer": answer, "date": day} for key, answer in found.items())
            Workspace(self.directory).append(self._file, *lines)


def replace_answers(directory: Path, new: Path, keys: Set[str]) -> None:
    """Put the answers to these keys that lie in another directory in the place of every rank's, and remove it."""
    lines = [line for file in sorted(new.glob("answers-*.jsonl")) for line in read_records(file)]
    for file in sorted({directory / "answers-0.jsonl", *directory.glob("answers-*.jsonl")}):
        lines += (line for line in read_records(file) if line["key"] not in keys)
        write_atomic(file, "".join(json.dumps(line) + "\n" for line in lines))
        lines = []
    shutil.rmtree(new)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What besides tasks and model decides a score."""

    data_dir: Path | None = None
    limit: int | None = None
    shots: int | None = None  # None: as many as the task says
    seed: int | None = None  # of the draw of examples; None: 0, of the harness's own draw 1234
    draw: Literal["own", "harness"] = "own"
    overlong: Literal["truncate", "error", "skip"] = "truncate"  # a record that loses tokens to the window
    run_programs: bool = False  # that a model has written
    fewshot_as_multiturn: bool = True  # in a chat an example is a turn of each side, no part of the question

    def __post_init__(self) -> None:
        if self.data_dir is not None and not self.data_dir.is_dir():
            fix = "--data-dir, or evaluation.data_dir in a recipe, names the directory that holds the tasks' files"
            raise WrongUse("no such directory", where=self.data_dir, fix=fix)


@dataclass
class TaskScores:
    """One task's scores, every record's answer in order, and the questions as they stand without examples."""

    summary: dict[str, Any]
    samples: list[dict[str, Any]] = field(default_factory=list)
    items: list[Item] = field(default_factory=list)


class _Row(NamedTuple):
    """A record that fits the model."""

    number: int
    item: Item
    asks: Asks
    lost: int  # context tokens


class Asked:
    """One task's records as questions with their keys."""

    def __init__(self, scorer: Scorer, bound: BoundTask, settings: Settings) -> None:
        self.scorer, self.bound, self.settings, self.kind = scorer, bound, settings, bound.kind
        shots = int(bound.member.get("shots", bound.task.shots))
        self.shots = shots if settings.shots is None else settings.shots
        if self.kind.runs_programs and not settings.run_programs:
            why = "its score is whether the programs that the model writes pass tests"
            fix = "give --run-programs, in a container that may break"
            raise WrongUse(f"task {bound.name} runs programs", why=why, fix=fix)
        self.skipped = 0
        self.rows = self._fitting(self._items())
        self.items = [row.item for row in self.rows]
        self.asks = [ask for row in self.rows for ask in row.asks]
        asked = [f"{ANSWERS}\0{scorer.identity}\0{self.kind.key(ask)}" for ask in self.asks]
        self.keys = [hashlib.sha256(text.encode()).hexdigest()[:24] for text in asked]

    def _items(self) -> list[Item]:
        bound, settings = self.bound, self.settings
        task = bound.task
        if self.shots and (why := self.kind.no_examples):
            raise WrongUse(f"task {bound.name} takes no examples", why=why, fix="leave --shots out")
        pool = self._pool() if self.shots else []
        limit = None if pool is None else settings.limit  # the draw does not depend on --limit
        self.plain = self.kind.items(bound.records(settings.data_dir, limit))
        given = self.scorer.chat
        chat = given and Chat(given, task.delimiter, settings.fewshot_as_multiturn)
        if not self.shots and not task.description and chat is None:
            return self.plain
        if chat is not None and self.kind.draw:
            why, fix = "its prompts are one text by definition", "leave --apply-chat-template out"
            raise WrongUse(f"task {bound.name} is no chat", why=why, fix=fix)
        draw = self.kind.draw or DRAWS[settings.draw]
        drawn = draw(bound.name, self.shots, settings.seed, task.first, task.headroom)
        before = task.description, task.separator, chat
        return with_examples(self.plain, pool, drawn, *before)[: settings.limit]

    def _pool(self) -> list[Item] | None:
        """What examples are made of; None: the evaluated records themselves."""
        bound = self.bound
        if given := bound.task.examples:
            records = [Record(f"{bound.name}, example {i}", one) for i, one in enumerate(given, 1)]
            return self.kind.items(records, example=True)
        if not bound.source.fewshot_files and not bound.source.fewshot_split:
            return None
        try:
            return self.kind.items(bound.records(self.settings.data_dir, None, fewshot=True), example=True)
        except WrongUse as error:
            why = f"no training records at hand ({error.why or error.what})"
            say(f"{bound.name}: {why}; examples are drawn from the evaluated ones")
            return None

    def _fitting(self, items: list[Item]) -> list[_Row]:
        """The records to score; what is too long is treated as the settings say."""
        kept = []
        for number, (item, (asks, lost)) in enumerate(zip(items, self.kind.asks(items, self.scorer))):
            if lost and self.settings.overlong == "skip":
                continue
            if lost and self.settings.overlong == "error":
                where = f"{item.where} (task {self.bound.name})"
                why = f"{lost:,} tokens of the context would be lost to the window of {self.scorer.window:,}"
                fix = "--overlong truncate cuts contexts on their left, skip leaves such records out"
                raise Failed("the record's context is too long for the model", where=where, why=why, fix=fix)
            self.kind.check(item, asks, self.scorer)
            kept.append(_Row(number, item, asks, lost))
        if not kept:
            fix = "evaluate a model with a longer window, or cut contexts with --overlong truncate"
            raise Failed(f"no record of task {self.bound.name} fits the model", where=items[0].where, fix=fix)
        self.skipped = len(items) - len(kept)
        return kept

    def answer(self, answers: Answers, mine: Callable[[str], bool]) -> None:
        """Ask what is not answered yet and belongs to this rank; equal questions are asked once."""
        pending = {key: number for number, key in enumerate(self.keys) if key not in answers and mine(key)}
        if not pending:
            return
        keys, numbers = list(pending), list(pending.values())
        wheres = [row.item.where for row in self.rows for _ in row.asks]
        with progress(self.bound.name, total=len(self.keys), unit="questions") as bar:
            bar.start_at(len(self.keys) - len(keys))
            asks, places = [self.asks[number] for number in numbers], [wheres[number] for number in numbers]
            for batch in self.kind.answers(self.scorer, asks, places):
                answers.add({keys[place]: value for place, value in batch})
                bar.advance(len(batch))

    def scores(self, answers: Answers) -> TaskScores:
        """Aggregate the answers of all records."""
        bound, task = self.bound, self.bound.task
        given = iter([answers[key] for key in self.keys])
        samples, outcomes = [], []
        for row in self.rows:
            found = [next(given) for _ in row.asks]
            outcomes.append(outcome := self.kind.outcome(row.item, found))
            about = {"task": bound.name, "record": row.number, "where": row.item.where, "lost": row.lost}
            about |= self.plain[row.number].shown
            # without the NaN behind a list (`by_function`), which is no JSON
            own = {name: [one for one in outcome[name] if one == one] for name in self.kind.reported}
            samples.append(about | {"answers": found, "metrics": own})
        metrics = {}
        for name in self.kind.reported:
            how = self.kind.metric(name)
            value, error = aggregate(how, [outcome[name] for outcome in outcomes])
            metrics[name] = {
                "value": value,
                "per": how.per,
                "stderr": error,
                "random": random_baseline(name, self.items),
                "higher_is_better": how.higher,
            }
        lost = [row.lost for row in self.rows]
        asked = repr([(item.pairs, item.gold, item.text, item.answers) for item in self.items])
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
            "data_hash": hashlib.sha256(asked.encode()).hexdigest()[:12],
            "checked": task.checked,
            "stride": min(task.stride, self.scorer.window) or None,
            "truncated_records": sum(map(bool, lost)),
            "truncated_tokens": sum(lost),
            "skipped_records": self.skipped,
            "scorer": self.scorer.recipe,
        }
        return TaskScores(summary, samples, [self.plain[row.number] for row in self.rows])
