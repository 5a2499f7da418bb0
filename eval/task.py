"""Tasks: small TOML files that say where records are, how a prompt is made from one, and what is measured.

A task has one kind and one or more `[[prompt]]` blocks, one per form in which its data circulate (the hub's schema, a
repackaged file); the first block whose `fields` a record has is used. Templates are Jinja; `gold`, `answers` and a
`choices` or `contexts` that is one string are Jinja expressions, which keep their type.
"""

import difflib
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from ..core.errors import WrongUse
from ..core.files import sha256_json
from ..core.recipe import Section, build_recipe
from .items import Item, item_of, joined
from .sources import KNOWN, Record, TextLayout, find_files, hub_records, read_records, unknown_files

Kind = Literal[
    "multiple_choice", "partial", "loglikelihood", "last_token", "rolling", "stream", "generate_until", "cloze", "masked"
]  # fmt: skip

# What each kind's prompt block must give, and what the kind measures.
CHOICE = ("acc", "acc_norm", "acc_bytes", "f1", "f1_macro")
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "multiple_choice": (("choices", "gold"), CHOICE),
    "partial": (("contexts", "target", "gold"), CHOICE),
    "loglikelihood": (("context", "target"), ("acc", "perplexity")),
    "last_token": (("text",), ("acc", "perplexity")),
    "rolling": (("text",), ("word_perplexity", "byte_perplexity", "bits_per_byte", "token_perplexity")),
    "stream": (("text",), ("adjusted_perplexity", "token_perplexity", "bits_per_byte")),
    "generate_until": (("context", "answers"), ("exact_match",)),
    "cloze": (("context", "answers"), ("p_at_1", "p_at_10")),
    "masked": (("text",), ("mlm_accuracy", "mlm_perplexity")),
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
    lines: Annotated[int, Field(ge=0)] = 0
    """Lines a record in a .txt file."""
    pages: bool = False
    """A .txt file is WikiText: one record an article."""
    tabs: bool = False
    """A .txt file is a table: tab-separated, with a header."""


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
    max_tokens: Annotated[int, Field(gt=0)] = 32
    """Kind generate_until: longest answer in tokens."""
    stride: Annotated[int, Field(ge=0)] = 0
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
class BoundTask:
    """A task by its own name (a member of a group, or a plain task) with its source filled in."""

    name: str
    group: str
    task: Task
    source: Source
    named: bool = False  # the user asked for it itself, not for its group

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
            records = read_records(paths, TextLayout(source.lines, source.pages, source.tabs), limit)
            if not records:
                raise WrongUse(f"no records for task {self.name}", where=paths[0], why="the file is empty")
            return records
        split = source.fewshot_split if fewshot else source.split
        if data_dir is None and source.dataset and split:
            return hub_records(source.dataset, source.config, split, limit)
        patterns = source.fewshot_files if fewshot else source.files
        if others := unknown_files(patterns, _roots(data_dir)):
            raise WrongUse(
                f"no data for task {self.name}", where=others[0], why="unknown data format", fix=KNOWN
            )
        raise WrongUse(
            f"no data for task {self.name}",
            where=" or ".join(str(root) for root in _roots(data_dir)),
            why="none of these is there: " + ", ".join(patterns or ["(the task names no local files)"]),
            fix="put the file there, or choose another --data-dir",
        )

    def items(self, records: Sequence[Record]) -> list[Item]:
        """Questions of the records; a stream is one. Raises Failed naming file, line and field of the first bad record."""
        items = [item_of(self, record) for record in records]
        return [item_of(self, joined(records))] if self.task.kind == "stream" and len(items) > 1 else items


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
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUse(
            "cannot read the task file", where=path, why=str(error), fix="a task is TOML in UTF-8"
        ) from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WrongUse(
            "the task file is not valid TOML", where=path, why=str(error), fix="mend that line"
        ) from None
    fix = f"the shipped task files are examples: {Path(str(resources.files(__package__))) / 'tasks'}"
    task = build_recipe(tree, Task, where=path, text=text, what="the task file", fix=fix)
    if problems := list(_problems(task)):
        raise WrongUse(
            f"the task cannot be one of kind {task.kind}",
            where=path,
            why="\n".join(problems),
            fix="mend the file",
        )
    return task


def _problems(task: Task) -> Iterator[str]:
    needed, measured = KINDS[task.kind]
    for name, given in (("[[prompt]]", task.prompt), ("metrics", task.metrics)):
        if not given:
            yield f"{name}: at least one is needed"
    for number, prompt in enumerate(task.prompt, 1):
        if missing := [key for key in needed if not getattr(prompt, key)]:
            yield f"prompt {number} lacks {', '.join(missing)}"
    if "" in task.until:
        yield "until: an empty string would end every answer before it begins"
    for name in task.metrics:
        if name not in measured:
            yield f"metrics: {name!r} is none of {', '.join(measured)}"


def find_tasks(names: Sequence[str]) -> list[BoundTask]:
    """The tasks of these names: shipped tasks, groups (all members), single members, or paths of task files.

    Raises WrongUse naming the nearest known task, and for two tasks of one name.
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
            near = difflib.get_close_matches(name.lower(), known, 1, 0.5)
            fix = (f"did you mean {near[0]}? " if near else "") + "list them with: throughline eval --list"
            raise WrongUse(f"unknown task {name!r}", fix=fix)
        group = known[name]
        members = _members(group, load_task(shipped_tasks()[group]))
        found += [
            replace(bound, named=name == bound.name) for bound in members if name in (group, bound.name)
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
    try:
        return value.format_map(fill) if isinstance(value, str) else value
    except (KeyError, ValueError, IndexError) as error:
        why, fix = f"{error} is not among {', '.join(fill)}", "give it to every member in [members]"
        raise WrongUse(f"cannot fill in {value!r} for a member of the group", why=why, fix=fix) from None
