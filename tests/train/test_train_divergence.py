"""A run whose loss is not finite: what it saves, what it keeps, and how it goes on."""

import math
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.errors import Failed
from throughline.train import loop
from throughline.train.build import RunPlan
from throughline.train.checkpoints.run_directory import checkpoints
from throughline.train.logs.metrics import read_metrics
from throughline.train.loop import train
from throughline.train.step import LossScaler, launch_step


def diverge_from(monkeypatch: pytest.MonkeyPatch, step: int, value: float = math.nan) -> None:
    """From this step on the first weight of the model is `value`, so that every loss and gradient is lost."""

    def launched(trainer: Any, *arguments: Any) -> Any:
        if trainer.step + 1 == step:
            with torch.no_grad():
                for local in trainer.engine.local_shards:
                    local.value.fill_(value)
            trainer.engine.publish()
        return launch_step(trainer, *arguments)

    monkeypatch.setattr(loop, "launch_step", launched)


def run_the_fix(error: Failed) -> None:
    (command, *_) = error.fix.splitlines()
    result = CliRunner().invoke(main, [*shlex.split(command)[1:], "-q"])
    assert result.exit_code == 0, result.output


def names(run: Path) -> list[str]:
    return [path.name.removeprefix("step-0000000") for path in checkpoints(run / "checkpoints")]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_no_checkpoint_is_written_or_pruned_while_the_loss_is_not_finite(
    make_plan: Callable[..., RunPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    """The error names the last good checkpoint, and its command goes on from it in the same directory."""
    train_section = {"steps": 9, "stop_after_skipped": 4}
    plan = make_plan(train=train_section, checkpoint={"save_every_steps": 2, "keep": 1})
    with monkeypatch.context() as patched:
        diverge_from(patched, 4, value)
        with pytest.raises(Failed) as caught:
            train(plan, tmp_path / "run")
    assert names(tmp_path / "run") == ["2"]
    assert str(tmp_path / "run" / "checkpoints" / "step-00000002") in caught.value.why
    run_the_fix(caught.value)
    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, 10))
    assert all(record["loss"] is not None for record in records)
    assert records[-1]["lr"] < 3e-4


def test_the_checkpoint_of_the_step_that_diverged_is_not_good(
    make_plan: Callable[..., RunPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved every step with keep = 1: the one before it is still there, is named, and can be begun with."""
    plan = make_plan(
        train={"steps": 9, "stop_after_skipped": 3}, checkpoint={"save_every_steps": 1, "keep": 1}
    )
    with monkeypatch.context() as patched:
        diverge_from(patched, 4)
        with pytest.raises(Failed) as caught:
            train(plan, tmp_path / "run")
    assert names(tmp_path / "run") == ["3", "2"]
    assert f"{tmp_path}/run/checkpoints/step-00000002; no step after step-00000003" in caught.value.why
    run_the_fix(caught.value)
    assert all(record["loss"] is not None for record in read_metrics(tmp_path / "run-2"))


def test_a_run_that_never_had_a_finite_step_begins_again(
    make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    """A learning rate that ruins the weights at once: no checkpoint, and the command works in the same directory."""
    plan = make_plan(
        train={"steps": 12}, optimizer={"learning_rate": 1e30}, checkpoint={"save_every_steps": 4, "keep": 1}
    )
    with pytest.raises(Failed) as caught:
        train(plan, tmp_path / "run")
    assert names(tmp_path / "run") == [] and "has no checkpoint" in caught.value.why
    run_the_fix(caught.value)
    assert names(tmp_path / "run") == ["12"[-1:]] or checkpoints(tmp_path / "run" / "checkpoints")


def test_a_run_whose_last_steps_diverge_is_not_finished(
    make_plan: Callable[..., RunPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer than stop_after_skipped: there is no last checkpoint of such weights, and no finished run."""
    plan = make_plan(train={"steps": 6}, checkpoint={"save_every_steps": 2})
    diverge_from(monkeypatch, 5)
    with pytest.raises(Failed, match="2 steps in a row"):
        train(plan, tmp_path / "run")
    assert names(tmp_path / "run") == ["4", "2"][:2] and not (tmp_path / "run" / "manifest.json").exists()


def test_a_save_that_was_due_comes_with_the_next_good_step(
    make_plan: Callable[..., RunPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One lost step at the time of a save puts it off, and does not leave it out."""

    def launched(trainer: Any, batch: Any, *arguments: Any) -> Any:
        if trainer.step + 1 == 4:  # of this batch alone the loss is not a number
            batch.agreed = torch.full_like(batch.counts_there, math.nan)
        return launch_step(trainer, batch, *arguments)

    monkeypatch.setattr(loop, "launch_step", launched)
    plan = make_plan(train={"steps": 7}, checkpoint={"save_every_steps": 4, "keep": 0})
    train(plan, tmp_path / "run")
    assert names(tmp_path / "run") == ["7", "5"]


def test_the_scale_of_fp16_has_a_floor_of_one() -> None:
    """An overflow below it is the model's own: the scale stays, and such a step counts as diverged."""
    scaler = LossScaler.of("fp16")
    for _ in range(40):
        scaler.update(finite=False)
    assert scaler.scale == 1.0
    scaler.scale = 1.5
    scaler.update(finite=False)
    assert scaler.scale == 1.0


def test_an_overflow_of_fp16_is_saved_and_one_at_the_floor_is_not(make_plan: Callable[..., RunPlan]) -> None:
    """The gradient overflows while the loss is finite: halving the scale mends it, but not below its floor."""
    from throughline.train.build import build_trainer
    from throughline.train.divergence import Divergence
    from throughline.train.step import Launched

    trainer = build_trainer(make_plan())
    for scale, diverged in ((64.0, False), (1.0, True)):
        trainer.scaler = LossScaler(scale, 0, True)
        divergence = Divergence(trainer, Path("run"))
        divergence.add(Launched(trainer, [2.5, math.inf, 0.0], None, scale, 0, 1).read())
        assert divergence.diverged is diverged
    trainer.scaler = LossScaler(64.0, 0, True)
    divergence.add(Launched(trainer, [math.inf, math.inf, 0.0], None, 64.0, 0, 1).read())
    assert divergence.diverged


def test_two_steps_in_flight_halve_the_scale_once(make_plan: Callable[..., RunPlan]) -> None:
    """A GPU's step is read when the next is under way: both overflowed by the same scale."""
    from throughline.train.build import build_trainer
    from throughline.train.step import Launched

    trainer = build_trainer(make_plan())
    trainer.scaler = LossScaler(64.0, 0, True)
    first, second = (Launched(trainer, [2.5, math.inf, 0.0], None, 64.0, 0, step) for step in (1, 2))
    first.read()
    second.read()
    assert trainer.scaler.scale == 32.0
