"""The processes of one run: who writes, what all must agree on, and that none outlives the launcher.

The first process keeps the run's directory; the others train and stay silent. A run of one process is a crew of one and
joins no group.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...core.workspace import Workspace
from .layout import Layout
from .mesh import Mesh, make_mesh, start_group

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class SilentWorkspace(Workspace):
    """The run's directory as the other processes see it: read, never written, and without the lock."""

    def __enter__(self) -> "SilentWorkspace":
        return self

    def append(self, name: str, *records: dict[str, Any], sync: bool = False) -> None:
        """Only the first process keeps records."""

    def finish(self, *_: Any, **__: Any) -> None:
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


def end_with_parent() -> None:
    """Let the kernel end this process when the launcher is killed: it would train on beside the next start (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
