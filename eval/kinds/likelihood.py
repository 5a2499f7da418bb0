"""Kind `loglikelihood`: one continuation."""

from collections.abc import Sequence

from ...core.scorer import Score
from ..items import Form, Item
from .kind import Kind, Outcome


class LogLikelihood(Kind):
    """One continuation. acc: every token is the arg-max; perplexity: per record, whatever its number of tokens."""

    needs: tuple[str, ...] = ("context", "target")
    metrics = ("acc", "perplexity")

    def item(self, form: Form) -> Item:
        return Item(
            form.where,
            ((form.text("context"), form.filled("target")),),
            gap=self.task.delimiter,
            data=form.data,
        )

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        return {"acc": [float(scores[0].greedy)], "perplexity": [scores[0].logprob]}
