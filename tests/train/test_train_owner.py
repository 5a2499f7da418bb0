"""Only the latest start of a run writes its directory."""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from throughline.core.artifact import MANIFEST
from throughline.core.errors import Refused, WrongUse
from throughline.core.workspace import read_records
from throughline.prove.forked import run_ranks, warm
from throughline.train.build import RunPlan, plan_run
from throughline.train.checkpoints import run_directory
from throughline.train.checkpoints.run_directory import HANDOVER_SECONDS, OWNER, RunWorkspace, find_resumable
from throughline.train.loop import train
from throughline.train.recipes.recipe import Recipe


def test_a_start_whose_token_was_replaced_saves_and_records_nothing_more(
    make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    """As when it was taken for dead on another machine, where the lock does not reach, and wakes up."""

    def take_over(model: torch.nn.Module, step: int) -> dict[str, Any]:
        if step == 3:
            while not (tmp_path / "run/checkpoints/latest").exists():  # the save of step 2 was in time
                time.sleep(0.01)
            (tmp_path / "run" / OWNER).write_text("another")
        return {}

    plan = make_plan(
        "gpt", train={"steps": 8, "eval_every_steps": 1}, checkpoint={"save_every_steps": 2, "keep": 0}
    )
    with pytest.raises(Refused, match="another start of this run has taken over") as caught:
        train(plan, tmp_path / "run", evaluators=[take_over])
    assert "belongs to another" in caught.value.why
    found = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert found == ["latest", "step-00000002"]
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step-00000002\n"
    assert max(record["step"] for record in read_records(tmp_path / "run" / "events.jsonl")) == 2
    assert train(plan, tmp_path / "run")["step"] == 8
    assert (
        find_resumable(tmp_path / "run" / "checkpoints") == tmp_path / "run" / "checkpoints" / "step-00000008"
    )
    assert not (tmp_path / "run" / OWNER).exists()


def test_a_directory_in_use_is_refused_and_one_just_left_is_taken(tmp_path: Path) -> None:
    """A start waits a moment for the processes of a launcher that was just killed, which still hold the lock."""
    with (
        RunWorkspace(tmp_path, "first") as first,
        pytest.raises(WrongUse, match="another process is working in this directory"),
    ):
        first.own()
        RunWorkspace(tmp_path, "second").__enter__()
    assert (tmp_path / OWNER).read_text() == "first"
    handle = os.open(tmp_path / ".lock", os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    released = threading.Timer(HANDOVER_SECONDS / 4, lambda: os.close(handle))
    released.start()
    begun = time.monotonic()
    with RunWorkspace(tmp_path, "third") as workspace:
        workspace.own()
        workspace.append("events.jsonl", {"step": 1})
    released.join()
    assert time.monotonic() - begun >= HANDOVER_SECONDS / 8
    assert (tmp_path / OWNER).read_text() == "third"


def test_a_start_that_is_refused_takes_nothing_over(
    make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    """Where the lock does not reach, a slip (another seed, --resume never, files of somebody) would else end
    the run that lives.
    """
    train(make_plan("gpt", train={"steps": 1}), tmp_path / "run")
    (tmp_path / "run" / OWNER).write_text("the run that lives")
    with pytest.raises(WrongUse, match="another recipe"):
        train(make_plan("gpt", train={"steps": 2, "seed": 6}), tmp_path / "run")
    with pytest.raises(WrongUse, match="already there"):
        train(make_plan("gpt", train={"steps": 2}), tmp_path / "run", resume="never")
    assert (tmp_path / "run" / OWNER).read_text() == "the run that lives"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    with pytest.raises(WrongUse, match="not a run's directory"):
        train(make_plan("gpt"), tmp_path / "mine")
    assert not (tmp_path / "mine" / OWNER).exists()


def test_processes_without_a_common_directory_are_refused_before_the_first_step(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two machines with a disk each: both end at once, nothing is trained, and the message names the file system."""
    monkeypatch.setattr(run_directory, "SHOWN_SECONDS", 0.0)
    recipe = make_recipe("gpt", parallel={"data": 2}, checkpoint={"save_every_steps": 1})

    def start() -> tuple[str, str, int | None]:
        try:
            train(plan_run(recipe), tmp_path / f"disk-{os.environ['RANK']}" / "run")
        except Refused as error:
            return error.what, error.fix, error.exit_code
        except SystemExit as end:
            return "", "", int(end.code or 0)
        return "trained", "", 0

    warm()
    first, second = run_ranks(2, start)
    assert first[0] == "the processes do not share the run's directory" and "file system" in first[1]
    assert second == ("", "", first[2])
    assert not list(tmp_path.rglob("metrics.jsonl")) and not list(tmp_path.rglob("checkpoints"))


def test_a_directory_that_was_removed_is_not_said_to_be_taken_over(tmp_path: Path) -> None:
    with RunWorkspace(tmp_path, "token") as workspace:
        workspace.own()
        (tmp_path / OWNER).unlink()
        with pytest.raises(Refused, match="removed or emptied"):
            workspace.check_owner()


def test_a_start_that_wakes_up_after_its_successor_has_finished_is_refused(tmp_path: Path) -> None:
    """A finished run has a manifest and no owner."""
    with RunWorkspace(tmp_path, "old") as workspace:
        workspace.own()
        (tmp_path / OWNER).unlink()
        (tmp_path / MANIFEST).write_text("{}")
        with pytest.raises(
            Refused, match="another start of this run has taken over its directory"
        ) as refused:
            workspace.check_owner()
        assert "has finished the run" in refused.value.why
