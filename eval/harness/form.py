"""How lm-evaluation-harness fills a prompt in from a record, and scores by a task's own functions."""

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..items import Form, Item, template
from ..kinds.choices import MultipleChoice, Partial
from ..kinds.kind import Kind, Outcome
from ..metrics import Metric
from .files import CALL, function


class HarnessForm(Form):
    """A prompt block whose values are the harness's: the name of a field, a Jinja template that may spell a Python
    literal, or the name of a function.
    """

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
            try:
                return ast.literal_eval(value)
            except (SyntaxError, ValueError):
                return value
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


def by_function(
    kind: type[Kind], process: Callable[..., Mapping[str, Any]], sums: Mapping[str, Any]
) -> type[Kind]:
    """The kind with a task's own function (process_results) in the place of its outcomes. `sums`: metric -> its own
    function over all outcomes, where it has one.
    """

    def outcome(self: Kind, item: Item, found: Sequence[Any]) -> Outcome:
        results = (
            found
            if not kind.probabilities
            else [(one[0], one[1] == one[2]) for part in found for one in part]
        )
        if kind.probabilities and item.text:  # a document's windows are one answer
            results = [sum(value for value, _ in results)]
        return {name: _numbers(value) for name, value in process(item.data, list(results)).items()}

    def metric(self: Kind, name: str) -> Metric:
        if name not in sums:
            return kind.metric(self, name)
        return Metric(
            lambda rows: np.asarray(sums[name]([row[0] if len(row) == 1 else list(row) for row in rows]))
        )

    return type(f"{kind.__name__}ByFunction", (kind,), {"outcome": outcome, "metric": metric})


def _numbers(value: Any) -> list[float]:
    return [float(one) for one in value] if isinstance(value, list | tuple | np.ndarray) else [float(value)]
