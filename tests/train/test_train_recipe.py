"""The recipe: every rule speaks, resolving changes nothing that matters, and no torch is needed."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from throughline.core.errors import WrongUse
from throughline.core.recipe import build_recipe, describe, dump_toml
from throughline.train.optimizers.build import learning_rate_factor
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import model_config, resolve
from throughline.train.recipes.rules import RULES


def tree(**sections: dict) -> dict:
    base = {"data": {"train": "tokens"}, "train": {"steps": 100, "sequence_length": 16, "batch_rows": 12}}
    for name, fields in sections.items():
        base[name] = base.get(name, {}) | fields
    return base


def test_a_resolved_recipe_is_valid_input_and_resolves_to_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = tree(
        train={"batch_rows": None, "batch_tokens": 192},
        model={"preset": "gpt-toy"},
        schedule={"warmup_steps": 5},
    )
    recipe = resolve(build_recipe(given, Recipe, RULES))
    monkeypatch.chdir("/")
    again = build_recipe(tomllib.loads(dump_toml(recipe)), Recipe, RULES)
    assert again == recipe
    assert resolve(again) == recipe
    assert (recipe.train.batch_rows, recipe.train.micro_batch_rows) == (12, 12)
    assert recipe.data.sources()[0].path == str(tmp_path / "tokens")


@pytest.mark.parametrize(
    ("sections", "key", "words"),
    [
        ({"train": {"batch_rows": None}}, "train.batch_rows", "no batch is given"),
        ({"train": {"batch_rows": None, "batch_tokens": 100}}, "train.batch_tokens", "for example 96"),
        ({"train": {"batch_tokens": 100 * 16}}, "train.batch_tokens", "contradict"),
        ({"train": {"micro_batch_rows": 5}}, "train.micro_batch_rows", "does not divide the batch of 12"),
        ({"schedule": {"warmup_steps": 100}}, "schedule.warmup_steps", "not below train.steps = 100"),
        ({"schedule": {"warmup_steps": 50, "decay_steps": 60}}, "schedule.decay_steps", "at most 50"),
        ({"objective": {"mask_fraction": 0.2}}, "objective", "belongs to BERT"),
        (
            {"model": {"family": "bert"}, "data": {"separate_documents": True}},
            "data.separate_documents",
            "belongs to GPT",
        ),
        ({"data": {"train": ""}}, "data.train", "no token store"),
        (
            {"data": {"validation_fraction": 0.0}, "train": {"eval_every_steps": 5}},
            "train.eval_every_steps",
            "no validation",
        ),
        ({"model": {"preset": "gpt-toyy"}}, "model.preset", "did you mean gpt-toy"),
        ({"model": {"overrides": {"layer": 3}}}, "model.overrides.layer", "did you mean layers"),
        ({"model": {"overrides": {"width": 30, "heads": 4}}}, "model", "not a multiple"),
        ({"model": {"family": "bert", "preset": "gpt-toy"}}, "model.family", "is a gpt"),
        (
            {"model": {"preset": "gpt-toy"}, "train": {"sequence_length": 64}},
            "train.sequence_length",
            "32 positions",
        ),
        (
            {"model": {"family": "bert", "overrides": {"nsp": False}}},
            "objective.sentences",
            "needs a model with nsp",
        ),
        ({"parallel": {"tensor": 3}}, "parallel.tensor", "cannot be shared by 3 processes"),
        (
            {
                "parallel": {"data": 2, "sharding": "full"},
                "optimizer": {"name": "muon"},
                "train": {"offload": True},
            },
            "optimizer.name",
            "offload has them on the host",
        ),
        ({"train": {"stepz": 5}}, "train.stepz", "did you mean steps"),
        ({"train": {"precision": "bf17"}}, "train.precision", "bf16"),
        ({"train": {"steps": "100"}}, "train.steps", "integer"),
        ({"train": {"seed": 2**63}}, "train.seed", "less than"),
        ({"data": {"train": [{"path": "tokens", "wait": 2}]}}, "data.train.0.wait", "did you mean weight"),
        ({"model": {"overrides": {"layers": "3"}}}, "model", "layers is '3'; it must be a whole number"),
    ],
)
def test_each_rule_names_the_field_and_the_way_out(sections: dict, key: str, words: str) -> None:
    with pytest.raises(WrongUse) as caught:
        build_recipe(tree(**sections), Recipe, RULES)
    assert f"[{key}]" in caught.value.why
    assert words in caught.value.why


def test_all_problems_are_shown_at_once() -> None:
    with pytest.raises(WrongUse) as caught:
        build_recipe(
            tree(schedule={"warmup_steps": 100}, train={"micro_batch_rows": 5}, parallel={"data": 2}),
            Recipe,
            RULES,
        )
    assert "3 problems" in caught.value.what


def test_the_vocabulary_is_that_of_the_tokens_unless_given() -> None:
    recipe = build_recipe(tree(model={"preset": "gpt-toy"}), Recipe, RULES)
    assert model_config(recipe, 99).vocab_size == 99
    recipe = build_recipe(tree(model={"preset": "gpt-toy", "overrides": {"vocab_size": 128}}), Recipe, RULES)
    assert model_config(recipe, 99).vocab_size == 128


def test_a_bert_without_pairs_has_no_pair_head() -> None:
    recipe = build_recipe(tree(model={"family": "bert"}, objective={"sentences": "none"}), Recipe, RULES)
    assert model_config(recipe, 99).nsp is False


def test_every_field_says_what_it_is() -> None:
    assert [key for key, _, _, note in describe(Recipe) if not note] == []


def test_recipes_are_checked_without_torch(root: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from throughline.train.recipes.recipe import Recipe\n"
        "from throughline.train.recipes.resolved import resolve\n"
        "from throughline.train.recipes.rules import RULES\n"
        "from throughline.core.recipe import build_recipe\n"
        f"resolve(build_recipe({tree()!r}, Recipe, RULES))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root.parent)


def test_a_warm_up_is_measured_in_whole_batches() -> None:
    """400 steps of a batch that grows to 16 rows over 3,000 are 102 whole batches: 350 of warm-up would never end."""
    ramp = {"start_rows": 2, "step_rows": 2, "over_rows": 3000}
    grown = {"steps": 400, "sequence_length": 32, "batch_rows": 16, "micro_batch_rows": 2, "batch_ramp": ramp}
    whole = build_recipe(tree(train=grown), Recipe, RULES).train
    batches = whole.rows_before(400) // 16
    build_recipe(tree(train=grown, schedule={"warmup_steps": batches - 1}), Recipe, RULES)
    for schedule, key in (
        ({"warmup_steps": 350}, "schedule.warmup_steps"),
        ({"warmup_steps": batches}, "schedule.warmup_steps"),
        ({"warmup_steps": batches // 2, "decay_steps": batches - batches // 2 + 1}, "schedule.decay_steps"),
    ):
        with pytest.raises(WrongUse) as caught:
            build_recipe(tree(train=grown, schedule=schedule), Recipe, RULES)
        assert f"[{key}]" in caught.value.why and f"{batches} whole batches" in caught.value.why


def test_a_decay_from_the_start_contains_the_warm_up() -> None:
    """A published BERT schedule, spelled out, is the one that it is by default; a decay beyond the run is none."""
    schedule = {"kind": "polynomial", "warmup_steps": 30, "decay_from_start": True, "final_fraction": 0.0}
    run = {"steps": 100, "sequence_length": 32, "batch_rows": 4}
    usual = build_recipe(tree(train=run, schedule=schedule), Recipe, RULES)
    spelled = build_recipe(tree(train=run, schedule=schedule | {"decay_steps": 100}), Recipe, RULES)
    for step in range(100):
        assert learning_rate_factor(step, spelled) == learning_rate_factor(step, usual)
    with pytest.raises(WrongUse) as caught:
        build_recipe(tree(train=run, schedule=schedule | {"decay_steps": 101}), Recipe, RULES)
    assert "at most 100" in caught.value.why
    with pytest.raises(WrongUse):  # wsd's decay comes after the peak, wherever others are counted from
        wsd = schedule | {"kind": "wsd", "decay_steps": 80}
        build_recipe(tree(train=run, schedule=wsd), Recipe, RULES)
