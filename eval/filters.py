"""What is made of a written answer before it is compared: chains of filters, as lm-evaluation-harness names them."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from .task_file import Step


def filtered(chain: Sequence[Step], answer: str) -> Any:
    """The answer after every step of the chain."""
    for step in chain:
        answer = STEPS[step.function](step, answer)
    return answer


def _regex(step: Step, answer: str) -> str:
    """The match that the step selects; of several groups the first that holds anything."""
    found = re.findall(step.regex_pattern, answer)
    if not -len(found) <= step.group_select < len(found):
        return step.fallback
    picked = found[step.group_select]
    if isinstance(picked, tuple):
        picked = next(filter(None, picked), step.fallback)
    return str(picked).strip()


STEPS: dict[str, Callable[[Step, Any], Any]] = {
    "regex": _regex,
    "remove_whitespace": lambda step, answer: answer.strip(),
    "lowercase": lambda step, answer: answer.lower(),
    "uppercase": lambda step, answer: answer.upper(),
    "map": lambda step, answer: step.mapping_dict.get(answer, step.default_value),
    "take_first": lambda step, answer: answer,  # one answer is written a question
}
