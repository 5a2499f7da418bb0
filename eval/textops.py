"""Filters of task files: published preprocessing as lm-evaluation-harness 0.4.13 applies it, to the character."""

import ast
import re
import tomllib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _wikitext_rules() -> list[tuple[str, str]]:
    return tomllib.loads(Path(__file__).with_name("wikitext.toml").read_text(encoding="utf-8"))["rules"]


def wikitext_detokenize(text: str) -> str:
    """Undo WikiText's spacing (the same rules in lm_eval and in Megatron-LM's zero-shot task)."""
    for pattern, new in _wikitext_rules():
        text = re.sub(pattern, new, text)
    return text


def without_brackets(text: str) -> str:
    """HellaSwag: drop WikiHow's bracketed marks and the double spaces that they leave."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def lower_first(text: str) -> str:
    """The text with its first letter in lower case."""
    return text[:1].lower() + text[1:]


def which(value: Any, *names: Sequence[str]) -> int:
    """The index of the first list of names that holds `value` in lower case. Raises ValueError when none does."""
    wanted = str(value).strip().lower()
    for index, options in enumerate(names):
        if wanted in options:
            return index
    raise ValueError(f"{value!r} is none of {', '.join('/'.join(options) for options in names)}")


def parse_list(value: Any) -> Any:
    """A Python or JSON literal given as text (RACE keeps its problems so); lists pass through."""
    return ast.literal_eval(value) if isinstance(value, str) else value


def places(labels: Sequence[Any], wanted: Sequence[Any] = (1,)) -> list[int]:
    """The places of the labels that are 1, or among others that are wanted."""
    return [place for place, label in enumerate(labels) if label in wanted]


def filled_in(entities: Sequence[str], query: str) -> list[str]:
    """ReCoRD: a query with each of the entities, in their order, in the place of `@placeholder`."""
    return [f"  - {query}".replace("@placeholder", one) for one in sorted(set(entities))]


_CAPITALISED = frozenset(["A", "An", "The", "She", "He", "It", "They", "My", "His", "Her", "Their"])
_POSSESSIVE = frozenset(["my", "his", "her", "our", "their"])


def winograd_option(option: str, text: str, pronoun: str, pronoun_loc: int) -> str:
    """WSC273: an option in the form that fits the pronoun's place ("The dog" -> "the dog's" for an inner "its")."""
    if pronoun.lower() in _POSSESSIVE:
        option += "'s"
    first = option.split()[0]
    starts_sentence = text[pronoun_loc - 2] == "."
    return option if starts_sentence or first not in _CAPITALISED else option.replace(first, first.lower())


_ALL = (
    wikitext_detokenize,
    without_brackets,
    lower_first,
    which,
    parse_list,
    places,
    filled_in,
    winograd_option,
)
FILTERS: dict[str, Callable[..., Any]] = {function.__name__: function for function in _ALL}
