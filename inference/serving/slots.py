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
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

import numpy as np

from ...core.backend import CausalBackend, Span, library
from ...core.console import warn
from ...core.errors import Failed
from ...core.scorer import common
from ...data.text_stream import Decode, TextStream
from ...data.tokenizer import Tokenizer
from ..runtimes.sampling import Chooser, beside, choose, probabilities
from .generation import Draft, Guide, Job, Sequence, TextDelta, Token, look_up
from .prefixes import LEAST_PREFIX, Prefixes

CHUNK_TOKENS = 64  # of prompts in a step on a CPU: costs about three decode steps of GPT-2 124M on two cores
IDLE_CHUNK_TOKENS = 256  # where nobody is decoding
GPU_CHUNK_TOKENS = 512
CONTEXT_TOKENS = 256  # of a prompt, by which the first token of an answer is decoded
PREFIX_BYTES = 256 << 20  # of finished sequences
GUESSING_ROWS = 1  # beyond which guesses do not pay on a CPU: see docs/journal.md
NO_NUMBER = "the model's output is not a number"
LOGIT_NUMBERS = 1 << 25  # asked for at a time for a prompt's probabilities: 128 MiB
Deltas = list[tuple[Sequence, TextDelta]]
Item = TypeVar("Item")
Result = TypeVar("Result")


