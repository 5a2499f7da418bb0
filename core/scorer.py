"""The protocol between whatever computes token probabilities and the evaluation that asks for them.

Lengths are in tokens, log-probabilities in nats. A scorer owns tokenisation, truncation and batching; a task owns prompts
and metrics. Nothing here imports torch, so tasks and reports can be read on any machine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """Pairs (context ids, continuation ids) that are answered together, usually one context with its choices.

    Pairs of one question may share work (a common prefix is computed once), so a question is the unit of a batch and of
    a resumed evaluation.
    """

    pairs: tuple[tuple[Ids, Ids], ...]


@dataclass(frozen=True)
class Score:
    """The answer to one pair."""

    logprob: float  # nats, summed over the continuation's tokens
    greedy: bool  # every token of the continuation is the arg-max (the first one, on a tie)
    tokens: int  # scored tokens
    truncated: int = 0  # context tokens dropped from the left to fit the window
    token_logprobs: tuple[float, ...] = ()  # filled when the scorer was asked to keep them


Scored = list[tuple[int, tuple[Score, ...]]]


class Scorer(Protocol):
    """What evaluation needs from a model, an exported graph or an engine.

    `recipe` holds the facts that are printed beside every score (kind, window, bos, dtype, ...); equal recipes on equal
    weights give equal scores. `identity` is a hash of weights, tokenizer and recipe: the key of stored answers.
    """

    recipe: dict[str, Any]
    identity: str

    def encode(self, questions: Sequence[Sequence[tuple[str, str]]]) -> list[Question]:
        """Tokenises questions given as (context, continuation) texts."""
        ...

    def encode_document(self, text: str) -> list[Question]:
        """Tokenises a document into windows that predict every token of it exactly once."""
        ...

    def score(self, questions: Sequence[Question]) -> Iterator[Scored]:
        """Yields batches of (index into `questions`, one Score per pair), in any order, each question once."""
        ...

    def generate(self, contexts: Sequence[str], until: Sequence[str], max_tokens: int) -> Iterator[list[tuple[int, str]]]:
        """Greedy continuations, cut before the first stop string; yields batches of (index into `contexts`, text)."""
        ...
