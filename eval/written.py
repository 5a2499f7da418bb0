"""Answers that a model writes itself: greedy continuations up to a stop string, on any causal backend."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from ..core.backend import Cache, CausalBackend, Span
from ..core.errors import Failed, WrongUse
from ..inference.runtimes.sampling import GREEDY
from ..inference.serving.generation import Job
from ..inference.serving.slots import answer
from .causal_text import CausalText

SLOTS = 16


class _Checked:
    """A backend that refuses logits without a finite maximum: a NaN would be written as the first token."""

    def __init__(self, backend: CausalBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(self, spans: Sequence[Span], cache: Cache) -> Any:
        logits_NV = self._backend.step(spans, cache)
        best_N = np.array([float(logits_V.max()) for logits_V in logits_NV])  # arrays and tensors alike
        if not np.isfinite(best_N).all():
            why = "a logit is no finite number, so the answers would mean nothing"
            fix = "look for NaN or overflow in its weights; evaluate an earlier checkpoint"
            raise Failed("the model predicts nothing", why=why, fix=fix)
        return logits_NV


def greedy_texts(
    backend: CausalBackend, text: CausalText, contexts: Sequence[str], until: Sequence[str], max_tokens: int
) -> Iterator[list[tuple[int, str]]]:
    """Yields batches of (index, answer) as they end. A context loses tokens from its left when it and the
    answer do not fit the window.
    """
    room = text.window - max_tokens
    if room < 1:
        why, fix = (
            f"{max_tokens:,} tokens, the window has {text.window:,}",
            "evaluate a model with a longer window",
        )
        raise WrongUse("an answer of that length leaves no room for a question", why=why, fix=fix)
    prompts = [(text.bos + ids)[-room:] or (text.prefix,) for ids in text.tokenize(contexts)]
    jobs = [Job(np.array(ids, np.int64), max_tokens, GREEDY, tuple(until)) for ids in prompts]
    answers = [""] * len(jobs)
    own = text.tokenizer
    rest = own.decode, own.eos_id, own.vocab_size, min(SLOTS, len(jobs))
    for number, _, piece in answer(cast(CausalBackend, _Checked(backend)), jobs, *rest):
        answers[number] += piece.text
        if piece.finish:
            yield [(number, answers[number])]
