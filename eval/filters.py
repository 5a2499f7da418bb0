"""What is made of a written answer before it is compared: chains of filters, as lm-evaluation-harness names them."""

import re
import sys
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from string import ascii_uppercase
from typing import Any

from .task_file import Step

Chain = Sequence[Step]


def filtered(chain: Chain, answer: str, record: Mapping[str, Any]) -> Any:
    """The answer after every step of the chain. `record`: the data of the question, in which choices stand."""
    for step in chain:
        answer = STEPS[step.function](step, answer, record)
    return answer


def _matched(found: list[Any], step: Step) -> str:
    """The match that the step selects; of several groups the first that holds anything. "" for none."""
    if not found or not -len(found) <= step.group_select < len(found):
        return ""
    picked = found[step.group_select]
    if isinstance(picked, tuple):
        picked = next((group for group in picked if group), "")
    return str(picked).strip()


def _regex(step: Step, answer: Any, record: Mapping[str, Any]) -> str:
    found = re.findall(step.regex_pattern, answer if isinstance(answer, str) else "")
    if found and (not isinstance(found[0], tuple)):
        return _matched(found, step)  # an empty match is a match
    return _matched(found, step) or step.fallback


def _letter(step: Step, answer: str, record: Mapping[str, Any]) -> str:
    """The letter of a choice, "(B)": by the pattern, else by the text of a choice, else by ": B"."""
    letters = dict(zip(ascii_uppercase, record["choices"]))
    texts = {_bare(step, choice.strip()): f"({letter})" for letter, choice in letters.items()}
    if found := _matched(re.findall(step.regex_pattern, answer), step):
        return found
    longest_first = sorted(map(re.escape, texts), key=len, reverse=True)
    if found := _matched(re.findall("|".join(longest_first), _bare(step, answer)), step):
        return texts.get(found, found)
    found = _matched(re.findall(rf":[\s]*({'|'.join(letters)})", answer), step)
    return f"({found})" if found else step.fallback


def _bare(step: Step, text: str) -> str:
    for pattern in step.regexes_to_ignore:
        text = re.sub(pattern, "", text)
    text = text.lower() if step.ignore_case else text
    return text.translate(_punctuation()) if step.ignore_punctuation else text


@cache
def _punctuation() -> dict[int, None]:
    """Every mark of Unicode's P categories."""
    return dict.fromkeys(i for i in range(sys.maxunicode) if unicodedata.category(chr(i)).startswith("P"))


STEPS: dict[str, Callable[[Step, Any, Mapping[str, Any]], Any]] = {
    "regex": _regex,
    "multi_choice_regex": _letter,
    "remove_whitespace": lambda step, answer, record: answer.strip(),
    "lowercase": lambda step, answer, record: answer.lower(),
    "uppercase": lambda step, answer, record: answer.upper(),
    "map": lambda step, answer, record: step.mapping_dict.get(answer, step.default_value),
    "take_first": lambda step, answer, record: answer,  # one answer is written a question
}
