"""Task scores inside a training run: an evaluator for `train(..., evaluators=[...])`."""

from collections.abc import Sequence
from typing import Any

from ..models.bert import BERT
from .causal import CausalScorer
from .masked import MaskedScorer
from .runner import Settings, evaluate
from .task import find_tasks


class TaskEvaluator:
    """Called with the model and the step; returns {"task/metric": value}. The model's mode is given back as it was."""

    def __init__(self, tasks: Sequence[str], tokenizer: Any, settings: Settings) -> None:
        self.tasks, self.tokenizer, self.settings = find_tasks(tasks), tokenizer, settings

    def __call__(self, model: Any, step: int) -> dict[str, float]:
        training = model.training
        make = MaskedScorer if isinstance(model, BERT) else CausalScorer
        try:
            found = evaluate(make(model, self.tokenizer), self.tasks, self.settings)
        finally:
            model.train(training)
        summaries = [score.summary for score in found]
        return {f"{one['task']}/{name}": metric["value"] for one in summaries for name, metric in one["metrics"].items()}
