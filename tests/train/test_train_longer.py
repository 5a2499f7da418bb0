"""A resume that changes the length of a run, or its learning rate: the rate goes on from where it stood."""

import itertools
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.artifact import read_manifest
from throughline.core.errors import WrongUse
from throughline.core.recipe import build_recipe
from throughline.train.build import RunPlan
from throughline.train.logs.metrics import read_metrics
from throughline.train.loop import train
from throughline.train.optimizers.build import learning_rate_factor
from throughline.train.recipes.recipe import Recipe

DECAYING = ["linear", "cosine", "polynomial", "wsd"]


def a_recipe(steps: int, ramp: bool = False, **schedule: Any) -> Recipe:
    given: dict[str, Any] = {"steps": steps, "sequence_length": 8, "batch_rows": 8}
    if ramp:
        given["batch_ramp"] = {"start_rows": 2, "step_rows": 2, "over_rows": 80}
    usual = {"warmup_steps": 5, "power": 2.0, "final_fraction": 0.1}
    return build_recipe({"train": given, "schedule": usual | schedule}, Recipe)


@pytest.mark.parametrize("ramp", [False, True])
@pytest.mark.parametrize("from_start", [False, True])
@pytest.mark.parametrize("at", [3, 30, 90, 100])
@pytest.mark.parametrize("longer", [120, 200, 95])
@pytest.mark.parametrize("kind", DECAYING)
def test_the_rate_goes_on_where_it_stood(
    kind: str, longer: int, at: int, from_start: bool, ramp: bool
) -> None:
    """Whenever the length changes, to more steps or to fewer: no step moves the rate by more than the steepest step of
    the decay that is left, it never rises again, and a decay that was on its way ends with the run.
    """
    if longer <= at:
        return
    before = a_recipe(100, ramp, kind=kind, decay_from_start=from_start)
    after = a_recipe(longer, ramp, kind=kind, decay_from_start=from_start)
    old = [learning_rate_factor(step, before) for step in range(100)]
    new = [learning_rate_factor(step, after, [(at, 100)]) for step in range(longer)]
    assert new[:at] == pytest.approx(old[:at])
    warmed_up = next(step for step, factor in enumerate(new) if factor == 1.0)
    drop_after_warm_up = 0.2 if from_start else 0.0  # of published BERT recipes
    for earlier, later in itertools.pairwise(new[max(warmed_up, at - 1) :]):
        length = longer // 5 if kind == "wsd" else longer - max(at, warmed_up)
        # a parabola begins with twice the mean slope; while the batch grows the decay has fewer whole batches
        steepest = 4 / max(min(length, longer - at), 1)
        assert earlier >= later >= earlier - steepest - drop_after_warm_up
    assert 0.1 <= new[-1] < 0.25


@pytest.mark.parametrize("decay_steps", [None, 20])
def test_a_stable_rate_that_is_cut_short_begins_to_decay_where_it_stood(decay_steps: int | None) -> None:
    """Of 100 steps made 65 at step 60, where a run of 65 steps would long have been decaying; and then 110 at 64."""
    recipe = a_recipe(65, kind="wsd", decay_steps=decay_steps)
    rates = [learning_rate_factor(step, recipe, [(60, 100)]) for step in range(65)]
    assert rates[59:] == pytest.approx([1.0, 1.0, 0.82, 0.64, 0.46, 0.28])
    longer = a_recipe(110, kind="wsd", decay_steps=decay_steps)
    assert learning_rate_factor(64, longer, [(60, 100), (64, 65)]) == pytest.approx(0.28)


@pytest.mark.parametrize("kind", ["constant", "inverse-sqrt"])
def test_a_schedule_without_an_end_does_not_see_the_length(kind: str) -> None:
    rates = [learning_rate_factor(step, a_recipe(200, kind=kind)) for step in range(200)]
    assert [learning_rate_factor(step, a_recipe(200, kind=kind), [(50, 100)]) for step in range(200)] == rates
    assert [learning_rate_factor(step, a_recipe(100, kind=kind)) for step in range(100)] == rates[:100]


