"""Batches made ahead of the training step. The state is one integer: samples consumed by all ranks.

Batch k of rank r is rows position + (k * world + r) * batch_size onward, `batch_size` of them: a pure
function, as it is where the size follows from the position, so any number of workers, ranks and restarts
reads the same rows. Workers are threads: the work is NumPy's large loops and the tokenizer, which both release
Python's lock, and a process would copy each batch once more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from ..core.errors import WrongUse
from .options import Batch, Dataset


class Loader:
    """An endless iterator of batches; `position`: samples consumed by all ranks, after what was yielded.

    `batch_size`: rows of one rank's batch, or how many they are at a position. `workers` threads keep `ahead`
    batches each ready; with 0 workers a batch is made when it is asked for.
    `waited` counts the batches that were not ready when asked for, after the first. Use as a context manager,
    or call `close`.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int | Callable[[int], int],
        *,
        position: int = 0,
        rank: int = 0,
        world: int = 1,
        workers: int = 1,
        ahead: int = 4,
    ):
        self._rows: Callable[[int], int] = batch_size if callable(batch_size) else lambda _: batch_size
        if self._rows(position) < 1 or not 0 <= rank < world or position < 0:
            why = f"batch_size {batch_size}, rank {rank} of {world}, position {position}"
            raise WrongUse("bad loader", why=why)
        self.dataset, self.position = dataset, position
        self.rank, self.world, self.waited = rank, world, 0
        self._ahead = workers * ahead
        self._asked = position  # where the next batch that nobody works on begins
        self._pending: deque[Future[Batch]] = deque()
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="loader") if workers else None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch of this rank. An error of a worker is raised here, in its turn."""
        rows = self._rows(self.position)
        if self._pool is None:
            batch = self.dataset.batch(self.position + self.rank * rows, rows)
        else:
            if self._pending:
                self.waited += not self._pending[0].done()
            while len(self._pending) <= self._ahead:
                asked = self._rows(self._asked)
                start = self._asked + self.rank * asked
                self._pending.append(self._pool.submit(self.dataset.batch, start, asked))
                self._asked += asked * self.world
            batch = self._pending.popleft().result()
        self.position += rows * self.world
        return batch

    def close(self) -> None:
        """Drop what was made ahead and end the workers."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pending.clear()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
