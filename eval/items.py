"""Questions: a prompt filled in from a record, and what stands before it: a description and solved examples."""

import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from ..core.errors import Failed, WrongUse
from ..data.records import Record
from .task_file import Prompt
from .textops import FILTERS

MASK = "[MASK]"  # in the context of a cloze question: what a BERT is to name
HARNESS_SEED = 1234  # of the harness's draws, unless --fewshot_seed says otherwise


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
    before: int = 0  # characters that all contexts of its task begin with: the same solved examples
    gap: str = ""  # between context and continuation of an example alone: the harness delimits it there too (LAMBADA)

    @property
    def context(self) -> str:
        """The one context of kinds that have one."""
        return self.pairs[0][0]

    @property
    def solved(self) -> str:
        """The text of the question with its right answer."""
        return "".join(self.pairs[self.gold])

    @property
    def example(self) -> str:
        """The same as a few-shot example shows it."""
        return self.gap.join(self.pairs[self.gold])

    @property
    def shown(self) -> dict[str, Any]:
        """The question for people, of kinds that have one; without examples."""
        if not self.pairs:
            return {}
        several = len({context for context, _ in self.pairs}) > 1  # before one target
        choices = self.answers or [context + answer if several else answer for context, answer in self.pairs]
        right = range(len(choices)) if self.answers else self.right or [self.gold]
        asked = "" if several else self.context
        return {"question": asked, "choices": list(choices), "right": list(right)}


Items = Sequence[Item]


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


class Form:
    """A record beside the prompt block that fits it, which fills the fields of an item."""

    def __init__(self, name: str, prompt: Prompt, record: Record, member: Mapping[str, str]) -> None:
        self.name, self.prompt, self.where = name, prompt, record.where
        self.data = record.data | ({"member": member} if member else {})  # as templates know the record

    @classmethod
    def of(cls, prompts: Sequence[Prompt], name: str, record: Record, member: Mapping[str, str]) -> "Form":
        """By the first block whose fields the record has. Raises Failed when none has."""
        for prompt in prompts:
            if all(field in record.data for field in prompt.fields):
                return cls(name, prompt, record, member)
        missing = [field for field in prompts[0].fields if field not in record.data]
        forms = " or ".join("{" + ", ".join(prompt.fields) + "}" for prompt in prompts)
        why = f"task {name} reads {forms}; the record has {{{', '.join(record.data)}}}"
        fix = "mend the record, or give a task file with a [[prompt]] for this form"
        raise Failed(f"the record lacks the field {missing[0]!r}", where=record.where, why=why, fix=fix)

    def text(self, key: str) -> str:
        return self.render(key, getattr(self.prompt, key))

    def filled(self, key: str) -> str:
        text = self.text(key)
        if not text:
            raise self.bad(key, "it is empty")
        return text

    def texts(self, key: str) -> tuple[str, ...]:
        given = getattr(self.prompt, key)
        texts = self.evaluate(key) if isinstance(given, str) else [self.render(key, one) for one in given]
        if not isinstance(texts, list) or not texts:
            raise self.bad(key, f"{texts!r} is not a list of texts")
        for number, text in enumerate(texts):
            if not isinstance(text, str) or not text:
                why = "it is empty" if isinstance(text, str) else f"{text!r} is not a text"
                raise self.bad(f"{key}[{number}]", why)
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

    def guarded(self, key: str, action: Callable[[], Any]) -> Any:
        from jinja2.exceptions import TemplateError

        data_errors = (ValueError, TypeError, LookupError, AttributeError, SyntaxError, ArithmeticError)
        try:
            return action()
        except (TemplateError, *data_errors) as error:
            raise self.bad(key, str(error)) from error

    def bad(self, key: str, why: str) -> Failed:
        why += f" (task {self.name}, made from the fields {', '.join(self.prompt.fields)})"
        fix = "mend the record, or the task's prompt"
        return Failed(f"cannot make the {key} of a question", where=self.where, why=why, fix=fix)


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


