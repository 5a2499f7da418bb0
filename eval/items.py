"""Questions: a prompt block of a task filled in from a record; complaints name file, line and field."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ..core.errors import Failed
from ..data.records import Record, whole_line
from .task_file import Prompt
from .textops import FILTERS

MASK = "[MASK]"  # in the context of a cloze question: what a BERT is to name


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
    right: tuple[int, ...] = ()  # where several choices are right: all of them, the first one being `gold`
    data: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of its record
    gap: str = ""  # between context and continuation of an example alone: the harness delimits it there too (LAMBADA)

    @property
    def context(self) -> str:
        """The one context of kinds that have one."""
        return self.pairs[0][0]

    @property
    def solved(self) -> str:
        """The text of the question with its right answer."""
        return "".join(self._right)

    @property
    def example(self) -> str:
        """The same as a few-shot example shows it."""
        return self.gap.join(self._right)

    @property
    def _right(self) -> tuple[str, str]:
        return self.pairs[self.gold] if self.gold < len(self.pairs) else self.pairs[0]


@cache
def _environment() -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True, finalize=_given
    )
    environment.filters.update(FILTERS)
    return environment


def _given(value: Any) -> Any:
    """What a template prints; a null would be printed as the word "None", one of pandas as "nan"."""
    if value is None or (isinstance(value, float) and value != value):
        raise ValueError("a field is null")
    return value


@cache
def template(text: str) -> Any:
    """A compiled template."""
    return _environment().from_string(text)


@cache
def expression(text: str) -> Any:
    """A compiled expression."""
    return _environment().compile_expression(text, undefined_to_none=False)


def joined(records: Sequence[Record]) -> Record:
    """All records as one, at the first one's place: its texts, each with its line end, behind one another."""
    texts = [key for key, value in records[0].data.items() if isinstance(value, str)]
    parts = {
        key: [record.data[key] for record in records if isinstance(record.data.get(key), str)]
        for key in texts
    }
    whole = {key: "".join(map(whole_line, some)) for key, some in parts.items()}
    return Record(records[0].where, whole)


class Form:
    """A record beside the prompt block that fits it, which fills the fields of an item."""

    def __init__(self, name: str, prompt: Prompt, record: Record, member: Mapping[str, str]) -> None:
        self.name, self.prompt, self.where = name, prompt, record.where
        self.data = (
            record.data | {"member": member} if member else record.data
        )  # as templates know the record

    @classmethod
    def of(cls, prompts: Sequence[Prompt], name: str, record: Record, member: Mapping[str, str]) -> "Form":
        """By the first block whose fields the record has. Raises Failed when none has."""
        for prompt in prompts:
            if all(field in record.data for field in prompt.fields):
                return cls(name, prompt, record, member)
        missing = [field for field in prompts[0].fields if field not in record.data]
        forms = " or ".join("{" + ", ".join(prompt.fields) + "}" for prompt in prompts)
        raise Failed(
            f"the record lacks the field {missing[0]!r}",
            where=record.where,
            why=f"task {name} reads {forms}; the record has {{{', '.join(record.data)}}}",
            fix="mend the record, or give a task file with a [[prompt]] for this form",
        )

    def text(self, key: str) -> str:
        return self.render(key, getattr(self.prompt, key))

    def filled(self, key: str) -> str:
        text = self.text(key)
        if not text:
            raise self.bad(key, "it is empty")
        return text

    def texts(self, key: str) -> tuple[str, ...]:
        given = getattr(self.prompt, key)
        texts = (
            self.evaluate(key)
            if isinstance(given, str)
            else [self.render(key, template) for template in given]
        )
        if not isinstance(texts, list) or not texts:
            raise self.bad(key, f"{texts!r} is not a list of texts")
        for number, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                raise self.bad(
                    f"{key}[{number}]", "it is empty" if isinstance(text, str) else f"{text!r} is not a text"
                )
        return tuple(texts)

    def answers(self) -> tuple[str, ...]:
        """The accepted answers."""
        found = self.evaluate("answers")
        if not isinstance(found, list) or not found or not all(isinstance(answer, str) for answer in found):
            raise self.bad("answers", f"{found!r} is not a list of accepted answers")
        return tuple(found)

    def gold(self, choices: Sequence[str]) -> tuple[int, ...]:
        """The indices of the right choices, one at least."""
        value = self.evaluate("gold")
        right = []
        for one in value if isinstance(value, list) and value else [value]:
            number = int(one) if isinstance(one, str) and re.fullmatch(r"\s*-?[0-9]+\s*", one) else one
            if not isinstance(number, int) or not 0 <= number < len(choices):
                raise self.bad("gold", f"{one!r} is not the index of one of the {len(choices)} choices")
            right.append(int(number))
        return tuple(right)

    def render(self, key: str, text: str) -> str:
        return self.guarded(key, lambda: _encodable(template(text).render(self.data)))

    def evaluate(self, key: str) -> Any:
        text = getattr(self.prompt, key)
        return self.guarded(key, lambda: _encodable(_settled(expression(text)(self.data))))

    def guarded(self, key: str, action: Any) -> Any:
        from jinja2.exceptions import TemplateError

        try:
            return action()
        except (
            TemplateError,
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            SyntaxError,
            ArithmeticError,
        ) as error:
            raise self.bad(key, str(error)) from error

    def bad(self, key: str, why: str) -> Failed:
        fields = ", ".join(self.prompt.fields)
        return Failed(
            f"cannot make the {key} of a question",
            where=self.where,
            why=f"{why} (task {self.name}, made from the fields {fields})",
            fix="mend the record, or the task's prompt",
        )


def _encodable(value: Any) -> Any:
    """Raises ValueError for half a surrogate pair, which JSON can hold and UTF-8 cannot."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str):
            text.encode()
    return value


def _settled(value: Any) -> Any:
    """Raises for an undefined value, which an expression would otherwise return as an object."""
    from jinja2 import StrictUndefined

    if isinstance(value, StrictUndefined):
        str(value)
    return list(value) if isinstance(value, tuple) else value
