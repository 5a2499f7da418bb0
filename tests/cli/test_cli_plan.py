"""The plan command: tables, JSON, errors, recipes that the trainer accepts."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.recipe import load_recipe
from throughline.models.config import preset
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.rules import RULES


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(main, ["plan", *arguments])
    assert result.exit_code == code, result.output + result.stderr
    return result.output + result.stderr


def test_ranks_layouts_and_names_prices_with_their_date() -> None:
    text = run(
        "gpt3-13b", "--gpus", "64", "--on", "aws-p4d.24xlarge", "--rows", "512", "--target-tokens", "300e9"
    )
    assert "MFU" in text and "HFU" in text and "does not fit" in text and "capacity block" in text
    facts = json.loads(run("gpt3-13b", "--gpus", "64", "--on", "a100-80gb", "--rows", "512", "--json"))
    assert facts["layouts"] and facts["layouts"][0]["step_seconds"] == min(
        row["step_seconds"] for row in facts["layouts"]
    )


def test_writes_a_recipe_that_the_trainer_accepts(tmp_path: Path) -> None:
    file = tmp_path / "planned.toml"
    run("gpt3-1.3b", "--gpus", "16", "--on", "a100-40gb", "--rows", "256", "--write-recipe", str(file))
    result = CliRunner().invoke(main, ["recipe", "check", str(file), "--json"])
    assert result.exit_code == 0, result.output
    recipe = json.loads(result.output)["recipe"]
    steps, parallel = recipe["train"]["steps"], recipe["parallel"]
    assert recipe["train"]["eval_every_steps"] == recipe["checkpoint"]["save_every_steps"] == steps // 20
    assert recipe["schedule"]["warmup_steps"] > 0 and recipe["data"]["validation_fraction"] > 0
    assert recipe["optimizer"]["learning_rate"] == 2e-4, "Brown et al. 2020, table 2.1, 1.3 B"
    assert parallel["data"] * parallel["tensor"] * parallel["pipeline"] * parallel["context"] == 16


def test_a_planned_recipe_saves_as_often_as_its_days_are_reckoned(tmp_path: Path) -> None:
    file = tmp_path / "planned.toml"
    words = ("llama-8b", "--gpus", "64", "--on", "h100-80gb", "--target-tokens", "2e11", "--json")
    best = json.loads(run(*words, "--write-recipe", str(file)))["layouts"][0]
    saves = load_recipe(str(file), Recipe, (), RULES).checkpoint.save_every_steps
    assert saves * best["step_seconds"] == pytest.approx(60 * best["run"]["save_every_minutes"], rel=0.01)


def test_weights_are_planned_by_their_shape(tmp_path: Path) -> None:
    """As the preset of the same shape; a recipe of them is written by another command."""
    (tmp_path / "model.json").write_text(
        json.dumps({"family": "gpt", "config": preset("gpt2-355m").to_dict()})
    )
    train, serve = ("--gpus", "8", "--on", "a100-80gb", "--json"), ("--on", "t4", "--json")
    assert (
        json.loads(run(str(tmp_path), *train))["layouts"] == json.loads(run("gpt2-355m", *train))["layouts"]
    )
    rows = [json.loads(run("serve", name, *serve))["rows"] for name in (str(tmp_path), "gpt2-355m")]
    assert rows[0] == rows[1]
    told = run(str(tmp_path), *train, "--write-recipe", str(tmp_path / "r.toml"), code=2)
    assert "recipe new --from" in told and not (tmp_path / "r.toml").exists()


def test_plans_a_recipe_with_its_own_batch() -> None:
    facts = json.loads(run("gpt-shakespeare", "--gpus", "2", "--on", "t4", "--json"))
    assert facts["rows"] == 16 and facts["length"] == 128


def test_plans_the_averages_that_a_recipe_keeps() -> None:
    """An fp32 number more for every parameter, of one process in whole."""
    words = ("gpt-shakespeare", "--gpus", "1", "--on", "t4", "--precision", "fp32", "--json")
    none, kept = (
        json.loads(run(*words, "--set", f"optimizer.ema_decay={decay}"))["layouts"][0] for decay in (0, 0.999)
    )
    assert kept["needed_gib"] - none["needed_gib"] > 0
    assert kept["step_seconds"] > none["step_seconds"]


def test_plans_a_bert_recipe_with_its_masked_share() -> None:
    """More masked places are more logits: the recipe's share counts, unless the command says another one."""
    words = (
        "bert-large-phase1",
        "--gpus",
        "8",
        "--on",
        "dgx-1-32gb",
        "--precision",
        "fp16",
        "--layout",
        "recompute=none",
        "--json",
    )
    more = ("--set", "objective.mask_fraction=0.6")
    asked = (words, (*words, *more), (*words, *more, "--predicted", "0.15"))
    usual, masked, told = (json.loads(run(*one))["layouts"][0]["step_seconds"] for one in asked)
    assert usual == told < masked


def test_what_does_not_fit_says_how_much_is_missing() -> None:
    text = run("gpt3-175b", "--gpus", "8", "--on", "t4", "--rows", "64", code=1)
    assert "nothing fits" in text and "GiB" in text and "recommend" in text


def test_unknown_names_are_answered_with_near_ones(tmp_path: Path) -> None:
    assert "a100-80gb" in run("gpt3-13b", "--gpus", "8", "--on", "a100-80", code=2)
    assert "sharding is one of" in run(
        "gpt3-13b", "--gpus", "8", "--on", "t4", "--layout", "sharding=z9", code=2
    )
    own = tmp_path / "own.toml"
    own.write_text('[clusters.mine]\nchip = "t4"\nchips_per_node = 4\nprice_per_chip_hour = 0.2\n')
    text = run(
        "bert-base",
        "--gpus",
        "4",
        "--on",
        "mine",
        "--hardware",
        str(own),
        "--rows",
        "64",
        "--target-tokens",
        "1e9",
        "--precision",
        "fp16",
    )
    assert "0.2 USD" in text
    own.write_text('[clusters.mine]\nchip = "t4"\nchip_per_node = 4\n')
    assert "did you mean chips_per_node?" in run(
        "bert-base", "--gpus", "4", "--on", "mine", "--hardware", str(own), code=2
    )


def test_explain_and_validate() -> None:
    text = run(
        "explain", "bert-large", "--gpus", "8", "--on", "dgx-1-32gb", "--length", "128", "--rows", "512"
    )
    assert "matrix products" in text and "sum" in text
    assert "mean of the tables' medians" in run("validate")
