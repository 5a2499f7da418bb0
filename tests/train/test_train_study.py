"""A study of this machine: probes are physical, the refit follows what it was given, the artifact is used."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.artifact import verify_artifact
from throughline.core.hardware import machine
from throughline.core.recipe import dump_toml
from throughline.planner.hardware import FITTED, this_machine
from throughline.planner.memory import capacity_bytes
from throughline.train.build import plan_run
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import model_config, predicted_step_seconds
from throughline.train.study import Stretch, probed, refit


def test_refit_finds_the_machine_that_made_the_times(make_recipe: Callable[..., Recipe]) -> None:
    """Times predicted for a machine with half the speed and four times the launch time lead back to it: both factors
    are on the grid, and the pull towards the probes is a thousandth of the errors' weight.
    """
    big, small = make_recipe(train={"batch_rows": 64}), make_recipe(train={"batch_rows": 4})
    probes = {"tflops": 0.05, "bandwidth_gb_s": 10.0, "launch_s": 2e-6}
    cluster = probed(this_machine(), probes, "fp32", [])
    chip = dataclasses.replace(cluster.chip, tflops=cluster.chip.tflops | {"fp32": 0.025})
    constants = dataclasses.replace(cluster.constants, launch_s=8e-6)
    truth = dataclasses.replace(cluster, chip=chip, constants=constants)
    runs = [Stretch("run", recipe, model_config(recipe, 64), 1.0, 0.0) for recipe in (big, small)]
    runs = [dataclasses.replace(run, seconds=run.predicted(truth)) for run in runs]
    found = refit(runs, cluster, "fp32")
    for run in runs:
        assert run.predicted(found) == pytest.approx(run.seconds, rel=0.02)
    assert found.constants.launch_s == pytest.approx(8e-6, rel=0.5)


def test_study_writes_a_calibration_that_predictions_use(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(train={"batch_rows": 8})
    file, out = tmp_path / "recipe.toml", tmp_path / "calibration"
    file.write_text(dump_toml(recipe))
    result = CliRunner().invoke(main, ["study", str(file), "--out", str(out), "--steps", "4"])
    assert result.exit_code == 0, result.output + result.stderr
    assert verify_artifact(out).kind == "calibration"
    facts = json.loads((out / "calibration.json").read_text())
    assert [row["left_out"] for row in facts["runs"]] == [False, False, True]
    assert all(value > 0 for value in facts["probes"].values())
    config = plan_run(recipe).config
    before = predicted_step_seconds(config, recipe)
    monkeypatch.setenv("THROUGHLINE_CALIBRATION", str(out))
    after = predicted_step_seconds(config, recipe)
    # what the study said of this run; how near that is to the clock depends on what else the machine does meanwhile
    assert after != before and after == pytest.approx(facts["runs"][0]["refit_seconds"], rel=1e-6)
    assert all(row["measured_seconds"] > 0 for row in facts["runs"])
    assert FITTED.launch_s != facts["constants"]["launch_s"]


@pytest.mark.skipif(bool(machine().gpus), reason="this machine is planned by its GPU")
def test_a_processor_has_the_memory_of_the_machine_shared_by_its_processes() -> None:
    """What may be planned with is all of it in GiB, as of a card, less what an allocator loses."""
    whole = machine().cpu.memory_bytes
    for processes in (1, 4):
        capacity = capacity_bytes(this_machine(processes).chip.memory_gib)
        assert capacity == pytest.approx(whole / processes * 0.96)
