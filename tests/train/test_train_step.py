"""One optimizer step: clipping, loss scaling, skipping, and which figures and terms of the loss it tells."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from stepping import setting, weights
from throughline.models.experts import RoutedFeedForward, Routing
from throughline.train.build import RunPlan
from throughline.train.logs.metrics import read_metrics
from throughline.train.loop import train
from throughline.train.objective import StepBatch
from throughline.train.stage import ROUTER_FIGURES
from throughline.train.step import GROWTH_INTERVAL, LossScaler, Trainer, train_step


def plain_step(trainer: Trainer, batch: StepBatch, clip: float) -> tuple[torch.Tensor, float]:
    """The same step in the obvious way."""
    (stage,) = trainer.engine.stages
    stage.load(batch.micro_batches, 1 / batch.counts_there, 1.0)
    for _ in batch.micro_batches:
        stage(torch.empty(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(trainer.engine.stages[0].model.parameters(), clip).item()
    for group in trainer.optimizer.param_groups:
        group["lr"] = group["base_lr"] * 0.5
    trainer.optimizer.step()
    return weights(trainer), norm


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_equals_the_plain_step(make_plan: Callable[..., RunPlan], family: str, clip: float) -> None:
    """In float64, with and without clipping taking hold; 1e-12 is rounding."""
    sections = {"train": {"precision": "fp64", "clip_norm": clip, "micro_batch_rows": 2}}
    trainer, batch = setting(make_plan, family, **sections)
    other, _ = setting(make_plan, family, **sections)
    expected, norm = plain_step(other, batch, clip)
    result = train_step(trainer, batch, 0.5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-12)
    torch.testing.assert_close(weights(trainer), expected, atol=1e-12, rtol=0)
    assert (trainer.step, trainer.samples, trainer.skipped) == (1, 4, 0)


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(
    make_plan: Callable[..., RunPlan],
) -> None:
    trainer, batch = setting(make_plan)
    train_step(trainer, batch, 1.0)
    before, state = weights(trainer), trainer.optimizer.state_dict()["state"]
    moments = {
        (index, slot): value.clone() for index, slots in state.items() for slot, value in slots.items()
    }
    (stage,) = trainer.engine.stages
    healthy = stage.head
    stage.head = lambda *inputs: healthy(*inputs) * math.nan
    assert train_step(trainer, batch, 1.0).skipped
    assert torch.equal(weights(trainer), before)
    after = trainer.optimizer.state_dict()["state"]
    assert all(torch.equal(after[index][slot], value) for (index, slot), value in moments.items())
    assert (trainer.step, trainer.samples, trainer.skipped, trainer.skipped_in_row) == (2, 8, 1, 1)
    stage.head = healthy
    assert not train_step(trainer, batch, 1.0).skipped
    assert (trainer.skipped, trainer.skipped_in_row) == (1, 0)


def test_a_nan_in_one_gradient_alone_is_noticed(make_plan: Callable[..., RunPlan]) -> None:
    """The loss is finite, one element of one gradient is not."""
    trainer, batch = setting(make_plan)
    spoil = torch.zeros(32)
    spoil[7] = math.inf
    trainer.engine.stages[0].model.norm.bias.register_hook(lambda gradient: gradient + spoil)
    before = weights(trainer)
    result = train_step(trainer, batch, 1.0)
    assert result.skipped
    assert math.isfinite(result.loss)
    assert torch.equal(weights(trainer), before)


def test_the_loss_scale_cancels(make_plan: Callable[..., RunPlan]) -> None:
    """Powers of two scale exactly: one step with any scale moves the weights to the same bits."""
    moved = []
    for scale in (1.0, 2.0**10):
        trainer, batch = setting(make_plan, train={"clip_norm": 0.0})
        trainer.scaler = LossScaler(scale, active=True)
        result = train_step(trainer, batch, 1.0)
        moved.append((weights(trainer), result.grad_norm))
    assert torch.equal(moved[0][0], moved[1][0])
    assert moved[0][1] == moved[1][1]


def test_the_loss_scale_finds_its_place() -> None:
    scaler = LossScaler.of("fp16")
    scaler.update(False)
    assert scaler.scale == 2.0**15
    for _ in range(GROWTH_INTERVAL):
        scaler.update(True)
    assert (scaler.scale, scaler.good_steps) == (2.0**16, 0)
    still = LossScaler.of("bf16")
    still.update(False)
    assert still.scale == 1.0


def test_the_share_of_dropped_answers_is_told(
    make_plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that were chosen in the step's micro-batches and layers, once each where a forward is repeated."""
    model = {"layers": 2, "width": 32, "heads": 2, "bias": False, "experts": 4, "expert_capacity_factor": 1.0}
    train = {"micro_batch_rows": 2, "recompute": "full"}
    trainer, batch = setting(make_plan, model={"overrides": model}, train=train)
    found, real = list[torch.Tensor](), RoutedFeedForward._dropped

    def dropped(layer: RoutedFeedForward, routing: Routing) -> torch.Tensor:
        found.append(real(layer, routing))
        return found[-1]

    monkeypatch.setattr(RoutedFeedForward, "_dropped", dropped)
    told = dict(zip(ROUTER_FIGURES, train_step(trainer, batch, 1.0).routers))["dropped_tokens"]
    assert len(found) == 2 * 2 * 2, "layers, micro-batches, forwards"
    assert told == pytest.approx(torch.stack(found).double().mean().item()) and told > 0.01


SMALL = {"layers": 2, "width": 32, "heads": 2}


@pytest.mark.parametrize(
    ("family", "sections", "terms", "logged"),
    [
        ("gpt", {"train": {"z_loss": 0.1}}, ("next", "z_loss"), ("next",)),
        ("gpt", {"model": {"overrides": SMALL | {"predict_ahead": 1}}}, ("next", "ahead"), ("next",)),
        ("bert", {}, ("mlm", "nsp"), ("mlm", "nsp")),
    ],
)
def test_the_logged_loss_leaves_auxiliary_terms_out(
    make_plan: Callable[..., RunPlan],
    tmp_path: Path,
    family: str,
    sections: dict[str, Any],
    terms: tuple[str, ...],
    logged: tuple[str, ...],
) -> None:
    """It is what a validation measures; every term is in the record by its name, and in the gradient."""
    train(
        make_plan(family, **sections | {"train": {"steps": 2} | sections.get("train", {})}), tmp_path / "run"
    )
    for record in read_metrics(tmp_path / "run"):
        assert record["loss"] == pytest.approx(sum(record[name] for name in logged))
        assert all(record[name] > 0 for name in terms)
