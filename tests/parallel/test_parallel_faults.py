"""Killed, stopped, orphaned, doubled: a run loses nothing, and only one start of it writes its directory.

The runs are real ones under `throughline launch`. What is proved does not depend on when a kill arrives; how
long each takes is measured by benchmarks/faults.py.
"""

import os
import random
import signal
from collections import defaultdict
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from throughline.benchmarks.faults import Launched, make_store, orphans, stall  # noqa: E402
from throughline.core.artifact import verify_artifact  # noqa: E402
from throughline.core.workspace import read_records  # noqa: E402
from throughline.train.checkpoints.checkpoint import load_model  # noqa: E402
from throughline.train.logs.metrics import read_metrics  # noqa: E402

pytestmark = pytest.mark.slow
KILLS = 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("faults") / "store")


def assert_same_run(run: Launched, whole: Launched, steps: int) -> None:
    """Every step's loss, each time it was taken, and the weights, to the last bit."""
    taken = defaultdict(set)
    for record in read_records(run.run / "metrics.jsonl"):
        taken[record["step"]].add((record["loss"], record["grad_norm"]))
    assert all(len(values) == 1 for values in taken.values()), "a repeated step had another loss"
    expected = {record["step"]: {(record["loss"], record["grad_norm"])} for record in read_metrics(whole.run)}
    assert sorted(expected) == list(range(1, steps + 1))
    assert taken == expected
    weights, others = (load_model(each.run)[0].state_dict() for each in (run, whole))
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_twenty_kills_lose_nothing_beyond_the_last_verified_checkpoint(store: Path, tmp_path: Path) -> None:
    """Any process, in its steps and at any file operation of a save. At each kill `latest` names a whole
    checkpoint, from which (or from a later one) the next start goes on; in the end the run is the one that
    was never killed.
    """
    draw = random.Random(5)
    with Launched(tmp_path / "killed", store).start() as run:
        for number in range(KILLS):
            run.strike(draw, in_save=number % 2 == 1)
        steps = run.stop()
    resumed = run.events("resumed")
    assert len(resumed) == KILLS
    assert all(step >= kill.latest for step, kill in zip(resumed, run.kills, strict=True))
    assert run.errors().count("was lost (SIGKILL): all 2 start again") == KILLS
    with Launched(tmp_path / "whole", store, steps=steps, save_every=0).start() as whole:
        assert whole.process.wait(600) == 0, whole.errors()
    assert_same_run(run, whole, steps)


def test_a_stopped_process_is_named_and_the_run_goes_on(store: Path, tmp_path: Path) -> None:
    """Each of the two: the other waits for the time limit of the groups, says whom it waited for, and all
    start again.
    """
    with Launched(tmp_path / "run", store).start() as run:
        for rank in (1, 0):
            stall(run, rank)
            assert f"process {rank} has not answered for" in run.errors()
        run.stop()


def test_no_process_outlives_the_launcher_and_the_next_launch_goes_on(store: Path, tmp_path: Path) -> None:
    with Launched(tmp_path / "run", store).start() as run, Launched(run.directory, store) as second:
        orphans(run)
        before = run.latest()
        run.start()
        run.wait_for_progress(before)
        assert run.events("resumed")[0] >= before
        second.start()
        assert second.process.wait(300) == 2, "a second launch on a live run"
        assert "another process is working in this directory" in second.errors()
        assert f"process {run.workers()[0]} holds its lock" in second.errors()
        assert "frame #" not in second.errors(), (
            "the other processes end without torch's words about the first"
        )
        run.wait_for_progress(run.latest())
        run.stop()


def test_a_start_that_wakes_up_beside_its_successor_is_refused(store: Path, tmp_path: Path) -> None:
    """The first start is frozen as a machine without network is, and the lock does not reach its successor:
    another file.
    """
    with Launched(tmp_path / "a", store, timeout=600).start() as old, Launched(tmp_path / "b", store) as new:
        old.wait_for_progress(0)
        frozen = [old.process.pid, *old.workers()]
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)
        (old.run / ".lock").unlink()
        new.steps = old.latest() + 20
        new.directory.mkdir()
        (new.directory / "run").symlink_to(old.run)
        new.start()
        assert new.process.wait(300) == 0, new.errors()
        facts = verify_artifact(new.run).facts
        files = sorted(path.name for path in (new.run / "checkpoints").iterdir())
        for pid in frozen:
            os.kill(pid, signal.SIGCONT)
        assert old.process.wait(120) == 3, old.errors()
        assert "another start of this run has taken over its directory" in old.errors()
        assert verify_artifact(new.run).facts == facts
        assert sorted(path.name for path in (new.run / "checkpoints").iterdir()) == files
