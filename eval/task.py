"""Tasks: small TOML files that say where records are, how a prompt is made from one, and what is measured.

A task has one kind and one or more `[[prompt]]` blocks, one per form in which its data circulate (the hub's schema, a
repackaged file); the first block whose `fields` a record has is used. Templates are Jinja; `gold`, `answers` and a
`choices` or `contexts` that is one string are Jinja expressions, which keep their type.
"""

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ..core.errors import Failed, WrongUse
from ..core.files import sha256_json
from ..core.recipe import Section, build_recipe
from .sources import Record, TextLayout, find_files, hub_records, read_records
from .textops import FILTERS

Kind = Literal[
    "multiple_choice", "partial", "loglikelihood", "last_token", "rolling", "stream", "generate_until", "cloze", "masked"
]  # fmt: skip

# What each kind's prompt block must give.
NEEDED: dict[str, tuple[str, ...]] = {
    "multiple_choice": ("choices", "gold"),
    "partial": ("contexts", "target", "gold"),
    "loglikelihood": ("context", "target"),
    "last_token": ("text",),
    "rolling": ("text",),
    "stream": ("text",),
    "generate_until": ("context", "answers"),
    "cloze": ("context", "answers"),
    "masked": ("text",),
}


class Source(Section):
    """Where the records are. `{name}` stands for the member of a group, other `{keys}` for what `[members]` gives."""

    files: list[str]
    """Patterns below --data-dir (and the shipped samples), in order of preference."""
    fewshot_files: list[str] = []
    """The same for the records that few-shot examples are drawn from; none: the evaluated records themselves."""
    dataset: str = ""
    """Name for the `datasets` library, used only when no local file is found and no --data-dir is given."""
    config: str | None = None
    """Its configuration."""
    split: str = "test"
    """Its split that is evaluated."""
    fewshot_split: str = ""
    """Its split that few-shot examples are drawn from."""
    lines: int = 0
    """Lines a record in a .txt file."""
    pages: bool = False
    """A .txt file is WikiText: one record an article."""


class Prompt(Section):
    """How one form of the data becomes a question."""

    fields: list[str]
    """Fields by which this form is recognised."""
    context: str = ""
    """Template of the text before the answer."""
    choices: str | list[str] = ""
    """Templates of the choices, or one expression that yields them."""
    contexts: str | list[str] = ""
    """Kind partial: the contexts, one per choice, that `target` follows."""
    target: str = ""
    """Template of the scored text after the context(s)."""
    gold: str = ""
    """Expression: the index of the right choice."""
    text: str = ""
    """Template of the document to predict."""
    original: str = ""
    """Template of the text whose words and bytes normalise its perplexity; none: `text`."""
    answers: str = ""
    """Expression: the list of accepted answers."""


class Task(Section):
    """One task, or a group of tasks of one form (BLiMP's paradigms, ANLI's rounds)."""

    about: str
    """One line: what it asks, and which split is evaluated."""
    kind: Kind
    metrics: list[str]
    """What is reported, the first one being the score."""
    source: Source
    prompt: list[Prompt]
    delimiter: str = " "
    """Put between context and choice."""
    until: list[str] = []
    """Kind generate_until: strings that end an answer."""
    max_tokens: int = 32
    """Kind generate_until: longest answer in tokens."""
    stride: int = 0
    """Kind stream: new targets per window; 0 = windows do not overlap."""
    hidden: Annotated[float, Field(gt=0, le=1)] = 0.15
    """Kind masked: tokens of each window that are hidden at once."""
    members: dict[str, dict[str, str]] = {}
    """Kind of a group: member name -> values for `{keys}` in `source`."""
    mean: bool = False
    """A group reports the mean over its members."""
    checked: Literal["scores", "prompts", "nothing"] = "scores"
    """What the tests compared with lm-evaluation-harness: scores on real records, prompts on hand-written ones, or nothing."""


@dataclass(frozen=True)
class Item:
    """A record turned into a question; which fields are filled depends on the kind."""

    where: str
    pairs: tuple[tuple[str, str], ...] = ()  # (context, continuation) texts
    choices: tuple[str, ...] = ()  # as acc_norm measures them: without the delimiter
    gold: int = 0
    text: str = ""
    original: str = ""
    answers: tuple[str, ...] = ()

    @property
    def context(self) -> str:
        """The one context of kinds that have one."""
        return self.pairs[0][0]

    @property
    def solved(self) -> str:
        """The text of the question with its right answer, as a few-shot example shows it."""
        context, continuation = self.pairs[self.gold] if self.gold < len(self.pairs) else self.pairs[0]
        return context + continuation


