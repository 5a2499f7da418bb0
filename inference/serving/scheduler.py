"""Engines: they answer jobs in batches, a step at a time, on the thread that calls them.

A job says by its `tell` where its answer goes. A batch that breaks is answered with its error and the engine
goes on with the next one. A cancelled job leaves the queue at once and the batch at its next step. Who may
submit how much is decided before: see `remote`.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from ...core.backend import CausalBackend, EncoderBackend
from ...core.console import warn
from ...core.errors import Failed
from .encoding import Encoding, batch_limits, encode_batch, take_batch
from .generation import Request, TextDelta
from .slots import Sequence as Generation
from .slots import SlotBatch

Told = TextDelta | dict[str, np.ndarray] | Failed


@dataclass(eq=False)
class Job:
    """What every job has: its number and where its answer goes, with the time and the size of the batch."""

    number: int
    tell: Callable[["Job", Told, int], None]
    submitted_s: float = field(default_factory=time.monotonic)
    began_s: float = 0.0


@dataclass(eq=False, kw_only=True)
class Generating(Job):
    """A text to continue."""

    request: Request
    sequence: Generation | None = None
    whole: bool = False  # nobody looks at parts of the answer


@dataclass(eq=False, kw_only=True)
class Reading(Job):
    """A text for an encoder."""

    text: Encoding
    details: dict[str, Any]  # what is wanted of it


AnyJob = TypeVar("AnyJob", bound=Job)


class Engine(Generic[AnyJob]):
    """What both engines share: the queue and the end of a turn. `_turn` does one step of work."""

    def __init__(self, turned: Callable[[], None]) -> None:
        self._turned = turned  # called when a turn has told all it made
        self._queue: deque[AnyJob] = deque()

    @property
    def busy(self) -> bool:
        """Whether a turn would do something."""
        return bool(self._queue or self._begun())

    def submit(self, jobs: Sequence[AnyJob]) -> None:
        """Queue these jobs."""
        self._queue.extend(jobs)

    def cancel(self, numbers: set[int]) -> None:
        """Nobody reads these answers any more: their places are given up."""
        self._queue = deque(job for job in self._queue if job.number not in numbers)
        for job in self._begun():
            if job.number in numbers:
                self._cancel(job)

    def turn(self) -> None:
        """One step of work on what is queued and begun."""
        try:
            self._turn()
        except Exception as error:  # whatever a backend throws: those who wait must hear of it
            warn(f"a batch failed: {type(error).__name__}: {error}")
            failure = Failed("the model failed on this batch", why=f"{type(error).__name__}: {error}")
            for job in self._give_up():
                job.tell(job, failure, 0)
        self._turned()

    def _begun(self) -> Sequence[AnyJob]:
        """Jobs taken from the queue and not answered."""
        raise NotImplementedError

    def _cancel(self, job: AnyJob) -> None:
        """Begun work of this job is not needed."""

    def _turn(self) -> None:
        raise NotImplementedError

    def _give_up(self) -> list[AnyJob]:
        """Forget everyone in the present batch."""
        raise NotImplementedError


class CausalEngine(Engine[Generating]):
    """Continuous batching of a GPT over `slots` cache rows."""

    def __init__(
        self,
        backend: CausalBackend,
        decode: Callable[[list[int]], str],
        turned: Callable[[], None],
        *,
        slots: int,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(turned)
        self._new_batch = lambda: SlotBatch(backend, decode, slots, vocab_size)
        self._batch = self._new_batch()
        self._jobs: dict[int, Generating] = {}  # begun

    def _begun(self) -> list[Generating]:
        return list(self._jobs.values())

    def _cancel(self, job: Generating) -> None:
        if job.sequence is not None:
            job.sequence.cancelled = True

    def _turn(self) -> None:
        while self._batch.free > 0 and (job := self._take()):
            job.sequence = self._batch.add(job.request)
            job.sequence.owner = job
        deltas = self._batch.step()
        for sequence, delta in deltas:
            if delta.finish:
                del self._jobs[sequence.owner.number]
            sequence.owner.tell(sequence.owner, delta, len(deltas))

    def _take(self) -> Generating | None:
        if not self._queue:
            return None
        job = self._queue.popleft()
        job.began_s = time.monotonic()
        self._jobs[job.number] = job
        return job

    def _give_up(self) -> list[Generating]:
        self._batch = self._new_batch()
        broken, self._jobs = list(self._jobs.values()), {}
        return broken


class EncoderEngine(Engine[Reading]):
    """Batches texts of similar length, a token budget at a time; never waits for more to come."""

    def __init__(self, backend: EncoderBackend, turned: Callable[[], None], *, pad_id: int) -> None:
        super().__init__(turned)
        self._backend, self._pad_id = backend, pad_id
        self._batch: list[Reading] = []

    def _begun(self) -> list[Reading]:
        return self._batch

    def _turn(self) -> None:
        """The oldest text with those queued ones that are nearest in length."""
        texts = {id(job.text): job for job in self._queue}
        queued = [job.text for job in self._queue]
        self._batch = [texts[id(text)] for text in take_batch(queued, batch_limits(self._backend))]
        taken = {job.number for job in self._batch}
        self._queue = deque(job for job in self._queue if job.number not in taken)
        now_s = time.monotonic()
        for job in self._batch:
            job.began_s = now_s
        answers = encode_batch(self._backend, [job.text for job in self._batch], self._pad_id)
        batch, self._batch = self._batch, []
        for job, answer in zip(batch, answers):
            job.tell(job, answer, len(batch))

    def _give_up(self) -> list[Reading]:
        broken, self._batch = self._batch, []
        return broken
