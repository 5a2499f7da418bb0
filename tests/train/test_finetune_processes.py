"""Fine-tuning that was stopped, accumulates or is shared by processes learns what one whole run learns."""

import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_cases import DRAW, phrase, recipe_for, scored, several, write_records
from throughline.core.recipe import recipe_hash
from throughline.prove.forked import run_ranks, warm
from throughline.train.build import build_trainer
from throughline.train.checkpoints.weights_in import open_weights
from throughline.train.evaluate import whole_model
from throughline.train.finetune.recipe import FinetuneRecipe
from throughline.train.finetune.run import finetune, plan_task
from throughline.train.loop import train
from throughline.train.parallel.mesh import make_mesh, start_group
from throughline.train.step import train_step


def test_stopped_accumulated_and_shared_out_it_learns_the_same(
    bases: dict[str, Path], tmp_path: Path
) -> None:
    """A run that failed in its second epoch goes on to the weights of one that did not; two processes that share the
    weights, and micro-batches of 4 records, come to them within the rounding of sums.
    """
    warm()
    records = write_records("classification", tmp_path, 70)
    usual = partial(recipe_for, "classification", bases, records, epochs=2, learning_rate=1e-3)

    def weights(out: str, **more: Any) -> dict[str, Any]:
        recipe = usual(**more)

        def work() -> None:
            torch.set_num_threads(1)
            finetune(recipe, tmp_path / out)

        run_ranks(recipe.parallel.data, work)
        return dict(open_weights(tmp_path / out)[0].named_parameters())

    whole = weights("whole")
    shared = weights("shared", parallel={"data": 2, "sharding": "full"}, micro_batch_rows=4)
    for name, value in shared.items():
        assert (value - whole[name]).norm() <= 1e-4 * whole[name].norm() + 1e-6, name

    def fail(engine: Any, step: int) -> dict[str, Any]:
        if step > 5:
            raise ZeroDivisionError
        return plan.measure(engine, step)

    recipe = usual()
    plan = plan_task(recipe)
    home = Path(f"{tmp_path / 'again'}.{recipe_hash(recipe)[-8:]}.run")
    with pytest.raises(ZeroDivisionError):
        train(plan, home, evaluators=[fail])
    again = weights("again")
    assert not home.exists()
    assert all(torch.equal(value, whole[name]) for name, value in again.items())


def test_processes_that_share_experts_learn_what_one_does(bases: dict[str, Path], tmp_path: Path) -> None:
    """Responses, by a Mixtral whose experts two processes share, with the weights sharded and without."""
    warm()
    records, base = write_records("instruction", tmp_path, 70), bases | {"gpt": bases["mixtral"]}
    found = []
    for out, parallel in {
        "one": {},
        "shared": {"data": 2, "expert": 2},
        "sharded": {"data": 2, "expert": 2, "sharding": "full"},
    }.items():
        recipe = recipe_for("instruction", base, records, epochs=2, learning_rate=1e-3, parallel=parallel)

        def work(recipe: FinetuneRecipe = recipe, out: str = out) -> None:
            torch.set_num_threads(1)
            finetune(recipe, tmp_path / out)

        run_ranks(recipe.parallel.data, work)
        model = open_weights(tmp_path / out)[0]
        assert model.config.experts == 4
        found.append(dict(model.named_parameters()))
    one, *others = found
    before = dict(open_weights(bases["mixtral"])[0].named_parameters())
    for shared in others:
        for name, value in shared.items():
            way = (one[name] - before[name]).norm()
            assert 0 < (value - one[name]).norm() <= 1e-2 * way or torch.equal(value, one[name]), name
            assert way > 0, name


def repeated_passages() -> dict[str, Any]:
    kind = DRAW.choice(["cat", "dog", "king", "moon"])
    return {"text": f"{phrase()} {kind}", "passage": f"{kind} in rome"}


LOSSES: dict[str, tuple[str, Any, dict[str, str]]] = {
    "regression": ("classification", scored, {}),
    "several": ("classification", several, {}),
    "retrieval": ("retrieval", repeated_passages, {"pair_field": "passage"}),
}


def whole_parameters(engine: Any) -> dict[str, torch.Tensor]:
    """The weights, of all processes together. Collective."""
    model = whole_model(engine)
    return {} if model is None else {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("name", LOSSES)
def test_two_processes_compute_what_one_does(name: str, bases: dict[str, Path], tmp_path: Path) -> None:
    """Losses, gradient norms and weights of two steps in float64: with copies of the weights and with shares of them,
    the records of a process all at once or in parts. Retrieval compares what a micro-batch has, which is as much.
    """
    warm()
    task, draw, fields = LOSSES[name]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(draw()) + "\n" for _ in range(60)))
    results = []
    for parallel in ({}, {"data": 2}, {"data": 2, "sharding": "full"}):
        data = {"train": str(path), **fields}
        recipe = recipe_for(task, bases, path, data=data, parallel=parallel, micro_batch_rows=4)

        def work(recipe: FinetuneRecipe = recipe) -> tuple[list[float], dict[str, torch.Tensor]]:
            torch.set_num_threads(1)
            plan = plan_task(recipe)
            section = plan.recipe.train.model_copy(update={"precision": "fp64"})
            plan = dataclasses.replace(plan, recipe=plan.recipe.model_copy(update={"train": section}))
            layout = plan.recipe.parallel.layout()
            if layout.world > 1:
                start_group(plan.device, 60)
            mesh = make_mesh(layout, plan.device, 60)
            trainer, batches, figures = build_trainer(plan, mesh), plan.batches(mesh), []
            own = section.rows_per_step // layout.data
            for step in range(2):
                batch = batches.batch(step * section.rows_per_step + mesh.data.rank * own, own)
                result = train_step(trainer, batch, 1.0)
                figures += [result.loss, result.grad_norm]
            return figures, dict(whole_parameters(trainer.engine))

        results.append(run_ranks(recipe.parallel.layout().world, work)[0])
    (one, weights), *others = results
    assert one[0] > 0.01 and one[1] > 0
    for figures, shared in others:
        assert figures == pytest.approx(one, rel=1e-12)
        for parameter, value in shared.items():
            assert (value - weights[parameter]).abs().max() < 1e-12, parameter
