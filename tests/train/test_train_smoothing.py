"""Label smoothing and z-loss: the training loss alone has them, and every layout trains with the same one."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from throughline.prove.forked import run_ranks, warm
from throughline.train.build import (
    RunPlan,
    StepBatches,
    build_trainer,
    plan_run,
    training_rows,
    validation_rows,
)
from throughline.train.evaluate import Validation
from throughline.train.logs.metrics import read_metrics
from throughline.train.loop import train
from throughline.train.parallel.mesh import Mesh, make_mesh, start_group
from throughline.train.recipes.recipe import Recipe
from throughline.train.step import train_step


def step(plan: RunPlan, mesh: Mesh) -> tuple[float, float]:
    """Loss of the masked tokens and gradient norm of the first step."""
    trainer = build_trainer(plan, mesh)
    batch = StepBatches(plan, training_rows(plan), mesh.data).batch(0, 4)
    result = train_step(trainer, batch, 1.0)
    return float(result.terms[0]), float(result.grad_norm)


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_a_layout_smooths_as_one_process(
    make_recipe: Callable[..., Recipe], parallel: dict[str, Any]
) -> None:
    """In float64, where rounding is 1e-15. Without smoothing both figures differ in the first digits."""
    warm()

    def work(recipe: Recipe) -> Callable[[], tuple[float, float]]:
        def call() -> tuple[float, float]:
            torch.set_num_threads(1)
            device = torch.device("cpu")
            if recipe.parallel.layout().world > 1:
                start_group(device, 60)
            return step(plan_run(recipe), make_mesh(recipe.parallel.layout(), device, 60))

        return call

    def recipe(smoothing: float, **parallel: Any) -> Recipe:
        objective = {"label_smoothing": smoothing, "packing": True}
        return make_recipe("bert", objective=objective, train={"precision": "fp64"}, parallel=parallel)

    plain, smooth = (run_ranks(1, work(recipe(smoothing)))[0] for smoothing in (0.0, 0.1))
    cut = run_ranks(2, work(recipe(0.1, **parallel)))
    assert all(found == pytest.approx(smooth, rel=1e-12) for found in cut)
    assert abs(plain[0] - smooth[0]) > 1e-4
    assert abs(plain[1] - smooth[1]) > 1e-3


def test_validation_is_not_smoothed(make_plan: Callable[..., RunPlan]) -> None:
    losses = []
    for smoothing in (0.0, 0.1):
        plan = make_plan("bert", data={"validation_fraction": 0.2}, objective={"label_smoothing": smoothing})
        batch = validation_rows(plan)[0].batch(0, 8)
        losses.append(build_trainer(plan).engine.evaluate([batch], 0.15)[0].item())
    assert losses[0] == losses[1]


def test_a_z_loss_is_a_figure_of_its_own(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """The loss of a step leaves it out, as a validation does."""
    found = []
    for z_loss in (0.0, 0.01):
        plan = plan_run(make_recipe("gpt", train={"precision": "fp64", "z_loss": z_loss}))
        train(plan, tmp_path / str(z_loss), evaluators=[Validation(plan)])
        found.append(read_metrics(tmp_path / str(z_loss)))
    (plain, *_), (first, *_) = found
    assert "z_loss" not in plain and first["next"] == pytest.approx(plain["loss"], rel=1e-12)
    assert first["z_loss"] == pytest.approx(0.01 * math.log(plan.config.vocab_size) ** 2, rel=0.1)
    assert first["loss"] == first["next"]
    with_z, last = found[1][-1]["validation"]["loss"], found[1][-1]
    assert abs(with_z - found[0][-1]["validation"]["loss"]) < last["z_loss"] / 2
