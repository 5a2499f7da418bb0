"""Label smoothing: the training loss alone has it, and every layout trains with the same one."""

from collections.abc import Callable
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
