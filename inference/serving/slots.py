"""Continuous batching without threads: jobs join and leave between steps of one cache.

- Every step decodes one token of all sequences that are ready and reads a part of the prompts that are not,
  in one call of the backend: a long prompt does not hold up the others.
- Row i of the cache belongs to `_live[i]`; when a sequence leaves, the last row moves into its place.
- What a cache row or the store of finished sequences already holds of a prompt is copied, not computed: a
  prompt asked n times is read once, and a conversation goes on where it was. A job whose prompt is just being
  read by another waits for it.
"""

import time
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ...core.backend import CausalBackend, Span
from ...core.errors import Failed
from ...core.logits import library
from ..runtimes.sampler import Chooser, Probabilities, beside, choose, probabilities
from .constrain import Guide
from .generation import Job, TextDelta, TextStream, Token
from .prefixes import LEAST_PREFIX, Prefixes, common
from .sequence import Sequence

CHUNK_TOKENS = 64  # of prompts in a step on a CPU: costs about three decode steps of GPT-2 124M on two cores
IDLE_CHUNK_TOKENS = 256  # where nobody is decoding
GPU_CHUNK_TOKENS = 512
PREFIX_BYTES = 256 << 20  # of finished sequences
GUESSING_ROWS = 1  # beyond which guesses do not pay on a CPU: see docs/journal.md
NO_NUMBER = "the model's output is not a number"
LOGIT_NUMBERS = 1 << 25  # asked for at a time for a prompt's probabilities: 128 MiB