@dataclass(frozen=True)
class Draw:
    """`count` different examples for each record; `first`: the first ones, in order.

    A pure function of (seed, task, record number): of no rank, batch or limit. `seed` None: 0, in `HarnessDraw` 1234.
    """

    task: str
    count: int
    seed: int | None = None
    first: bool = False
    headroom: bool = False

    def picks(self, items: Items, source: Items, own: Sequence[int | None]) -> list[list[int]]:
        """For each item the places of its examples in `source`; never `own`, its own place there."""
        if self.first:
            return [[i for i in range(self.count + 1) if i != place][: self.count] for place in own]
        return [self._drawn(record, len(source), place) for record, place in enumerate(own)]

    def _drawn(self, record: int, pool: int, exclude: int | None) -> list[int]:
        digest = hashlib.sha256(f"{self.seed or 0}/{self.task}/{record}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
        candidates = pool if exclude is None else pool - 1
        picks = generator.choice(candidates, size=self.count, replace=False, shuffle=True).tolist()
        return [pick + 1 if exclude is not None and pick >= exclude else pick for pick in picks]


class HarnessDraw(Draw):
    """As the harness draws: by one generator; with `headroom` one more, the question's own left out by its data."""

    def picks(self, items: Items, source: Items, own: Sequence[int | None]) -> list[list[int]]:
        if self.first:
            return super().picks(items, source, own)
        generator = random.Random(HARNESS_SEED if self.seed is None else self.seed)
        found = []
        for item in items:
            drawn = generator.sample(range(len(source)), self.count + self.headroom)
            if self.headroom:
                drawn = [place for place in drawn if source[place].data != item.data][: self.count]
            if len(drawn) < self.count:  # several copies of the question were drawn
                others = [place for place, other in enumerate(source) if other.data != item.data]
                drawn = generator.sample(others, self.count)
            found.append(drawn)
        return found


@dataclass(frozen=True)
class Chat:
    """Questions as turns of a chat, as lm-evaluation-harness has them: the description is the system's, an example the
    user's and the model's (`multiturn`) or a part of the user's question, and no delimiter stands before an answer.
    """

    template: Any  # a `ChatTemplate`
    delimiter: str
    multiturn: bool

    def of(self, item: Item, said: str, examples: Sequence[Item], separator: str, fixed: bool) -> Item:
        """The item with the description and its examples before it; `fixed`: they are those of the whole task."""
        turns = [("system", said)] if said else []
        before = "" if self.multiturn else "".join(one.example + separator for one in examples)
        for one in examples if self.multiturn else ():
            turns += [("user", one.pairs[one.gold][0]), ("assistant", self._answer(one, one.gold))]
        asked = [chat_text(self.template, [*turns, ("user", before + context)]) for context, _ in item.pairs]
        answers = [self.template.plain(self._answer(item, place)) for place in range(len(asked))]
        same = asked[0].rfind(item.context.strip()) if fixed and asked else 0
        text = self.template.plain(item.text)
        return replace(item, pairs=tuple(zip(asked, answers)), text=text, before=max(0, same))

    def _answer(self, item: Item, place: int) -> str:
        answer = item.pairs[place][1]
        return answer if item.gap else answer.removeprefix(self.delimiter)


def chat_text(template: Any, turns: Sequence[tuple[Any, str]]) -> str:
    """The template's text; of one that knows no system, without its turn, as the harness does it."""
    said = [{"role": role, "content": content} for role, content in turns]
    try:
        return template.text(said)
    except WrongUse:
        if said[0]["role"] != "system":
            raise
        return template.text(said[1:])


def with_examples(
    items: Sequence[Item],
    pool: Sequence[Item] | None,
    draw: Draw,
    description: str = "",
    separator: str = "\n\n",
    chat: Chat | None = None,
) -> list[Item]:
    """The items with the description and solved examples before every context, or in a chat. `pool` None: examples are
    the other evaluated items. A record that is in the pool too, by its file and line, is no example of itself.
    """
    source = items if pool is None else pool
    places = {item.where: place for place, item in enumerate(source)}
    own = [number if pool is None else places.get(item.where) for number, item in enumerate(items)]
    available = len(source) - any(place is not None for place in own)
    if draw.count > available:
        what = f"{draw.count} examples asked for, {available} to choose from"
        raise WrongUse(what, where=f"task {draw.task}", fix="lower --shots")
    picked = draw.picks(items, source, own) if draw.count else [[] for _ in items]
    made = []
    for item, picks, place in zip(items, picked, own):
        said = template(description).render(item.data) if description else ""
        shown = [source[place] for place in picks]
        fixed = draw.first and place is None
        if chat is not None:
            made.append(chat.of(item, said, shown, separator, fixed))
            continue
        before = said + "".join(one.example + separator for one in shown)
        same = len(before) if fixed else 0
        pairs = tuple((before + context, answer) for context, answer in item.pairs)
        made.append(replace(item, pairs=pairs, before=same))
    return made
