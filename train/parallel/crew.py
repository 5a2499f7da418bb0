"""The processes of one run: who writes, what all must agree on, and that none outlives the launcher.

The first process keeps the run's directory; the others train and stay silent. A run of one process is a crew of one and
joins no group.
"""

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ...core.console import configure
from ...core.errors import Failed, ThroughlineError
from ...core.workspace import Workspace
from .launch import end_with_parent
from .layout import Layout
from .mesh import Mesh, make_mesh, start_group

Decision = TypeVar("Decision")
# what gloo and NCCL say when a peer is gone or stalled
LOST = re.compile("Connection closed|Connection reset|Broken pipe|[Tt]imed out|NCCL|remote process exited")


class Lost(Failed):
    """Another process of the run is gone or stalled; the run can start again (exit 1)."""


class SilentWorkspace(Workspace):
    """The run's directory as the other processes see it: read, never written, and without the lock."""

    def __enter__(self) -> "SilentWorkspace":
        return self

    def append(self, name: str, *records: dict[str, Any], sync: bool = False) -> None:
        """Only the first process keeps records."""

    def finish(self, *_: Any, **__: Any) -> None:  # type: ignore[override]
        """Only the first process ends the run."""


class Crew:
    """This process among those of a run."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.token = self.share(os.urandom(4).hex())  # of this start: tells what it writes from remains of another

    @classmethod
    def start(cls, layout: Layout, device: torch.device) -> "Crew":
        """Join the processes that the launcher started and make the mesh of the layout. Collective."""
        if layout.world > 1:
            end_with_parent()
            start_group(device)
        return cls(make_mesh(layout, device))

    def __enter__(self) -> "Crew":
        if not self.leads:
            configure(quiet=True)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.alone:
            return
        if error is None:
            dist.destroy_process_group()
        elif isinstance(error, RuntimeError) and LOST.search(str(error)):
            raise Lost(
                "the processes of the run no longer work together",
                where=f"process {self.mesh.rank} of {self.mesh.world.size}",
                why=str(error).splitlines()[0],
                fix="the first process that failed says why; the same command continues from the last checkpoint",
            ) from error

    def first_decides(self, decide: Callable[[], Decision]) -> Decision:
        """What `decide` returns on the first process, on every one. Collective.

        When it raises an error of a user, the first process raises it and the others end silently with its exit code.
        """
        if not self.leads:
            good, answer = self.share(None)
            if not good:
                raise SystemExit(answer)
            return answer
        try:
            answer = decide()
        except ThroughlineError as error:
            self.share((False, error.exit_code))
            raise
        self.share((True, answer))
        return answer

    @property
    def leads(self) -> bool:
        """Whether this process keeps the run's directory."""
        return self.mesh.rank == 0

    @property
    def alone(self) -> bool:
        return self.mesh.world.group is None

    def workspace(self, path: Path | str) -> Workspace:
        """The run's directory: locked by the first process, read by the others."""
        return Workspace(path) if self.leads else SilentWorkspace(path)

    def share(self, value: Any) -> Any:
        """The first process's value, on every process. Collective."""
        if self.alone:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.mesh.device)
        return box[0]

    def most(self, number: int) -> int:
        """The largest of all processes' numbers. Collective."""
        if self.alone:
            return number
        largest = torch.tensor([number], device=self.mesh.device)
        return int(self.mesh.world.all_reduce(largest, dist.ReduceOp.MAX).item())

    def wait(self) -> None:
        """Wait until every process is here. Collective."""
        self.most(0)

    @contextmanager
    def one_first(self) -> Iterator[None]:
        """The first process does this before the others, who then find what it wrote. Collective."""
        if not self.leads:
            self.wait()
        yield
        if self.leads:
            self.wait()
