"""The protocol between whatever computes token probabilities and the evaluation that asks for them.

Lengths are in tokens, log-probabilities in nats. A scorer owns tokenisation, truncation and batching; a task owns
prompts and metrics.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .errors import Failed

Ids = tuple[int, ...]
Texts = Sequence[tuple[str, str]]  # the pairs of a question before they are tokenised


def common(rows: Sequence[Any]) -> int:
    """How many ids all rows begin with."""
    shortest = min(map(len, rows))
    same = np.equal([row[:shortest] for row in rows], rows[0][:shortest]).all(axis=0)
    return int(np.append(same, False).argmin())


@dataclass(frozen=True)
class Question:
    """Pairs (context ids, continuation ids) that are answered together, mostly one context with its choices. All
    contexts begin with `shared` tokens: questions that begin alike and are asked behind one another compute them once.
    """

    pairs: tuple[tuple[Ids, Ids], ...]
    shared: int = 0

    @property
    def trunk(self) -> Ids:
        return self.pairs[0][0][: self.shared]


@dataclass(frozen=True)
class Score:
    """The answer to one pair."""

    logprob: float  # nats, summed over the continuation's tokens
    right: int  # tokens of the continuation that are the arg-max (the first one, on a tie)
    tokens: int  # scored tokens
    rank: int = 0  # answers at a [MASK]: how many tokens are more probable, of the worst of them
    token_logprobs: tuple[float, ...] = ()  # filled when the scorer was asked to keep them

    @property
    def greedy(self) -> bool:
        """Every token of the continuation is the arg-max."""
        return self.right == self.tokens


Scored = list[tuple[int, tuple[Score, ...]]]
Written = list[tuple[int, str]]


def check_question(
    question: Question, window: int, where: str = "", fields: Sequence[str] = (), mask: int | None = None
) -> None:
    """Raise Failed when a continuation has no tokens or does not fit the window, which cuts contexts alone; one with a
    `mask` in it is not cut, and has one for each token of its answer. `fields`: the continuations' names in the task.
    """
    for number, (context, continuation) in enumerate(question.pairs):
        name = fields[number] if fields else "a continuation"
        tokens, masks = len(continuation), 0 if mask is None else context.count(mask)
        if masks and masks != tokens:
            why = f"{masks} [MASK], and {name} has {tokens} tokens"
            fix = "give contexts with one [MASK] for each token of the answer"
            raise Failed("not a cloze question", where=where, why=why, fix=fix)
        if masks and len(context) > window:
            why = f"{len(context):,} tokens, the window has {window:,}"
            fix = "shorten or remove the record, or leave it out with --overlong skip"
            raise Failed("a cloze question is longer than the model's window", where=where, why=why, fix=fix)
        if not tokens:
            what, fix = f"nothing to score: {name} has no tokens", "mend the record"
            why = "the tokenizer makes no token of it, or merges it into the context"
            raise Failed(what, where=where, why=why, fix=fix)
        if tokens > window:
            why = f"{tokens:,} tokens, the window has {window:,}"
            fix = "shorten or remove the record, leave it out with --overlong skip, or use a model with a longer window"
            raise Failed(f"{name} is longer than the model's window", where=where, why=why, fix=fix)


class Scorer(Protocol):
    """What evaluation needs from a model, an exported graph or an engine.

    `recipe` is printed beside every score; with equal weights it gives equal scores. `identity`, of weights, tokenizer,
    recipe and whether the log-probabilities of tokens are kept, is the key of stored answers. `window` is the longest
    input in tokens, `bos` what stands before every text (often nothing), `prefix` the token of an empty context, `mask`
    the one that hides another (None where a model reads from left to right): a context with masks asks what stands
    there, one answer token a mask. `chat` is the chat template that texts have been through, or None.
    """

    recipe: dict[str, Any]
    identity: str
    window: int
    bos: Ids
    chat: Any

    @property
    def prefix(self) -> int: ...

    @property
    def mask(self) -> int | None: ...

    def tokenize(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, nothing added."""
        ...

    def encode(self, questions: Sequence[Texts], before: Sequence[int] = ()) -> list[Question]:
        """Tokenises questions given as (context, continuation) texts; `before`: characters at the beginning of each
        question's contexts that others begin with too.
        """
        ...

    def lost(self, question: Question) -> int:
        """Context tokens that a pair of it loses on its left to the window, at most."""
        ...

    def score(self, questions: Sequence[Question]) -> Iterator[Scored]:
        """Yields batches of (index into `questions`, one Score per pair), in any order, each question once."""
        ...

    def room(self, max_tokens: int, who: str = "the request") -> int:
        """Tokens of a context before an answer of so many. Raises WrongUse where none are left or none is written."""
        ...

    def generate(self, contexts: Sequence[str], until: Sequence[str], max_tokens: int) -> Iterator[Written]:
        """Greedy continuations, cut before the first stop string: batches of (index in `contexts`, text)."""
        ...
