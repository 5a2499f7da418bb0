"""A model in a process of its own, as the HTTP process sees it: started, fed, watched and started again.

- `submit` never waits: it takes all work of a request or says that it cannot. The places of answers that are accepted
  and not given are bounded here, so that a full queue is known without asking the other process.
- A process that dies is started again; everyone it owed an answer gets an error. Killed are one that sends no
  heartbeat for `hang_s`, one whose present step takes longer than `load_s` (a first compilation, or the build of an
  engine, may happen in a step), and one that does not load within `load_s`.
"""

import asyncio
import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.exceptions import HTTPException

from ...core.backend import BackendOptions
from ...core.console import log_settings, warn
from ...core.errors import Failed, ThroughlineError
from .accounts import ServerLimits
from .channel import Ask, Beat, Broken, Cancel, Made, Message, Messages, Open, Read, Ready, Turn, Work, pack
from .keys import later

FORGETTING = 0.9  # of the running mean of seconds per job
UNREAD_BYTES = 64 << 20  # that a process which has stopped may leave with us
PRIORITY_S = 60.0  # by which a step of priority is earlier in the queue
LONGEST_PAUSE_S = 30.0  # between two attempts to start a process that keeps dying
WATCH_S = 1.0  # between two looks at whether the process lives
QUIET_S = 5.0  # without a heartbeat, after which a model does not count as ready

Answer = Made | Read | ThroughlineError
Hear = Callable[[tuple[int, Answer]], None]  # takes the place of an answer in its request, and some of it


@dataclass
class Owed:
    """An answer that was accepted."""

    place: int  # in its request
    hear: Hear
    cost: int
    places: float  # of the queue
    began: bool = False  # as is known with its first token


@dataclass
class ModelTotals:
    """Counters of one model's name since the server started; they go on when the model is replaced."""

    restarts: int = 0  # processes that ended and were started again
    failed: int = 0  # answers
    guessed: int = 0  # tokens ahead
    right: int = 0  # of them
    watch_failures: int = 0  # versions of a watched path that could not be read or opened


def spawn(connection: socket.socket) -> subprocess.Popen[bytes]:
    """A process that answers on this socket, in a group of its own: Ctrl-C reaches only the HTTP process."""
    fd = connection.fileno()
    module = "throughline.inference.serving.worker"
    words = [sys.executable, "-u", "-m", module, str(fd), *log_settings()]
    # What libraries print must not mix with a result on stdout.
    return subprocess.Popen(words, pass_fds=[fd], stdin=subprocess.DEVNULL, stdout=2, process_group=0)


