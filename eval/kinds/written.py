"""Kind `generate_until`: text that the model writes, made ready to be compared by the harness's filters."""

import re
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...core.scorer import Scorer
from ...data.answers import NO_PUNCTUATION, answer_f1
from ..items import Form, Item
from ..task_file import Matching, Step
from .kind import Asks, Kind, Outcome

PLAIN = "none"  # the chain of filters whose name stands beside no metric


class GenerateUntil(Kind):
    """Text that the model writes: its filters make it ready to be compared with the accepted ones."""

    needs: tuple[str, ...] = ("context", "answers")
    metrics: tuple[str, ...] = ("exact_match", "f1_words", "contains")
    probabilities = False
    asked = Kind.asked | {"filters", "exact_match"}

    def item(self, form: Form) -> Item:
        answers = form.answers()
        pair = (form.text("context"), self.task.delimiter + answers[0])
        return Item(form.where, (pair,), answers=answers, data=form.data)

    def asks(self, items: Sequence[Item], scorer: Scorer) -> Iterator[tuple[Asks, int]]:
        room = scorer.room(self.task.max_tokens, f"task {self.name}")
        for item, ids in zip(items, scorer.tokenize([item.context for item in items])):
            yield [item.context], max(0, len(scorer.bos) + len(ids) - room)

    def key(self, ask: Any) -> str:
        return f"{ask}\0{self.task.until}\0{self.task.max_tokens}"

    def check(self, item: Item, asks: Asks, scorer: Scorer) -> None:
        """Any context can be gone on with."""

    def answers(self, scorer: Scorer, asks: Asks, wheres: Sequence[str]) -> Iterator[list[tuple[int, Any]]]:
        yield from scorer.generate(asks, self.task.until, self.task.max_tokens)

    @property
    def reported(self) -> list[str]:
        """Each metric for each chain of filters."""
        chains = ["" if name == PLAIN else f",{name}" for name in self.task.filters] or [""]
        return [metric + chain for chain in chains for metric in self.task.metrics]

    def outcome(self, item: Item, found: Sequence[Any]) -> Outcome:
        made: Outcome = {}
        for name, chain in self.task.filters.items() or [(PLAIN, [])]:
            answer = found[0]
            for step in chain:
                answer = self.step(step, answer, item)
            suffix = "" if name == PLAIN else f",{name}"
            values = self.of_answer(item, str(answer))
            made |= {metric + suffix: [value] for metric, value in values.items()}
        return made

    def step(self, step: Step, answer: Any, item: Item) -> Any:
        """What one filter makes of an answer."""
        return STEPS[step.function](step, answer)

    def of_answer(self, item: Item, answer: str) -> dict[str, float]:
        """Every metric of an answer that its filters have made ready; the best of the accepted answers counts."""
        given = seen(answer, self.task.exact_match)
        return {
            "exact_match": float(any(seen(one, self.task.exact_match) == given for one in item.answers)),
            "f1_words": max(answer_f1(answer, one) for one in item.answers),
            "contains": float(any(one.lower() in answer.lower() for one in item.answers)),
        }


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

_NO_DIGITS = str.maketrans("", "", string.digits)


def seen(text: str, matching: Matching) -> str:
    """A text as exact match compares it."""
    for pattern in matching.regexes_to_ignore:
        text = re.sub(pattern, "", text)
    text = text.lower() if matching.ignore_case else text
    text = text.translate(NO_PUNCTUATION) if matching.ignore_punctuation else text
    return text.translate(_NO_DIGITS) if matching.ignore_numbers else text
