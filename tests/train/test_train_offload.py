"""A run with train.offload is the run without it: the same losses and checkpoints, continued alike, memory as
predicted.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from throughline.core.errors import WrongUse
from throughline.prove.forked import run_ranks, warm
from throughline.train.build import RunPlan, build_trainer, plan_run
from throughline.train.checkpoints.checkpoint import load_model
from throughline.train.logs.metrics import read_metrics
from throughline.train.loop import train
from throughline.train.recipes.recipe import Recipe

FIGURES = ("step", "loss", "grad_norm", "lr", "skipped")


def outcome(run: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    records = [{name: record.get(name) for name in FIGURES} for record in read_metrics(run)]
    return records, dict(load_model(run)[0].state_dict())


@pytest.mark.parametrize(
    ("family", "sections"),
    [
        ("gpt", {"train": {"micro_batch_rows": 2}}),
        ("bert", {}),
        ("gpt", {"optimizer": {"name": "muon"}, "train": {"precision": "fp64"}}),
    ],
    ids=["gpt accumulated", "bert", "muon fp64"],
)
def test_equals_the_run_without_it(
    family: str, sections: dict[str, Any], make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    """Every step's figures and the saved weights, to the bit."""
    for name, offload in (("plain", False), ("moved", True)):
        given = sections | {"train": sections.get("train", {}) | {"offload": offload}}
        train(make_plan(family, **given), tmp_path / name)
    (records, weights), (other_records, other_weights) = (
        outcome(tmp_path / "plain"),
        outcome(tmp_path / "moved"),
    )
    assert records == other_records
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.mark.parametrize(
    "parallel", [{"data": 2, "sharding": "zero1"}, {"tensor": 2}, {"context": 2}], ids=str
)
def test_a_bert_in_a_layout_equals_the_run_without_it(
    parallel: dict[str, Any], make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """The pair head, which one process of a context has alone, and tables that all share: every step and
    weight to the bit.
    """
    warm()
    for name, offload in (("plain", False), ("moved", True)):
        recipe = make_recipe(
            "bert", train={"steps": 3, "micro_batch_rows": 2, "offload": offload}, parallel=parallel
        )
        run_ranks(2, lambda recipe=recipe, name=name: train(plan_run(recipe), tmp_path / name)["step"])
    (records, weights), (other_records, other_weights) = (
        outcome(tmp_path / "plain"),
        outcome(tmp_path / "moved"),
    )
    assert records == other_records and len(records) == 3
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


def test_continues_to_the_bit(make_plan: Callable[..., RunPlan], tmp_path: Path) -> None:
    """bf16, three steps and then three more, against six at once: masters keep what bf16 does not."""
    section, schedule = {"offload": True, "precision": "bf16"}, {"kind": "constant"}
    train(make_plan(train=section | {"steps": 3}, schedule=schedule), tmp_path / "parts")
    for name in ("parts", "once"):
        train(make_plan(train=section, schedule=schedule), tmp_path / name)
    (records, weights), (other_records, other_weights) = (
        outcome(tmp_path / "parts"),
        outcome(tmp_path / "once"),
    )
    assert records == other_records
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in weights.values())


def test_memory_is_that_of_its_tensors(make_plan: Callable[..., RunPlan]) -> None:
    plan = make_plan("gpt", train={"offload": True, "precision": "bf16", "micro_batch_rows": 2})
    trainer = build_trainer(plan)
    sides = trainer.engine.offload.sides
    assert plan.memory["weights"] == sum(side.parameter.nbytes for side in sides)
    assert plan.memory["weights"] == 2 * plan.config.parameter_count()
    for term, field in (
        ("master weights", "master"),
        ("transfer buffers", "staging"),
        ("gradient sums", "total"),
    ):
        assert plan.memory[term] == sum(getattr(side, field).nbytes for side in sides)


def test_what_it_cannot_do_is_told(make_recipe: Callable[..., Recipe]) -> None:
    with pytest.raises(WrongUse, match=r"train\.offload"):
        make_recipe(train={"offload": True, "batch_rows": 4}, parallel={"pipeline": 2})
    with pytest.raises(WrongUse, match=r"added in 16 bits"):
        make_recipe(
            train={"offload": True, "batch_rows": 8, "micro_batch_rows": 2, "precision": "bf16"},
            parallel={"data": 2},
        )
