"""A stalled collective names the processes that are behind, and every group has the run's time limit."""

import itertools
import json
import os
import re
import signal
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import torch.distributed as dist  # noqa: E402
from throughline.models.config import GPTConfig  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.objective import prepare  # noqa: E402
from throughline.train.parallel import ranks as module  # noqa: E402
from throughline.train.parallel.ranks import Heartbeat, HeartbeatRecord, Lost, Ranks, name_behind, read_place  # noqa: E402  # noqa: E402

LIMIT_S = 5
NOW = 1000.0


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm()


def place(time: float = NOW, marks: int = 9, **collectives: int) -> HeartbeatRecord:
    return HeartbeatRecord(time, 7, "backward", marks, "train/step.py:80 _update", collectives)


def test_the_first_sign_that_tells_processes_apart_decides() -> None:
    assert name_behind({0: place(), 1: place()}, NOW, 3) == {}
    silent = name_behind({0: place(), 1: place(NOW - 40, marks=2), 2: None}, NOW, 3)
    assert silent == {
        1: "process 1 has not answered for 40 s: step 7 after backward, in train/step.py:80 _update",
        2: "process 2 never answered",
    }
    assert list(name_behind({0: place(marks=8), 1: place(), 2: place()}, NOW, 3)) == [0]
    counted = {0: place(a=5, b=2), 1: place(a=4), 2: place(b=2), 3: place(a=5)}
    assert list(name_behind(counted, NOW, 3)) == [1]


def late_rank(directory: Path, collectives_only: bool) -> tuple[str, list[str]]:
    """Three processes take three steps; then the last does not come to a collective."""
    ranks = Ranks.start(Layout(data=3), torch.device("cpu"), LIMIT_S)
    warned: list[str] = []
    module.warn = warned.append
    seen = directory / f"seen-{ranks.mesh.rank}"
    try:
        with ranks, ranks.watch(directory / "heartbeat") as heartbeat:
            for step in range(3):
                heartbeat.mark("its batch", step)
                ranks.wait()
            if ranks.mesh.rank == 2:
                while not all((directory / f"seen-{rank}").exists() for rank in (0, 1)):
                    time.sleep(0.05)
                return "", []
            if not collectives_only:
                heartbeat.mark("backward")
            try:
                ranks.wait()
            finally:
                time.sleep(0.5)  # so that both have seen the records of three live processes
    except Lost as lost:
        return lost.why, warned
    finally:
        seen.touch()
    raise AssertionError("the collective went through")


@pytest.mark.parametrize("collectives_only", [False, True])
def test_a_stalled_collective_names_who_is_behind(tmp_path: Path, collectives_only: bool) -> None:
    """By the phases that have ended, or when those are equal by the collectives that were started. One of
    those who wait warns.
    """
    answers = run_ranks(3, lambda: late_rank(tmp_path, collectives_only))
    # the first of them to time out closes its connections, which the other may hear before its own time is up
    assert any("imed out" in why for why, _ in answers[:2])
    for why, _ in answers[:2]:
        first, *others = why.splitlines()
        assert "imed out" in first or "closed by peer" in first
        assert len(others) == 1
        assert others[0].startswith("process 2 is behind: step 2 after its batch, in "), others
    assert [len(warned) for _, warned in answers] == [1, 0, 0]
    assert "process 2 is behind" in answers[0][1][0]


