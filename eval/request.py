"""What a user asks of an evaluation, and where its scores go."""

import os
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import WrongUse
from .asked import Settings
from .harness.reader import read_harness_task
from .opening import ScorerOptions
from .task import BoundTask, find_tasks


@dataclass(frozen=True)
class Request(Settings, ScorerOptions):
    """Everything a user can ask of an evaluation; see `throughline eval --help`."""

    path: Path
    tasks: str = ""
    harness_tasks: tuple[Path, ...] = ()
    task_code: bool = False
    against: str | None = None
    bound: float = 1e-3
    contamination: str | None = None
    out: Path | None = None
    fresh: bool = False

    @property
    def home(self) -> Path:
        """Where scores go: beside the model or, of a checkpoint, beside its run, whose manifest covers all
        that lies inside it.
        """
        if self.out is not None:
            return self.out
        if self._in_run:
            run = Path(os.path.abspath(self.path)).parents[1]
            home = run.with_name(run.name + ".scores")
            return home if self.path.is_absolute() else Path(os.path.relpath(home))
        named = self.path if self.path.name not in ("", "..") else self.path.resolve()
        return named.with_name(self.path.resolve().name + ".scores")

    @property
    def scores(self) -> Path:
        """The artifact of one model's scores; of a run's checkpoint it is where --all-checkpoints would write
        it.
        """
        return self.home / (
            Path(os.path.abspath(self.path)).name if self.out is None and self._in_run else "scores"
        )

    @property
    def _in_run(self) -> bool:
        return Path(os.path.abspath(self.path)).parent.name == "checkpoints"


def wanted_tasks(request: Request) -> list[BoundTask]:
    """The tasks. Raises WrongUse when one of the checks asked for would have nothing to look at."""
    tasks = find_tasks([name.strip() for name in request.tasks.split(",") if name.strip()])
    for file in request.harness_tasks:
        tasks += read_harness_task(file, code=request.task_code)
    model = Path(os.path.realpath(request.path))
    inside = model.parents[1] if model.parent.name == "checkpoints" else model
    if request.out is not None and Path(os.path.realpath(request.out)).is_relative_to(inside):
        why = f"the files of {inside} are hashed: with scores among them it would count as changed"
        raise WrongUse(
            "scores cannot lie inside what is scored", where=request.out, why=why, fix="choose another --out"
        )
    if request.contamination is not None and not tasks:
        raise WrongUse(
            "--contamination has nothing to look for",
            why="it looks for the records of tasks",
            fix="give --tasks",
        )
    if request.against is not None and not any(task.kind.probabilities for task in tasks):
        why, fix = (
            "it compares the probabilities of answers, and no task has any",
            "give --tasks, for example blimp",
        )
        raise WrongUse("--against has nothing to compare", why=why, fix=fix)
    return tasks