@dataclass(frozen=True)
class BoundTask:
    """A task by its own name (a member of a group, or a plain task) with its source filled in."""

    name: str
    group: str
    task: Task
    source: Source

    @property
    def prompt_hash(self) -> str:
        """Identity of what is asked: kind, prompts and delimiter (12 hex digits)."""
        facts = {"kind", "prompt", "delimiter", "until", "max_tokens", "stride"}
        if self.task.kind == "masked":
            facts.add("hidden")
        asked = self.task.model_dump(mode="json", include=facts)
        return sha256_json(asked)[:12]

    def files(self, data_dir: Path | None, *, fewshot: bool = False) -> list[Path]:
        """Its files that are at hand."""
        return find_files(self.source.fewshot_files if fewshot else self.source.files, _roots(data_dir))

    def records(self, data_dir: Path | None, limit: int | None, *, fewshot: bool = False) -> list[Record]:
        """The records of the task (or those few-shot examples come from). Raises WrongUse when there are none."""
        source = self.source
        if paths := self.files(data_dir, fewshot=fewshot):
            records = read_records(paths, TextLayout(source.lines, source.pages), limit)
            if not records:
                raise WrongUse(f"no records for task {self.name}", where=paths[0], why="the file is empty")
            return records
        split = source.fewshot_split if fewshot else source.split
        if data_dir is None and source.dataset and split:
            return hub_records(source.dataset, source.config, split, limit)
        patterns = source.fewshot_files if fewshot else source.files
        raise WrongUse(
            f"no data for task {self.name}",
            where=" or ".join(str(root) for root in _roots(data_dir)),
            why="none of these is there: " + ", ".join(patterns or ["(the task names no local files)"]),
            fix="put the file there, or choose another --data-dir",
        )

    def items(self, records: Sequence[Record]) -> list[Item]:
        """Questions of the records. Raises Failed naming file, line and field of the first bad one."""
        return [_item(self, record) for record in records]


def _roots(data_dir: Path | None) -> list[Path]:
    return [root for root in (data_dir, samples_dir()) if root is not None]


def samples_dir() -> Path:
    """The data that the package ships."""
    return Path(str(resources.files(__package__.rsplit(".", 1)[0]).joinpath("recipes"))) / "samples"


def shipped_tasks() -> dict[str, Path]:
    """Name -> path of the task files in the package."""
    folder = Path(str(resources.files(__package__).joinpath("tasks")))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


@cache
def load_task(path: Path) -> Task:
    """Read and check a task file. Raises WrongUse with every problem at once."""
    text = path.read_text()
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WrongUse("the task file is not valid TOML", where=path, why=str(error), fix="mend that line") from None
    task = build_recipe(tree, Task, where=path, text=text)
    for number, prompt in enumerate(task.prompt, 1):
        for key in NEEDED[task.kind]:
            if not getattr(prompt, key):
                why = f"tasks of kind {task.kind} need {', '.join(NEEDED[task.kind])}"
                raise WrongUse(f"prompt {number} of the task lacks {key!r}", where=path, why=why, fix="add it")
    return task


def find_tasks(names: Sequence[str]) -> list[BoundTask]:
    """The tasks of these names: shipped tasks, groups (all members), single members, or paths of task files.

    Raises WrongUse naming the nearest known task.
    """
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
            near = difflib.get_close_matches(name, known, 1, 0.5)
            fix = (f"did you mean {near[0]}? " if near else "") + "list them with: throughline eval --list"
            raise WrongUse(f"unknown task {name!r}", fix=fix)
        group = known[name]
        found += [bound for bound in _members(group, load_task(shipped_tasks()[group])) if name in (group, bound.name)]
    return list({bound.name: bound for bound in found}.values())


def _known() -> dict[str, str]:
    """Every name that --tasks accepts -> the task file it belongs to."""
    known = {}
    for group, path in shipped_tasks().items():
        known[group] = group
        known.update(dict.fromkeys(load_task(path).members, group))
    return known


def _members(group: str, task: Task) -> Iterator[BoundTask]:
    if not task.members:
        yield BoundTask(group, "", task, task.source)
    for name, values in task.members.items():
        fill = {"name": name.removeprefix(f"{group}_"), **values}
        tree = {key: _fill(value, fill) for key, value in task.source.model_dump().items()}
        yield BoundTask(name, group, task, Source.model_validate(tree))


def _fill(value: Any, fill: dict[str, str]) -> Any:
    if isinstance(value, list):
        return [_fill(part, fill) for part in value]
    return value.format_map(fill) if isinstance(value, str) else value