class Remote:
    """The other end of one model's process."""

    def __init__(
        self,
        name: str,
        path: str,
        options: BackendOptions,
        limits: ServerLimits,
        totals: ModelTotals | None = None,
    ) -> None:
        self.name, self.path = name, path
        self._options = options
        self.totals = totals or ModelTotals()
        self.limits, self.places = limits, limits.slots + limits.queue
        self.ready = False  # for work
        self.accepted = 0
        self.cache_usage = 0.0  # share of the key-value cache that held tokens at the last heartbeat
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: asyncio.Transport | None = None
        self._opened: asyncio.Future[Ready | Broken]  # what the present process says first
        self._ended: asyncio.Future[None]
        self._waiting: dict[int, Owed] = {}
        self._taken = 0.0  # places of `_waiting`
        self.cost = 0  # tokens to read and to make for `_waiting`, at most
        self._next = 0
        self._seconds_per_job = 0.1  # running mean, for Retry-After
        self._watching: asyncio.Task[None] | None = None
        self._silent_s = 0.0  # since the last message, in looks of `_watch`
        self._busy_s = 0.0  # that its present step had taken at the last heartbeat
        self._has_died = False

    def watch(self) -> None:
        """Take work from now on, and start the process again whenever it ends."""
        self.ready = True
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        self.ready = False
        if self._watching is not None:
            self._watching.cancel()
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()  # it holds nothing that is worth a farewell
            await asyncio.to_thread(self._process.wait)

    @property
    def responsive(self) -> bool:
        """Whether the process takes work and its heartbeat comes."""
        return self.ready and self._silent_s <= QUIET_S

    @property
    def waiting(self) -> int:
        """Jobs accepted and not answered."""
        return len(self._waiting)

    @property
    def active(self) -> int:
        """Of them, those that have begun."""
        return sum(owed.began for owed in self._waiting.values())

    @property
    def queued(self) -> int:
        return self.waiting - self.active

    def refusal(self, places: float) -> HTTPException | None:
        """Why work of so many places cannot be taken now, if so: 503 without the model, 429 for a full queue. An idle
        process takes work of any size: bodies are bounded.
        """
        if not self.ready:
            state = "starting again" if self._has_died else "loading"
            return later(503, f"the model {self.name} is {state}", 5)
        if self._waiting and self._taken + places > self.places:
            wait_s = max(1, min(60, math.ceil(len(self._waiting) * self._seconds_per_job)))
            why = f"{math.ceil(self._taken)} of {self.places} places are taken"
            return later(429, f"the queue of {self.name} is full: {why}", wait_s)
        if self._connection is not None and self._connection.get_write_buffer_size() > UNREAD_BYTES:
            return later(503, f"the model {self.name} does not take requests in", 5)
        return None

    def submit(self, work: Sequence[Work], hear: Hear, priority: int = 0, tenant: str = "") -> range:
        """Send the work of a request, for which there must be room, and return the numbers of its answers."""
        assert self._connection is not None
        answers = [one for one in work for _ in range(one.n)]
        numbers = range(self._next, self._next + len(answers))
        due_s = time.monotonic() - priority * PRIORITY_S
        message = pack(Ask(numbers.start, list(work), due_s, tenant))  # what cannot be said is owed to nobody
        self._next = numbers.stop
        for place, (number, one) in enumerate(zip(numbers, answers)):
            self._waiting[number] = Owed(place, hear, one.cost, one.places)
            self._taken += one.places
            self.cost += one.cost
        self._connection.write(message)
        self.accepted += len(numbers)
        return numbers

    def cancel(self, numbers: Sequence[int]) -> None:
        """Nobody waits for these any more; answered ones may be among them."""
        left = [number for number in numbers if number in self._waiting]
        for number in left:
            self._forget(number)
        if left and self.ready and self._connection is not None:
            self._connection.write(pack(Cancel(left)))

    async def open(self) -> dict[str, Any]:
        """Start the process and wait for what it says of the model. Raises what opening the model raised."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = spawn(theirs)
            except OSError:
                ours.close()
                raise
        loop = asyncio.get_running_loop()
        opened, ended = self._opened, self._ended = loop.create_future(), loop.create_future()

        end = partial(ended.set_result, None)
        self._connection, _ = await loop.create_connection(lambda: Messages(self._route, end), sock=ours)
        limits, draft = self.limits, str(self.limits.draft or "")
        opening = Open(self.name, self.path, limits.slots, self._options, limits.speculate, draft)
        self._connection.write(pack(opening))
        await asyncio.wait((opened, ended), timeout=limits.load_s, return_when=asyncio.FIRST_COMPLETED)
        if opened.done():
            if isinstance(first := opened.result(), Broken):
                raise first.error()
            return first.facts
        if ended.done():
            code = await asyncio.to_thread(self._process.wait)
            meaning = "killed, perhaps for want of memory" if code == -9 else "what it printed is above"
            what = "the process of the model ended while it was loading"
            raise Failed(what, where=self.path, why=f"exit code {code}; {meaning}")
        self._connection.close()
        self._process.kill()
        why = f"it took more than {limits.load_s:g} s"
        raise Failed("the model did not load", where=self.path, why=why, fix="see --load-timeout")

    async def _watch(self) -> None:
        """Kill a process that has stopped, and start one that has ended again. Acts first, then writes to the log."""
        while True:
            assert self._process is not None
            await asyncio.wait((self._ended,), timeout=WATCH_S)
            if not self._ended.done():
                # Of this process's seconds: when it stands still itself, it blames nobody.
                self._silent_s += WATCH_S
                if (why := self._stuck()) is not None:
                    self._silent_s = self._busy_s = 0.0
                    self._process.kill()
                    warn(f"{self.name}: the process of the model {why} and is killed")
                continue
            await self._lost()
            await self._start_again()

    def _stuck(self) -> str | None:
        """Why the process counts as hung, if it does."""
        if self._silent_s > self.limits.hang_s:
            return f"has sent no heartbeat for {self._silent_s:.0f} s"
        if self._busy_s > self.limits.load_s:
            return f"has been in one step for {self._busy_s:.0f} s"
        return None

    async def _start_again(self) -> None:
        pause_s = 0.1
        while not self.ready:
            try:
                await self.open()
                self.ready = True
            except Exception as error:  # whatever it is: a later attempt may do better
                why = error if isinstance(error, ThroughlineError) else f"{type(error).__name__}: {error}"
                warn(f"{self.name}: {why}; next attempt in {pause_s:.0f} s")
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s + 1, LONGEST_PAUSE_S)
        warn(f"{self.name}: the model answers again")

    async def _lost(self) -> None:
        """Tell everyone who waits that the process has ended."""
        self.ready, self._has_died = False, True
        self._silent_s = self._busy_s = self.cache_usage = 0.0
        self.totals.restarts += 1
        waiting, self._waiting = self._waiting, {}
        self._taken, self.cost = 0.0, 0
        assert self._connection is not None and self._process is not None
        self._connection.close()
        with suppress(OSError):
            self._process.kill()  # a socket that closed without a death is no use either
        failure = Failed("the process of the model ended", fix="send the request again")
        for owed in waiting.values():
            owed.hear((owed.place, failure))
        await asyncio.to_thread(self._process.wait)
        ended = f"the process of the model ended with {len(waiting)} requests in it"
        warn(f"{self.name}: {ended}; starting it again")

    def _forget(self, number: int) -> None:
        """Give the places of an answer back."""
        owed = self._waiting.pop(number)
        self.cost -= owed.cost
        self._taken = self._taken - owed.places if self._waiting else 0.0  # rounding ends with the queue

    def _route(self, message: Message) -> None:
        """Hand a message of the process to those who wait for it."""
        self._silent_s = 0.0
        if isinstance(message, Beat):
            self._busy_s, self.cache_usage = message.busy_s, message.cache_usage
        elif isinstance(message, Turn):
            self._busy_s = 0.0
            self.totals.guessed += message.guessed
            self.totals.right += message.right
            for made in message.made:
                self._answer(made.number, made, made.deltas[-1].finish is not None)
        elif isinstance(message, Read):
            self._answer(message.number, message, True)
        elif isinstance(message, Ready) or (isinstance(message, Broken) and not message.numbers):
            self._opened.set_result(message)
        elif isinstance(message, Broken):
            for number in message.numbers:
                self.totals.failed += message.kind == "Failed"
                self._answer(number, message.error(), True)

    def _answer(self, number: int, answer: Answer, last: bool) -> None:
        if number not in self._waiting:  # cancelled
            return
        owed = self._waiting[number]
        owed.began = True
        if last:
            self._forget(number)
            if not isinstance(answer, ThroughlineError):
                took_s = (time.monotonic() - answer.began_s) / max(answer.batch, 1)
                self._seconds_per_job = FORGETTING * self._seconds_per_job + (1 - FORGETTING) * took_s
        owed.hear((owed.place, answer))
