"""Conversations as the ids that a model was trained to answer, by its own chat template."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..core.errors import ThroughlineError, WrongUse
from .model_settings import CHAT, chat_template, end_ids
from .roles import ROLES, TURN_ENDS, settings_beside
from .tokenizer import BREAK, FILE, Tokenizer

# Names under which messages carry reasoning; templates read the first.
REASONING = ("reasoning_content", "thinking", "reasoning")
ANSWER = "answer"  # of the conversation that shows how a template ends a turn
Turn = Mapping[str, Any]  # `role`, `content` and whatever else the template reads: `name`, `tool_calls`, ...


class ChatTemplate:
    """A conversation becomes the ids that a model was trained to answer, by its own template
    (`chat_template.jinja`, or `chat_template` in `tokenizer_config.json`) in the environment that
    transformers gives it.

    Special tokens count only where the template writes them. A message that spells one is read as those
    characters, so nobody can forge the end of a turn. Any other text has the ids of transformers'
    `apply_chat_template`. Raises WrongUse when the template cannot be compiled.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, names: dict[str, str], ends: Iterable[int] = ()
    ) -> None:
        """`names` are the special tokens as the template knows them (`bos_token`, ...); `ends` are ids that
        end a text.
        """
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            fix = "correct the template, or serve the model without chats by removing it"
            raise WrongUse("the chat template is broken", where=CHAT, why=str(error), fix=fix) from error
        self.source, self._tokenizer, self._names = source, tokenizer, names
        added = tokenizer.added_tokens
        self._added = {token.content: i for i, token in added.items()}
        self._guarded = _any_of({token.content for token in tokenizer.guarded_tokens})
        # Such tokens are found in the normalised text, so other spellings of them count too.
        self._has_spellings = any(token.special and token.normalized for token in added.values())
        self.turn_ends = frozenset(self._turn_ends())  # what the template writes behind an answer
        self.end_ids: frozenset[int] = frozenset(ends) | self.turn_ends  # the ids that end an answer

    @classmethod
    def find(cls, directory: Path, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The template beside a tokenizer, None without one. Raises WrongUse for one that cannot be used."""
        try:
            if (source := chat_template(directory)) is None:
                return None
            names = _token_names(settings_beside(directory / FILE), tokenizer)
            return cls(source, tokenizer, names, end_ids(directory, tokenizer))
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            why = f"{type(error).__name__}: {error}"
            raise WrongUse("the chat template cannot be read", where=directory, why=why) from error

    @classmethod
    def find_usable(cls, directory: Path, tokenizer: Tokenizer) -> "tuple[ChatTemplate | None, str]":
        """The template beside a tokenizer and, where there is one that cannot be used, None and the reason."""
        try:
            return cls.find(directory, tokenizer), ""
        except ThroughlineError as error:
            return None, str(error)

    def ids(self, turns: Sequence[Turn], /, **settings: Any) -> np.ndarray:
        """The ids of a conversation up to where the answer begins, int64 (S,). See `text`."""
        return self.encode(self.text(turns, **settings))

    def text(self, turns: Sequence[Turn], /, **settings: Any) -> str:
        """The same before it is encoded: special tokens that a message spells have a mark in them (`plain`).

        `settings` are what the template may read besides: `tools`, `documents`, `enable_thinking`, ... By
        default the text ends where the answer begins; `add_generation_prompt=False` ends it behind the last
        turn. Raises WrongUse when the conversation does not fit the template.
        """
        usual = {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            given = self._names | usual | self._marked(settings)
            return self._template.render(given | {"messages": [self._message(turn) for turn in turns]})
        except Exception as error:  # a template is a program: it may fail in any way
            why = f"the model's chat template says: {error}"
            raise WrongUse("the messages do not fit the chat template", where="messages", why=why) from error

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text whose special tokens count, but for those that `plain` has marked; int64 (S,)."""
        return np.array(self._tokenizer.parse(text), np.int64)

    def plain(self, text: str) -> str:
        """The text with a mark in every special token that it spells."""
        text = self._guarded.sub(lambda found: found[0][0] + BREAK + found[0][1:], text.replace(BREAK, ""))
        if not self._has_spellings:
            return text
        for start, _ in reversed(self._tokenizer.special_spans(text)):
            text = text[: start + 1] + BREAK + text[start + 1 :]
        return text

    def _message(self, turn: Turn) -> dict[str, Any]:
        """A message as templates expect it: without fields that are null, and with reasoning by its usual
        name.
        """
        message = {key: value if key == "role" else self._marked(value) for key, value in turn.items()}
        message = {key: value for key, value in message.items() if value is not None}
        reasoning = next((message[name] for name in REASONING if name in message), None)
        if reasoning is None:
            return message
        return {"thinking": reasoning} | message | {"reasoning_content": reasoning}

    def _marked(self, value: Any) -> Any:
        """A value whose texts are all `plain`."""
        if isinstance(value, str):
            return self.plain(value)
        if isinstance(value, Mapping):
            return {self._marked(key): self._marked(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._marked(one) for one in value]
        return value

    def _turn_ends(self) -> set[int]:
        """The tokens that the template writes behind an answer, else the usual ones that it names."""
        turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": ANSWER}]
        try:
            text = self.text(turns, add_generation_prompt=False)
        except WrongUse:
            return {i for name, i in self._added.items() if name in TURN_ENDS and name in self.source}
        behind = text.rpartition(ANSWER)[2].lstrip()
        end = _any_of(self._added).match(behind)
        return {self._added[end[0]]} if end else set()


class _Generation(Extension):
    """`{% generation %}` marks the model's words for training masks; here the block is written as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the sandboxed jinja environment with the extensions and functions that transformers defines."""
    usual: dict[str, Any] = {
        "trim_blocks": True,
        "lstrip_blocks": True,
        "extensions": [loopcontrols, _Generation],
    }
    environment = ImmutableSandboxedEnvironment(**usual)
    environment.filters["tojson"] = _json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


def _token_names(settings: dict[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens by the names of a template: as tokenizer_config.json has them, else by their roles."""
    texts = {i: text for text, i in tokenizer.vocab.items()}
    names = {}
    for role in ROLES:
        token = settings.get(f"{role}_token")
        name = token.get("content") if isinstance(token, dict) else token
        if name is None and role in tokenizer.special:
            name = texts[tokenizer.special[role]]
        if isinstance(name, str):
            names[f"{role}_token"] = name
    return {"bos_token": "", "eos_token": ""} | names


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return text.replace(json.dumps(BREAK)[1:-1], BREAK)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)
