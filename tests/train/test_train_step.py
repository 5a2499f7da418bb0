"""One optimizer step: clipping, loss scaling, skipping, and how often the device is waited for."""

import math
from collections.abc import Callable

import pytest
import torch
from throughline.train.build import Plan, StepBatches, build_trainer, training_rows
from throughline.train.objective import StepBatch
from throughline.train.precision import GROWTH_INTERVAL, LossScaler
from throughline.train.step import Trainer, train_step


def setting(
    make_plan: Callable[..., Plan], family: str = "gpt", **sections: dict
) -> tuple[Trainer, StepBatch]:
    plan = make_plan(family, **sections)
    return build_trainer(plan), StepBatches(plan, training_rows(plan)).batch(0, 4)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().clone() for parameter in trainer.model.parameters()])


def plain_step(trainer: Trainer, batch: StepBatch, clip: float) -> tuple[torch.Tensor, float]:
    """The same step in the obvious way."""
    for micro_batch in batch.micro_batches:
        trainer.loss(trainer.model, micro_batch, batch.inverse_counts)[0].backward()
    norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), clip).item()
    for group in trainer.optimizer.param_groups:
        group["lr"] = group["base_lr"] * 0.5
    trainer.optimizer.step()
    return weights(trainer), norm


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_equals_the_plain_step(make_plan: Callable[..., Plan], family: str, clip: float) -> None:
    """In float64, with and without clipping taking hold; 1e-12 is rounding."""
    sections = {"train": {"precision": "fp64", "clip_norm": clip, "micro_batch_rows": 2}}
    trainer, batch = setting(make_plan, family, **sections)
    other, _ = setting(make_plan, family, **sections)
    expected, norm = plain_step(other, batch, clip)
    result = train_step(trainer, batch, 0.5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-12)
    torch.testing.assert_close(weights(trainer), expected, atol=1e-12, rtol=0)
    assert (trainer.step, trainer.samples, trainer.skipped) == (1, 4, 0)


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(make_plan: Callable[..., Plan]) -> None:
    trainer, batch = setting(make_plan)
    train_step(trainer, batch, 1.0)
    before, state = weights(trainer), trainer.optimizer.state_dict()["state"]
    moments = {
        (index, slot): value.clone() for index, slots in state.items() for slot, value in slots.items()
    }
    healthy = trainer.loss
    trainer.loss = lambda *inputs: tuple(part * math.nan for part in healthy(*inputs))
    assert train_step(trainer, batch, 1.0).skipped
    assert torch.equal(weights(trainer), before)
    after = trainer.optimizer.state_dict()["state"]
    assert all(torch.equal(after[index][slot], value) for (index, slot), value in moments.items())
    assert (trainer.step, trainer.samples, trainer.skipped, trainer.skipped_in_row) == (2, 8, 1, 1)
    trainer.loss = healthy
    assert not train_step(trainer, batch, 1.0).skipped
    assert (trainer.skipped, trainer.skipped_in_row) == (1, 0)


def test_a_nan_in_one_gradient_alone_is_noticed(make_plan: Callable[..., Plan]) -> None:
    """The loss is finite, one element of one gradient is not."""
    trainer, batch = setting(make_plan)
    spoil = torch.zeros(32)
    spoil[7] = math.inf
    trainer.model.norm.bias.register_hook(lambda gradient: gradient + spoil)
    before = weights(trainer)
    result = train_step(trainer, batch, 1.0)
    assert result.skipped
    assert math.isfinite(result.loss)
    assert torch.equal(weights(trainer), before)


def test_the_loss_scale_cancels(make_plan: Callable[..., Plan]) -> None:
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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_stays_near_fp32(make_plan: Callable[..., Plan], precision: str) -> None:
    """Weights are fp32 masters; the loss of a fresh model differs by rounding of 8 or 11 bits, not more."""
    trainer, batch = setting(make_plan, train={"precision": precision})
    reference, _ = setting(make_plan)
    assert all(parameter.dtype == torch.float32 for parameter in trainer.model.parameters())
    for _ in range(3):
        low, full = train_step(trainer, batch, 1.0), train_step(reference, batch, 1.0)
        assert low.loss == pytest.approx(full.loss, rel=2e-2)
        assert low.grad_norm == pytest.approx(full.grad_norm, rel=5e-2)


def test_waits_for_the_device_once(make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, batch = setting(make_plan, "bert", train={"micro_batch_rows": 1})
    reads = []
    for name in ("item", "tolist", "__bool__", "__float__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(
            torch.Tensor, name, lambda self, *a, _o=original, _n=name: reads.append(_n) or _o(self, *a)
        )
    train_step(trainer, batch, 1.0)
    assert reads == ["tolist"]
