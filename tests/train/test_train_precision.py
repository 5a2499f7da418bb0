"""Precision: fp16 and bf16 stay near fp32, masters take small updates, and the choice fits the device."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from stepping import setting
from throughline.core import console
from throughline.core.errors import WrongUse
from throughline.core.hardware import machine
from throughline.models.attention_cuda import CAPABILITIES
from throughline.train.build import RunPlan
from throughline.train.precision import pick_device
from throughline.train.recipes.recipe import Recipe
from throughline.train.step import train_step


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_stays_near_fp32(make_plan: Callable[..., RunPlan], precision: str) -> None:
    """Weights are fp32 masters; the loss of a fresh model differs by rounding of 8 or 11 bits, not more."""
    trainer, batch = setting(make_plan, train={"precision": precision})
    reference, _ = setting(make_plan)
    assert all(value.dtype == torch.float32 for _, value in trainer.engine.named_parameters())
    assert all(parameter.dtype.itemsize == 2 for parameter in trainer.engine.stages[0].model.parameters())
    for _ in range(3):
        low, full = train_step(trainer, batch, 1.0), train_step(reference, batch, 1.0)
        assert low.loss == pytest.approx(full.loss, rel=2e-2)
        assert low.grad_norm == pytest.approx(full.grad_norm, rel=5e-2)


def test_auto_is_what_the_gpu_is_made_for(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 without one; bf16 from compute capability 8 on; fp16 on a V100 or T4, of which one is enough."""
    assert make_recipe(train={"precision": "auto"}).train.precision == "fp32"
    for gpus, expected in (
        (["9.0"], "bf16"),
        (["7.5"], "fp16"),
        (["8.0", "7.0"], "fp16"),
        (["6.1"], "fp32"),
    ):
        # the driver says nothing, as in a container without its tool: torch is asked
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: len(gpus))
        for index, gpu in enumerate(gpus):
            monkeypatch.setitem(CAPABILITIES, index, tuple(map(int, gpu.split("."))))
        found = make_recipe(train={"precision": "auto", "device": "auto"})
        assert found.train.precision == expected
        assert make_recipe(train={"precision": "auto", "device": "cpu"}).train.precision == "fp32"


def test_tf32_is_of_gpus(make_plan: Callable[..., RunPlan]) -> None:
    with pytest.raises(WrongUse, match="no tf32"):
        make_plan(train={"precision": "tf32"})


@pytest.mark.parametrize("dtypes", [("fp32",), ("fp32", "bf16")])
def test_bf16_on_a_processor_without_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtypes: tuple[str, ...]
) -> None:
    """On a Zen 3 torch makes bf16 products at a twentieth of fp32's rate: a run that asks for them says so, once."""
    here = machine()
    cpu = dataclasses.replace(here.cpu, dtypes=dtypes)
    monkeypatch.setattr("throughline.train.precision.machine", lambda: dataclasses.replace(here, cpu=cpu))
    console.warn_once.cache_clear()
    for precision in ("fp32", "bf16", "bf16"):
        pick_device("cpu", precision)
    assert capsys.readouterr().err.count("no bf16 products") == ("bf16" not in dtypes)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_small_updates_reach_the_masters(make_plan: Callable[..., RunPlan], precision: str) -> None:
    """Steps far below the spacing of 16-bit weights add up in the masters, of which the weights are roundings."""
    trainer, batch = setting(make_plan, train={"precision": precision}, optimizer={"learning_rate": 1e-6})
    before = {local.name: local.value.detach().clone() for local in trainer.engine.local_shards}
    for _ in range(3):
        train_step(trainer, batch, 1.0)
    for local in trainer.engine.local_shards:
        assert not torch.equal(local.value, before[local.name]), local.name
        assert torch.equal(local.computed, local.value.to(local.computed.dtype))
