"""Labels of records, inspected before training: what kind of problem they pose, and how each is named.

| labels of texts | problem |
|---|---|
| texts, whole numbers, true and false | one class for each text |
| numbers, of which some are not whole | regression: one number for each text |
| lists of labels, or of 0 and 1 for each class | several classes for each text |

A class is named by its content: 1, 1.0 and "1" are the class "1". true and false are the classes "true" and "false",
also where they are written as text in any case; beside 0 and 1 they are the classes "1" and "0".
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ...core.errors import WrongUse
from ...models.config import MULTI_LABEL, REGRESSION, SINGLE_LABEL, ProblemType

NUMBER = re.compile(r"[+-]?(0|[1-9]\d*)(\.\d*)?([eE][+-]?\d+)?")  # "007" is a name
FLAGS = {"false": "0", "true": "1"}
SHOWN = 10  # labels in a message
WHERE = "data.label_field"
AS_CLASSES = f"--set problem_type={SINGLE_LABEL}"


@dataclass(frozen=True)
class TextLabels:
    """The problem that the labels of texts pose, and the names of the head's outputs."""

    problem: ProblemType
    names: tuple[str, ...]
    flags_are_numbers: bool = False  # true is 1, false is 0
    flags_are_words: bool = False  # "True" is true
    class_names: tuple[str, ...] = ()  # of labels that are numbers
    is_multi_hot: bool = False  # a list has a 0 or a 1 for each class

    def value(self, label: Any) -> str | float | frozenset[str]:
        """A label as the name of its class, a number, or the names of several classes."""
        label = listed(label)
        if self.problem == REGRESSION:
            return _number(label)
        if self.problem == MULTI_LABEL:
            if self.is_multi_hot:
                return frozenset(name for name, flag in zip(self.names, label) if flag)
            return frozenset(self._class(one) for one in _elements(label))
        return self._class(label)

    def _class(self, label: Any) -> str:
        name = class_name(label)
        if self.flags_are_numbers:
            return FLAGS.get(name.casefold(), name)
        if self.flags_are_words:
            return name.casefold()
        return _named(name, self.class_names)


def inspect_labels(
    labels: Sequence[Any], problem: str = "auto", class_names: Sequence[str] = ()
) -> TextLabels:
    """What the labels of texts are. Raises WrongUse for labels that fit no problem, or not the one that is wanted."""
    labels = [listed(label) for label in labels]
    has_lists = any(isinstance(label, list | tuple) for label in labels)
    if problem == SINGLE_LABEL and has_lists:
        example = next(label for label in labels if isinstance(label, list | tuple))
        why = f"one of them is {example!r}"
        raise WrongUse("a label is a list", where=WHERE, why=why, fix=f"--set problem_type={MULTI_LABEL}")
    if problem == MULTI_LABEL or (problem == "auto" and has_lists):
        return _inspect_lists(labels, class_names)
    names = [class_name(label) for label in labels]
    numbers = [name for name in names if NUMBER.fullmatch(name)]
    has_fractions = any(not _is_whole(name) for name in numbers)
    if problem == REGRESSION or (problem == "auto" and has_fractions and not class_names):
        others = Counter(name for name in names if not NUMBER.fullmatch(name))
        if others:
            fix = f"remove those records, or make every label a class: {AS_CLASSES}"
            raise WrongUse("labels mix numbers and names", where=WHERE, why=_counted(others), fix=fix)
        return TextLabels(REGRESSION, ("score",))
    found = set(names)
    folded = {name.casefold() for name in found}
    has_flags = any(isinstance(label, bool) for label in labels) or not folded.isdisjoint(FLAGS)
    is_flags = has_flags and folded <= {*FLAGS, *FLAGS.values()}
    if any(isinstance(label, bool) for label in labels) and not is_flags and len(numbers) > 0:
        fix = "write one of the two everywhere"
        raise WrongUse("labels mix true and false with numbers", where=WHERE, why=_counted(names), fix=fix)
    is_numbers = is_flags and bool(numbers)
    rule = TextLabels(SINGLE_LABEL, (), is_numbers, is_flags and not is_numbers, tuple(class_names))
    classes = {str(rule.value(label)) for label in labels}
    if len(classes) < 2 and not class_names:
        fix = "give records of at least two classes, or name the field of the label: --set data.label_field=NAME"
        raise WrongUse("the records have one label only", where=WHERE, why=_counted(names), fix=fix)
    ordered = tuple(class_names) or tuple(in_order(classes))
    return TextLabels(SINGLE_LABEL, ordered, is_numbers, is_flags and not is_numbers, tuple(class_names))