@cache
def _environment() -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters.update(FILTERS)
    return environment


@cache
def _template(text: str) -> Any:
    return _environment().from_string(text)


@cache
def _expression(text: str) -> Any:
    return _environment().compile_expression(text, undefined_to_none=False)


def _item(bound: BoundTask, record: Record) -> Item:
    task = bound.task
    prompt = next((prompt for prompt in task.prompt if all(field in record.data for field in prompt.fields)), None)
    if prompt is None:
        missing = [field for field in task.prompt[0].fields if field not in record.data]
        raise Failed(
            f"the record lacks the field {missing[0]!r}", where=record.where,
            why=f"task {bound.name} reads " + " or ".join("{" + ", ".join(p.fields) + "}" for p in task.prompt)
            + f"; the record has {{{', '.join(record.data)}}}",
            fix="mend the record, or give a task file with a [[prompt]] for this form",
        )  # fmt: skip
    return _Builder(bound, prompt, record).item()


class _Builder:
    """Fills one prompt block from one record."""

    def __init__(self, bound: BoundTask, prompt: Prompt, record: Record) -> None:
        self.bound, self.prompt, self.record = bound, prompt, record

    def item(self) -> Item:
        kind, where = self.bound.task.kind, self.record.where
        if kind == "multiple_choice":
            context = self.text("context")
            choices = self.texts("choices")
            pairs = tuple((context, self.bound.task.delimiter + choice) for choice in choices)
            return Item(where, pairs, choices, self.gold(len(choices)))
        if kind == "partial":
            contexts = self.texts("contexts")
            target = self.filled("target")
            pairs = tuple((context, self.bound.task.delimiter + target) for context in contexts)
            return Item(where, pairs, contexts, self.gold(len(contexts)))
        if kind == "loglikelihood":
            return Item(where, ((self.text("context"), self.filled("target")),))
        if kind in ("generate_until", "cloze"):
            answers = self.evaluate("answers")
            if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
                raise self.bad("answers", f"{answers!r} is not a list of accepted answers")
            context = self.text("context")
            return Item(where, ((context, self.bound.task.delimiter + answers[0]),), answers=tuple(answers))
        text = self.text("text")
        return Item(where, text=text, original=self.text("original") if self.prompt.original else text)

    def text(self, key: str) -> str:
        return self.render(key, getattr(self.prompt, key))

    def filled(self, key: str) -> str:
        text = self.text(key)
        if not text.strip():
            raise self.bad(key, "it is empty")
        return text

    def texts(self, key: str) -> tuple[str, ...]:
        given = getattr(self.prompt, key)
        texts = self.evaluate(key) if isinstance(given, str) else [self.render(key, template) for template in given]
        if not isinstance(texts, list) or not texts:
            raise self.bad(key, f"{texts!r} is not a list of texts")
        for number, text in enumerate(texts):
            if not isinstance(text, str) or not text.strip():
                raise self.bad(f"{key}[{number}]", "it is empty" if isinstance(text, str) else f"{text!r} is not a text")
        return tuple(texts)

    def gold(self, choices: int) -> int:
        value = self.evaluate("gold")
        if isinstance(value, str) and value.strip().lstrip("-").isdigit():
            value = int(value)
        if not isinstance(value, int) or not 0 <= value < choices:
            raise self.bad("gold", f"{value!r} is not the index of one of the {choices} choices")
        return int(value)

    def render(self, key: str, template: str) -> str:
        return self.guarded(key, lambda: _template(template).render(self.record.data))

    def evaluate(self, key: str) -> Any:
        text = getattr(self.prompt, key)
        return self.guarded(key, lambda: _settled(_expression(text)(self.record.data)))

    def guarded(self, key: str, action: Any) -> Any:
        from jinja2.exceptions import TemplateError

        try:
            return action()
        except (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError, SyntaxError) as error:
            raise self.bad(key, str(error)) from error

    def bad(self, key: str, why: str) -> Failed:
        fields = ", ".join(self.prompt.fields)
        return Failed(
            f"cannot make the {key} of a question", where=self.record.where,
            why=f"{why} (task {self.bound.name}, made from the fields {fields})", fix="mend the record",
        )  # fmt: skip


def _settled(value: Any) -> Any:
    """Raises for an undefined value, which an expression would otherwise return as an object."""
    from jinja2 import StrictUndefined

    if isinstance(value, StrictUndefined):
        str(value)
    return list(value) if isinstance(value, tuple) else value
