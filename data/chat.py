"""Conversations as the ids that a model was trained to answer, by its own chat template."""

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..core.errors import WrongUse
from .tokenizer import CHAT, CONFIG, GENERATION, TURN_ENDS, Tokenizer, beside_model, chat_template

BREAK = "\ufdd0"  # a noncharacter, put into added tokens that a message spells: they are encoded in two parts
Turn = Mapping[str, str]  # `role`, `content` and, of some, `name`


class ChatTemplate:
    """A conversation becomes the ids that a model was trained to answer, by its own template (`chat_template.jinja`, or
    `chat_template` in `tokenizer_config.json`) in jinja's sandbox. Special tokens count only where the template writes
    them: the text of a message that spells one is read as those characters, so that nobody can forge the end of a turn.
    Raises WrongUse when the template cannot be compiled.
    """

    def __init__(self, source: str, tokenizer: Tokenizer, names: dict[str, str], *ends: int) -> None:
        usual: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "extensions": [loopcontrols]}
        environment = ImmutableSandboxedEnvironment(**usual)
        environment.filters["tojson"] = _json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = time.strftime
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise WrongUse("the chat template is broken", where=CHAT, why=str(error)) from error
        self.source, self._tokenizer, self._names = source, tokenizer, names
        added = tokenizer.config.get("added_tokens") or []
        self._special = {token["content"]: int(token["id"]) for token in added}
        self._any_special = _any_of(self._special)
        usual_ends = (*TURN_ENDS, names["eos_token"])
        self.ends = tuple(name for name, i in self._special.items() if name in usual_ends or i in ends)
        # What a model says of itself, such as `</think>`, stays in its own earlier answers: templates look for it.
        said = {token["content"] for token in added if not token.get("special", True)} - {*self.ends}
        self._not_said = _any_of(self._special.keys() - said)

    @classmethod
    def find(cls, directory: Path, tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The template beside a tokenizer, None without one; answers end where the model's defaults say, too."""
        config, defaults = _object(directory / CONFIG), _object(beside_model(directory, GENERATION))
        if (source := chat_template(directory)) is None:
            return None
        names = {}
        for role in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = config.get(role)
            names[role] = token.get("content", "") if isinstance(token, dict) else token or ""
        ends = defaults.get("eos_token_id") or []
        return cls(source, tokenizer, names, *(ends if isinstance(ends, list) else [ends]))

    def ids(self, turns: Sequence[Turn]) -> np.ndarray:
        """The ids of a conversation up to where the answer begins, int64 (S,). Raises WrongUse."""
        return self.encode(self.text(turns))

    def text(self, turns: Sequence[Turn]) -> str:
        """The same before it is encoded."""
        given = [
            {
                key: text
                if key == "role"
                else self.plain(text, key == "content" and turn["role"] == "assistant")
                for key, text in turn.items()
            }
            for turn in turns
        ]
        try:
            return self._template.render(messages=given, add_generation_prompt=True, **self._names)
        except (TemplateError, TypeError, ValueError, OverflowError) as error:
            why = f"the model's chat template says: {error}"
            raise WrongUse("the messages do not fit the chat template", where="messages", why=why) from error

    def encode(self, text: str) -> np.ndarray:
        """The ids of a text whose special tokens count, but for those that `plain` has marked; int64 (S,)."""
        special = self._special
        parts = self._any_special.split(text)  # texts and special tokens by turns
        ids = [np.array([special[part]]) if part in special else self._encode(part) for part in parts]
        return np.concatenate(ids).astype(np.int64)

    def plain(self, text: str, own: bool = False) -> str:
        """The text with a mark in every special token that it spells; `own`: but for those that a model says."""
        text, forged = text.replace(BREAK, ""), self._not_said if own else self._any_special
        return forged.sub(lambda found: found[0][0] + BREAK + found[0][1:], text)

    def _encode(self, text: str) -> np.ndarray:
        parts = [self._tokenizer.encode(part) for part in text.split(BREAK) if part]
        return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _object(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _any_of(names: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)
