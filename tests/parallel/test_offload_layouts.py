"""Offload in layouts of several processes: the numbers are those without it, masters keep what 16 bits lose,
bytes add up.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from throughline.core.recipe import build_recipe  # noqa: E402
from throughline.planner.memory import IN_A_STEP  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.train.build import plan_run  # noqa: E402
from throughline.train.checkpoints.checkpoint import load_model  # noqa: E402
from throughline.train.logs.metrics import read_metrics  # noqa: E402
from throughline.train.loop import train  # noqa: E402
from throughline.train.optimizers.offload import HostOffload  # noqa: E402
from throughline.train.recipes.recipe import Recipe  # noqa: E402
from throughline.train.recipes.resolved import layout_facts, model_config, predicted_memory, resolve  # noqa: E402  # noqa: E402
from throughline.train.recipes.rules import RULES  # noqa: E402

LAYOUTS = {
    "replicated": {"data": 2},
    "zero1": {"data": 2, "sharding": "zero1"},
    "full": {"data": 2, "sharding": "full"},
    "tensor": {"tensor": 2},
}
Outcome = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def make(store: Path) -> Callable[..., Recipe]:
    def recipe(layout: str, offload: bool, **section: Any) -> Recipe:
        tree = {
            "data": {"train": str(store)},
            "model": {"overrides": {"layers": 2, "width": 32, "heads": 2, "vocab_size": 40}},
            "train": {"steps": 4, "sequence_length": 32, "batch_rows": 4, "compile": "off", "device": "cpu"}
            | section,
            "schedule": {"kind": "constant"},
            "parallel": LAYOUTS[layout],
        }
        tree["train"]["offload"] = offload
        return resolve(build_recipe(tree, Recipe, RULES))

    warm()
    return recipe


def run(recipe: Recipe, directory: Path) -> Outcome:
    """Losses and norms of every step, and the saved weights."""

    def work() -> None:
        torch.set_num_threads(1)
        train(plan_run(recipe), directory)

    run_ranks(recipe.parallel.layout().world, work)
    records = [(record["loss"], record["grad_norm"]) for record in read_metrics(directory)]
    return records, dict(load_model(directory)[0].state_dict())


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one[0] == other[0]
    assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_layout_without_it(
    layout: str, make: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 with two micro-batches: every loss, norm and weight to the bit, although updates take long. After backward
    gradients are fetched of copies, and over a tensor axis the partial ones; those of shards have left.
    """

    def update(self: HostOffload, *of_a_unit: Any) -> None:
        time.sleep(0.02)
        _update(self, *of_a_unit)

    def fetch(self: HostOffload, gradients: list[Any]) -> None:
        here, late = len(gradients), sum(gradient is not None for gradient in gradients)
        assert late == {"replicated": here, "tensor": late}.get(layout, 0) and (
            layout != "tensor" or 0 < late < here
        )
        _fetch(self, gradients)

    _update, _fetch = HostOffload._update, HostOffload.fetch
    monkeypatch.setattr(HostOffload, "_update", update)
    monkeypatch.setattr(HostOffload, "fetch", fetch)
    section = {"micro_batch_rows": 1}
    assert_same(
        run(make(layout, False, **section), tmp_path / "plain"),
        run(make(layout, True, **section), tmp_path / "moved"),
    )


@pytest.mark.parametrize("layout", ["full", "tensor"])
def test_bf16_continues_to_the_bit(layout: str, make: Callable[..., Recipe], tmp_path: Path) -> None:
    """Two steps and two more are four: masters hold what the device's 16 bits do not; losses are near those
    of fp32 weights.
    """
    whole = run(make(layout, True, precision="bf16"), tmp_path / "whole")
    run(make(layout, True, precision="bf16", steps=2), tmp_path / "parts")
    assert_same(run(make(layout, True, precision="bf16"), tmp_path / "parts"), whole)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in whole[1].values())
    plain, _ = run(make(layout, False, precision="bf16"), tmp_path / "plain")
    for (loss, norm), (other_loss, other_norm) in zip(whole[0], plain, strict=True):
        assert loss == pytest.approx(other_loss, abs=0.02)
        assert norm == pytest.approx(other_norm, rel=0.05)


def test_bytes_are_accounted(make: Callable[..., Recipe]) -> None:
    """2 + 2 bytes a parameter on the device where the layout keeps them whole; 14 of this process's shard on the host,
    and room for its part of the largest unit's gradients in fp32.
    """
    recipe = make("zero1", True, precision="bf16")
    config = model_config(recipe)
    facts, lines = layout_facts(recipe, config)
    count = config.parameter_count()
    block = config.block_parameters()
    unit = 4 * max(block, count - config.layers * block) / recipe.parallel.layout().shards
    for process in facts["processes"]:
        assert process["weights"] == process["gradients"] == 2 * count
        assert process["host"] == pytest.approx(14 * process["parameters"] + unit, abs=1)
    assert sum(process["parameters"] for process in facts["processes"]) == count
    assert any("host" in line for line in lines)
    terms = predicted_memory(config, recipe, "cuda", IN_A_STEP)
    assert "optimizer" not in terms and terms["gradients"] == 2 * count
    on_cpu = predicted_memory(config, recipe)
    host = sum(on_cpu[name] for name in ("master weights", "transfer buffers", "optimizer"))
    assert host == pytest.approx(14 * max(process["parameters"] for process in facts["processes"]), rel=0.01)
