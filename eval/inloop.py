"""Task scores inside a training run: an evaluator for `train(..., evaluators=[...])`, which cli hands to the
loop.

The figures are those of `throughline eval` on the checkpoint of the same step: the same questions of the same
weights, with nothing kept between two evaluations, so that a resumed run has the curve of one that was never
stopped.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import WrongUse
from ..core.scorer import Scorer
from ..models.config import family_of
from ..models.init import empty_model
from ..train.whole_model import whole_model
from .asked import Settings
from .opening import scorer_of
from .runner import evaluate, group_means, prepare
from .task import find_tasks

if TYPE_CHECKING:
    from ..train.build import RunPlan
    from ..train.engine import Engine


class TaskEvaluator:
    """Called with the engine and the step; returns {"task/metric": value}, nothing at steps that are not its
    own.

    A group that reports a mean gives the mean alone. Data and records are checked when it is made, before the
    first step: raises as `evaluate` does, and WrongUse without a tokenizer. The model's mode is given back as
    it was.
    """

    def __init__(self, plan: "RunPlan") -> None:
        wanted = plan.recipe.evaluation
        tokenizer = plan.corpus.tokenizer
        if tokenizer is None:
            why, fix = "tasks are texts", "tokenize the store again with a tokenizer, or take the tasks out"
            raise WrongUse("the token store has no tokenizer", where="evaluation.tasks", why=why, fix=fix)
        self.tokenizer, self.steps, self.every = tokenizer, plan.recipe.train.steps, wanted.every_steps
        self.tasks = find_tasks(wanted.tasks)
        data_dir = Path(wanted.data_dir) if wanted.data_dir else None
        self.settings = Settings(data_dir=data_dir, limit=wanted.limit)
        prepare(self._scorer(empty_model(plan.config)), self.tasks, self.settings)  # asking needs no weights

    def _scorer(self, model: Any) -> Scorer:
        return scorer_of(model, family_of(model.config), self.tokenizer)

    def __call__(self, engine: "Engine", step: int) -> dict[str, float]:
        """Collective; the first process scores, the others return nothing."""
        if step != self.steps and (not self.every or step % self.every):
            return {}
        model = whole_model(engine)
        if model is None:
            return {}
        found = evaluate(self._scorer(model), self.tasks, self.settings)
        means = group_means(found, {task.group: task.task.mean for task in self.tasks if task.group})
        inside = {summary["task"] for summary in means}
        summaries = [*(score.summary for score in found if score.summary["group"] not in inside), *means]
        return {
            f"{one['task']}/{name}": metric["value"]
            for one in summaries
            for name, metric in one["metrics"].items()
        }
