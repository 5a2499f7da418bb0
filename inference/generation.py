"""Generating text: requests, what each has said so far, and one batch in which they take turns.

- `SlotBatch` is continuous batching without threads: requests join and leave between steps, prompts are filled in
  pieces of `CHUNK_TOKENS` so that a long one does not hold up the others, and every step decodes one token of all.
  Rows 0 … n-1 of the cache are decoding and row n is being filled: rows stay adjacent by copying the last one into a
  gap, so a decode step never computes an empty row.
- `TextStream` gives out text as it becomes certain: never half a character, never a part of a stop string. The whole
  answer is by definition the sum of its pieces.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..core.backend import CausalBackend
from ..core.errors import WrongUse
from .sampling import GREEDY, Sampling, choose, log_softmax

CHUNK_TOKENS = 64  # filling 64 tokens costs about three decode steps of GPT-2 124M on two cores
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class Request:
    """One answer to make. `logprobs`: also the k most probable tokens of every step; None = no probabilities at all."""

    prompt_ids: np.ndarray  # (S,), at least one token
    max_tokens: int
    sampling: Sampling = GREEDY
    stop: tuple[str, ...] = ()
    eos_id: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class Token:
    """A generated token; probabilities are those of the model, before temperature and filters."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What one step added to an answer: the token and the text that became certain (both may be missing)."""

    text: str
    token: Token | None
    finish: str | None = None  # "stop" (end token or stop string), "length", "cancelled"; None = more to come


class TextStream:
    """Text from token ids as they arrive. `decode` turns a list of ids into text (the tokenizer's).

    `before`: the last token of what is continued. Many decoders write a word's space only after another word.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stop: tuple[str, ...] = (), before: list[int] | None = None
    ) -> None:
        self._decode, self._stop = decode, stop
        self._ids = before or []  # the last certain token as context, and those after it
        self._given = len(decode(self._ids)) if before else 0  # characters of decode(_ids) already taken
        self._held = ""  # decoded, but it may become a stop string
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that is certain now; "" while a character or a stop string may still be open."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        # A cut character decodes to one replacement at the very end; the next token may complete it.
        certain = len(text) - text.endswith(REPLACEMENT)
        self._held += text[self._given : certain]
        self._given = max(self._given, certain)
        if certain == len(text):
            self._ids = self._ids[-1:]
            self._given = len(self._decode(self._ids))
        return self._release()

    def finish(self) -> str:
        """The rest of the text when no more tokens come."""
        self._held += self._decode(self._ids)[self._given :]
        self._ids, self._given = [], 0
        text = self._release()
        rest, self._held = self._held, ""
        return text if self.stopped else text + rest

    def _release(self) -> str:
        found = [at for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            text, self._held, self.stopped = self._held[: min(found)], "", True
            return text
        keep = max((open_stop(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def open_stop(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    return next(
        (size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0
    )


@dataclass
class Sequence:
    """A request on its way: its tokens so far and its row in the cache."""

    request: Request
    stream: TextStream
    generator: np.random.Generator
    past: int = 0  # tokens in the cache
    made: list[int] = field(default_factory=list)
    cancelled: bool = False
    owner: Any = None  # whoever submitted it may note something here
    seen_V: np.ndarray | None = None  # bool, kept only when the repetition penalty needs it

    def accept(self, token: Token) -> Piece:
        """Add a token and say what it means for the answer."""
        if token.id == self.request.eos_id:
            return Piece(self.stream.finish(), token, "stop")
        self.made.append(token.id)
        if self.seen_V is not None:
            self.seen_V[token.id] = True
        text = self.stream.push(token.id)
        if self.stream.stopped:
            return Piece(text, token, "stop")
        if len(self.made) == self.request.max_tokens:
            text += self.stream.finish()
            return Piece(text, token, "stop" if self.stream.stopped else "length")
        return Piece(text, token)


class SlotBatch:
    """Answers many requests at once on one backend; `slots` of them decode together, the others wait in order.

    `vocab_size`: the tokenizer's, when smaller than the model's, whose padding rows then are never chosen.
    """

    def __init__(
        self,
        backend: CausalBackend,
        decode: Callable[[list[int]], str],
        slots: int,
        vocab_size: int | None = None,
    ) -> None:
        self.backend, self.slots = backend, slots
        self._vocab_size = min(vocab_size or backend.vocab_size, backend.vocab_size)
        self._decode = decode
        self._cache = backend.new_cache(slots)
        self._decoding: list[Sequence] = []  # row i of the cache is self._decoding[i]
        self._filling: Sequence | None = None  # its row is len(self._decoding)
        self.waiting: deque[Sequence] = deque()

    def add(self, request: Request) -> Sequence:
        """Take a request in. Raises WrongUse when it cannot fit the model's context."""
        check_fit(request, self.backend.context)
        stream = TextStream(self._decode, request.stop, [int(i) for i in request.prompt_ids[-1:]])
        sequence = Sequence(request, stream, request.sampling.generator())
        if request.sampling.repetition_penalty != 1:
            sequence.seen_V = np.zeros(self._vocab_size, bool)
            sequence.seen_V[request.prompt_ids[request.prompt_ids < self._vocab_size]] = True
        self.waiting.append(sequence)
        return sequence

    @property
    def busy(self) -> bool:
        return bool(self._decoding or self._filling or self.waiting)

    @property
    def free(self) -> int:
        """Requests that could start now."""
        return self.slots - len(self._decoding) - (self._filling is not None) - len(self.waiting)

    def step(self) -> list[tuple[Sequence, Piece]]:
        """Fill one piece of one prompt, then decode one token of every sequence that is ready."""
        pieces = self._drop_cancelled()
        decoding = len(self._decoding)
        filled = self._fill()
        if decoding:
            pieces += self._choose(self._decoding[:decoding], self._decode_logits(decoding))
        if filled is not None:
            pieces += self._choose(self._decoding[decoding:], filled)
        self._leave({id(sequence) for sequence, piece in pieces if piece.finish})
        return pieces

    def sequences(self) -> list[Sequence]:
        """Everyone in the batch, for whoever has to tell them that it broke."""
        filling = [self._filling] if self._filling else []
        return [*self._decoding, *filling, *self.waiting]

    def _fill(self) -> np.ndarray | None:
        """The next piece of the prompt in hand; logits (1, V) when that was its last (the sequence then decodes)."""
        if self._filling is None and self.waiting and len(self._decoding) < self.slots:
            self._filling = self.waiting.popleft()
        if (sequence := self._filling) is None:
            return None
        prompt = sequence.request.prompt_ids
        piece = np.asarray(prompt[sequence.past : sequence.past + CHUNK_TOKENS], np.int64)[None]
        last = sequence.past + piece.shape[1] == len(prompt)
        ask = np.full((1, int(last)), piece.shape[1] - 1, np.int64)
        logits = self.backend.forward(piece, np.array([sequence.past]), ask, self._cache, len(self._decoding))
        sequence.past += piece.shape[1]
        if not last:
            return None
        self._decoding.append(sequence)
        self._filling = None
        return logits[:, 0, : self._vocab_size]

    def _decode_logits(self, rows: int) -> np.ndarray:
        """Put the newest token of the first `rows` sequences into the cache; logits (rows, V)."""
        ready = self._decoding[:rows]
        ids_B1 = np.array([[sequence.made[-1]] for sequence in ready], np.int64)
        past_B = np.array([sequence.past for sequence in ready], np.int64)
        logits = self.backend.forward(ids_B1, past_B, np.zeros((rows, 1), np.int64), self._cache)
        for sequence in ready:
            sequence.past += 1
        return logits[:, 0, : self._vocab_size]

    def _choose(self, sequences: list[Sequence], logits_BV: np.ndarray) -> list[tuple[Sequence, Piece]]:
        settings = [sequence.request.sampling for sequence in sequences]
        ids_B = choose(logits_BV, settings, [s.seen_V for s in sequences], [s.generator for s in sequences])
        return [
            (sequence, sequence.accept(describe(int(token_id), logits_V, sequence.request.logprobs)))
            for sequence, token_id, logits_V in zip(sequences, ids_B, logits_BV)
        ]

    def _drop_cancelled(self) -> list[tuple[Sequence, Piece]]:
        gone = [sequence for sequence in self.sequences() if sequence.cancelled]
        if gone:
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.cancelled)
            if self._filling is not None and self._filling.cancelled:
                self._filling = None
            self._leave({id(sequence) for sequence in gone})
        return [(sequence, Piece("", None, "cancelled")) for sequence in gone]

    def _leave(self, leaving: set[int]) -> None:
        """Take sequences out of the cache: the last row moves into the gap, the row being filled follows."""
        for row in reversed(range(len(self._decoding))):
            if id(self._decoding[row]) not in leaving:
                continue
            last = self._decoding.pop()
            if row < len(self._decoding):
                self._decoding[row] = last
                self.backend.copy_row(self._cache, len(self._decoding), row, last.past)
            if self._filling is not None:
                self.backend.copy_row(
                    self._cache, len(self._decoding) + 1, len(self._decoding), self._filling.past
                )
        if not self.busy:
            self._cache = self.backend.new_cache(self.slots)  # gives back what long sequences made it grow to