def test_a_length_that_changes_twice_keeps_both_changes() -> None:
    """Linear to 0 over 100 steps, at step 50 made 150, at step 100 made 200: halves of what is left each time."""
    recipe = a_recipe(200, kind="linear", warmup_steps=0, final_fraction=0.0)
    changes = [(50, 100), (100, 150)]
    found = {step: learning_rate_factor(step, recipe, changes) for step in (25, 50, 75, 100, 150)}
    assert found == pytest.approx({25: 0.75, 50: 0.5, 75: 0.375, 100: 0.25, 150: 0.125})


def test_a_decay_with_a_length_of_its_own_is_left_alone() -> None:
    recipe = a_recipe(200, kind="cosine", decay_steps=60)
    same = [learning_rate_factor(step, recipe) for step in range(200)]
    assert [learning_rate_factor(step, recipe, [(30, 100)]) for step in range(200)] == same


def test_a_finished_run_that_is_made_longer_keeps_its_last_rate(
    make_plan: Callable[..., RunPlan], tmp_path: Path, capsys: Any
) -> None:
    """Said with both rates, written down as an event, and the same after another resume and with averages."""
    sections: dict[str, Any] = {"schedule": {"kind": "linear", "warmup_steps": 2}}
    sections["optimizer"] = {"learning_rate": 3e-3, "ema_decay": 0.9}

    def run(steps: int) -> dict[int, float]:
        train(make_plan(train={"steps": steps}, **sections), tmp_path / "run")
        return {record["step"]: record["lr"] for record in read_metrics(tmp_path / "run")}

    run(10)
    capsys.readouterr()
    rates = run(14)
    said = capsys.readouterr().err
    assert rates[11] == rates[14] == pytest.approx(3e-4) and rates[11] <= rates[10] < 7e-4
    assert "train.steps was 10, is 14" in said
    assert f"was {rates[10]:.4g} at step 10, is {rates[11]:.4g} at step 11" in said
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (changed,) = [event for event in events if event["event"] == "changed"]
    assert changed["changes"] == {"train.steps": [10, 14]} and changed["step"] == 10
    assert run(16)[16] == pytest.approx(3e-4)


def test_another_rate_on_resume_is_said_and_written_down(
    make_plan: Callable[..., RunPlan], tmp_path: Path, capsys: Any
) -> None:
    schedule = {"kind": "constant", "warmup_steps": 0}
    train(make_plan(train={"steps": 3}, schedule=schedule), tmp_path / "run")
    plan = make_plan(train={"steps": 4}, schedule=schedule, optimizer={"learning_rate": 1e-4})
    train(plan, tmp_path / "run")
    rates = [record["lr"] for record in read_metrics(tmp_path / "run")]
    assert rates == pytest.approx([3e-3, 3e-3, 3e-3, 1e-4])
    said = capsys.readouterr().err
    assert (
        "optimizer.learning_rate was 0.003, is 0.0001" in said
        and "was 0.003 at step 3, is 0.0001 at step 4" in said
    )


def test_steps_at_a_rate_of_zero_are_refused_with_a_command_that_works(
    make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    schedule = {"kind": "linear", "warmup_steps": 0, "final_fraction": 0.0}
    train(make_plan(train={"steps": 4}, schedule=schedule), tmp_path / "run")
    with pytest.raises(WrongUse) as caught:
        train(make_plan(train={"steps": 8}, schedule=schedule), tmp_path / "run")
    assert read_manifest(tmp_path / "run", "run").facts["step"] == 4  # as it was
    command = shlex.split(caught.value.fix.partition(": ")[2])
    result = CliRunner().invoke(main, [*command[1:], "-q"])
    assert result.exit_code == 0, result.output
    records = read_metrics(tmp_path / "run-2")
    assert len(records) == 8 and records[0]["lr"] == pytest.approx(3e-3)
