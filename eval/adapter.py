"""Throughline models inside lm-evaluation-harness: all of its tasks run on our artifacts, with our scoring.

    python -m throughline.eval.adapter run --model throughline --model_args path=runs/gpt --tasks mmlu

is its own command with this model known; in a program, importing this module is enough. Needs the extra `eval`.
"""

import sys
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from ..core.console import say
from ..core.errors import MissingExtra, ThroughlineError, WrongUse
from ..core.scorer import Question, Scorer
from .items import chat_text
from .kinds.texts import rolling
from .masked import PLL
from .opening import ScorerOptions, open_scorer

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError:
    missing = MissingExtra("lm_eval", "the adapter", "throughline[eval]")
    if __name__ != "__main__":
        raise missing from None
    say(f"error: {missing}")
    sys.exit(missing.exit_code)


OPTIONS = ("bos", "window", "batch_tokens", "pll", "dtype")


@register_model("throughline")
class ThroughlineLM(LM):
    """The harness's model interface over a `Scorer`; `path` is anything that `throughline eval` takes, the other
    arguments are its options. Batch sizes mean nothing here. Raises WrongUse for an argument that is none.
    """

    tokenizer_name = ""  # of the harness's stored requests: the path

    def __init__(
        self,
        path: str = "",
        device: str | None = None,
        scorer: Scorer | None = None,
        *,
        batch_size: Any = None,
        max_batch_size: Any = None,
        **given: Any,
    ) -> None:
        super().__init__()
        where = "--model_args"
        if unknown := set(given) - set(OPTIONS):
            fix = f"give path, {', '.join(OPTIONS)}"
            raise WrongUse(f"no argument of the model is called {min(unknown)!r}", where=where, fix=fix)
        if (pll := given.get("pll", PLL[0])) not in PLL:
            fix = f"give {' or '.join(PLL)}"
            raise WrongUse(f"no pseudo-log-likelihood is called {pll!r}", where=where, fix=fix)
        if scorer is None and not path:
            raise WrongUse("no model is given", where=where, fix="give path=DIRECTORY")
        if device and device.startswith("cuda") and not torch.cuda.is_available():
            say("no CUDA device here: the CPU scores")  # the harness asks for cuda unless told otherwise
            device = "cpu"
        self.tokenizer_name, self.options = path, ScorerOptions(device=device or "auto", **given)
        self.scorer = scorer or open_scorer(path, self.options).scorer

    def apply_chat_template(self, chat_history: list[Any], add_generation_prompt: bool = True) -> str:
        """A conversation as the model's own template has it. Raises WrongUse for an answer that is begun for it."""
        if not add_generation_prompt:
            why = "the template's turn of the model would have to stay open"
            raise WrongUse("no answer can be begun here", where="gen_prefix", why=why)
        if self.scorer.chat is None:
            options = replace(self.options, apply_chat_template=True)
            self.scorer = open_scorer(self.tokenizer_name, options).scorer
        return chat_text(self.scorer.chat, [(one["role"], one["content"]) for one in chat_history])

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Requests of one record that follow one another with one context are one question, whose common tokens are
        computed once; not those of different records: all of BLiMP's have the same empty context.
        """
        alike = groupby(requests, lambda one: (one.task_name, one.doc_id, one.args[0]))
        questions = self.scorer.encode([[one.args for one in group] for _, group in alike])
        return [(score.logprob, score.greedy) for scores in self._scores(questions) for score in scores]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """The sum over every token of each document."""
        texts = [request.args[0] for request in requests]
        scorer = self.scorer
        windows = [rolling(scorer.bos + ids, scorer.window, scorer.prefix) for ids in scorer.tokenize(texts)]
        scores = iter(self._scores([question for document in windows for question in document]))
        return [sum(next(scores)[0].logprob for _ in document) for document in windows]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Greedy text. Raises WrongUse for a request that asks for sampling."""
        found = [""] * len(requests)
        alike: dict[tuple[tuple[str, ...], int], list[int]] = {}
        for number, request in enumerate(requests):
            how = request.args[1]
            sampled = how.get("do_sample") and float(how.get("temperature", 1)) > 0
            if sampled or int(how.get("num_beams", 1)) > 1:
                why, fix = f"task {request.task_name} samples or searches", "take do_sample and num_beams out"
                raise WrongUse("answers are greedy here", where="generation_kwargs", why=why, fix=fix)
            most, until = how.get("max_gen_toks", 256), how.get("until") or ()
            stops = (until,) if isinstance(until, str) else tuple(until)
            alike.setdefault((stops, most), []).append(number)
        for (until, most), mine in alike.items():
            for batch in self.scorer.generate([requests[i].args[0] for i in mine], until, most):
                for place, text in batch:
                    found[mine[place]] = text
        return found

    def _scores(self, questions: list[Question]) -> list[tuple[Any, ...]]:
        answers = dict(item for batch in self.scorer.score(questions) for item in batch)
        return [answers[index] for index in range(len(questions))]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except ThroughlineError as error:
        say(f"error: {error}")
        sys.exit(error.exit_code)
