"""Answers that a model writes itself: greedy continuations up to a stop string, on any causal backend."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ..core.backend import CausalBackend
from ..core.errors import WrongUse
from ..inference.generation import Request, generate
from ..inference.sampling import Sampling

if TYPE_CHECKING:
    from .causal import CausalText

SLOTS = 16


def greedy_texts(
    backend: CausalBackend, text: "CausalText", contexts: Sequence[str], until: Sequence[str], max_tokens: int
) -> Iterator[list[tuple[int, str]]]:
    """Yields batches of (index, answer) as they end. A context loses tokens from its left when it and the answer do not fit
    the window."""
    room = text.window - max_tokens
    if room < 1:
        why, fix = (
            f"{max_tokens:,} tokens, the window has {text.window:,}",
            "evaluate a model with a longer window",
        )
        raise WrongUse("an answer of that length leaves no room for a question", why=why, fix=fix)
    prompts = [(text.bos + ids)[-room:] or (text.prefix,) for ids in text.tokenize(contexts)]
    requests = [
        Request(
            np.array(ids, np.int64), max_tokens, Sampling(temperature=0), tuple(until), text.tokenizer.eos_id
        )
        for ids in prompts
    ]
    answers = [""] * len(requests)
    decode = text.tokenizer.decode
    for number, piece in generate(backend, decode, requests, SLOTS, text.tokenizer.vocab_size):
        answers[number] += piece.text
        if piece.finish:
            yield [(number, answers[number])]
