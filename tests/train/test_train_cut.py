"""A save that is cut anywhere, at any file operation or byte, never becomes the checkpoint that a run goes on
from.
"""

import errno
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from throughline.core.artifact import verify_artifact
from throughline.core.errors import Failed
from throughline.train.build import RunPlan, build_trainer
from throughline.train.checkpoints import checkpoint as module
from throughline.train.checkpoints.checkpoint import CheckpointWriter
from throughline.train.checkpoints.run_directory import find_resumable
from throughline.train.step import Trainer

OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir")


@pytest.fixture
def trainer(make_plan: Callable[..., RunPlan]) -> Trainer:
    return build_trainer(make_plan("gpt"))


def save(directory: Path, trainer: Trainer, step: int) -> None:
    trainer.step = step
    writer = CheckpointWriter(directory, 2)
    writer.save(trainer)
    writer.close()


def in_child(work: Callable[[], None]) -> int:
    """The wait status of a forked process that does this."""
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def assert_goes_on(directory: Path, cut: int) -> bool:
    """`latest` and the newest whole checkpoint are step 1 or the step that was cut; whether they are the
    latter.
    """
    latest = (directory / "latest").read_text().strip()
    verify_artifact(directory / latest)
    found = find_resumable(directory)
    assert found is not None
    assert found.name in ("step-00000001", f"step-{cut:08d}")
    assert latest in ("step-00000001", found.name)
    return latest == f"step-{cut:08d}"


def test_cut_at_every_file_operation(trainer: Trainer, tmp_path: Path) -> None:
    """Killed at the first one, the second, ... until the save survives: only the very last ones find it
    complete.
    """
    save(tmp_path, trainer, 1)
    outcomes = []
    while len(outcomes) < 200:
        left = [len(outcomes) + 1]

        def die(event: str, arguments: tuple, left: list[int] = left) -> None:
            if event in OPERATIONS and str(tmp_path) in str(arguments[0]):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        step = 2 + len(outcomes)

        def work(step: int = step, die: Callable[..., None] = die) -> None:
            sys.addaudithook(die)
            save(tmp_path, trainer, step)

        status = in_child(work)
        complete = assert_goes_on(tmp_path, step)
        outcomes.append(complete)
        if not os.WIFSIGNALED(status):
            break
        for path in tmp_path.glob("step-*"):
            if path.name != "step-00000001":  # each cut starts from the same place
                for file in path.iterdir():
                    file.unlink()
                path.rmdir()
        (tmp_path / "latest").write_text("step-00000001\n")
    assert 20 < len(outcomes) < 200, len(outcomes)
    assert outcomes == sorted(outcomes), "an earlier cut was complete and a later one was not"
    assert outcomes[-1]


def test_cut_at_any_byte(trainer: Trainer, tmp_path: Path) -> None:
    """The system kills the process at a random byte of the largest file."""
    save(tmp_path, trainer, 1)
    largest = max(file.stat().st_size for file in (tmp_path / "step-00000001").iterdir())
    draw = random.Random(3)
    for byte in [0, 1, 8, largest - 1, *(draw.randrange(largest) for _ in range(12))]:

        def work(byte: int = byte) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (byte, byte))
            save(tmp_path, trainer, 2)

        status = in_child(work)
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ
        assert not assert_goes_on(tmp_path, 2)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000001"]


def test_the_first_process_may_take_a_part_at_once(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory of a part goes in the moment in which `part.json` appears: whoever wrote it does not
    touch it again.
    """
    taken = []

    def taking(move: Callable[..., None]) -> Callable[..., None]:
        def moved(source: Path, target: Path) -> None:
            move(source, target)
            if Path(target).name == "part.json":
                shutil.rmtree(Path(target).parent)
                taken.append(target)

        return moved

    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, taking(getattr(os, name)))
    writer = CheckpointWriter(tmp_path, 2, process=1, processes=2, token="start")
    writer.save(trainer)
    writer.close()
    assert len(taken) == 1


def test_a_part_that_does_not_fit_on_the_disk_leaves_nothing(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = module.Snapshot.write_tensors

    def fill(*arguments: Any) -> None:
        write(*arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.Snapshot, "write_tensors", fill)
    writer = CheckpointWriter(tmp_path, 2, process=1, processes=2, token="start")
    writer.save(trainer)
    with pytest.raises(Failed, match="cannot write") as caught:
        writer.close()
    assert "the disk is full" in caught.value.why
    assert not list(tmp_path.iterdir())
