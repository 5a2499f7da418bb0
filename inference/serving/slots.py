"""Continuous batching without threads: jobs join and leave between steps of one cache.

- Every step decodes one token of all sequences that are ready and reads a part of the prompts that are not,
  in one call of the backend: a long prompt does not hold up the others.
- Row i of the cache belongs to `_live[i]`; when a sequence leaves, the last row moves into its place.
- What a cache row or the store of finished sequences already holds of a prompt is copied, not computed: a
  prompt asked n times is read once, and a conversation goes on where it was. A job whose prompt is just being
  read by another waits for it.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.backend import CausalBackend, Span
from ..runtimes.sampler import Chooser, Probabilities, beside, choose, probabilities
from .constrain import Guide
from .generation import Job, TextDelta, TextStream, Token

CHUNK_TOKENS = 64  # of prompts in a step on a CPU: costs about three decode steps of GPT-2 124M on two cores
IDLE_CHUNK_TOKENS = 256  # where nobody is decoding
GPU_CHUNK_TOKENS = 512
LEAST_PREFIX = 16  # tokens below which looking up and copying saves nothing
PREFIX_BYTES = 256 << 20  # of finished sequences
LOGIT_NUMBERS = 1 << 25  # asked for at a time for a prompt's probabilities: 128 MiB


@dataclass(eq=False)
class Sequence:
    """A job on its way: its tokens so far and its row in the cache."""

    job: Job
    stream: TextStream
    guide: Guide | None
    chooser: Chooser | None = None  # made with its row: penalties take memory of the vocabulary's size
    owner: Any = None  # whoever submitted it may note something here
    untold: list[TextDelta] = field(default_factory=list)  # and keep what he sends later here
    past: int = 0  # tokens in the cache
    reused: int = 0  # of them, those that were copied
    made: list[int] = field(default_factory=list)
    prompt: list[Token] = field(default_factory=list)  # with probabilities, when they are asked for
    began_s: float = 0.0  # time.monotonic() when it got its row

    @property
    def filling(self) -> bool:
        """Whether some of its prompt is still to be read."""
        return self.past < len(self.job.prompt_ids)

    def held(self) -> np.ndarray:
        """The ids that its cache row holds."""
        answer = self.made[: max(0, self.past - len(self.job.prompt_ids))]
        return np.concatenate((self.job.prompt_ids[: self.past], np.array(answer, np.int64)))

    def accept(self, token: Token, eos_id: int | None) -> TextDelta:
        """Add a token and say what it means for the answer."""
        assert self.chooser is not None
        if token.id == eos_id:
            return TextDelta(self.stream.finish(), token, "stop")
        self.made.append(token.id)
        self.chooser.accept(token.id)
        complete = self.guide is not None and self.guide.accept(token.id)
        text = self.stream.push(token.id)
        if self.stream.stopped:
            return TextDelta(text, token, "stop")
        if complete or len(self.made) == self.job.max_tokens:
            text += self.stream.finish()
            return TextDelta(text, token, "stop" if complete or self.stream.stopped else "length")
        return TextDelta(text, token)


class Prefixes:
    """Finished sequences whose keys and values are kept, the least recently used dropped first."""

    def __init__(self, backend: CausalBackend, limit_bytes: int) -> None:
        self._backend, self._limit = backend, limit_bytes
        self.kept: dict[bytes, tuple[np.ndarray, Any]] = {}  # in the order of use

    def find(self, prompt_ids: np.ndarray) -> tuple[int, Any]:
        """How many tokens the best entry shares with the prompt, and that entry (its use is noted)."""
        shared = {key: common(ids, prompt_ids) for key, (ids, _) in self.kept.items()}
        if not any(shared.values()):
            return 0, None
        best = max(shared, key=shared.__getitem__)
        self.kept[best] = self.kept.pop(best)
        return shared[best], self.kept[best][1]

    def keep(self, ids: np.ndarray, cache: Any, row: int) -> None:
        """Save a row, unless an entry holds all of it already; entries that it continues are dropped."""
        tokens = len(ids)
        size = self._backend.token_bytes
        if not size or tokens < LEAST_PREFIX or tokens * size > self._limit:
            return
        shares = {key: common(old, ids) for key, (old, _) in self.kept.items()}
        if any(shared == tokens for shared in shares.values()):
            return
        for key, shared in shares.items():
            if shared == len(self.kept[key][0]):
                del self.kept[key]
        while sum(len(old) for old, _ in self.kept.values()) * size + tokens * size > self._limit:
            del self.kept[next(iter(self.kept))]
        if (saved := self._backend.save_row(cache, row, tokens)) is not None:
            self.kept[ids.tobytes()] = (ids, saved)


class SlotBatch:
    """Answers many jobs at once on one backend; `slots` of them share the cache, the others wait in order.

    `vocab_size`: the tokenizer's, when smaller than the model's, whose padding rows then are never chosen;
    probabilities are those of the model, as in evaluation. `eos_id` ends an answer.
    `prefix_bytes`: memory for finished sequences that later prompts may begin with.
    """

    def __init__(
        self,
        backend: CausalBackend,
        decode: Callable[[list[int]], str],
        slots: int,
        vocab_size: int | None = None,
        eos_id: int | None = None,
        prefix_bytes: int = PREFIX_BYTES,
    ) -> None:
        self.backend, self.slots = backend, min(slots, backend.limits.rows or slots)
        self._vocab_size = min(vocab_size or backend.vocab_size, backend.vocab_size)
        self._decode, self._eos_id = decode, eos_id
        self._cache = backend.new_cache(self.slots)
        self._live: list[Sequence] = []  # row i of the cache is self._live[i]
        self._prefixes = Prefixes(backend, prefix_bytes)
        self.waiting: list[Sequence] = []

    def add(self, job: Job, guide: Guide | None = None) -> Sequence:
        """Take a job of one answer in. Raises WrongUse when it cannot fit the model's context."""
        job.check(self.backend.context)
        stream = TextStream(self._decode, job.stop, [int(i) for i in job.prompt_ids[-1:]])
        sequence = Sequence(job, stream, guide)
        self.waiting.append(sequence)
        return sequence

    def drop(self, owners: set[Any]) -> None:
        """Nobody reads these answers any more: their places are given up."""
        self.waiting = [sequence for sequence in self.waiting if sequence.owner not in owners]
        self._leave({id(sequence) for sequence in self._live if sequence.owner in owners})

    def broken(self) -> list[Any]:
        """After an error in a step: the owners of those who were in it, whose rows are lost; the others begin anew."""
        lost, self._live = [sequence.owner for sequence in self._live], []
        self._prefixes.kept.clear()
        self._cache = None  # before there is another: memory may have been what was missing
        self._cache = self.backend.new_cache(self.slots)
        return lost

    @property
    def busy(self) -> bool:
        return bool(self._live or self.waiting)

    def step(self) -> list[tuple[Sequence, TextDelta]]:
        """Decode one token of every sequence that is ready and read some of the prompts that are not."""
        self._admit()
        sequences, spans = self._spans()
        if not spans:
            return []
        logits_NV = self.backend.step(spans, self._cache)
        ready, lines, at = [], [], 0
        for sequence, span in zip(sequences, spans):
            if sequence.job.prompt_logprobs is not None and span.asked and sequence.filling:
                self._note_prompt(sequence, span, logits_NV[at : at + span.asked])
            sequence.past += len(span.ids)
            at += span.asked
            if not sequence.filling:
                ready.append(sequence)
                lines.append(at - 1)
        deltas = self._choose(ready, logits_NV, lines)
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
                whole = sequence.job.prompt_logprobs is not None
                most = min(budget, max(1, LOGIT_NUMBERS // self.backend.vocab_size)) if whole else budget
                ids = np.asarray(sequence.job.prompt_ids[sequence.past : sequence.past + most], np.int64)
                budget -= len(ids)
                last = sequence.past + len(ids) == len(sequence.job.prompt_ids)
                asked = len(ids) if whole else int(last)
            else:
                continue
            sequences.append(sequence)
            spans.append(Span(row, sequence.past, ids, asked))
        return sequences, spans

    def _admit(self) -> None:
        """Give rows to those who wait, in order; who shares a prompt that is being read waits for it."""
        for sequence in list(self.waiting):
            if len(self._live) == self.slots:
                break
            if self._worth_waiting(sequence):
                continue
            self.waiting.remove(sequence)
            self._live.append(sequence)
            job, sequence.began_s = sequence.job, time.monotonic()
            sequence.chooser = Chooser(job.sampling, job.prompt_ids, self._vocab_size, self.backend.device)
            self._reuse(sequence, len(self._live) - 1)

    def _worth_waiting(self, sequence: Sequence) -> bool:
        """Whether somebody is about to read at least `LEAST_PREFIX` more tokens that it begins with, too."""
        prompt = sequence.job.prompt_ids
        return sequence.job.prompt_logprobs is None and any(
            common(other.job.prompt_ids, prompt[:-1]) - other.past >= LEAST_PREFIX
            for other in self._live
            if other.filling
        )

    def _reuse(self, sequence: Sequence, row: int) -> None:
        """Copy what is known of its prompt, all but the last token, whose logits nobody kept."""
        if sequence.job.prompt_logprobs is not None:
            return
        prompt = np.asarray(sequence.job.prompt_ids)[:-1]
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
        prompt = sequence.job.prompt_ids
        if span.past == 0:
            sequence.prompt.append(Token(int(prompt[0])))
        targets = np.asarray(prompt[span.past + 1 : span.past + len(span.ids) + 1], np.int64)
        if len(targets) == 0:
            return
        most = sequence.job.prompt_logprobs or 0
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
        choosers = [sequence.chooser for sequence in ready if sequence.chooser is not None]
        for sequence, chooser in zip(ready, choosers, strict=True):
            if sequence.guide is not None:
                chooser.allowed_V = sequence.guide.allowed()
        chosen = choose(logits_NV[:, : self._vocab_size], choosers)
        told = [row for row, sequence in enumerate(ready) if sequence.job.logprobs is not None]
        tokens = [Token(i) for i in chosen.tolist()]
        if told:
            most = max(ready[row].job.logprobs or 0 for row in told)
            rows = beside(logits_NV, np.array(told))
            found = probabilities(logits_NV[rows], chosen[rows], most)
            for line, row in enumerate(told):
                tokens[row] = token_of(tokens[row].id, found, line, ready[row].job.logprobs or 0)
        return [(sequence, self._accept(sequence, token)) for sequence, token in zip(ready, tokens)]

    def _accept(self, sequence: Sequence, token: Token) -> TextDelta:
        if sequence.made:
            return sequence.accept(token, self._eos_id)
        if sequence.job.max_tokens == 0:
            delta = TextDelta("", None, "length")
        else:
            delta = sequence.accept(token, self._eos_id)
        prompt = tuple(sequence.prompt) if sequence.job.prompt_logprobs is not None else None
        sequence.prompt = []
        return TextDelta(delta.text, delta.token, delta.finish, prompt, sequence.reused)

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


def answer(
    backend: CausalBackend,
    jobs: Iterable[Job],
    decode: Callable[[list[int]], str],
    eos_id: int | None = None,
    vocab_size: int | None = None,
    slots: int = 8,
    prefix_bytes: int = 0,
) -> Iterator[tuple[int, int, TextDelta]]:
    """Answer all jobs, which are drawn as places come free; yields (number of the job, which of its answers,
    delta) as text is made. Arguments as for `SlotBatch`.
    """
    batch = SlotBatch(backend, decode, slots, vocab_size, eos_id, prefix_bytes)
    numbered = enumerate(jobs)
    while True:
        while len(batch.waiting) < batch.slots and (drawn := next(numbered, None)):
            for copy, one in enumerate(drawn[1].each()):
                batch.add(one).owner = (drawn[0], copy)
        if not batch.busy:
            return
        for sequence, delta in batch.step():
            yield *sequence.owner, delta
