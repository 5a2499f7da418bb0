"""First values that a recipe asks for. A rate stays right when a model grows wider: the coordinate check of muP (Yang
et al. 2022, appendix D.1). Blocks begin as nothing where their projections are 0.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from throughline.core.errors import WrongUse
from throughline.train.build import RunPlan, StepBatches, build_trainer, training_rows
from throughline.train.step import train_step


def change(make_plan: Callable[..., RunPlan], width: int, base_width: int) -> float:
    """By how much four steps at one rate change the logits of their batch, in the mean."""
    overrides = {"layers": 2, "width": width, "heads": width // 16, "tied": False}
    plan = make_plan(
        model={"base_width": base_width, "overrides": overrides},
        optimizer={"learning_rate": 1e-2, "weight_decay": 0.0},
        schedule={"kind": "constant"},
    )
    trainer = build_trainer(plan)
    batch = StepBatches(plan, training_rows(plan)).batch(0, 4)
    (stage,) = trainer.engine.stages
    with torch.no_grad():
        before = stage.model(batch.micro_batches[0]["input_ids"])
    for _ in range(4):
        train_step(trainer, batch, 1.0)
    with torch.no_grad():
        return (stage.model(batch.micro_batches[0]["input_ids"]) - before).abs().mean().item()


def test_a_wider_model_moves_as_far(make_plan: Callable[..., RunPlan]) -> None:
    """At the base width nothing changes; sixteen times wider the logits move as far (0.7 times, seen), and without the
    field several times as far (4.7 seen), which is what the check is there to tell apart.
    """
    base = change(make_plan, 32, 32)
    assert change(make_plan, 32, 0) == base
    assert 0.5 < change(make_plan, 512, 32) / base < 2
    assert change(make_plan, 512, 0) / base > 3


def test_rates_decays_and_first_values_are_those_of_the_table(make_plan: Callable[..., RunPlan]) -> None:
    """Yang et al. 2022, table 3, of twice the base width: AdamW's rate of hidden matrices and of the output is halved,
    and the variance of their first values, the output's twice; what decays in a step stays, as does all else.
    """
    model = {"overrides": {"layers": 2, "width": 64, "heads": 4, "tied": False}}
    trainers = [build_trainer(make_plan(model=model | {"base_width": base})) for base in (0, 32)]
    values = [{local.name: local.value for local in one.engine.local_shards} for one in trainers]
    groups = [{p: g for g in one.optimizer.param_groups for p in g["params"]} for one in trainers]
    for name, value in values[0].items():
        output, hidden = name == "output.weight", name.startswith("blocks.") and value.dim() > 1
        share, usual, scaled = (
            (0.5 if output or hidden else 1.0),
            groups[0][value],
            groups[1][values[1][name]],
        )
        torch.testing.assert_close(
            values[1][name], value * (share if output else share**0.5), rtol=1e-6, atol=0
        )
        assert scaled["base_lr"] == share * usual["base_lr"], name
        assert scaled["base_lr"] * scaled["weight_decay"] == usual["base_lr"] * usual["weight_decay"], name
        assert usual["weight_decay"] > 0 or not hidden


@pytest.mark.parametrize(
    "sections",
    [
        {"model": {"base_width": 32}},
        {"model": {"base_width": 32, "overrides": {"tied": False}}, "optimizer": {"name": "muon"}},
    ],
)
def test_what_it_is_not_for_is_refused(make_plan: Callable[..., RunPlan], sections: dict[str, Any]) -> None:
    with pytest.raises(WrongUse, match="base_width"):
        make_plan(**sections)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_blocks_begin_as_nothing(make_plan: Callable[..., RunPlan], optimizer: str) -> None:
    """Before the first step what leaves the blocks is what entered them, and a step moves the projections and what is
    outside the blocks: what is before a projection has no gradient while it is 0.
    """
    model = {"zero_projections": True}
    plan = make_plan(model=model, optimizer={"name": optimizer, "weight_decay": 0.0})
    trainer = build_trainer(plan)
    batch = StepBatches(plan, training_rows(plan)).batch(0, 4)
    (stage,) = trainer.engine.stages
    ids, positions = batch.micro_batches[0]["input_ids"], torch.arange(32)
    before = {name: value.detach().clone() for name, value in stage.model.named_parameters()}
    with torch.no_grad():
        entered = stage.model.embed(ids, positions)
        assert torch.equal(stage.model.hidden(ids), stage.model.norm(entered))
    train_step(trainer, batch, 1.0)
    for name, value in stage.model.named_parameters():
        projection = ".attention.out." in name or ".mlp.down." in name
        assert not projection or not before[name].any()
        moved = not torch.equal(value, before[name])
        assert moved == (projection or not name.startswith("blocks.")), name


def test_experts_begin_as_nothing_too(make_plan: Callable[..., RunPlan]) -> None:
    shape = {"experts": 4, "shared_experts": 1, "gated": True, "activation": "silu"}
    plan = make_plan(model={"zero_projections": True, "overrides": shape})
    model, ids = build_trainer(plan).engine.stages[0].model, torch.arange(32)[None] % 8
    with torch.no_grad():
        assert torch.equal(model.hidden(ids), model.norm(model.embed(ids, torch.arange(32))))


def test_zero_projections_are_of_new_weights(make_plan: Callable[..., RunPlan]) -> None:
    with pytest.raises(WrongUse, match="zero_projections"):
        make_plan(model={"zero_projections": True, "init_from": "somewhere"})
