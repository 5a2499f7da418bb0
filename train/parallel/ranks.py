"""The processes of one run: what all must agree on, and who is behind when they wait for one another.

The first process keeps the run's directory; the others train and stay silent. A run of one joins no group.
"""

import contextlib
import json
import os
import pickle
import re
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...core.console import configure, duration, warn
from ...core.errors import Failed
from ...planner.layout import Layout
from .mesh import TIMEOUT_SECONDS, Mesh, make_mesh, start_group

Decision = TypeVar("Decision")
# what gloo and NCCL say when a peer is gone or stalled
LOST = re.compile(
    "Connection (was likely )?closed|Connection reset|Broken pipe|[Tt]imed out|[Tt]imeout|NCCL|remote process exited"
)
STALLED = re.compile("[Tt]imed out|[Tt]imeout")
LOOK_EVERY_S = 0.5  # whether the first process has let the others go
HEARD_SECONDS = 10.0  # at most, until all have heard it: they look once in half a second unless they are gone
UNFORESEEN = -1  # in place of an exit code: a failure of the first process that is no user's error
RECORDS_PER_LIMIT = 60  # one is written 60 times in a time limit, and once in 10 s at least
SPEAK_AT = 0.8  # of the time limit
PACKAGE = Path(__file__).parents[2]


class Lost(Failed):
    """Another process of the run is gone or stalled; the run can start again (exit 1)."""

    at_once = True  # the command line ends the process: destructors of process groups wait for those that stand still


def _loss(error: BaseException | None) -> str | None:
    """The line that says that a process is lost, in an error or its causes: torch's pipeline hides them."""
    while error is not None:
        if isinstance(error, RuntimeError) and (said := LOST.search(str(error))):
            return next(line for line in str(error).splitlines() if said[0] in line)
        error = error.__cause__
    return None


class Ranks:
    """This process among those of a run."""

    def __init__(self, mesh: Mesh, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.mesh, self.timeout_seconds = mesh, timeout_seconds
        self.behind: list[str] = []  # who the others waited for when a collective failed
        self._turns = 0  # of the first process before the others
        # of this start: tells what it writes from remains of another
        self.token = self.first_decides(lambda: os.urandom(4).hex())

    @classmethod
    def start(cls, layout: Layout, device: torch.device, timeout_seconds: float = TIMEOUT_SECONDS) -> "Ranks":
        """Join the processes that the launcher started and make the mesh of the layout. Collective."""
        if layout.world > 1:
            start_group(device, timeout_seconds)
        return cls(make_mesh(layout, device, timeout_seconds), timeout_seconds)

    def __enter__(self) -> "Ranks":
        if not self.leads:
            configure(quiet=True)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.alone:
            return
        if error is None:
            self._until_heard()
            dist.destroy_process_group()
        elif said := _loss(error):
            where = f"process {self.mesh.rank} of {self.mesh.world.size}"
            why = "\n".join([said, *self.behind])
            fix = "the first process that failed says why; the same command goes on from the last checkpoint"
            what = "the processes of the run no longer work together"
            raise Lost(what, where=where, why=why, fix=fix) from error

    def first_decides(self, decide: Callable[[], Decision]) -> Decision:
        """What the first `decide` returns, or the exit code of its error, for all. Collective, without a time limit."""
        self._turns += 1
        if not self.leads:
            answer, exit_code = _read(f"turn/{self._turns}")
            _store().add(f"heard/{self._turns}", 1)
            if exit_code == UNFORESEEN:
                raise Lost("the first process of the run has failed", fix="its message says why")
            if exit_code is not None:
                raise SystemExit(exit_code)
            return answer
        answer, exit_code = None, None
        try:
            answer = decide()
            return answer
        except BaseException as error:
            exit_code = getattr(error, "exit_code", UNFORESEEN)
            raise
        finally:
            if not self.alone:
                # at the store of the groups and not in a collective, which has a time limit
                _store().set(f"turn/{self._turns}", pickle.dumps((answer, exit_code)))  # type: ignore[arg-type]
            if exit_code is not None:
                self._until_heard()

    def first_enters(
        self, context: contextlib.AbstractContextManager[Any], entered: contextlib.ExitStack
    ) -> None:
        """Let the first process enter a context, such as a lock; an error of it ends all. Collective."""

        def enter() -> None:
            entered.enter_context(context)

        self.first_decides(enter)

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, on the first one; the others get none. Collective, without a time limit."""
        self._turns += 1
        if self.leads:
            return [value, *(_read(f"given/{self._turns}/{rank}") for rank in range(1, self.mesh.world.size))]
        _store().set(f"given/{self._turns}/{self.mesh.rank}", pickle.dumps(value))  # type: ignore[arg-type]
        return []

    def _until_heard(self) -> None:
        """Before the first process ends, and the store with it."""
        end, others = time.monotonic() + HEARD_SECONDS, self.mesh.world.size - 1 if self.leads else 0
        while others and _store().add(f"heard/{self._turns}", 0) < others and time.monotonic() < end:
            time.sleep(0.01)

    @property
    def leads(self) -> bool:
        """Whether this process keeps the run's directory."""
        return self.mesh.rank == 0

    @property
    def alone(self) -> bool:
        return self.mesh.world.group is None

    @contextlib.contextmanager
    def watch(self, directory: Path) -> Iterator["Heartbeat"]:
        """Write into `directory` how far this process is; when a collective fails, find who was behind."""
        where, mesh = None if self.alone else directory, self.mesh
        heartbeat = Heartbeat(where, mesh.rank, mesh.world.size, self.timeout_seconds, mesh.groups())
        try:
            yield heartbeat
        except BaseException as error:
            said = _loss(error)
            if said and STALLED.search(said):
                self.behind = list(heartbeat.behind().values())
            heartbeat.close()
            if self.leads and not said:  # else the others still read them
                heartbeat.remove()
            raise
        heartbeat.close()
        self.wait()  # until nobody writes one
        if self.leads:
            heartbeat.remove()

    def most(self, number: int) -> int:
        """The largest of all processes' numbers. Collective."""
        if self.alone:
            return number
        largest = torch.tensor([number], device=self.mesh.device)
        return int(self.mesh.world.all_reduce(largest, dist.ReduceOp.MAX).item())

    def wait(self) -> None:
        """Wait until every process is here. Collective."""
        self.most(0)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def _read(key: str) -> Any:
    """What another process has written there, or will have; a signal is heard in between."""
    pause_s = 0.01
    while not _store().check([key]):
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LOOK_EVERY_S)
    return pickle.loads(_store().get(key))  # noqa: S301 (ours)


