"""lm-evaluation-harness's task files as they lie (YAML, Python functions): their prompts and scores."""

import ast
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import MissingExtra, WrongUse, extra
from ...data.records import Record
from ..items import Form, Item, template
from ..kinds.choices import MultipleChoice, Partial
from ..kinds.kind import Kind, Outcome
from ..kinds.written import GenerateUntil
from ..metrics import Metric, mean
from ..task import KINDS, BoundTask
from ..task_file import Step

CALL = "!function "  # begins a value that names a Python function: "!function PLACE/FILE.NAME"
Fields = dict[str, Any]


@cache
def _loader(folder: Path) -> Any:
    """A loader of YAML for files of this folder. A function stays a name, with its place."""
    import yaml

    loader: Any = type("Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
    loader.add_constructor("!function", lambda made, node: f"{CALL}{folder}/{made.construct_scalar(node)}")
    return loader


def read_fields(path: Path, seen: tuple[Path, ...] = ()) -> Fields:
    """The fields of a file over those of the files that it includes. Raises WrongUse naming the file."""
    import yaml

    path = path.resolve()
    if path in seen:
        raise WrongUse("a task file includes itself", where=path, fix="take one of the includes out")
    try:
        with path.open("rb") as file:
            fields = yaml.load(file, Loader=_loader(path.parent))  # noqa: S506 (a safe loader's class)
    except OSError as error:
        what, fix = "cannot read the task file", "check the path"
        raise WrongUse(what, where=path, why=str(error), fix=fix) from error
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise WrongUse("the task file is no YAML", where=path, why=why, fix="mend the file") from error
    if not isinstance(fields, dict):
        raise WrongUse("the task file has no fields", where=path, fix="give a task or group of the harness")
    included = fields.pop("include", None) or []
    merged: Fields = {}
    for name in [included] if isinstance(included, str) else included:
        merged |= read_fields(path.parent / name, (*seen, path))
    return merged | fields


def members(path: Path) -> Iterator[tuple[Path, Fields]]:
    """The tasks of a group file, of nested groups and tags too: (file, fields). Raises WrongUse for an unknown name."""
    fields = read_fields(path)
    if "group" in fields:
        yield from named(path, fields["task"])
    else:
        yield path, fields


def named(path: Path, given: Any) -> Iterator[tuple[Path, Fields]]:
    """The tasks that a group of this file names, as `members` gives them."""
    known = files_by_name(path.parent.resolve())
    for name in [given] if isinstance(given, str) else given:
        own = {"task": name} if isinstance(name, str) else dict(name)
        title = own.pop("task", own.get("group"))
        if isinstance(title, list):  # a group inside the file
            yield from named(path, title)
            continue
        if title not in known:
            what = f"the group names {title!r}, which is not there"
            why = f"no file in {path.parent} is called so, as a task, a group or a tag"
            raise WrongUse(what, where=path, why=why, fix="read its files")
        for file in known[title]:
            for place, found in members(file):
                yield place, found | own


@cache
def files_by_name(folder: Path) -> dict[str, list[Path]]:
    """Every name of a task, a group or a tag below a folder -> its files, in order."""
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*.yaml")):
        fields = read_fields(file)
        tags = fields.get("tag") or []
        own = fields.get("group") or fields.get("task")
        for name in [own, *([tags] if isinstance(tags, str) else tags)]:
            if isinstance(name, str):
                found.setdefault(name, []).append(file)
    return found


@cache
def function(marked: str) -> Callable[..., Any]:
    """The Python function that a value names. Raises WrongUse when its file lacks it, MissingExtra for a library."""
    place, _, name = marked.removeprefix(CALL).rpartition(".")
    folder, _, module = place.rpartition("/")
    file = Path(folder) / (module.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location("harness" + re.sub(r"\W", "_", str(file)), file)
    if not file.is_file() or spec is None or spec.loader is None:
        fix = "give the whole folder of the task"
        raise WrongUse("the task's Python file is not there", where=file, fix=fix)
    made = importlib.util.module_from_spec(spec)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what its functions load lies here, or is refused
    try:
        spec.loader.exec_module(made)
    except ImportError as error:
        wanted = error.name or str(error)
        raise MissingExtra(wanted, f"the task's {file.name}", "throughline[eval]") from error
    except Exception as error:  # of whatever it loads
        raise WrongUse("the task's Python file cannot be run", where=file, why=str(error)[:300]) from error
    if not hasattr(made, name):
        fix = "give the files of one release"
        raise WrongUse(f"the task's Python file has no {name!r}", where=file, fix=fix)
    return getattr(made, name)


class HarnessForm(Form):
    """A prompt block in the harness's words: names of fields, Jinja that may spell a literal, functions."""

    def value(self, key: str) -> Any:
        """What doc_to_text (`context`), doc_to_choice (`choices`) or doc_to_target (`gold`) gives for the record."""
        given = getattr(self.prompt, key)
        if isinstance(given, list):
            return given
        if given.startswith(CALL):
            return self.guarded(key, lambda: function(given)(self.data))
        if given in self.data:
            return self.data[given]
        return self.guarded(key, lambda: template(given).render(self.data))

    def literal(self, key: str) -> Any:
        """The same; a whole number where there are choices, and a list, are read as what they spell."""
        value = self.value(key)
        if not isinstance(value, str) or getattr(self.prompt, key) in self.data:
            return value
        if value.isdigit() and self.prompt.choices:
            return int(value)
        if value[:1] == "[" and value[-1:] == "]" and key == "gold":
            with suppress(SyntaxError, ValueError):
                return ast.literal_eval(value)
        return value

    def text(self, key: str) -> Any:
        if key == "context":
            return self.literal("context")
        return self.literal("gold") if key in ("target", "text") else self.value(key)

    def texts(self, key: str) -> tuple[str, ...]:
        found = self.value("choices")
        if isinstance(found, str):
            found = self.guarded("choices", lambda: ast.literal_eval(found))
        if not found or not all(isinstance(one, str) for one in found):
            raise self.bad("choices", f"{found!r} is not a list of texts")
        return tuple(found)

    def answers(self) -> tuple[str, ...]:
        found = self.literal("gold")
        if self.prompt.choices and isinstance(found, int):
            found = self.texts("choices")[found]
        return tuple(map(str, found)) if isinstance(found, list) else (str(found),)

    def gold(self, choices: Sequence[str]) -> tuple[int, ...]:
        context = self.text("context")
        found = context if isinstance(context, int) else self.literal("gold")
        if isinstance(found, str) and found in choices:
            return (list(choices).index(found),)
        right = tuple(found if isinstance(found, list) else [found])
        if not right or not all(isinstance(one, int) and 0 <= one < len(choices) for one in right):
            raise self.bad("gold", f"{found!r} is not one of the {len(choices)} choices")
        return right


class HarnessChoices(MultipleChoice):
    """Choices after one context; or before one target, where doc_to_text gives the number of a choice."""

    def item(self, form: Form) -> Item:
        if isinstance(form.text("context"), int):
            return Partial.item(self, form)  # type: ignore[arg-type]
        return super().item(form)


class HarnessWritten(GenerateUntil):
    """Text that the model writes, whose filters may be Python: the task's, or one of the harness's own."""

    def step(self, step: Step, answer: Any, item: Item) -> Any:
        given = dict(step.mapping_dict)
        if step.function != "take_first" or not given:
            return super().step(step, answer, item)
        made = filter_of(given.pop("function"))(**given)
        ((answer, *_),) = made.apply([[answer]], [dict(item.data)])
        return answer


def filter_of(name: str) -> Any:
    """The class of a filter that a value names; None for a name that the harness does not know."""
    if name.startswith(CALL):
        return function(name)
    return extra("lm_eval.filters", f"the harness's filter {name}", "eval").filter_registry.get(name, None)


def by_function(kind: type[Kind], process: Callable[..., Any], ways: Mapping[str, str]) -> type[Kind]:
    """Outcomes by a task's own function in a kind's place. `ways`: metric -> "mean", or its own function over all."""
    sums = {name: function(way) for name, way in ways.items() if way != "mean"}

    def outcome(self: Kind, item: Item, found: Sequence[Any]) -> Outcome:
        results = list(found)
        if kind.probabilities:
            results = [(one[0], one[1] == one[2]) for part in found for one in part]
        if kind.probabilities and item.text:  # a document's windows are one answer
            results = [sum(value for value, _ in results)]
        return {name: _numbers(value, name in sums) for name, value in process(item.data, results).items()}

    def metric(self: Kind, name: str) -> Metric:
        if name not in sums:
            return Metric(mean, mean=True) if name in ways else kind.metric(self, name)
        own = sums[name]

        def summed(rows: np.ndarray) -> np.ndarray:
            if rows.ndim > 2:  # one after another of the bootstrap's resamples
                return np.array([summed(one) for one in rows])
            return np.asarray(own([row[0] if len(row) == 1 else list(row[~np.isnan(row)]) for row in rows]))

        return Metric(summed)

    return type(f"{kind.__name__}ByFunction", (kind,), {"outcome": outcome, "metric": metric})


def _numbers(value: Any, summed: bool) -> list[float]:
    """Of a list that a task's own function sums up, a NaN marks the end, for one of one number is a list too."""
    if not isinstance(value, list | tuple | np.ndarray):
        return [float(value)]
    return [float(one) for one in value] + [math.nan] * summed


@dataclass(frozen=True)
class HarnessTask(BoundTask):
    """A task of the harness, with its functions by name and the groups that it was asked for by."""

    calls: Mapping[str, str] = field(default_factory=dict)
    of: Mapping[str, bool] = field(default_factory=dict)

    @property
    def kind(self) -> Kind:
        kind = KINDS[self.task.kind]
        kind = {MultipleChoice: HarnessChoices, GenerateUntil: HarnessWritten}.get(kind, kind)
        if process := self.calls.get("process_results"):
            ways = {key.partition(":")[2]: way for key, way in self.calls.items() if ":" in key}
            kind = by_function(kind, function(process), ways)
        return kind(self.task, self.name, HarnessForm)

    @property
    def groups(self) -> dict[str, bool]:
        return dict(self.of)

    def records(self, data_dir: Path | None, limit: int | None, *, fewshot: bool = False) -> list[Record]:
        process = self.calls.get("fewshot_config.process_docs" if fewshot else "process_docs")
        process = process or self.calls.get("process_docs")
        records = super().records(data_dir, None if process else limit, fewshot=fewshot)
        if process is None:
            return records
        import datasets

        made = function(process)(datasets.Dataset.from_list([record.data for record in records]))
        where = records[0].where.rpartition(":")[0]
        return [Record(f"{where}, record {number}", dict(row)) for number, row in enumerate(made, 1)][:limit]
