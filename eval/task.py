"""Tasks by name: the shipped ones, groups and members, files of one's own; each with its records and questions."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from pathlib import Path
from textwrap import wrap
from typing import Any

from ..core.console import table
from ..core.errors import WrongUse, did_you_mean
from ..core.files import sha256_json
from ..core.recipe import build_recipe, read_toml
from ..data.records import KNOWN, Record, find_files, hub_records, read_records, unknown_files
from .items import expression
from .kinds.choices import LogLikelihood, MultipleChoice, Partial
from .kinds.core import Core
from .kinds.instructions import Instructions
from .kinds.kind import Kind
from .kinds.masks import Cloze, Masked
from .kinds.program import Program
from .kinds.texts import LastToken, Rolling, Stream
from .kinds.written import GenerateUntil
from .task_file import Source, Task

_ROOM = Path(str(resources.files(__package__)))
LISTING_WIDTH = 100
KINDS: dict[str, type[Kind]] = {
    "multiple_choice": MultipleChoice,
    "partial": Partial,
    "loglikelihood": LogLikelihood,
    "last_token": LastToken,
    "rolling": Rolling,
    "stream": Stream,
    "generate_until": GenerateUntil,
    "cloze": Cloze,
    "masked": Masked,
    "core": Core,
    "program": Program,
    "instructions": Instructions,
}


@dataclass(frozen=True)
class BoundTask:
    """A task by its own name (a member of a group, or a plain task) with its source filled in."""

    name: str
    group: str
    task: Task
    source: Source
    named: bool = False  # the user asked for it itself, not for its group
    member: Mapping[str, str] = field(default_factory=dict)  # what the group's file says of it

    @property
    def prompt_hash(self) -> str:
        """Identity of what is asked: kind, prompts, delimiter and the like (12 hex digits)."""
        asked = self.task.model_dump(mode="json", include=set(self.kind.asked))
        return sha256_json([asked, dict(self.member)])[:12]

    @property
    def groups(self) -> dict[str, bool]:
        """The groups that report a mean over it and others -> whether all records weigh the same in it."""
        own = [self.group] if self.group and self.task.mean else []
        parts = [name for name, members in self.task.groups.items() if self.name in members]
        return dict.fromkeys([*own, *parts], self.task.weighted)

    @property
    def kind(self) -> Kind:
        """How it asks and scores."""
        return KINDS[self.task.kind](self.task, self.name, member=self.member)

    def files(self, data_dir: Path | None, *, fewshot: bool = False) -> list[Path]:
        """Its files that are at hand."""
        patterns = self.source.fewshot_files if fewshot else self.source.files
        if self.source.anywhere:
            return [path for name in patterns if (path := Path(name)).is_file()]
        return find_files(patterns, _root(data_dir))

    def records(self, data_dir: Path | None, limit: int | None, *, fewshot: bool = False) -> list[Record]:
        """The records of the task (or of its few-shot examples). Raises WrongUse when there are none."""
        source, root = self.source, _root(data_dir)
        if paths := self.files(data_dir, fewshot=fewshot):
            cut = source.model_dump(include={"lines", "pages", "tabs"})
            if records := self._kept(read_records(paths, None if source.keep else limit, **cut), limit):
                return records
            raise WrongUse(f"no records for task {self.name}", where=paths[0], why="the file is empty")
        split = source.fewshot_split if fewshot else source.split
        if data_dir is None and source.dataset and split:
            found = hub_records(source.dataset, source.config, split, None if source.keep else limit)
            return self._kept(found, limit)
        patterns = source.fewshot_files if fewshot else source.files
        what = f"no data for task {self.name}"
        if others := unknown_files(patterns, root):
            raise WrongUse(what, where=others[0], why="unknown data format", fix=KNOWN)
        why = "none of these is there: " + ", ".join(patterns or ["(the task names no local files)"])
        raise WrongUse(what, where=root, why=why, fix="put the file there, or choose another --data-dir")

    def _kept(self, records: list[Record], limit: int | None) -> list[Record]:
        """Those that belong to the task, at most `limit`."""
        if self.source.keep:
            wanted = expression(self.source.keep)
            records = [one for one in records if wanted(one.data | {"member": self.member})]
        return records[:limit]


def _root(data_dir: Path | None) -> Path:
    """Where files are looked for: the user's directory alone, or the shipped samples, which may be other records."""
    return _ROOM.parent / "recipes" / "samples" if data_dir is None else data_dir


def shipped_tasks() -> dict[str, Path]:
    """Name -> path of the task files in the package."""
    return {path.stem: path for path in sorted((_ROOM / "tasks").glob("*.toml"))}


