"""Who is behind when the processes of a run wait for one another: each writes now and then how far it is.

The records are files in the run's directory, which all processes share: unlike keys of a store they can be
read when the process that would serve them is the one that stands still, and unlike torch's flight recorder, which
each process has in its own memory, when it is the one that is stopped. A process that stands still for most
of the groups' time limit reads them and says who is behind, before NCCL's watchdog would end it without a
word.
"""

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...core.console import duration, warn

RECORDS_PER_LIMIT = 60  # one is written 60 times in a time limit, and once in 10 s at least
SPEAK_AT = 0.8  # of the time limit
PACKAGE = Path(__file__).parents[2]


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
    """This process's records and a look at the others'; without a directory (a run of one) nothing."""

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
        """A phase of the run ended on this process."""
        self._after, self._since = phase, time.monotonic()
        self._step = self._step if step is None else step
        self._marks += 1

    def behind(self) -> dict[int, str]:
        """The processes that the others wait for, and where they are; empty when nobody stands out."""
        assert self.directory is not None
        places = {rank: read_place(self.directory / str(rank)) for rank in range(self.world)}
        return name_behind(places, time.time(), 3 * self._interval + 1.0)

    def close(self) -> None:
        """Write no more."""
        if self.directory is not None:
            self._end.set()
            self._thread.join()

    def remove(self) -> None:
        """Take the records of all processes away."""
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


def name_behind(
    places: Mapping[int, HeartbeatRecord | None], now: float, patience_s: float
) -> dict[int, str]:
    """A line for each process that the others wait for, found by the first sign that tells any apart.

    A process that writes no more is stopped, or its machine is gone; else the one that has ended fewer phases
    than others; else the one that has started fewer collectives of a group.
    """
    silent = {rank: place for rank, place in places.items() if place is None or now - place.time > patience_s}
    if silent:
        words = {
            r: f"has not answered for {duration(now - p.time)}: {p}" if p else "never answered"
            for r, p in silent.items()
        }
        return {rank: f"process {rank} {text}" for rank, text in words.items()}
    known = {rank: place for rank, place in places.items() if place is not None}
    most = max(place.marks for place in known.values())
    late = [rank for rank, place in known.items() if place.marks < most]
    if not late:
        names = {name for place in known.values() for name in place.collectives}
        started = {name: max(place.collectives.get(name, 0) for place in known.values()) for name in names}
        late = [
            r
            for r, place in known.items()
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