def _inspect_lists(labels: Sequence[Any], class_names: Sequence[str]) -> TextLabels:
    widths = {len(label) if isinstance(label, list | tuple) else 0 for label in labels}
    width = widths.pop() if len(widths) == 1 else 0
    if width > 1 and all(value in (0, 1) for label in labels for value in label):
        names = tuple(class_names) or tuple(str(place) for place in range(width))
        if len(names) != width:
            why = f"{len(names)} names, lists of {width} zeros and ones"
            raise WrongUse("there is not one name for each class", where="data.class_names", why=why)
        return TextLabels(MULTI_LABEL, names, is_multi_hot=True)
    found = [class_name(one) for label in labels for one in _elements(label)]
    if fractions := [name for name in found if NUMBER.fullmatch(name) and not _is_whole(name)]:
        fix = "give the classes of each text, or a 0 or a 1 for each class"
        raise WrongUse("lists of numbers that are not whole", where=WHERE, why=_counted(fractions), fix=fix)
    rule = TextLabels(MULTI_LABEL, (), class_names=tuple(class_names))
    classes = {name for label in labels for name in rule.value(label)}  # type: ignore[union-attr]
    if not classes:
        raise WrongUse("every list of labels is empty", where=WHERE, fix="give records with labels")
    return TextLabels(
        MULTI_LABEL, tuple(class_names) or tuple(in_order(classes)), class_names=tuple(class_names)
    )


def listed(cell: Any) -> Any:
    """The list that the cell of a table spells in JSON; any other value as it is. Raises WrongUse for other lists."""
    if not isinstance(cell, str) or not cell.strip().startswith("["):
        return cell
    try:
        value = json.loads(cell)
    except ValueError:
        if cell.strip().startswith(("['", '["')):
            fix = 'write lists as JSON, ["a", "b"], or give the records as .jsonl or .parquet'
            raise WrongUse("a list is not JSON", where="data", why=cell[:80], fix=fix) from None
        return cell
    return value if isinstance(value, list) else cell


def class_name(label: Any) -> str:
    """The name of a class: 1, 1.0, "1" and "1.0" are "1"; true is "true". Raises WrongUse for what names none."""
    if isinstance(label, bool):
        return str(label).lower()
    if isinstance(label, list | tuple | dict):
        fix = 'give a text or a number, or for several labels a list of them, ["a", "b"]'
        raise WrongUse("a label is no text and no number", where=WHERE, why=repr(label)[:80], fix=fix)
    name = str(label).strip()
    if not name or (isinstance(label, float) and not math.isfinite(label)):
        what = "a label is empty" if not name else "a label is no finite number"
        raise WrongUse(what, where=WHERE, why=repr(label), fix="remove the records without a label")
    if not NUMBER.fullmatch(name):
        return name
    return str(_whole(name)) if _is_whole(name) else repr(float(name))


def in_order(names: Iterable[str]) -> list[str]:
    """Names of classes in the order of a head's outputs: numbers first, by their size, then texts."""
    return sorted(
        names, key=lambda name: (0, float(name), name) if NUMBER.fullmatch(name) else (1, 0.0, name)
    )


def _whole(name: str) -> int:
    return int(name) if name.lstrip("+-").isdigit() else int(float(name))


def _is_whole(name: str) -> bool:
    return name.lstrip("+-").isdigit() or (math.isfinite(float(name)) and float(name).is_integer())


def _number(label: Any) -> float:
    try:
        value = float(label)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        fix = f"remove those records, or make every label a class: {AS_CLASSES}"
        raise WrongUse("a label is no number", where=WHERE, why=repr(label), fix=fix)
    return value


def _named(name: str, class_names: Sequence[str]) -> str:
    """The name of a class that is given by its number; a name of the list is itself."""
    if not class_names or name in class_names:
        return name
    place = _whole(name) if NUMBER.fullmatch(name) and _is_whole(name) else -1
    if not 0 <= place < len(class_names):
        why = f"{name} is none of 0 to {len(class_names) - 1}, nor one of the names"
        raise WrongUse("a label has no name", where="data.class_names", why=why, fix="name every class")
    return class_names[place]


def _elements(label: Any) -> Sequence[Any]:
    return label if isinstance(label, list | tuple) else [label]


def _counted(names: Iterable[str]) -> str:
    """The most frequent names, with their counts."""
    counts = Counter(names)
    parts = [f"{name!r} ({count:,})" for name, count in counts.most_common(SHOWN)]
    if len(counts) > SHOWN:
        parts.append(f"and {len(counts) - SHOWN:,} others")
    return ", ".join(parts)


# --- tags of words ---

SCHEMES = "B I (IOB1, IOB2), B I E S (IOBES, IOE) or B I L U (BILOU)"
Scheme = Literal["IOBES", "BILOU", "plain"]


@dataclass(frozen=True)
class Tags:
    """The tags of words, in the order of a head's outputs, and how they mark entities."""

    names: tuple[str, ...]
    scheme: Scheme
    is_suffix: bool = False  # PER-B
    class_names: tuple[str, ...] = ()

    def value(self, tag: Any) -> str:
        """The name of a tag."""
        return _named(class_name(tag), self.class_names)