@dataclass(frozen=True)
class HeartbeatRecord:
    """Where a process was at `time` (seconds since 1970)."""

    time: float
    step: int
    after: str  # the phase that ended last
    marks: int  # phases that have ended: the same number on all processes at the same point of a run
    inside: str  # file, line and function of ours where the main thread is
    collectives: dict[str, int]  # by group, started so far

    def __str__(self) -> str:
        return f"step {self.step:,} after {self.after}, in {self.inside}"


class Heartbeat:
    """This process's records and a look at the others'; without a directory (a run of one) nothing.

    They are files in the run's directory: unlike a store's keys they can be read when the process that would serve them
    stands still, and unlike torch's flight recorder, in each process's memory, when it is the one that is stopped. Who
    waits for most of the groups' time limit says who is behind, before NCCL's watchdog would end it without a word.
    """

    def __init__(
        self,
        directory: Path | None,
        rank: int = 0,
        world: int = 1,
        limit_seconds: float = 600.0,
        groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.directory, self.rank, self.world, self.limit = directory, rank, world, limit_seconds
        self._groups: Sequence[Any] = groups  # torch's types lack the method that counts
        self._step, self._after, self._marks, self._since = 0, "the start", 0, time.monotonic()
        self._counts: dict[str, int] = {}  # collectives, when it last looked
        self._warned = -1  # the mark at which others were named
        self._end = threading.Event()
        self._interval = min(limit_seconds / RECORDS_PER_LIMIT, 10.0)
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._main = threading.get_ident()
            self._write()
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()

    def mark(self, phase: str, step: int | None = None) -> None:
        self._after, self._since = phase, time.monotonic()
        self._step = self._step if step is None else step
        self._marks += 1

    def behind(self) -> dict[int, str]:
        """The processes that the others wait for, and where they are; empty when nobody stands out."""
        assert self.directory is not None
        places = {rank: read_place(self.directory / str(rank)) for rank in range(self.world)}
        return name_behind(places, time.time(), 3 * self._interval + 1.0)

    def close(self) -> None:
        if self.directory is not None:
            self._end.set()
            self._thread.join()

    def remove(self) -> None:
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _beat(self) -> None:
        while not self._end.wait(self._interval):
            self._write()
            stands = time.monotonic() - self._since
            if stands < SPEAK_AT * self.limit or self._warned == self._marks:
                continue
            found, self._warned = self.behind(), self._marks
            waiting = set(range(self.world)) - set(found)
            if found and self.rank == min(waiting, default=-1):  # one of those who wait speaks
                warn("\n".join([f"the processes have waited for {duration(stands)}:", *found.values()]))

    def _write(self) -> None:
        assert self.directory is not None
        counts = {str(group.group_name): group._get_sequence_number_for_group() for group in self._groups}
        if counts != self._counts:  # it moves within a long phase, such as an evaluation
            self._counts, self._since = counts, time.monotonic()
        inside = _inside(self._main)
        place = HeartbeatRecord(time.time(), self._step, self._after, self._marks, inside, counts)
        aside = self.directory / f"{self.rank}.tmp"
        with contextlib.suppress(OSError):  # a full disk, or the run has ended and the directory is gone
            aside.write_text(json.dumps(asdict(place)))
            os.replace(aside, self.directory / str(self.rank))


def read_place(file: Path) -> HeartbeatRecord | None:
    """The record of a process; None when there is none."""
    try:
        return HeartbeatRecord(**json.loads(file.read_text()))
    except (OSError, ValueError):
        return None


def name_behind(places: Mapping[int, HeartbeatRecord | None], now: float, limit_s: float) -> dict[int, str]:
    """A line for each process that others wait for: silent, else with fewer phases ended, else fewer collectives."""
    silent, known = {}, {}
    for rank, place in places.items():
        if place is None:
            silent[rank] = f"process {rank} never answered"
        elif (quiet_s := now - place.time) > limit_s:
            silent[rank] = f"process {rank} has not answered for {duration(quiet_s)}: {place}"
        else:
            known[rank] = place
    if silent:
        return silent
    most = max(place.marks for place in known.values())
    late = [rank for rank, place in known.items() if place.marks < most]
    if not late:
        started = reduce(or_, (Counter(place.collectives) for place in known.values()))  # the largest counts
        late = [
            rank
            for rank, place in known.items()
            if any(count < started[name] for name, count in place.collectives.items())
        ]
    return {rank: f"process {rank} is behind: {known[rank]}" for rank in late}


def _inside(thread: int) -> str:
    """The innermost function of this package that a thread is in: the others' loops say nothing."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE) and "site-packages" not in file.relative_to(PACKAGE).parts:
            return f"{file.relative_to(PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "the interpreter"