class SlotBatch:
    """Answers many jobs at once on one backend; `slots` of them share the cache, the others wait in order.

    `vocab_size`: the tokenizer's, when smaller than the model's, whose padding rows then are never chosen;
    probabilities are those of the model, as in evaluation. `eos_id` ends an answer.
    `prefix_bytes`: memory for finished sequences that later prompts may begin with. `speculate`: most tokens of a
    greedy answer that are guessed ahead and checked in one step.
    """

    def __init__(
        self,
        backend: CausalBackend,
        decode: Callable[[list[int]], str],
        slots: int,
        vocab_size: int | None = None,
        eos_id: int | None = None,
        prefix_bytes: int = PREFIX_BYTES,
        speculate: int = 0,
    ) -> None:
        self._speculate = speculate
        self.backend, self.slots = backend, min(slots, backend.limits.rows or slots)
        self._vocab_size = min(vocab_size or backend.vocab_size, backend.vocab_size)
        self._decode, self._eos_id = decode, eos_id
        self._cache = backend.new_cache(self.slots)
        self._live: list[Sequence] = []  # row i of the cache is self._live[i]
        self._prefixes = Prefixes(backend, prefix_bytes)
        self.waiting: list[Sequence] = []
        self.failed: list[tuple[Sequence, Exception]] = []  # what became of those who left with an error
        self._rows = self.slots  # of one call of the backend
        self.sick = False  # a step has failed for everybody

    def add(self, job: Job, guide: Guide | None = None, due_s: float = 0.0, tenant: str = "") -> Sequence:
        """Take a job of one answer in. Raises WrongUse when it cannot fit the model's context."""
        job.check(self.backend.context)
        stream = TextStream(self._decode, job.stop, [int(i) for i in job.prompt_ids[-1:]])
        sequence = Sequence(job, stream, guide, due_s=due_s, tenant=tenant, reach=self._speculate)
        insort(self.waiting, sequence, key=lambda one: one.due_s)
        return sequence

    def drop(self, owners: set[Any]) -> None:
        """Nobody reads these answers any more: their places are given up."""
        self.waiting = [sequence for sequence in self.waiting if sequence.owner not in owners]
        self._leave({id(sequence) for sequence in self._live if sequence.owner in owners})

    @property
    def busy(self) -> bool:
        return bool(self._live or self.waiting)

    def step(self) -> list[tuple[Sequence, TextDelta]]:
        """Decode one token of every sequence that is ready and read some of the prompts that are not."""
        self._admit()
        sequences, spans = self._spans()
        if not spans:
            return []
        sequences, spans, logits_NV = self._run(sequences, spans)
        ready, lines, at = [], [], 0
        for sequence, span in zip(sequences, spans):
            if sequence.job.prompt_logprobs is not None and span.asked and sequence.filling:
                self._note_prompt(sequence, span, logits_NV[at : at + span.asked])
            sequence.past += len(span.ids) - len(sequence.guesses)
            at += span.asked
            if not sequence.filling:
                ready.append(sequence)
                lines.append(at - 1 - len(sequence.guesses))
        deltas = self._take_guesses(ready, lines, logits_NV)
        deltas += self._choose(ready, logits_NV, lines)
        self._leave({id(sequence) for sequence, delta in deltas if delta.finish})
        self._leave({id(sequence) for sequence, _ in self.failed}, keep=False)
        if self.failed and not self._live:  # nobody knows what an error has left in the cache
            self._prefixes.kept.clear()
            self._cache = None  # before there is another: memory may have been what was missing
            self._cache = self.backend.new_cache(self.slots)
        return deltas

    def _run(self, sequences: list[Sequence], spans: list[Span]) -> tuple[list[Sequence], list[Span], Any]:
        """One step of these, and its logits. A call that fails is made again in halves, down to the one that breaks it;
        when memory was missing, later calls are no larger.
        """
        done: list[int] = []
        logits = []
        starts = range(0, len(spans), self._rows)
        groups = [range(start, min(start + self._rows, len(spans))) for start in reversed(starts)]
        while groups:
            group = groups.pop()
            try:
                logits.append(self.backend.step([spans[i] for i in group], self._cache))
                done += group
            except Exception as error:
                if len(group) == 1:
                    self.failed.append((sequences[group[0]], error))
                    continue
                half = len(group) // 2
                groups += [group[half:], group[:half]]
                if lacks_memory(error):
                    self._rows = half
        self.sick = not logits
        whole = library(logits[0]).concatenate(logits) if len(logits) > 1 else [*logits, None][0]
        return [sequences[i] for i in done], [spans[i] for i in done], whole

    def _spans(self) -> tuple[list[Sequence], list[Span]]:
        """Who takes part in this step, and with which ids."""
        decoding = any(not sequence.filling for sequence in self._live)
        budget = CHUNK_TOKENS if decoding else IDLE_CHUNK_TOKENS
        budget = budget if self.backend.device == "cpu" else GPU_CHUNK_TOKENS
        budget = min(budget, self.backend.limits.tokens or budget)
        guessing = self.backend.device != "cpu" or len(self._live) <= GUESSING_ROWS
        sequences, spans = [], []
        for row, sequence in enumerate(self._live):
            if not sequence.filling:
                ids = np.array([sequence.made[-1], *(sequence.guess() if guessing else ())], np.int64)
                asked = len(ids)
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
            job, sequence.began_s = sequence.job, time.monotonic()
            try:
                device = self.backend.device
                sequence.chooser = Chooser(job.sampling, job.prompt_ids, self._vocab_size, device)
                self._reuse(sequence, len(self._live))
                self._live.append(sequence)
            except Exception as error:
                self.failed.append((sequence, error))

    def _worth_waiting(self, sequence: Sequence) -> bool:
        """Whether somebody is about to read at least `LEAST_PREFIX` more tokens that it begins with, too."""
        prompt = sequence.job.prompt_ids
        return sequence.job.prompt_logprobs is None and any(
            common(other.job.prompt_ids, prompt[:-1]) - other.past >= LEAST_PREFIX
            for other in self._live
            if other.filling and other.tenant == sequence.tenant
        )

    def _reuse(self, sequence: Sequence, row: int) -> None:
        """Copy what is known of its prompt, all but the last token, whose logits nobody kept."""
        if sequence.job.prompt_logprobs is not None:
            return
        prompt = np.asarray(sequence.job.prompt_ids)[:-1]
        own = [other.tenant == sequence.tenant for other in self._live]
        shared = [common(other.held(), prompt) * mine for other, mine in zip(self._live, own)]
        best = int(np.argmax(shared)) if shared else -1
        kept, saved = self._prefixes.find(sequence.tenant, prompt)
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

    def _take_guesses(
        self, ready: list[Sequence], lines: list[int], logits_NV: Any
    ) -> list[tuple[Sequence, TextDelta]]:
        """Accept what was guessed as far as it is what the model says, and move the line of each sequence behind it.
        Answers that end there leave `ready`.
        """
        guessed = [line + i for line, one in zip(lines, ready) for i in range(len(one.guesses))]
        if not guessed:
            return []
        logits_GV = logits_NV[beside(logits_NV, np.array(guessed))]
        sound = library(logits_GV).isfinite(library(logits_GV).amax(logits_GV, 1)).tolist()
        said = dict(zip(guessed, logits_GV[:, : self._vocab_size].argmax(1).tolist()))
        said |= {line: -1 for line, fit in zip(guessed, sound) if not fit}  # an error where it is chosen
        deltas, going = [], []
        for sequence, line in zip(ready, lines):
            taken, over = 0, False
            while (
                not over and taken < len(sequence.guesses) and said[line + taken] == sequence.guesses[taken]
            ):
                try:
                    delta = sequence.accept(Token(sequence.guesses[taken]), self._eos_id)
                except Exception as error:
                    self.failed.append((sequence, error))
                    over = True
                    continue
                deltas.append((sequence, delta))
                taken, over = taken + 1, delta.finish is not None
            sequence.past += taken
            sequence.guesses, sequence.reach = [], min(self._speculate, 2 * taken + 1)
            going += [] if over else [(sequence, line + taken)]
        ready[:], lines[:] = [one for one, _ in going], [line for _, line in going]
        return deltas

    def _choose(
        self, ready: list[Sequence], logits_NV: Any, lines: list[int]
    ) -> list[tuple[Sequence, TextDelta]]:
        """The next token of every sequence whose prompt is read."""
        if not ready:
            return []
        numbers = library(logits_NV).isfinite(library(logits_NV).amax(logits_NV, 1)).tolist()
        sound = []
        for sequence, line in zip(ready, lines):
            try:
                if not numbers[line]:
                    raise Failed(NO_NUMBER)
                self._allow(sequence)
                sound.append((sequence, line))
            except Exception as error:
                self.failed.append((sequence, error))
        ready, lines = [sequence for sequence, _ in sound], [line for _, line in sound]
        if lines != list(range(len(logits_NV))):
            logits_NV = logits_NV[beside(logits_NV, np.array(lines, np.int64))]
        choosers = [sequence.chooser for sequence in ready if sequence.chooser is not None]
        if not choosers:
            return []
        chosen = choose(logits_NV[:, : self._vocab_size], choosers)
        told = [row for row, sequence in enumerate(ready) if sequence.job.logprobs is not None]
        tokens = [Token(i) for i in chosen.tolist()]
        if told:
            most = max(ready[row].job.logprobs or 0 for row in told)
            rows = beside(logits_NV, np.array(told))
            found = probabilities(logits_NV[rows], chosen[rows], most)
            for line, row in enumerate(told):
                tokens[row] = token_of(tokens[row].id, found, line, ready[row].job.logprobs or 0)
        deltas = []
        for sequence, token in zip(ready, tokens):
            try:
                deltas.append((sequence, self._accept(sequence, token)))
            except Exception as error:
                self.failed.append((sequence, error))
        return deltas

    def _allow(self, sequence: Sequence) -> None:
        """Say which tokens may come next, when not all may."""
        assert sequence.chooser is not None
        allowed_V = None if sequence.guide is None else sequence.guide.allowed()
        if len(sequence.made) < sequence.job.min_tokens:
            others_V = np.ones(self._vocab_size, bool) if allowed_V is None else allowed_V.copy()
            others_V[[i for i in sequence.ends(self._eos_id) if i < self._vocab_size]] = False
            allowed_V = others_V if others_V.any() else allowed_V
        sequence.chooser.allowed_V = allowed_V

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

    def _leave(self, leaving: set[int], keep: bool = True) -> None:
        """Take sequences out of the cache; the last row moves into the gap."""
        for row in reversed(range(len(self._live))):
            if id(self._live[row]) not in leaving:
                continue
            if keep:
                self._prefixes.keep(self._live[row].tenant, self._live[row].held(), self._cache, row)
            last = self._live.pop()
            if row < len(self._live):
                self._live[row] = last
                self.backend.copy_row(self._cache, len(self._live), row, last.past)
            self.backend.free_row(self._cache, len(self._live))


def lacks_memory(error: Exception) -> bool:
    """Whether a smaller batch may do."""
    said = f"{type(error).__name__} {error}".lower()
    return any(word in said for word in ("memory", "allocat"))


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
    fail: Callable[[int, Exception], None] | None = None,
) -> Iterator[tuple[int, int, TextDelta]]:
    """Answer all jobs, which are drawn as places come free; yields (number of the job, which of its answers,
    delta) as text is made. Arguments as for `SlotBatch`; `fail` hears of jobs that an error ends (None: it is raised).
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
        for sequence, error in batch.failed:
            if fail is None:
                raise error
            fail(sequence.owner[0], error)
        batch.failed = []
