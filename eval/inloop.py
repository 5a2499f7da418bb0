"""Evaluators for `train(..., evaluators=[...])`: scores as `throughline eval` has them for the checkpoint of the step;
nothing is kept between two; and samples of text.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec.structs import replace

from ..core.errors import ThroughlineError, WrongUse
from ..core.scorer import Scorer
from ..inference.runtimes.sampling import Sampling
from ..inference.runtimes.torch_backend import TorchCausal
from ..inference.serving.generation import Job
from ..inference.serving.slots import SlotBatch, answer
from ..models.config import family_of
from ..models.init import empty_model
from ..train.evaluate import whole_model
from ..train.logs.report import ERROR, SAMPLES
from .asked import Settings
from .opening import scorer_of
from .runner import evaluate, group_means, prepare
from .task import find_tasks

if TYPE_CHECKING:
    from ..train.build import RunPlan
    from ..train.engine import Engine

PROMPT, CONTINUED = 16, 48  # tokens of a sample


class TextSample:
    """Called with the engine and the step; has a GPT continue the beginning of the held-out text, for the report. Every
    step draws alike, by numbers of its own: the run's are not touched.
    """

    def __init__(self, plan: "RunPlan", run_dir: Path) -> None:
        self.file, self.tokenizer = run_dir / SAMPLES, plan.corpus.tokenizer
        ids = plan.corpus.validation[0].read(0, min(PROMPT, plan.recipe.train.sequence_length // 2))
        self.job = Job(ids.astype(np.int64), CONTINUED, Sampling(0.8, seed=0), ignore_eos=True)

    @staticmethod
    def suits(plan: "RunPlan") -> bool:
        """Whether the run has one: a GPT on one process, with held-out text."""
        alone = plan.recipe.parallel.layout().world == 1
        return plan.family == "gpt" and alone and bool(plan.corpus.validation and plan.corpus.tokenizer)

    def __call__(self, engine: "Engine", step: int) -> dict[str, float]:
        """Adds a line to the run's samples."""
        model, tokenizer = whole_model(engine), self.tokenizer
        assert model is not None and tokenizer is not None
        room = model.config.sequence_length - len(self.job.prompt_ids)
        job = replace(self.job, max_tokens=min(CONTINUED, room))
        with suppress(ThroughlineError):  # of weights that are no longer finite
            batch = SlotBatch(TorchCausal(model), tokenizer.decode, 1, tokenizer.vocab_size, prefix_bytes=0)
            said = "".join(delta.text for _, _, delta in answer(batch, [job]))
            with open(self.file, "a", encoding="utf-8") as file:
                sample = {"step": step, "prompt": tokenizer.decode(job.prompt_ids), "text": said}
                file.write(json.dumps(sample, ensure_ascii=False) + "\n")
        return {}


class TaskEvaluator:
    """Called with the engine and the step; returns {"task/metric": value} and {"task/metric_stderr": its error}, of a
    group that reports a mean the mean alone. Data and records are checked when it is made, before the first step:
    raises as `evaluate` does, and WrongUse without a tokenizer.
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
        due = step == self.steps or (self.every and not step % self.every)
        if not due or (model := whole_model(engine)) is None:
            return {}
        found = evaluate(self._scorer(model), self.tasks, self.settings)
        means = group_means(found)
        inside = {summary["task"] for summary in means}
        alone = [score.summary for score in found if inside.isdisjoint(score.summary["groups"])]
        figures = {}
        for one in (*alone, *means):
            for name, metric in one["metrics"].items():
                figures[f"{one['task']}/{name}"] = metric["value"]
                if metric["stderr"] is not None:
                    figures[f"{one['task']}/{name}{ERROR}"] = metric["stderr"]
        return figures
