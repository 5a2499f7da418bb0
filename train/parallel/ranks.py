"""The processes of one run: who writes, what all must agree on, and that none outlives the launcher.

The first process keeps the run's directory; the others train and stay silent. A run of one process is a ranks
of one and joins no group.
"""

import os
import pickle
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...core.artifact import Manifest
from ...core.console import configure
from ...core.errors import Failed, Refused, WrongUse
from ...core.files import write_atomic
from ...core.workspace import Workspace
from ...planner.layout import Layout
from .heartbeat import Heartbeat
from .launch import end_with_parent
from .mesh import TIMEOUT_SECONDS, Mesh, make_mesh, start_group

Decision = TypeVar("Decision")
# what gloo and NCCL say when a peer is gone or stalled
LOST = re.compile(
    "Connection (was likely )?closed|Connection reset|Broken pipe|[Tt]imed out|[Tt]imeout|NCCL|remote process exited"
)
STALLED = re.compile("[Tt]imed out|[Tt]imeout")
HANDOVER_SECONDS = 2.0  # in which the processes of a launcher that was just killed have ended
LOOK_EVERY_S = 0.5  # whether the first process has let the others go
HEARD_SECONDS = 10.0  # at most, until all have heard it: they look once in half a second unless they are gone
UNFORESEEN = -1  # in place of an exit code: a failure of the first process that is no user's error
OWNER = ".owner"  # the token of the start that writes the run's directory
HEARTBEAT = ".heartbeat"  # in it: how far its processes are


class Lost(Failed):
    """Another process of the run is gone or stalled; the run can start again (exit 1).

    The command line then ends the process at once: destructors of process groups wait for those that stand
    still.
    """

    at_once = True


def _loss(error: BaseException | None) -> str | None:
    """The line that says that a process is lost, in an error or its causes: torch's pipeline hides them."""
    while error is not None:
        if isinstance(error, RuntimeError) and (said := LOST.search(str(error))):
            return next(line for line in str(error).splitlines() if said[0] in line)
        error = error.__cause__
    return None


class RunWorkspace(Workspace):
    """The run's directory as the start of that token sees it: whoever starts the run later becomes its owner, and this
    one writes no more. The processes other than the first read it only, and take no lock.

    The lock keeps two starts on one machine apart. Where it does not reach (another machine, a file system
    without locks) a start that was taken for dead can wake up beside its successor; the token it left in the
    directory is then another's.
    """

    def __init__(self, path: Path | str, token: str, leads: bool = True) -> None:
        super().__init__(path)
        self.token, self.leads = token, leads

    def __enter__(self) -> "RunWorkspace":
        end = time.monotonic() + HANDOVER_SECONDS
        while self.leads:
            try:
                super().__enter__()
                break
            except WrongUse:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        return self

    def own(self) -> None:
        """Become the owner, after all checks: a start that is refused takes nothing from a run that lives."""
        write_atomic(self.path / OWNER, self.token)
        # of processes that were killed, perhaps more than there are now
        shutil.rmtree(self.path / HEARTBEAT, ignore_errors=True)

    def check_owner(self) -> None:
        """Raises Refused when the run was started again elsewhere since."""
        file = self.path / OWNER
        found = file.read_text() if file.exists() else "nobody"
        if found != self.token:
            raise Refused(
                "another start of this run has taken over its directory",
                where=self.path,
                why=f"this one is {self.token}, the directory belongs to {found}",
                fix="let the other one train; what it writes is whole, and nothing was written here",
            )

    def append(self, name: str, *records: dict[str, Any], sync: bool = False) -> None:
        if self.leads:
            self.check_owner()
            super().append(name, *records, sync=sync)

    def finish(self, *arguments: Any, **options: Any) -> Manifest | None:  # type: ignore[override]
        if not self.leads:
            return None
        self.check_owner()
        (self.path / OWNER).unlink()
        return super().finish(*arguments, **options)


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
        """Join the processes that the launcher started and make the mesh of the layout, every group with the
        time limit.

        Collective.
        """
        if layout.world > 1:
            end_with_parent()
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
            raise Lost(
                "the processes of the run no longer work together",
                where=f"process {self.mesh.rank} of {self.mesh.world.size}",
                why="\n".join([said, *self.behind]),
                fix="the first process that failed says why; the same command continues from the last checkpoint",
            ) from error

    def first_decides(self, decide: Callable[[], Decision]) -> Decision:
        """What `decide` returns on the first process, on every one. Collective.

        When it raises an error of a user, the first process raises it and the others end silently with its
        exit code.
        """
        if not self.leads:
            return self._hear()
        try:
            answer = decide()
        except BaseException as error:
            self._tell(None, getattr(error, "exit_code", UNFORESEEN))
            self._until_heard()
            raise
        self._tell(answer)
        return answer

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, on the first one; the others get none. Collective, without a time limit."""
        self._turns += 1
        if self.alone:
            return [value]
        keys = [f"given/{self._turns}/{rank}" for rank in range(self.mesh.world.size)]
        if not self.leads:
            _store().set(keys[self.mesh.rank], pickle.dumps(value))  # type: ignore[arg-type]
            return []
        while not _store().check(keys[1:]):
            time.sleep(0.01)
        return [value, *(pickle.loads(_store().get(key)) for key in keys[1:])]  # noqa: S301 (written above)

    # At the store of the groups and not in a collective, whose time limit is none for the index or the
    # checkpoint of a large run.
    def _tell(self, answer: Any, exit_code: int | None = None) -> None:
        self._turns += 1
        if not self.alone:
            _store().set(f"turn/{self._turns}", pickle.dumps((answer, exit_code)))  # type: ignore[arg-type]

    def _hear(self) -> Any:
        self._turns += 1
        turn, pause_s = f"turn/{self._turns}", 0.01
        while not _store().check([turn]):  # in pieces: a signal is heard in between
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_EVERY_S)
        answer, exit_code = pickle.loads(_store().get(turn))  # noqa: S301 (written by `_tell`)
        _store().add(f"heard/{self._turns}", 1)
        if exit_code == UNFORESEEN:
            raise Lost("the first process of the run has failed", fix="its message says why")
        if exit_code is not None:
            raise SystemExit(exit_code)
        return answer

    def _until_heard(self) -> None:
        """Before the first process ends, and the store with it: wait until the others have its last word."""
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

    @contextmanager
    def watch(self, directory: Path) -> Iterator[Heartbeat]:
        """Write into `directory` how far this process is; when a collective fails, find who was behind."""
        heartbeat = Heartbeat(
            None if self.alone else directory,
            self.mesh.rank,
            self.mesh.world.size,
            self.timeout_seconds,
            self.mesh.groups(),
        )
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
