"""Engines: a worker thread per model that answers requests in batches, behind a bounded queue.

`submit` never waits: it takes all of a request's jobs or raises `Busy`. Answers go to callbacks, on the worker's thread. A
batch that breaks is answered with its error and the engine goes on with the next one; `drain` answers everybody who was
accepted and then ends the thread. The forward itself runs outside Python's lock, so health checks are answered meanwhile.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ..core.backend import CausalBackend, EncoderBackend
from ..core.console import warn
from ..core.errors import Failed
from .encoding import Encoding, encode_batch, take_batch
from .generation import Piece, Request, SlotBatch, check_fit
from .generation import Sequence as Generation

FORGETTING = 0.9  # of the running mean of seconds per job
Job = TypeVar("Job")


class Busy(Failed):
    """The queue is full or the engine is shutting down; `retry_after_s` says when to come back."""

    def __init__(self, what: str, retry_after_s: int, shutting_down: bool = False) -> None:
        super().__init__(what, fix=f"try again in {retry_after_s} s")
        self.retry_after_s, self.shutting_down = retry_after_s, shutting_down


class Engine(Generic[Job]):
    """What both engines share: the bounded queue, the thread, and its end. `_turn` does one piece of work."""

    def __init__(self, name: str, queue_limit: int) -> None:
        self.queue_limit = queue_limit
        self.accepted = 0  # jobs, since the start
        self._queue: deque[Job] = deque()
        self._changed = threading.Condition()
        self._draining = False
        self._seconds_per_job = 0.1  # running mean, for Retry-After
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    @property
    def queued(self) -> int:
        """Jobs accepted and not begun."""
        return len(self._queue)

    def drain(self, timeout_s: float | None = None) -> bool:
        """Accept nothing more, answer everything accepted, end the thread; False when that took longer."""
        with self._changed:
            self._draining = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, jobs: Sequence[Job]) -> None:
        """Queue all of them or none."""
        with self._changed:
            if self._draining:
                raise Busy("the server is shutting down", 5, shutting_down=True)
            if len(self._queue) + len(jobs) > self.queue_limit:
                wait_s = max(1, min(60, math.ceil(len(self._queue) * self._seconds_per_job)))
                raise Busy(
                    f"the queue is full: {len(self._queue)} of {self.queue_limit} places are taken", wait_s
                )
            self._queue.extend(jobs)
            self.accepted += len(jobs)
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not (self._queue or self._working() or self._draining):
                    self._changed.wait()
                if self._draining and not (self._queue or self._working()):
                    return
            try:
                self._turn()
            except Exception as error:  # whatever a backend throws: those who wait must hear of it
                warn(f"a batch failed: {type(error).__name__}: {error}")
                self._fail(Failed("the model failed on this batch", why=f"{type(error).__name__}: {error}"))

    def _done(self, seconds: float, jobs: int) -> None:
        self._seconds_per_job = FORGETTING * self._seconds_per_job + (1 - FORGETTING) * seconds / jobs

    def _working(self) -> bool:
        """Whether begun work is left, besides the queue."""
        raise NotImplementedError

    def _turn(self) -> None:
        raise NotImplementedError

    def _fail(self, error: Failed) -> None:
        """Answer everyone in the present batch with the error."""
        raise NotImplementedError


@dataclass
class Generating:
    """A generation job: `tell` gets every piece, or the error that ended it."""

    request: Request
    tell: Callable[[Piece | Failed], None]
    began_s: float = 0.0
    sequence: Generation | None = None
    cancelled: bool = False

    def cancel(self) -> None:
        """Nobody reads the answer any more: its place is given up at the next step."""
        self.cancelled = True
        if self.sequence is not None:
            self.sequence.cancelled = True


class CausalEngine(Engine[Generating]):
    """Continuous batching of a GPT over `slots` cache rows."""

    def __init__(
        self,
        name: str,
        backend: CausalBackend,
        decode: Callable[[list[int]], str],
        *,
        slots: int,
        queue_limit: int,
        vocab_size: int | None = None,
    ) -> None:
        super().__init__(name, queue_limit)
        self.backend, self._slots = backend, slots
        self._new_batch = lambda: SlotBatch(backend, decode, slots, vocab_size)
        self._batch = self._new_batch()
        self._starting: Generating | None = None  # taken from the queue and not yet in the batch

    def submit(self, jobs: Sequence[Generating]) -> None:
        """Queue all of these jobs or none. Raises WrongUse when one does not fit the context, Busy when the queue is full."""
        for job in jobs:
            check_fit(job.request, self.backend.context)
        self._put(jobs)

    @property
    def active(self) -> int:
        """Sequences in the cache."""
        return len(self._batch.sequences())

    def _working(self) -> bool:
        return self._batch.busy

    def _turn(self) -> None:
        while self._queue and self._batch.free > 0:
            job = self._starting = self._queue.popleft()
            job.began_s = time.monotonic()
            job.sequence = self._batch.add(job.request)
            job.sequence.owner = job
            if (
                job.cancelled
            ):  # `cancel` may run at any moment: it sets the job first and the sequence if it is there
                job.sequence.cancelled = True
            self._starting = None
        for sequence, piece in self._batch.step():
            sequence.owner.tell(piece)
            if piece.finish:
                self._done((time.monotonic() - sequence.owner.began_s) / self._slots, 1)

    def _fail(self, error: Failed) -> None:
        broken, self._batch = self._batch, self._new_batch()
        starting, self._starting = self._starting, None
        for job in [sequence.owner for sequence in broken.sequences()] + ([starting] if starting else []):
            job.tell(error)


class EncoderEngine(Engine[Encoding]):
    """Batches texts of similar length, a token budget at a time; never waits for more to come."""

    def __init__(self, name: str, backend: EncoderBackend, *, pad_id: int, queue_limit: int) -> None:
        super().__init__(name, queue_limit)
        self.backend, self._pad_id = backend, pad_id
        self._batch: list[Encoding] = []

    def submit(self, jobs: Sequence[Encoding]) -> None:
        """Queue all of these jobs or none. Raises Busy when the queue is full."""
        self._put(jobs)

    def _working(self) -> bool:
        return False

    def _turn(self) -> None:
        """The oldest text with those queued ones that are nearest in length."""
        with self._changed:
            self._batch = take_batch(self._queue)
            taken = {id(job) for job in self._batch}
            self._queue = deque(job for job in self._queue if id(job) not in taken)
        began_s = time.monotonic()
        answers = encode_batch(self.backend, self._batch, self._pad_id)
        self._done(time.monotonic() - began_s, len(self._batch))
        batch, self._batch = self._batch, []
        for job, answer in zip(batch, answers):
            self._answer(job, answer)

    def _fail(self, error: Failed) -> None:
        broken, self._batch = self._batch, []
        for job in broken:
            self._answer(job, error)

    def _answer(self, job: Encoding, answer: dict[str, np.ndarray] | Failed) -> None:
        assert job.tell is not None
        job.tell(answer)
