"""Losses: sums over targets divided by global counts, whatever the split; heads only where there are targets."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from throughline.models.bert import BERT
from throughline.models.gpt import GPT
from throughline.models.init import build
from throughline.planner.layout import Layout
from throughline.train.build import RunPlan, StepBatches, training_rows
from throughline.train.objective import IGNORED, StepBatch, prepare, pretraining
from throughline.train.parallel.mesh import Mesh
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import step_shape
from throughline.train.stage import Stage
from torch.nn import functional as F

CPU = torch.device("cpu")


def rows_of(plan: RunPlan, count: int = 8) -> dict[str, np.ndarray]:
    return training_rows(plan).batch(3, count)


def losses(model: GPT | BERT, batch: StepBatch) -> torch.Tensor:
    """The mean loss of every term; the model's gradients are added up."""
    stage = Stage(model, 0, Mesh(Layout(), CPU), pretraining(model.config).sums)
    stage.load(
        batch.micro_batches,
        torch.tensor([1 / max(count, 1) for count in batch.counts], dtype=torch.float64),
        1.0,
    )
    for _ in batch.micro_batches:
        stage(torch.empty(0)).backward()
    return sum(stage.sums) * stage.inverse_counts


def gradients(plan: RunPlan, batch: StepBatch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and every gradient of one step, in float64."""
    model = build(plan.config, 1, dtype=torch.float64)
    return sum(losses(model, batch).tolist()), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("family", ["gpt", "bert", "packed"])
@pytest.mark.parametrize("micro_rows", [1, 2, 3])
def test_loss_and_gradients_do_not_depend_on_the_micro_batch(
    make_plan: Callable[..., RunPlan], family: str, micro_rows: int
) -> None:
    """Rows have unequal numbers of targets; 1e-12 is a thousand times float64's noise and far below any mean
    of means.
    """
    plan = make_plan("bert", objective={"packing": True}) if family == "packed" else make_plan(family)
    rows = rows_of(plan)
    rows["targets"][:3, 5:] = IGNORED
    whole = gradients(plan, prepare(dict(rows), plan.family, 8, CPU, 0.15))
    split = gradients(plan, prepare(dict(rows), plan.family, micro_rows, CPU, 0.15))
    assert split[0] == pytest.approx(whole[0], abs=1e-12)
    for name, gradient in whole[1].items():
        torch.testing.assert_close(split[1][name], gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize("packing", [False, True])
def test_bert_loss_is_that_of_heads_on_every_position(
    make_plan: Callable[..., RunPlan], packing: bool
) -> None:
    """Against the plain way: logits everywhere, mean of the cross-entropies where there are targets."""
    plan = make_plan("bert", objective={"packing": packing})
    rows = rows_of(plan)
    model = build(plan.config, 1, dtype=torch.float64)
    names = ("token_types", "attention_mask", "positions", "document_ids")
    inputs = {name: torch.from_numpy(rows[name]) for name in names if name in rows}
    hidden = model.hidden(torch.from_numpy(rows["input_ids"]), **inputs)
    mlm = F.cross_entropy(model.mlm_head(hidden).flatten(0, 1), torch.from_numpy(rows["targets"]).flatten())
    pair_targets = torch.from_numpy(rows["nsp_targets"])
    pair_logits = model.nsp_head(hidden.flatten(0, 1)) if packing else model.nsp_head(hidden[:, 0])
    nsp = F.cross_entropy(pair_logits, pair_targets.flatten())
    batch = prepare(rows, "bert", 8, CPU, 0.15)
    assert losses(model, batch).tolist() == pytest.approx([mlm.item(), nsp.item()], abs=1e-12)


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_a_batch_without_any_target_is_zero_and_not_nan(
    make_plan: Callable[..., RunPlan], family: str
) -> None:
    plan = make_plan(family)
    rows = rows_of(plan, 2)
    rows["targets"][:] = IGNORED
    if "nsp_targets" in rows:
        rows["nsp_targets"][:] = IGNORED
    loss, grads = gradients(plan, prepare(rows, family, 2, CPU, 0.15))
    assert loss == 0.0
    assert all(torch.isfinite(gradient).all() and not gradient.any() for gradient in grads.values())


def test_masked_places_have_few_shapes_and_lose_no_target(make_plan: Callable[..., RunPlan]) -> None:
    """A compiled step recompiles for each shape: over 40 batches at most four of them."""
    plan = make_plan("bert")
    dataset, shapes = training_rows(plan), set()
    batches = StepBatches(plan, dataset)
    for index in range(40):
        rows = dataset.batch(4 * index, 4)
        targets = rows["targets"]
        micro_batch = batches.batch(4 * index, 4).micro_batches[0]
        values, places = micro_batch["predicted_targets"], micro_batch["predicted"]
        kept = values != IGNORED
        assert values[kept].tolist() == targets[targets != IGNORED].tolist()
        seen = micro_batch["input_ids"].flatten()[places[kept]].tolist()
        assert seen == rows["input_ids"][targets != IGNORED].tolist()
        shapes.add((micro_batch["input_ids"].shape, len(values)))
    assert len(shapes) <= 4


@pytest.mark.parametrize("kind", ["bert", "packed", "gpt"])
def test_leaving_padding_out_changes_nothing_but_the_work(
    make_plan: Callable[..., RunPlan], kind: str
) -> None:
    """Loss and gradients of rows with much padding; 1e-12 as above."""
    if kind == "gpt":
        plan = make_plan("gpt", data={"packing": "best_fit"})
    else:
        plan = make_plan("bert", objective={"packing": kind == "packed"})
    rows = rows_of(plan)
    half = rows["input_ids"].shape[1] // 2
    for name, padding in (("attention_mask", False), ("document_ids", -1), ("targets", IGNORED)):
        if name in rows:
            rows[name][2:, half + 1 :] = padding
    if kind == "packed":
        rows["nsp_targets"][2:, half + 1 :] = IGNORED
    batches = [prepare(dict(rows), plan.family, 4, CPU, 0.15, unpad=unpad) for unpad in (False, True)]
    real = int((rows["document_ids"] >= 0)[4:].sum() if kind != "bert" else rows["attention_mask"][4:].sum())
    shape = batches[1].micro_batches[1]["input_ids"].shape
    assert shape[0] == 1 and real <= shape[1] < real + rows["input_ids"][:4].size // 8
    (loss, padded), (found, unpadded) = (gradients(plan, batch) for batch in batches)
    assert found == pytest.approx(loss, abs=1e-12)
    for name, gradient in padded.items():
        torch.testing.assert_close(unpadded[name], gradient, atol=1e-12, rtol=0)


@pytest.mark.parametrize(("rows", "length"), [(1, 20), (3, 20), (1, 60), (2, 64), (5, 33)])
def test_as_many_places_are_prepared_as_the_planner_counts(
    make_recipe: Callable[..., Recipe], rows: int, length: int
) -> None:
    """Also where a fraction of 0.15 gives no whole number of places or of their quarters."""
    section = {"sequence_length": length, "batch_rows": rows}
    recipe = make_recipe("bert", train=section, objective={"sentences": "none", "mask_fraction": 0.15})
    targets = np.full((rows, length), IGNORED)
    targets[:, : int(np.ceil(0.15 * length))] = 7  # the most that a row of one segment has
    batch = {"input_ids": np.ones((rows, length), np.int64), "targets": targets}
    made = prepare(batch, "bert", rows, CPU, 0.15).micro_batches[0]["predicted"]
    assert len(made) == step_shape(recipe).predicted >= (targets != IGNORED).sum()


def test_tokens_leave_padding_out(make_plan: Callable[..., RunPlan]) -> None:
    plan = make_plan("bert")
    rows = rows_of(plan)
    real = int(rows["attention_mask"].sum())
    assert real < rows["input_ids"].size
    assert prepare(rows, "bert", 8, CPU, 0.15).tokens == real