def inspect_tags(tags: Iterable[Any], class_names: Sequence[str] = ()) -> Tags:
    """What the tags of words are. Raises WrongUse for numbers without names, and for mixed schemes."""
    rule = Tags((), "plain", class_names=tuple(class_names))
    found = {rule.value(tag) for tag in tags}
    numbers = in_order(name for name in found if NUMBER.fullmatch(name))
    if numbers and len(numbers) == len(found - {"O"}):
        count = max(_whole(numbers[-1]) + 1, 1)
        names = ", ".join(['"O"', *(f'"NAME{place}"' for place in range(1, count))])
        why = f"they are {', '.join(numbers[:SHOWN])}; an entity cannot be told from a number"
        fix = f"name the classes in order, beginning with that of 0: --set 'data.class_names=[{names}]'"
        raise WrongUse("the tags are numbers", where=WHERE, why=why, fix=fix)
    scheme, is_suffix = _scheme_of(found - {"O"})
    ordered = tuple(class_names) or tuple(sorted(found, key=lambda name: (name != "O", name)))
    return Tags(ordered, scheme, is_suffix, tuple(class_names))


def _scheme_of(names: set[str]) -> tuple[Scheme, bool]:
    for is_suffix in (False, True):
        pattern = re.compile(
            "([BIESLU])|.+-([BIESLU])" if is_suffix else "([BIESLU])|([BIESLU])-.+", re.DOTALL
        )
        marked = {name: match for name in names if (match := pattern.fullmatch(name))}
        if not any(match[2] for match in marked.values()) and len(marked) < len(names):
            continue  # types, of which some may be called "B" or "S"
        if others := sorted(names - marked.keys()):
            why = f"{', '.join(sorted(marked)[:SHOWN])} have one, {', '.join(others[:SHOWN])} have none that is known"
            fix = f"give all or none a letter that marks its place: {SCHEMES}"
            raise WrongUse("tags of several schemes", where=WHERE, why=why, fix=fix)
        letters = {match[1] or match[2] for match in marked.values()}
        if letters & {"L", "U"} and letters & {"E", "S"}:
            why = f"letters {', '.join(sorted(letters))}"
            raise WrongUse("tags of several schemes", where=WHERE, why=why, fix=f"use one of: {SCHEMES}")
        return ("BILOU" if letters & {"L", "U"} else "IOBES"), is_suffix
    return "plain", False


# --- what is said about them ---


def label_notes(
    labels: TextLabels, learnt: Sequence[Any], measured: Sequence[Any]
) -> Iterator[tuple[bool, str]]:
    """(whether it is a warning, text) about labels (`TextLabels.value`) of records to learn from and to measure on."""
    if labels.problem == REGRESSION:
        low, high = min(learnt), max(learnt)
        text = f"the labels are numbers from {low:.6g} to {high:.6g}: a regression, by the squared error"
        yield False, f"{text}; to make each a class: {AS_CLASSES}"
        return
    counts, others = (Counter(_names_of(values)) for values in (learnt, measured))
    yield False, f"{len(labels.names):,} classes: {_counted(counts.elements())}"
    if 2 * len(labels.names) > len(learnt):
        text = f"{len(labels.names):,} classes in {len(learnt):,} records, more than one for every two"
        numbers = all(NUMBER.fullmatch(name) for name in labels.names)
        fix = f": if the labels are amounts, --set problem_type={REGRESSION}" if numbers else ""
        yield True, text + fix
    if alone := [name for name in labels.names if counts[name] == 1]:
        yield True, f"classes of one record: {len(alone):,}, such as {', '.join(map(repr, alone[:SHOWN]))}"
    missing = {name: count for name, count in others.items() if not counts[name]}
    if missing:
        text = f"{sum(missing.values()):,} labels of the validation records are in no training record"
        yield True, f"{text}: {_counted(Counter(missing).elements())}"


def check_common(labels: TextLabels, learnt: Sequence[Any], measured: Sequence[Any]) -> None:
    """Raise WrongUse where the validation records have labels, and none of them is in a training record."""
    if labels.problem == REGRESSION:
        return
    ours, theirs = (Counter(_names_of(values)) for values in (learnt, measured))
    if theirs and ours.keys().isdisjoint(theirs):
        why = f"they are {_counted(theirs.elements())}; those of the training records are {_counted(ours.elements())}"
        fix = 'name both alike, or name the classes of numbers: --set \'data.class_names=["A", "B"]\''
        raise WrongUse(
            "no label of the validation records is in a training record", where=WHERE, why=why, fix=fix
        )


def _names_of(values: Iterable[Any]) -> Iterator[str]:
    for value in values:
        yield from [value] if isinstance(value, str) else value
