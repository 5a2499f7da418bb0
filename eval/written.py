"""Answers that a model writes itself: greedy continuations up to a stop string, on any causal backend."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from ..core.backend import Cache, CausalBackend, Span
from ..core.errors import Failed
from ..core.logits import library
from ..core.scorer import Ids
from ..inference.runtimes.sampling import GREEDY
from ..inference.serving.generation import Job
from ..inference.serving.slots import answer

SLOTS = 16


class _Checked:
    """A backend that refuses logits without a finite maximum: a NaN would be written as the first token."""

    def __init__(self, backend: CausalBackend) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def step(self, spans: Sequence[Span], cache: Cache) -> Any:
        logits_NV = self._backend.step(spans, cache)
        xp = library(logits_NV)
        if not xp.isfinite(xp.amax(logits_NV, axis=-1)).all():
            why = "a logit is no finite number, so the answers would mean nothing"
            fix = "look for NaN or overflow in its weights; evaluate an earlier checkpoint"
            raise Failed("the model predicts nothing", why=why, fix=fix)
        return logits_NV


def greedy_texts(
    backend: CausalBackend, tokenizer: Any, prompts: Sequence[Ids], until: Sequence[str], max_tokens: int
) -> Iterator[list[tuple[int, str]]]:
    """Yields batches of (index, answer) as they end."""
    jobs = [Job(np.array(ids, np.int64), max_tokens, GREEDY, tuple(until)) for ids in prompts]
    answers = [""] * len(jobs)
    rest = tokenizer.decode, tokenizer.eos_id, tokenizer.vocab_size, min(SLOTS, len(jobs))
    for number, _, piece in answer(cast(CausalBackend, _Checked(backend)), jobs, *rest):
        answers[number] += piece.text
        if piece.finish:
            yield [(number, answers[number])]