def check_fit(request: Request, context: int) -> None:
    """Refuse a request that is empty or longer than the model's context."""
    prompt = len(request.prompt_ids)
    if prompt == 0:
        raise WrongUse("the prompt is empty", where="prompt", fix="give at least one token of text")
    if request.max_tokens < 1:
        raise WrongUse("max_tokens must be at least 1", where="max_tokens", why=f"it is {request.max_tokens}")
    if prompt + request.max_tokens > context:
        raise WrongUse(
            "the request is longer than the model's context", where="max_tokens",
            why=f"{prompt} prompt tokens + {request.max_tokens} new ones > {context}",
            fix=f"ask for at most {max(context - prompt, 0)} tokens or shorten the prompt",
        )  # fmt: skip


def describe(token_id: int, logits_V: np.ndarray, logprobs: int | None) -> Token:
    """The chosen token with its log-probability and the `logprobs` most probable ones."""
    if logprobs is None:
        return Token(token_id)
    values = log_softmax(logits_V.astype(np.float64))
    best = np.argsort(-values, kind="stable")[:logprobs]
    return Token(token_id, float(values[token_id]), tuple((int(i), float(values[i])) for i in best))


def generate(
    backend: CausalBackend,
    decode: Callable[[list[int]], str],
    requests: list[Request],
    slots: int = 8,
    vocab_size: int | None = None,
) -> Iterator[tuple[int, Piece]]:
    """Answer all requests; yields (request number, piece) as they are made. Arguments as for `SlotBatch`."""
    batch = SlotBatch(backend, decode, min(slots, len(requests)), vocab_size)
    for number, request in enumerate(requests):
        batch.add(request).owner = number
    while batch.busy:
        for sequence, piece in batch.step():
            yield sequence.owner, piece