class SlotBatch:
    """Answers many jobs at once on one backend; `slots` of them share the cache, the others wait in order.

    `vocab_size`: the tokenizer's, when smaller than the model's, whose padding rows then are never chosen;
    probabilities are those of the model, as in evaluation. `decode`: the tokenizer, or what makes text of ids. Each of
    `end_ids` ends an answer.
    `prefix_bytes`: memory for finished sequences that later prompts may begin with. `speculate`: most tokens of an
    answer that are guessed ahead and checked in one step, by the model `draft` if there is one.
    """

    def __init__(
        self,
        backend: CausalBackend,
        decode: Tokenizer | Decode,
        slots: int,
        vocab_size: int | None = None,
        end_ids: Iterable[int] = (),
        prefix_bytes: int = PREFIX_BYTES,
        speculate: int = 0,
        draft: CausalBackend | None = None,
    ) -> None:
        self._speculate = speculate
        self.guessed = self.right = 0  # tokens since somebody asked, and those of them that were taken
        limits = backend.limits.within(draft.limits) if draft else backend.limits
        self.backend, self.slots = backend, min(slots, limits.rows or slots)
        self._vocab_size = min(vocab_size or backend.vocab_size, backend.vocab_size)
        self._decode, self._end_ids = decode, frozenset(end_ids)
        self._cache = backend.new_cache(self.slots)
        self._draft = Draft(draft, self.slots, self._vocab_size) if draft else None
        self._live: list[Sequence] = []  # row i of the cache is self._live[i]
        self._prefixes = Prefixes(backend, prefix_bytes)
        self.waiting: list[Sequence] = []
        self.failed: list[tuple[Sequence, Exception]] = []  # what became of those who left with an error
        self._rows = self.slots  # of one call of the backend
        self.sick = False  # a step has failed for everybody

    def add(self, job: Job, guide: Guide | None = None, due_s: float = 0.0, tenant: str = "") -> Sequence:
        """Take a job of one answer in. Raises WrongUse when it cannot fit the model's context."""
        job.check(self.backend.context)
        before = job.prompt_ids[-CONTEXT_TOKENS:].tolist()
        stream = TextStream(self._decode, job.stop, before, job.skip_special_tokens)
        ends = frozenset(job.stop_ids)
        if not job.ignore_eos:
            ends |= self._end_ids
        reach = self._speculate if job.plain and guide is None else 0
        sequence = Sequence(job, stream, guide, ends=ends, due_s=due_s, tenant=tenant, reach=reach)
        insort(self.waiting, sequence, key=lambda one: one.due_s)
        return sequence

    def drop(self, owners: set[Any]) -> None:
        """Nobody reads these answers any more: their places are given up."""
        self.waiting = [sequence for sequence in self.waiting if sequence.owner not in owners]
        self._leave({id(sequence) for sequence in self._live if sequence.owner in owners})

    @property
    def busy(self) -> bool:
        """Whether a step does anything: not for those alone whose grammars are in the making."""
        return bool(self._live) or any(sequence.ready for sequence in self.waiting)

    def step(self) -> Deltas:
        """Decode one token of every sequence that is ready and read some of the prompts that are not."""
        self._admit()
        planned = self._spans()
        if not planned:
            return []

        def run(some: list[tuple[Sequence, Span]]) -> Any:
            return self.backend.step([span for _, span in some], self._cache)

        done, failed, self._rows = in_halves(planned, run, self._rows)
        self.failed += [(sequence, error) for (sequence, _), error in failed]
        self.sick = not done
        logits = [logits_NV for _, logits_NV in done]
        logits_NV = library(logits[0]).concatenate(logits) if len(logits) > 1 else [*logits, None][0]
        ready, at = [], 0
        for sequence, span in (one for group, _ in done for one in group):
            if sequence.job.prompt_logprobs is not None and span.asked and sequence.filling:
                self._note_prompt(sequence, span, logits_NV[at : at + span.asked])
            sequence.past += len(span.ids) - len(sequence.guesses)
            at += span.asked
            if not sequence.filling:
                ready.append((sequence, range(at - 1 - len(sequence.guesses), at)))
        deltas = self._choose(ready, logits_NV)
        self._leave({id(sequence) for sequence, delta in deltas if delta.finish})
        self._leave({id(sequence) for sequence, _ in self.failed}, keep=False)
        if self.failed and not self._live:  # nobody knows what an error has left in the cache
            self._prefixes.clear()
            self._cache = None  # before there is another: memory may have been what was missing
            self._cache = self.backend.new_cache(self.slots)
        return deltas

    def _spans(self) -> list[tuple[Sequence, Span]]:
        """Who takes part in this step, and with which ids."""
        decoding = any(not sequence.filling for sequence in self._live)
        budget = CHUNK_TOKENS if decoding else IDLE_CHUNK_TOKENS
        budget = budget if self.backend.device == "cpu" else GPU_CHUNK_TOKENS
        budget = min(budget, self.backend.limits.tokens or budget)
        if self.backend.device != "cpu" or len(self._live) <= GUESSING_ROWS:
            self._guess(budget)
        planned = []
        for row, sequence in enumerate(self._live):
            if not sequence.filling:
                ids = np.array([sequence.made[-1], *sequence.guesses], np.int64)
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
            planned.append((sequence, Span(row, sequence.past, ids, asked)))
        return planned

    def _guess(self, budget: int) -> None:
        """Fill the `guesses` of answers that are to be guessed ahead."""
        try:
            if self._draft is not None:
                self._draft.guess(self._live, budget)
            elif self._speculate:
                for sequence in self._live:
                    sequence.guesses = look_up(sequence.known(), sequence.room)
        except Exception as error:
            by = "the draft model" if self._draft else "the look-up"
            warn(f"nothing is guessed ahead from here on, {by} failed: {type(error).__name__}: {error}")
            self._draft, self._speculate = None, 0

    def _admit(self) -> None:
        """Give rows to those who wait, in order; who shares a prompt that is being read waits for it."""
        for sequence in list(self.waiting):
            if len(self._live) == self.slots:
                break
            if not sequence.ready or self._worth_waiting(sequence):
                continue
            self.waiting.remove(sequence)
            job, sequence.began_s = sequence.job, time.monotonic()
            try:
                if sequence.making is not None:
                    sequence.guide = sequence.making.result().copy()
                device = self.backend.device
                sequence.chooser = Chooser(job.sampling, job.prompt_ids, self._vocab_size, device)
                self._reuse(sequence, len(self._live))
                self._live.append(sequence)
            except Exception as error:
                self.failed.append((sequence, error))

    def _worth_waiting(self, sequence: Sequence) -> bool:
        """Whether somebody is about to read at least `LEAST_PREFIX` more tokens that it begins with, too."""
        reading = [one for one in self._live if one.filling and one.tenant == sequence.tenant]
        shared = [common((one.job.prompt_ids, sequence.job.prompt_ids[:-1])) - one.past for one in reading]
        return sequence.job.prompt_logprobs is None and max(shared, default=0) >= LEAST_PREFIX

    def _reuse(self, sequence: Sequence, row: int) -> None:
        """Copy what is known of its prompt, all but the last token, whose logits nobody kept."""
        if sequence.job.prompt_logprobs is not None:
            return
        prompt = np.asarray(sequence.job.prompt_ids)[:-1]
        own = [row for row, other in enumerate(self._live) if other.tenant == sequence.tenant]
        shared, best = max(((common((self._live[row].held(), prompt)), row) for row in own), default=(0, 0))
        kept, saved = self._prefixes.find(sequence.tenant, prompt)
        if max(shared, kept) < LEAST_PREFIX:
            return
        if shared >= kept:
            self.backend.copy_row(self._cache, best, row, shared)
        else:
            self.backend.load_row(self._cache, row, saved, kept)
        sequence.past = sequence.reused = max(shared, kept)

    def _note_prompt(self, sequence: Sequence, span: Span, logits_SV: Any) -> None:
        """Probabilities of the prompt's tokens that follow those of this span."""
        prompt = sequence.job.prompt_ids
        if span.past == 0:
            sequence.prompt.append(Token(int(prompt[0])))
        targets = np.asarray(prompt[span.past + 1 : span.past + len(span.ids) + 1], np.int64)
        most = sequence.job.prompt_logprobs or 0
        found = probabilities(logits_SV[: len(targets)], beside(logits_SV, targets), most)
        sequence.prompt += [Token(int(i), *one) for i, one in zip(targets, found)]

    def _choose(self, ready: list[tuple[Sequence, range]], logits_NV: Any) -> Deltas:
        """The next token of each sequence that is `ready`, with its lines of the logits, and guesses that are right."""
        if not ready:
            return []
        finite = library(logits_NV).isfinite(library(logits_NV).amax(logits_NV, 1)).tolist()
        sound, lines = [], list[int]()
        for sequence, own in ready:
            try:
                if not finite[own.start]:
                    raise Failed(NO_NUMBER)
                sequence.allow(self._vocab_size)
                sound.append((sequence, range(len(lines), len(lines) + len(own))))
                lines += own
            except Exception as error:
                self.failed.append((sequence, error))
        if not sound:
            return []
        if lines != list(range(len(logits_NV))):
            logits_NV = logits_NV[beside(logits_NV, np.array(lines, np.int64))]
        choosers = [sequence.chooser for sequence, own in sound for _ in own if sequence.chooser is not None]
        draws = {own.start: choosers[own.start].draws for one, own in sound if one.guesses}
        before = {row: one.bit_generator.state for row, one in draws.items()}
        chosen = choose(logits_NV[:, : self._vocab_size], choosers)
        tokens = [Token(i) for i in chosen.tolist()]
        told = [(own.start, one.job.logprobs) for one, own in sound if one.job.logprobs is not None]
        if told:
            rows = beside(logits_NV, np.array([row for row, _ in told]))
            found = probabilities(logits_NV[rows], chosen[rows], max(most for _, most in told))
            for (logprob, top), (row, most) in zip(found, told):
                tokens[row] = Token(tokens[row].id, logprob, top[:most])
        deltas = []
        for sequence, own in sound:
            taken, guesses = 0, sequence.guesses
            try:
                for taken, row in enumerate(own):
                    if not finite[lines[row]]:
                        raise Failed(NO_NUMBER)
                    delta = sequence.accept(tokens[row])
                    deltas.append((sequence, delta))
                    if delta.finish or guesses[taken : taken + 1] != [tokens[row].id]:
                        break
            except Exception as error:
                self.failed.append((sequence, error))
            if guesses:
                draws[own.start].bit_generator.state = before[own.start]
                draws[own.start].random(taken + 1)  # those behind a wrong guess were of no token
                self.guessed, self.right = self.guessed + len(guesses), self.right + taken
                sequence.past += taken
                sequence.guesses, sequence.reach = [], min(self._speculate, 2 * taken + 1)
        return deltas

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
            if self._draft is not None:
                self._draft.leave(row, len(self._live), last.drafted)


def in_halves(
    items: Collection[Item], run: Callable[[list[Item]], Result], most: int
) -> tuple[list[tuple[list[Item], Result]], list[tuple[Item, Exception]], int]:
    """What `run` makes of the items, of at most so many at a time: groups with their results, items with their errors,
    and the most for the next time. A group that fails is run again in halves, down to the item that breaks it; when
    memory was missing, later groups are no larger.
    """
    left = list(items)
    groups = [left[start : start + most] for start in reversed(range(0, len(left), most))]
    done, failed = [], []
    while groups:
        group = groups.pop()
        try:
            done.append((group, run(group)))
        except Exception as error:
            half = len(group) // 2
            groups += [group[half:], group[:half]] if half else []
            failed += [] if half else [(group[0], error)]
            said = f"{type(error).__name__} {error}".lower()
            if half and ("memory" in said or "allocat" in said):
                most = half
    return done, failed, most


def answer(
    batch: SlotBatch, jobs: Iterable[Job], fail: Callable[[int, Exception], None] | None = None
) -> Iterator[tuple[int, int, TextDelta]]:
    """(number of a job, which of its answers, delta) as text is made; `fail` hears of errors (None: raised)."""
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