def find_tasks(names: Sequence[str]) -> list[BoundTask]:
    """Shipped tasks, groups (all members), single members, files by path. Raises WrongUse naming the nearest task."""
    found: list[BoundTask] = []
    for name in names:
        path = Path(name)
        if path.suffix == ".toml":
            if not path.is_file():
                raise WrongUse("no such task file", where=path, fix="check the spelling")
            found += _members(path.stem, load_task(path))
            continue
        known = _known()
        if name not in known:
            harness = "lm-evaluation-harness's own run by: python -m throughline.eval.adapter run"
            fix = f"{did_you_mean(name, known)} list them with: throughline eval --list; {harness}".strip()
            raise WrongUse(f"unknown task {name!r}", fix=fix)
        group = known[name]
        members = _members(group, load_task(shipped_tasks()[group]))
        found += [
            replace(bound, named=name == bound.name)
            for bound in members
            if name in (group, bound.name) or bound.name in bound.task.groups.get(name, ())
        ]
    chosen: dict[str, BoundTask] = {}
    for bound in found:
        first = chosen.setdefault(bound.name, bound)
        if bound.named:
            chosen[bound.name] = bound
        if first.task is not bound.task:
            why, fix = "scores go by that name, which is the task file's", "rename one of the files"
            raise WrongUse(f"two tasks are called {bound.name}", why=why, fix=fix)
    return list(chosen.values())


def _known() -> dict[str, str]:
    """Every name that --tasks accepts -> the task file it belongs to."""
    known = {}
    for group, path in shipped_tasks().items():
        task = load_task(path)
        known.update(dict.fromkeys([group, *task.members, *task.groups], group))
    return known


def _members(group: str, task: Task) -> Iterator[BoundTask]:
    if not task.members:
        yield BoundTask(group, "", task, task.source)
    for name, values in task.members.items():
        fill = {"name": name.removeprefix(f"{group}_"), **values}
        given = task.source.model_dump().items()
        tree = {key: value if key == "keep" else _fill(value, fill) for key, value in given}
        yield BoundTask(name, group, task, Source.model_validate(tree), member=fill)


def _fill(value: Any, fill: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_fill(part, fill) for part in value]
    try:
        return value.format_map(fill) if isinstance(value, str) else value
    except (KeyError, ValueError, IndexError) as error:
        why, fix = f"{error} is not among {', '.join(fill)}", "give it to every member in [members]"
        raise WrongUse(f"cannot fill in {value!r} for a member of the group", why=why, fix=fix) from None


@cache
def load_task(path: Path) -> Task:
    """Read and check a task file. Raises WrongUse with every problem at once."""
    text, tree = read_toml(path, "the task file")
    fix = f"the shipped task files are examples: {_ROOM / 'tasks'}"
    task = build_recipe(tree, Task, where=path, text=text, what="the task file", fix=fix)
    if problems := "\n".join(_problems(task)):
        what = f"the task cannot be one of kind {task.kind}"
        raise WrongUse(what, where=path, why=problems, fix="mend the file")
    return task


def _problems(task: Task) -> Iterator[str]:
    if task.kind not in KINDS:
        yield f"kind: {task.kind!r} is none of {', '.join(KINDS)}"
        return
    kind = KINDS[task.kind]
    for name, given in (("[[prompt]]", task.prompt), ("metrics", task.metrics)):
        if not given:
            yield f"{name}: at least one is needed"
    for number, prompt in enumerate(task.prompt, 1):
        if missing := [key for key in kind.needs if not getattr(prompt, key)]:
            yield f"prompt {number} lacks {', '.join(missing)}"
    if "" in task.until:
        yield "until: an empty string would end every answer before it begins"
    for name in task.metrics:
        if name not in kind.metrics:
            yield f"metrics: {name!r} is none of {', '.join(kind.metrics)}"


def task_listing() -> tuple[dict[str, Any], list[str]]:
    """All shipped tasks and the files they look for: (JSON, lines)."""
    tasks = {name: load_task(file) for name, file in shipped_tasks().items()}
    rows = [(name, task.kind, len(task.members) or None, task.checked) for name, task in tasks.items()]
    lines = table(("task", "kind", "members", "checked"), rows)
    lines += [
        "",
        "checked: what the tests compared with lm-evaluation-harness (nothing: it has no such task)",
        "",
    ]
    for name, task in tasks.items():
        lines.append(name)
        patterns = "  ".join(task.source.files)
        for text in (
            task.about,
            f"metrics: {', '.join(task.metrics)}",
            f"files below --data-dir, in order: {patterns}",
        ):
            lines += wrap(
                text, LISTING_WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            )
    payload = {}
    for name, task in tasks.items():
        files = {bound.name: bound.source.files for bound in find_tasks([name])}
        payload[name] = task.model_dump(include={"about", "kind", "metrics", "checked"}) | {"files": files}
    return {"tasks": payload}, lines
