"""Text to questions for a GPT by lm-evaluation-harness's rules: shared by all that scores continuations.

- A pair is tokenised whole and then split at the length of the context's own encoding.
- Blanks at the end of the context belong to the continuation.
- An empty context is the prefix token (BOS, else EOS).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.errors import WrongUse
from ..core.scorer import Ids, Question


class CausalText:
    """Tokenisation by the harness's rules, shared by everything that scores continuations."""

    def __init__(self, tokenizer: Any, *, bos: bool, window: int) -> None:
        self.tokenizer, self.window = tokenizer, window
        self.bos: Ids = ()
        if bos:
            if tokenizer.bos_id is None:
                raise WrongUse("the tokenizer has no BOS token", fix="evaluate without --bos")
            self.bos = (tokenizer.bos_id,)

    @property
    def prefix(self) -> int:
        """The token that stands for an empty context."""
        for found in (self.tokenizer.bos_id, self.tokenizer.eos_id):
            if found is not None:
                return int(found)
        raise WrongUse(
            "the tokenizer has neither a BOS nor an EOS token",
            why="a text without context (BLiMP, perplexity of a document) is predicted from one of them",
            fix="choose tasks with a context, or a tokenizer with an end-of-text token",
        )

    @property
    def mask(self) -> None:
        """No token hides another."""

    def tokenize(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, without BOS."""
        if not texts:
            return []
        flat, lengths = self.tokenizer.encode_batch(list(texts))
        ends = np.cumsum(lengths)
        flat = np.asarray(flat).tolist()
        return [
            tuple(flat[stop - length : stop])
            for stop, length in zip(ends.tolist(), np.asarray(lengths).tolist())
        ]

    def encode(self, questions: Sequence[Sequence[tuple[str, str]]]) -> list[Question]:
        """(context, continuation) texts -> ids. Each distinct text is tokenised once."""
        moved = [[_blanks_to_the_right(*pair) for pair in pairs] for pairs in questions]
        texts = {
            text: Ids()
            for pairs in moved
            for context, continuation in pairs
            for text in (context, context + continuation)
        }
        texts.update(zip(texts, self.tokenize(list(texts))))
        return [
            Question(
                tuple(
                    self._pair(texts[context], texts[context + continuation])
                    for context, continuation in pairs
                )
            )
            for pairs in moved
        ]

    def lost(self, question: Question) -> int:
        """See `core.scorer.Scorer.lost`: the last token of an input is predicted, not read."""
        return max(max(0, len(context) + len(answer) - self.window - 1) for context, answer in question.pairs)

    def _pair(self, context: Ids, whole: Ids) -> tuple[Ids, Ids]:
        if context:
            return self.bos + context, whole[len(context) :]
        if whole[:1] == (self.prefix,):  # the text brings its own prefix token: it is not predicted
            return whole[:1], whole[1:]
        return (self.prefix,), whole


def _blanks_to_the_right(context: str, continuation: str) -> tuple[str, str]:
    kept = context.rstrip()
    return kept, context[len(kept) :] + continuation