def test_who_moves_within_a_long_phase_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of a long evaluation are of different moments: one that is a few collectives older is no
    process that is behind.
    """
    warned: list[str] = []
    monkeypatch.setattr(module, "warn", warned.append)
    counts = itertools.count(1)
    group = SimpleNamespace(group_name="a", _get_sequence_number_for_group=lambda: next(counts))
    other = HeartbeatRecord(time.time() + 1000, 0, "the start", 0, "train/evaluate.py:60 measure", {"a": 0})
    (tmp_path / "1").write_text(json.dumps(asdict(other)))
    own = Heartbeat(tmp_path, 0, 2, 2.0, [group])
    time.sleep(5)
    assert not warned
    group._get_sequence_number_for_group = lambda: 10**6
    end = time.monotonic() + 60
    while not warned and time.monotonic() < end:
        time.sleep(0.05)
    own.close()
    assert len(warned) == 1 and "process 1 is behind" in warned[0]


def stalled_in_a_stage(directory: Path) -> str:
    """The last of four processes does not come to its stage; the other one of that stage waits for it inside
    its forward.
    """
    config = GPTConfig(layers=2, width=32, heads=4, vocab_size=64, sequence_length=32)
    ranks = Ranks.start(Layout(pipeline=2, tensor=2), torch.device("cpu"), LIMIT_S)
    engine = Engine(config, ranks.mesh, "fp32")
    engine.fill()
    ids = np.ones((2, 32), np.int64)
    seen = directory / f"seen-{ranks.mesh.rank}"
    try:
        with ranks:
            if ranks.mesh.rank == 3:
                while not all((directory / f"seen-{rank}").exists() for rank in range(3)):
                    time.sleep(0.05)
                return ""
            engine.accumulate(prepare({"input_ids": ids, "targets": ids}, "gpt", 1, ranks.mesh.device), 0)
    except Lost as lost:
        return lost.why
    finally:
        seen.touch()
    raise AssertionError("the step went through")


def test_a_loss_inside_a_stage_is_one(tmp_path: Path) -> None:
    """torch's pipeline raises an error of its own, which says nothing of the process that did not answer."""
    for why in run_ranks(4, lambda: stalled_in_a_stage(tmp_path))[:3]:
        assert re.search("[Tt]imed out|closed", why), why


def test_a_stopped_process_writes_no_more(tmp_path: Path) -> None:
    """SIGSTOP stops the thread too: its record grows old, and that names it."""
    child = os.fork()
    if child == 0:
        Heartbeat(tmp_path, 1, 2, 6.0)
        time.sleep(600)
        os._exit(0)
    try:
        own = Heartbeat(tmp_path, 0, 2, 6.0)
        end = time.monotonic() + 60
        while read_place(tmp_path / "1") is None or own.behind():
            assert time.monotonic() < end
            time.sleep(0.05)
        os.kill(child, signal.SIGSTOP)
        while not own.behind():
            assert time.monotonic() < end
            time.sleep(0.05)
        assert list(own.behind()) == [1]
        assert "process 1 has not answered for" in own.behind()[1]
        own.close()
        own.remove()
        assert not tmp_path.exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def limits() -> list[float]:
    ranks = Ranks.start(Layout(pipeline=2, data=2, tensor=2, sharding="full"), torch.device("cpu"), 77)
    Engine(GPTConfig(layers=2, width=32, heads=4, vocab_size=64, sequence_length=32), ranks.mesh, "fp32")
    groups = dist.distributed_c10d._world.pg_map
    assert len(groups) >= 4
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_every_group_of_a_layout_has_the_time_limit() -> None:
    """Groups that torch makes by itself would wait for its 30 minutes."""
    for found in run_ranks(8, limits):
        assert set(found) == {77}


def first_takes_long() -> tuple[int, float]:
    """The first process needs longer than the time limit of a collective; what the others waited."""
    ranks = Ranks.start(Layout(data=3), torch.device("cpu"), 1)
    begun = time.monotonic()
    with ranks:
        answer = ranks.first_decides(lambda: time.sleep(2) or 7)
    return answer, time.monotonic() - begun


def test_what_the_first_process_prepares_has_no_time_limit() -> None:
    """An index of a large store, the hashes of a large checkpoint."""
    for answer, seconds in run_ranks(3, first_takes_long):
        assert answer == 7 and seconds >= 2


def first_fails() -> str:
    ranks = Ranks.start(Layout(data=2), torch.device("cpu"), LIMIT_S)

    def fail() -> None:
        raise ValueError("of the first process alone")

    try:
        with ranks:
            ranks.first_decides(fail)
    except ValueError:
        return ""
    except Lost as lost:
        return lost.what
    raise AssertionError("nobody was lost")


def test_who_waits_for_a_first_process_that_fails_ends() -> None:
    assert "first process of the run has failed" in run_ranks(2, first_fails)[1]
