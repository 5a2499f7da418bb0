"""Continuous batching without threads: requests join and leave between steps of one cache.

- Every step decodes one token of all sequences that are ready and reads a part of the prompts that are not,
  in one call of the backend: a long prompt does not hold up the others.
- Row i of the cache belongs to `_live[i]`; when a sequence leaves, the last row moves into its place.
- What a cache row or the store of finished sequences already holds of a prompt is copied, not computed: a
  prompt asked n times is read once, and a conversation goes on where it was. A request whose prompt is just
  being read by another waits for it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.backend import CausalBackend, Span
from ..runtimes.sampler import Chooser, Probabilities, beside, choose, probabilities
from .generation import Request, TextDelta, TextStream, Token, check_fit

CHUNK_TOKENS = 64  # of prompts in a step on a CPU: costs about three decode steps of GPT-2 124M on two cores
IDLE_CHUNK_TOKENS = 256  # where nobody is decoding
GPU_CHUNK_TOKENS = 512
LEAST_PREFIX = 16  # tokens below which looking up and copying saves nothing
PREFIX_BYTES = 256 << 20  # of finished sequences
LOGIT_NUMBERS = 1 << 25  # asked for at a time for a prompt's probabilities: 128 MiB


@dataclass
class Sequence:
    """A request on its way: its tokens so far and its row in the cache."""

    request: Request
    stream: TextStream
    chooser: Chooser
    owner: Any = None  # whoever submitted it may note something here
    past: int = 0  # tokens in the cache
    reused: int = 0  # of them, those that were copied
    made: list[int] = field(default_factory=list)
    prompt: list[Token] = field(default_factory=list)  # with probabilities, when they are asked for
    cancelled: bool = False
    started_s: float | None = None  # time.monotonic() when it got its row

    @property
    def filling(self) -> bool:
        """Whether some of its prompt is still to be read."""
        return self.past < len(self.request.prompt_ids)

    def held(self) -> np.ndarray:
        """The ids that its cache row holds."""
        answer = self.made[: max(0, self.past - len(self.request.prompt_ids))]
        return np.concatenate((self.request.prompt_ids[: self.past], np.array(answer, np.int64)))

    def accept(self, token: Token) -> TextDelta:
        """Add a token and say what it means for the answer."""
        if token.id == self.request.eos_id:
            return TextDelta(self.stream.finish(), token, "stop")
        self.made.append(token.id)
        self.chooser.accept(token.id)
        guide = self.request.guide
        complete = guide is not None and guide.accept(token.id)
        text = self.stream.push(token.id)
        if self.stream.stopped:
            return TextDelta(text, token, "stop")
        if complete or len(self.made) == self.request.max_tokens:
            text += self.stream.finish()
            return TextDelta(text, token, "stop" if complete or self.stream.stopped else "length")
        return TextDelta(text, token)


class Prefixes:
    """Finished sequences whose keys and values are kept, the least recently used dropped first."""

    def __init__(self, backend: CausalBackend, limit_bytes: int) -> None:
        self._backend, self._limit = backend, limit_bytes
        self._kept: dict[bytes, tuple[np.ndarray, Any]] = {}  # in the order of use

    def find(self, prompt_ids: np.ndarray) -> tuple[int, Any]:
        """How many tokens the best entry shares with the prompt, and that entry (its use is noted)."""
        best, found = 0, None
        for key, (ids, saved) in self._kept.items():
            if (shared := common(ids, prompt_ids)) > best:
                best, found = shared, (key, saved)
        if found is None:
            return 0, None
        self._kept[found[0]] = self._kept.pop(found[0])
        return best, found[1]

    def keep(self, ids: np.ndarray, cache: Any, row: int) -> None:
        """Save a row, unless an entry holds all of it already; entries that it continues are dropped."""
        tokens = len(ids)
        size = self._backend.token_bytes
        if not size or tokens < LEAST_PREFIX or tokens * size > self._limit:
            return
        shares = {key: common(old, ids) for key, (old, _) in self._kept.items()}
        if any(shared == tokens for shared in shares.values()):
            return
        for key, shared in shares.items():
            if shared == len(self._kept[key][0]):
                del self._kept[key]
        while sum(len(old) for old, _ in self._kept.values()) * size + tokens * size > self._limit:
            del self._kept[next(iter(self._kept))]
        if (saved := self._backend.save_row(cache, row, tokens)) is not None:
            self._kept[ids.tobytes()] = (ids, saved)


class SlotBatch:
    """Answers many requests at once on one backend; `slots` of them share the cache, the others wait in order.

    `vocab_size`: the tokenizer's, when smaller than the model's, whose padding rows then are never chosen;
    probabilities are those of the model, as in evaluation.
    `prefix_bytes`: memory for finished sequences that later prompts may begin with.
    """

    def __init__(
        self,
        backend: CausalBackend,
        decode: Callable[[list[int]], str],
        slots: int,
        vocab_size: int | None = None,
        prefix_bytes: int = PREFIX_BYTES,
    ) -> None:
        self.backend, self.slots = backend, min(slots, backend.limits.rows or slots)
        self._vocab_size = min(vocab_size or backend.vocab_size, backend.vocab_size)
        self._decode = decode
        self._cache = backend.new_cache(self.slots)
        self._live: list[Sequence] = []  # row i of the cache is self._live[i]
        self._prefixes = Prefixes(backend, prefix_bytes)
        self.waiting: deque[Sequence] = deque()
        self.prompt_tokens = self.reused_tokens = 0  # since the start

    def add(self, request: Request) -> Sequence:
        """Take a request in. Raises WrongUse when it cannot fit the model's context."""
        check_fit(request, self.backend.context)
        stream = TextStream(self._decode, request.stop, [int(i) for i in request.prompt_ids[-1:]])
        chooser = Chooser(request.sampling, request.prompt_ids, self._vocab_size, self.backend.device)
        sequence = Sequence(request, stream, chooser)
        self.waiting.append(sequence)
        return sequence

    @property
    def busy(self) -> bool:
        return bool(self._live or self.waiting)

    @property
    def free(self) -> int:
        """Requests that could start now."""
        return self.slots - len(self._live) - len(self.waiting)

    def sequences(self) -> list[Sequence]:
        """Everyone in the batch, for whoever has to tell them that it broke."""
        return [*self._live, *self.waiting]

    def step(self) -> list[tuple[Sequence, TextDelta]]:
        """Decode one token of every sequence that is ready and read some of the prompts that are not."""
        deltas = self._drop_cancelled()
        self._admit()
        sequences, spans = self._spans()
        if not spans:
            return deltas
        logits_NV = self.backend.step(spans, self._cache)
        ready, lines, at = [], [], 0
        for sequence, span in zip(sequences, spans):
            if sequence.request.prompt_logprobs is not None and span.asked and sequence.filling:
                self._note_prompt(sequence, span, logits_NV[at : at + span.asked])
            sequence.past += len(span.ids)
            at += span.asked
            if not sequence.filling:
                ready.append(sequence)
                lines.append(at - 1)
        deltas += self._choose(ready, logits_NV, lines)
        self._leave({id(sequence) for sequence, delta in deltas if delta.finish})
        return deltas

    def _spans(self) -> tuple[list[Sequence], list[Span]]:
        """Who takes part in this step, and with which ids."""
        decoding = any(not sequence.filling for sequence in self._live)
        budget = CHUNK_TOKENS if decoding else IDLE_CHUNK_TOKENS
        budget = budget if self.backend.device == "cpu" else GPU_CHUNK_TOKENS
        budget = min(budget, self.backend.limits.tokens or budget)
        sequences, spans = [], []
        for row, sequence in enumerate(self._live):
            if not sequence.filling:
                ids = np.array(sequence.made[-1:], np.int64)
                asked = 1
            elif budget:
                whole = sequence.request.prompt_logprobs is not None
                most = min(budget, max(1, LOGIT_NUMBERS // self.backend.vocab_size)) if whole else budget
                ids = np.asarray(sequence.request.prompt_ids[sequence.past : sequence.past + most], np.int64)
                budget -= len(ids)
                last = sequence.past + len(ids) == len(sequence.request.prompt_ids)
                asked = len(ids) if whole else int(last)
            else:
                continue
            sequences.append(sequence)
            spans.append(Span(row, sequence.past, ids, asked))
        return sequences, spans

    def _admit(self) -> None:
        """Give rows to those who wait, in order; who shares a prompt that is being read waits for it."""
        held_back: deque[Sequence] = deque()
        while self.waiting and len(self._live) < self.slots:
            sequence = self.waiting.popleft()
            if self._worth_waiting(sequence):
                held_back.append(sequence)
                continue
            sequence.started_s = time.monotonic()
            self._live.append(sequence)
            self._reuse(sequence, len(self._live) - 1)
            self.prompt_tokens += len(sequence.request.prompt_ids)
            self.reused_tokens += sequence.reused
        self.waiting.extendleft(reversed(held_back))

    def _worth_waiting(self, sequence: Sequence) -> bool:
        """Whether somebody is about to read at least `LEAST_PREFIX` more tokens that it begins with, too."""
        prompt = sequence.request.prompt_ids
        if sequence.request.prompt_logprobs is not None:
            return False
        return any(
            common(other.request.prompt_ids, prompt[:-1]) - other.past >= LEAST_PREFIX
            for other in self._live
            if other.filling
        )

    def _reuse(self, sequence: Sequence, row: int) -> None:
        """Copy what is known of its prompt, all but the last token, whose logits nobody kept."""
        if sequence.request.prompt_logprobs is not None:
            return
        prompt = np.asarray(sequence.request.prompt_ids)[:-1]
        shared = [common(other.held(), prompt) for other in self._live[:row]]
        best = int(np.argmax(shared)) if shared else -1
        kept, saved = self._prefixes.find(prompt)
        reused = max(kept, shared[best] if shared else 0)
        if reused < LEAST_PREFIX:
            return
        if shared and shared[best] >= kept:
            self.backend.copy_row(self._cache, best, row, reused)
        else:
            self.backend.load_row(self._cache, row, saved, reused)
        sequence.past = sequence.reused = reused

    def _note_prompt(self, sequence: Sequence, span: Span, logits_SV: Any) -> None:
        """Probabilities of the prompt's tokens that follow those of this span."""
        prompt = sequence.request.prompt_ids
        if span.past == 0:
            sequence.prompt.append(Token(int(prompt[0])))
        targets = np.asarray(prompt[span.past + 1 : span.past + len(span.ids) + 1], np.int64)
        if len(targets) == 0:
            return
        most = sequence.request.prompt_logprobs or 0
        found = probabilities(logits_SV[: len(targets)], beside(logits_SV, targets), most)
        sequence.prompt += [token_of(int(i), found, line) for line, i in enumerate(targets)]

    def _choose(
        self, ready: list[Sequence], logits_NV: Any, lines: list[int]
    ) -> list[tuple[Sequence, TextDelta]]:
        """The next token of every sequence whose prompt is read."""
        if not ready:
            return []
        if lines != list(range(len(logits_NV))):
            logits_NV = logits_NV[beside(logits_NV, np.array(lines))]
        for sequence in ready:
            if sequence.request.guide is not None:
                sequence.chooser.allowed_V = sequence.request.guide.allowed()
        chosen = choose(logits_NV[:, : self._vocab_size], [sequence.chooser for sequence in ready])
        told = [row for row, sequence in enumerate(ready) if sequence.request.logprobs is not None]
        tokens: dict[int, Token] = {}
        if told:
            most = max(ready[row].request.logprobs or 0 for row in told)
            rows = beside(logits_NV, np.array(told))
            found = probabilities(logits_NV[rows], chosen[rows], most)
        ids = chosen.tolist()
        for line, row in enumerate(told):
            tokens[row] = token_of(ids[row], found, line, ready[row].request.logprobs or 0)
        return [
            (sequence, self._accept(sequence, tokens.get(row) or Token(ids[row])))
            for row, sequence in enumerate(ready)
        ]

    def _accept(self, sequence: Sequence, token: Token) -> TextDelta:
        if sequence.made:
            return sequence.accept(token)
        if sequence.request.max_tokens == 0:
            delta = TextDelta("", None, "length")
        else:
            delta = sequence.accept(token)
        prompt = tuple(sequence.prompt) if sequence.request.prompt_logprobs is not None else None
        sequence.prompt = []
        return TextDelta(delta.text, delta.token, delta.finish, prompt, sequence.reused)

    def _drop_cancelled(self) -> list[tuple[Sequence, TextDelta]]:
        gone = [sequence for sequence in self.sequences() if sequence.cancelled]
        if gone:
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.cancelled)
            self._leave({id(sequence) for sequence in gone})
        return [(sequence, TextDelta("", None, "cancelled")) for sequence in gone]

    def _leave(self, leaving: set[int]) -> None:
        """Take sequences out of the cache; the last row moves into the gap."""
        for row in reversed(range(len(self._live))):
            if id(self._live[row]) not in leaving:
                continue
            self._prefixes.keep(self._live[row].held(), self._cache, row)
            last = self._live.pop()
            if row < len(self._live):
                self._live[row] = last
                self.backend.copy_row(self._cache, len(self._live), row, last.past)
            self.backend.free_row(self._cache, len(self._live))


def common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two sequences share at their beginning."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differ[0]) if len(differ) else length


def token_of(token_id: int, found: Probabilities, line: int, most: int | None = None) -> Token:
    """One line of `probabilities` as a token with its `most` most probable alternatives (None = all found)."""
    top = zip(found.top_ids[line, :most].tolist(), found.top[line, :most].tolist())
    return Token(token_id, float(found.of[line]), tuple(top))


def generate(
    backend: CausalBackend,
    decode: Callable[[list[int]], str],
    requests: list[Request],
    slots: int = 8,
    vocab_size: int | None = None,
) -> Iterator[tuple[int, TextDelta]]:
    """Answer all requests; yields (request number, delta) as they are made. Arguments as for `SlotBatch`."""
    batch = SlotBatch(backend, decode, min(slots, len(requests)), vocab_size, prefix_bytes=0)
    for number, request in enumerate(requests):
        batch.add(request).owner = number
    while batch.busy:
        for sequence, delta in batch.step():
            yield sequence.owner, delta
