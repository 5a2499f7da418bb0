"""Kinds `loglikelihood`, `multiple_choice` and `partial`: one continuation, or choices by their log-probability."""

from collections.abc import Sequence

import numpy as np

from ...core.scorer import Score
from ..items import Form, Item
from .kind import Kind, Outcome

METRICS = "acc acc_norm acc_bytes exact_match f1 f1_macro mcc brier_score share_right"


class LogLikelihood(Kind):
    """One continuation. acc: every token is the arg-max; perplexity: per record, whatever its number of tokens."""

    needs: tuple[str, ...] = ("context", "target")
    metrics = ("acc", "perplexity")

    def item(self, form: Form) -> Item:
        pair = (form.text("context"), form.filled("target"))
        return Item(form.where, (pair,), gap=self.task.delimiter, data=form.data)

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        return {"acc": [float(scores[0].greedy)], "perplexity": [scores[0].logprob]}


class MultipleChoice(Kind):
    """One context with its choices."""

    needs: tuple[str, ...] = ("choices", "gold")
    metrics = tuple(METRICS.split())
    field = "choices[{}]"

    def item(self, form: Form) -> Item:
        context, choices = form.text("context"), form.texts("choices")
        pairs = tuple((context, self.task.delimiter + choice) for choice in choices)
        return self.chosen(form, pairs, choices)

    def chosen(self, form: Form, pairs: Sequence[tuple[str, str]], choices: tuple[str, ...]) -> Item:
        """The question whose right choices the record names."""
        right = form.gold(choices)
        return Item(form.where, tuple(pairs), choices, right[0], right=right, data=form.data)

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        """Ties go to the first choice. acc compares sums, acc_norm sums per character of the choice, acc_bytes sums
        per UTF-8 byte, delimiters left out; share_right is the probability of all that is right (TruthfulQA's mc2).
        """
        correct = item.right or (item.gold,)
        sums = np.array([score.logprob for score in scores])
        characters = np.array([len(choice) for choice in item.choices])
        size = np.array([len(choice.encode()) for choice in item.choices])
        picks = {"acc": sums, "acc_norm": sums / characters, "acc_bytes": sums / size}
        found = {name: [float(np.argmax(values) in correct)] for name, values in picks.items()}
        labels = [float(item.gold), float(np.argmax(sums))]
        likely = np.exp(sums - sums.max()) / np.exp(sums - sums.max()).sum()
        right = np.isin(np.arange(len(sums)), correct)
        found["exact_match"] = [float(any(scores[choice].greedy for choice in correct))]
        found["brier_score"] = [float(((likely - right) ** 2).sum())]
        found["share_right"] = [float(likely[right].sum())]
        return found | {"f1": labels, "mcc": labels, "f1_macro": [*labels, float(len(scores))]}


class Partial(MultipleChoice):
    """The choices are contexts, before one target."""

    needs = ("contexts", "target", "gold")
    field = "target"

    def item(self, form: Form) -> Item:
        contexts, target = form.texts("contexts"), form.filled("target")
        return self.chosen(form, [(one, self.task.delimiter + target) for one in contexts], contexts)
