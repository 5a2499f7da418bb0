"""A model with an attention pattern trains alike in every layout that may have one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from common import index_file  # noqa: E402
from throughline.core.recipe import build_recipe  # noqa: E402
from throughline.models.attention import scaled_dot_product  # noqa: E402
from throughline.models.transformer import AttentionPattern  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.prove.proof import BOUNDS, Case, Prover  # noqa: E402
from throughline.train.build import plan_run  # noqa: E402
from throughline.train.checkpoints.checkpoint import load_model  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.logs.metrics import read_metrics  # noqa: E402
from throughline.train.loop import train  # noqa: E402
from throughline.train.parallel import context  # noqa: E402
from throughline.train.recipes.recipe import Recipe  # noqa: E402
from throughline.train.recipes.resolved import resolve  # noqa: E402
from throughline.train.recipes.rules import RULES  # noqa: E402


@pytest.mark.parametrize(
    "layout", [Layout(tensor=2), Layout(pipeline=2), Layout(data=2, sharding="full")], ids=Layout.describe
)
def test_a_bert_equals_the_single_process(layout: Layout) -> None:
    """Padded rows, a window, a global block and drawn ones, which depend on the layer's global number: as the
    proof of layouts.
    """
    warm()
    pattern = {
        "attention_window": 3,
        "attention_block": 4,
        "attention_global_blocks": 1,
        "attention_random_blocks": 1,
    }
    errors = Prover().prove(Case(layout.describe(), layout, family="bert", steps=2, model=pattern))
    assert not errors.beyond("fp64"), errors


def test_losses_equal_the_single_process(tmp_path: Path) -> None:
    """float64, three steps, window of 5: tensor, pipeline and sharded data each within 1e-12; the checkpoint
    keeps the pattern.
    """
    tokens = (np.arange(20_000) * 7 % 31).astype(np.uint16)
    (tmp_path / "store").mkdir()
    tokens.tofile(tmp_path / "store" / "00000.bin")
    index_file(tmp_path / "store" / "00000.idx", np.array([len(tokens)]), np.array([0, 1]), np.uint16)
    overrides = {
        "layers": 2,
        "width": 32,
        "heads": 2,
        "vocab_size": 40,
        "attention_window": 5,
        "attention_block": 8,
    }
    warm()

    def losses(name: str, **parallel: Any) -> list[float]:
        tree = {
            "data": {"train": str(tmp_path / "store")},
            "model": {"overrides": overrides},
            "train": {
                "steps": 3,
                "sequence_length": 32,
                "batch_rows": 4,
                "compile": "off",
                "device": "cpu",
                "precision": "fp64",
            },
            "parallel": parallel,
        }
        recipe = resolve(build_recipe(tree, Recipe, RULES))

        def work() -> None:
            torch.set_num_threads(1)
            train(plan_run(recipe), tmp_path / name)

        run_ranks(recipe.parallel.layout().world, work)
        return [record["loss"] for record in read_metrics(tmp_path / name)]

    alone = losses("alone")
    for name, parallel in {
        "tensor": {"tensor": 2},
        "pipeline": {"pipeline": 2},
        "full": {"data": 2, "sharding": "full"},
    }.items():
        assert losses(name, **parallel) == pytest.approx(alone, abs=1e-12), name
    assert load_model(tmp_path / "tensor")[0].config.attention_pattern == AttentionPattern(window=5, block=8)


def forgotten_window(engine: Engine) -> None:
    """A layer with a window goes round the ring as the others do."""
    for block in engine.stages[0].model.blocks.values():
        block.attention.attend = scaled_dot_product


def own_keys_for_all(engine: Engine) -> None:
    """A process takes its own part of a row for those of the others."""
    context.gather_rows = lambda x, axis: x.repeat(1, axis.size, 1, 1)


@pytest.mark.parametrize("plant", [None, forgotten_window, own_keys_for_all])
def test_windows_over_the_context_axis(plant: Callable[[Engine], None] | None) -> None:
    """As one process in float64; a window that is forgotten, or keys of others that are, are caught."""
    warm()
    model = {"attention_window": 5, "layer_pattern": "gl"}
    case = Case("windows", Layout(context=2), steps=2, model=model)
    errors = Prover().prove(case, plant)
    assert errors.loss > 1e5 * BOUNDS["fp64"]["loss"] if plant else not errors.beyond("fp64"), errors
