"""What scoring with a GPT and with a BERT share: questions laid out, batched and answered, whatever computes.

What computes is a reader: a torch module (`module_reader.py`) or a backend of `inference` (`backend_reader.py`).
Questions of similar length are batched up to a budget of tokens, and a batch is halved when memory runs out. What the
pairs of a question to a GPT have in common is a prefix, computed once, behind which each has a branch that sees the
prefix and itself: four choices of 20 tokens after a context of 60 cost 140 token steps, not 320.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..core.backend import Limits, batches
from ..core.errors import Failed, WrongUse
from ..core.files import sha256_json
from ..core.hardware import return_freed_memory
from ..core.scorer import Ids, Question, Score, Scored, check_question, common

# What torch's allocator (a plain RuntimeError on the CPU), CUDA and ONNX Runtime write where memory ends.
OUT_OF_MEMORY = re.compile(
    "(can't|Failed to) allocate memory|not enough memory|bad_alloc|CUDA error: out of memory|STATUS_ALLOC_FAILED"
)
RETURN_SECONDS = 0.25  # between two returns of freed memory: of a small model's time they would take a tenth

Predicted = tuple[np.ndarray, np.ndarray]  # of each target: log-probability, whether it is the arg-max
Ranked = tuple[np.ndarray, np.ndarray, np.ndarray]  # and how many tokens are more probable
MaskedRows = tuple[np.ndarray, ...]  # lines (L, S); of each target (T,) its line, its place there, its id


class Reader(Protocol):
    """What a scorer knows of what computes."""

    name: str  # " (onnxruntime)"; "" for a torch module
    dtype: str  # as a report prints it
    by: list[str]  # what a score depends on besides model and question: versions of programs, the device
    vocab_size: int
    context: int  # tokens of the longest input
    batch_tokens: int  # tokens of a batch that suit it
    shares: bool  # it computes the trunk of several questions once


@dataclass(frozen=True)
class Tree:
    """A question laid out as one row of S tokens behind its trunk: a prefix, then branches."""

    ids: np.ndarray  # (S,) int64
    positions: np.ndarray  # (S,) int64
    prefix: int  # tokens of the common prefix
    branches: tuple[int, ...]  # tokens of each branch; none for a plain sequence
    lines: tuple[np.ndarray, ...]  # for each pair, the rows that predict its continuation, (n,) int64
    targets: tuple[np.ndarray, ...]  # for each pair, the continuation's ids, (n,) int64
    trunk: Ids = ()  # what other questions begin with too

    @property
    def tokens(self) -> int:
        return len(self.ids)


def plant(question: Question, window: int) -> Tree:
    """Lay out a question; inputs are cut from the left to `window` tokens, in which a continuation must fit."""
    wholes = [np.array(context + continuation, np.int64) for context, continuation in question.pairs]
    inputs = [whole[-(window + 1) :][question.shared : -1] for whole in wholes]
    prefix = common(inputs)
    rests = [ids[prefix:] for ids in inputs]
    branches = tuple(len(rest) for rest in rests if len(rest))
    starts = prefix + np.concatenate([[0], np.cumsum([len(rest) for rest in rests])])
    lines = []
    for (_, continuation), ids, start in zip(question.pairs, inputs, starts):
        place = np.arange(len(ids) - len(continuation), len(ids))
        lines.append(np.where(place < prefix, place, place - prefix + start))
    positions = np.concatenate([np.arange(prefix), *(prefix + np.arange(len(rest)) for rest in rests)])
    return Tree(
        ids=np.concatenate([inputs[0][:prefix], *rests]),
        positions=positions + question.shared,
        prefix=prefix,
        branches=branches if len(branches) > 1 else (),
        lines=tuple(lines),
        targets=tuple(np.array(continuation, np.int64) for _, continuation in question.pairs),
        trunk=question.trunk,
    )


class BatchedScorer:
    """Answers questions in batches. `identity` names the weights (a checkpoint's hash); `batch_tokens` bounds memory,
    not results. With `keep_tokens` answers carry the log-probability of every token. `chat`: the `ChatTemplate` that
    texts have been through.
    """

    window: int
    mask: Any
    roles: tuple[str, ...] = ()  # of special tokens that it cannot do without

    def __init__(
        self,
        reader: Reader,
        tokenizer: Any,
        recipe: dict[str, Any],
        *,
        identity: str = "",
        batch_tokens: int | None = None,
        keep_tokens: bool = False,
        chat: Any = None,
    ) -> None:
        missing = [role for role in self.roles if getattr(tokenizer, f"{role}_id") is None]
        if missing or tokenizer.vocab_size > reader.vocab_size:
            sizes = f"{tokenizer.vocab_size:,} tokens, the model predicts {reader.vocab_size:,}"
            why = f"it lacks {', '.join(missing)}" if missing else f"it has {sizes}"
            fix = "give the tokenizer.json that the model was trained with"
            raise WrongUse("the tokenizer does not belong to the model", why=why, fix=fix)
        self.tokenizer, self.keep_tokens, self.chat = tokenizer, keep_tokens, chat
        self.batch_tokens = batch_tokens or reader.batch_tokens
        self.recipe = recipe | {"dtype": reader.dtype}
        if chat is not None:
            self.recipe["chat template"] = sha256_json(chat.source)[:12]
        known = [identity, tokenizer.fingerprint(), self.recipe, keep_tokens, reader.by]
        self.identity = sha256_json(known)

    def laid_out(self, question: Question) -> tuple[int, Any]:
        """A question as the reader takes it, with its tokens."""
        raise NotImplementedError

    def answered(self, laid: list[Any]) -> list[tuple[Score, ...]]:
        """The answers to the questions of a batch."""
        raise NotImplementedError

    def of_tokens(self, logprobs: np.ndarray, greedy: np.ndarray, rank: int = 0) -> Score:
        """The answer to a pair from those to its tokens."""
        kept = tuple(logprobs.tolist()) if self.keep_tokens else ()
        total = float(logprobs.sum(dtype=np.float64))
        return Score(total, int(greedy.sum()), len(logprobs), rank, kept)

    def score(self, questions: Sequence[Question]) -> Iterator[Scored]:
        """Answers, trunk by trunk, longest questions first, so that memory is at its peak at once."""
        for question in questions:
            check_question(question, self.window, mask=self.mask)
        laid = [self.laid_out(question) for question in questions]
        alike: dict[Ids, list[int]] = {}
        for index in sorted(range(len(laid)), key=lambda index: (-laid[index][0], index)):
            alike.setdefault(questions[index].trunk, []).append(index)
        limits, returned = Limits(tokens=self.batch_tokens), time.monotonic()
        for order in alike.values():
            for batch in batches(order, lambda index: laid[index][0], limits, packed=True):
                yield from halving(batch, lambda part: self.answered([laid[index][1] for index in part]))
                if time.monotonic() - returned > RETURN_SECONDS:
                    return_freed_memory()  # what differing sizes leave in the heap adds up to 20 MB
                    returned = time.monotonic()


def halving(batch: list[int], answer: Callable[[list[int]], list[tuple[Score, ...]]]) -> Iterator[Scored]:
    """Answer a batch; when memory runs out, its halves. Raises Failed when one question alone does not fit."""
    try:
        found = answer(batch)
    except Exception as error:  # onnxruntime's own classes derive from Exception alone
        known = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not known and not OUT_OF_MEMORY.search(str(error)):
            raise
    else:
        yield list(zip(batch, found))
        return
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if len(batch) == 1:
        fix = "use a device with more memory, or a smaller --window"
        raise Failed("out of memory on a single question", fix=fix)
    middle = len(batch) // 2
    for half in (batch[:middle], batch[middle:]):
        yield from halving(half, answer)
