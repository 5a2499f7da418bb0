"""The small twin of a recipe keeps what decides the arithmetic of its layout, and is proven from the command line."""

import json

import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.recipe import build_recipe, load_recipe, shipped_recipes
from throughline.planner.layout import layout_problems
from throughline.prove.twin import PROCESSES, twin
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import resolve
from throughline.train.recipes.rules import RULES

PRETRAINING = [name for name in shipped_recipes() if not name.startswith("finetune")]


@pytest.mark.parametrize("name", PRETRAINING)
def test_every_shipped_recipe_has_a_twin(name: str) -> None:
    recipe = resolve(load_recipe(name, Recipe, ("data.train=tokens",), RULES))
    case, notes = twin(recipe)
    given = recipe.parallel.layout()
    assert case.layout.world <= PROCESSES
    assert not layout_problems(case.layout, case.config, case.length, case.rows, case.micro_rows)
    for axis in ("data", "tensor", "pipeline", "context"):
        assert (getattr(case.layout, axis) > 1) == (getattr(given, axis) > 1)
        if getattr(case.layout, axis) != getattr(given, axis):
            assert any(f"parallel.{axis} = " in note for note in notes)
    assert (case.layout.sharding, case.layout.schedule) == (given.sharding, given.schedule)
    assert case.config.parameter_count() < 1_000_000


def test_the_switches_of_the_model_stay() -> None:
    overrides = {
        "kv_heads": 2,
        "norm": "rmsnorm",
        "positions": "rotary",
        "gated": True,
        "bias": False,
        "tied": False,
    }
    tree = {
        "data": {"train": "tokens"},
        "model": {"overrides": {"layers": 6, "width": 64, "heads": 8, "vocab_size": 999} | overrides},
        "train": {"steps": 4, "sequence_length": 64, "batch_rows": 8, "precision": "bf16"},
        "parallel": {"tensor": 2, "pipeline": 2},
    }
    case, _ = twin(resolve(build_recipe(tree, Recipe, RULES)))
    small = case.config
    assert small.key_value_heads == 2 and small.heads == 4
    assert (small.norm, small.positions, small.gated, small.bias, small.tied) == (
        "rmsnorm",
        "rotary",
        True,
        False,
        False,
    )
    assert case.precision == "bf16"


@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_what_a_run_adds_to_its_model_stays(axis: str) -> None:
    """Averages, further tokens, and experts that drop tokens where a process has whole rows, as one process has."""
    overrides = {"layers": 2, "width": 64, "heads": 8, "bias": False, "experts": 4, "predict_ahead": 1}
    tree = {
        "data": {"train": "tokens"},
        "model": {"overrides": overrides | {"expert_capacity_factor": 1.25}},
        "optimizer": {"ema_decay": 0.9},
        "train": {"steps": 4, "sequence_length": 64, "batch_rows": 8},
        "parallel": {axis: 2},
    }
    case, notes = twin(resolve(build_recipe(tree, Recipe, RULES)))
    small = case.config
    assert (case.ema_decay, small.predict_ahead, small.experts_per_token) == (0.9, 1, 2)
    assert small.expert_capacity_factor == (1.25 if axis == "data" else 0.0)
    assert any("no token is dropped" in note for note in notes) == (axis == "tensor")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [("parallel.data=2", "parallel.sharding=full"), ("parallel.tensor=2",)], ids="-".join
)
def test_a_recipe_is_proven(layout: tuple[str, ...]) -> None:
    """Two proofs, in float64 and in the recipe's own precision, and an exit code."""
    words = ["data.train=tokens", "train.precision=bf16", *layout]
    result = CliRunner().invoke(
        main, ["prove", "gpt2-124m", "--json", *(w for word in words for w in ("--set", word))]
    )
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["equal"] and [row["precision"] for row in facts["proofs"]] == ["fp64", "bf16"]


def test_a_layout_that_is_not_equal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 3, with the bounds that are broken: here those of copies are set below what rounding allows."""
    from throughline.prove import proof

    monkeypatch.setitem(proof.BOUNDS, "fp64", {"loss": -1.0})
    words = ["data.train=tokens", "train.precision=fp64", "parallel.data=2"]
    result = CliRunner().invoke(main, ["prove", "gpt2-124m", *(w for word in words for w in ("--set", word))])
    assert result.exit_code == 3
    assert "NOT EQUAL" in result.stdout and "beyond the bound: loss" in result.stdout
