"""Recipes that ship and recipes that `recipe new` writes pass every rule, and hold what the machine can hold."""

import dataclasses
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.errors import WrongUse
from throughline.core.hardware import chips
from throughline.core.recipe import build_recipe, describe, load_recipe, shipped_recipes
from throughline.core.recipe_names import THEIRS
from throughline.models.config import BERTConfig, GPTConfig, ModelConfig, preset, preset_names
from throughline.models.families import families
from throughline.models.huggingface_config import read_config
from throughline.planner.hardware import find_cluster
from throughline.planner.memory import capacity_bytes
from throughline.train.recipes.new_recipe import new_recipe
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import model_config, predicted_memory
from throughline.train.recipes.rules import RULES

PUBLISHED_NAMES = Path(__file__).parents[1] / "models" / "published_names.json"


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_pass_and_name_their_knob(name: str) -> None:
    text = shipped_recipes()[name].read_text()
    assert "Knob: " in text.splitlines()[0]
    if "task" not in tomllib.loads(text):  # recipes for fine-tuning have a form of their own
        load_recipe(name, Recipe, (), RULES)


def test_the_shape_of_llama_1b_is_the_published_one() -> None:
    """Meta's model card says 1.23 G parameters, with its vocabulary of 128,256."""
    config = model_config(load_recipe("llama-1b-8gpu", Recipe, (), RULES), 128_256)
    assert round(config.parameter_count() / 1e9, 2) == 1.24


@pytest.mark.parametrize(
    ("model", "machine", "gpus", "sharding", "precision"),
    [
        ("gpt2-124m", "a100-80gb", 1, "replicated", "bf16"),
        ("llama-8b", "h100-80gb", 8, "full", "bf16"),  # 128 GB of states, 80 GB a card
        ("bert-base", "t4", 2, "replicated", "fp16"),  # a card without bf16
        ("gpt-toy", "cpu", 1, "replicated", "fp32"),
    ],
)
def test_a_new_recipe_is_legal_and_fits(
    tmp_path: Path, model: str, machine: str, gpus: int, sharding: str, precision: str
) -> None:
    given = ["--model", model, "--data", "tokens/x", "--machine", machine, "--gpus", str(gpus)]
    done = CliRunner().invoke(main, ["recipe", "new", *given, "--out", str(tmp_path / "r.toml")])
    assert done.exit_code == 0, done.output
    recipe = load_recipe(str(tmp_path / "r.toml"), Recipe, (), RULES)
    assert (recipe.parallel.sharding, recipe.train.precision) == (sharding, precision)
    assert recipe.parallel.data == gpus and recipe.train.rows_per_step % gpus == 0
    if machine != "cpu":  # what the planner predicts of the recipe fits the card; twice the rows do not
        config, room = model_config(recipe), capacity_bytes(chips()[machine].memory_gib)
        rows = recipe.train.rows_per_micro_batch
        more = recipe.model_copy(
            update={"train": recipe.train.model_copy(update={"micro_batch_rows": 2 * rows})}
        )
        assert sum(predicted_memory(config, recipe, "cuda").values()) <= room
        assert rows == 64 or sum(predicted_memory(config, more, "cuda").values()) > room


def test_a_model_too_large_is_refused_with_a_number_that_holds_it() -> None:
    with pytest.raises(WrongUse, match="does not fit") as caught:
        new_recipe("gpt3-13b", "tokens", "a100-80gb", 1)
    needed = int(caught.value.fix.split()[1])
    assert (
        tomllib.loads(new_recipe("gpt3-13b", "tokens", "a100-80gb", needed + 1))["parallel"]["data"]
        == needed + 1
    )
    assert 13e9 * 18 / (needed * 80 * 2**30) < 1  # bytes of a parameter's states in bf16


def test_what_is_not_given_is_named_where_nobody_can_be_asked(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        main, ["recipe", "new", "--model", "gpt-toy", "--out", str(tmp_path / "r.toml")]
    )
    assert done.exit_code == 2 and "--data, --machine" in done.output and not (tmp_path / "r.toml").exists()


def test_an_unknown_machine_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(WrongUse) as caught:
        new_recipe("gpt2-124m", "tokens/x", "A100")
    assert "a100-40gb" in caught.value.fix and "a100-80gb" in caught.value.fix
    with pytest.raises(WrongUse) as caught:
        new_recipe("gpt2-124m", "tokens/x", "quantum")
    assert caught.value.fix.startswith("one of cpu, v100-16gb")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """400 tokens of GPT-2's vocabulary, a foreign store of Megatron's."""
    from common import index_file

    (tmp_path / "store").mkdir()
    np.zeros(400, np.uint16).tofile(tmp_path / "store" / "00000.bin")
    index_file(tmp_path / "store" / "00000.idx", np.array([400]), np.array([0, 1]), np.uint16)
    return tmp_path / "store"


def test_a_new_recipe_knows_the_store(store: Path, tmp_path: Path) -> None:
    """Passes over it, time and money are told, too many passes warned of, and at least a row is held out."""
    given = ["--data", str(store), "--machine", "cpu"]
    out = str(tmp_path / "r.toml")
    done = CliRunner().invoke(main, ["recipe", "new", "--model", "gpt-toy", *given, "--json", "--out", out])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    recipe = load_recipe(out, Recipe, (), RULES)
    held = recipe.data.validation_fraction * 400
    assert recipe.train.sequence_length < held <= 40.1 and facts["seconds"] > 0
    assert facts["epochs"] == pytest.approx(facts["tokens_to_train"] / (400 - held))
    assert facts["epochs"] > 4 and "the run reads its text" in done.stderr
    long = ["recipe", "new", "--model", "gpt2-124m", *given, "--out", str(tmp_path / "s.toml")]
    done = CliRunner().invoke(main, long)
    assert (
        done.exit_code == 2
        and "too small to validate on" in done.output
        and not (tmp_path / "s.toml").exists()
    )


def test_a_new_recipe_from_weights_has_their_shape(tmp_path: Path) -> None:
    """At a tenth of the rate, for one pass over the store."""
    fields = {"family": "gpt", "config": GPTConfig(vocab_size=50257, layers=3, width=48, heads=4).to_dict()}
    (tmp_path / "step").mkdir()
    (tmp_path / "step" / "model.json").write_text(json.dumps(fields))
    text = new_recipe("", "tokens", init_from=str(tmp_path / "step"), stored=10_000_000)
    (tmp_path / "r.toml").write_text(text)
    recipe = load_recipe(tmp_path / "r.toml", Recipe, (), RULES)
    config = model_config(recipe)
    assert (config.layers, config.width, config.vocab_size) == (3, 48, 50257) and not recipe.model.preset
    assert recipe.optimizer.learning_rate == pytest.approx(6e-5)
    assert recipe.train.steps * recipe.train.rows_per_step * recipe.train.sequence_length == pytest.approx(
        1e7, rel=0.1
    )


@pytest.mark.parametrize(
    ("command", "key", "said"),
    [
        (["train", "gpt-shakespeare"], "train.learning_rate", "it is optimizer.learning_rate here"),
        (["train", "gpt-shakespeare"], "model.layers", "model.overrides.layers"),
        (["train", "gpt-shakespeare"], "train.step", "did you mean steps?"),
        (["finetune", "finetune-search"], "train.learning_rate", "it is optimizer.learning_rate here"),
        (["finetune", "finetune-search"], "model", "it has model.init_from"),
        (["train", "gpt-shakespeare"], "parallel.tp", "it is parallel.tensor here"),
        (["train", "gpt-shakespeare"], "parallel.dp", "it is parallel.data here"),
        (["train", "gpt-shakespeare"], "parallel.fsdp", 'it is parallel.sharding = "full" here'),
        (["train", "gpt-shakespeare"], "optimizer.lr", "it is optimizer.learning_rate here"),
        (["train", "gpt-shakespeare"], "max_model_len", "it is train.sequence_length here"),
        (["train", "gpt-shakespeare"], "model.overrides.n_layer", "it is model.overrides.layers here"),
        (["train", "gpt-shakespeare"], "log.sinks", "--set 'log.sinks=[1]'"),
        (["finetune", "finetune-search"], "lr", "it is optimizer.learning_rate here"),
    ],
)
def test_a_field_of_another_section_is_named_with_it(command: list[str], key: str, said: str) -> None:
    done = CliRunner().invoke(main, [*command, "--set", f"{key}=1"])
    assert done.exit_code == 2 and said in done.output


def test_every_familiar_name_leads_to_a_setting_that_exists() -> None:
    """Each setting is a field of a recipe or of a model's shape, and its value, where it has one, is legal."""
    fields = {key for key, *_ in describe(Recipe)}
    shape = {field.name for each in (GPTConfig, BERTConfig) for field in dataclasses.fields(each)}
    for setting in THEIRS:
        key, _, value = setting.partition(" = ")
        assert key in fields or key.removeprefix("model.overrides.") in shape, key
        load_recipe("gpt-shakespeare", Recipe, [f"{key}={value}"] if value else [])
    names = " ".join(THEIRS.values()).split()
    assert len(names) == len(set(names)) and not any("_" in name or "-" in name for name in names)


def test_a_new_recipe_says_what_a_rented_cluster_costs(tmp_path: Path) -> None:
    """Price a chip and hour times chips times hours."""
    given = [
        "--model",
        "gpt2-124m",
        "--data",
        "tokens/x",
        "--gpus",
        "8",
        "--json",
        "--out",
        str(tmp_path / "r.toml"),
    ]
    done = CliRunner().invoke(main, ["recipe", "new", "--machine", "aws-p4d.24xlarge", *given])
    assert done.exit_code == 0, done.output
    facts, cluster = json.loads(done.stdout), find_cluster("aws-p4d.24xlarge")
    assert facts["cost"] == pytest.approx(cluster.price_per_chip_hour * 8 * facts["seconds"] / 3600)
    done = CliRunner().invoke(
        main, ["recipe", "new", "--machine", "A100", *given[:-1], str(tmp_path / "s.toml")]
    )
    assert done.exit_code == 2 and "--machine" in done.output and "a100-80gb" in done.output


def published_shapes() -> dict[str, ModelConfig]:
    """The shape of one published model of every family that docs/models.md lists."""
    published = json.loads(PUBLISHED_NAMES.read_text())
    for alias, of in (("xlm-roberta", "roberta"), ("megatron-bert", "bert")):
        published[alias] = published[of] | {"config": published[of].get("config", {}) | {"model_type": alias}}
    published["megatron-bert"].pop("config")  # that of the preset
    shapes = {}
    for name, row in published.items():
        shape = preset(row["preset"]) if "preset" in row else read_config(row["config"], {}, name)
        shapes[name] = dataclasses.replace(shape, nsp=False) if isinstance(shape, BERTConfig) else shape
    assert shapes.keys() == families().keys()
    return shapes


def sensible(recipe: Recipe, config: ModelConfig, stored: int) -> None:
    """The numbers that a person who knows pretraining would not stop at."""
    train, held_out = recipe.train, recipe.data.validation_fraction * stored
    assert train.sequence_length <= config.sequence_length
    assert held_out > train.sequence_length and recipe.data.validation_fraction <= 0.1
    rows = train.rows_per_step // recipe.parallel.data
    assert rows.bit_count() == 1 and rows % train.rows_per_micro_batch == 0
    tokens = train.rows_per_step * train.sequence_length
    assert tokens <= max(stored / 20, recipe.parallel.data * train.sequence_length), (
        "a step is a small part of the text"
    )
    assert tokens <= 4e6 * max(config.parameter_count() / 125e6, 0.05), "and of what suits the model"
    assert train.steps >= 20 and len(str(train.steps).rstrip("0")) <= 2
    assert train.steps / 20 - 1 <= train.eval_every_steps <= max(train.steps / 4, 1)
    assert (
        recipe.checkpoint.save_every_steps == train.eval_every_steps
        and recipe.schedule.warmup_steps < train.steps
    )
    assert len(f"{recipe.optimizer.learning_rate:.15g}") <= 7, "no digits of a division"
    assert (train.eval_rows or 0) >= 32


@pytest.mark.parametrize("stored", [2_900, 30_000, 1_000_000, 100_000_000, 1_000_000_000])
def test_a_new_recipe_passes_the_check_for_every_shape_and_size(
    stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every preset and of weights of every family, from 10 kB of text to a thousand million tokens."""
    for name in preset_names():
        tree = tomllib.loads(new_recipe(name, "tokens", tokens=stored, stored=stored))
        recipe = build_recipe(tree, Recipe, RULES)
        sensible(recipe, model_config(recipe), stored)
    for name, shape in published_shapes().items():
        monkeypatch.setattr("throughline.train.recipes.new_recipe.shape_of", lambda _, shape=shape: shape)
        monkeypatch.setattr("throughline.train.recipes.resolved.shape_of", lambda _, shape=shape: shape)
        text = new_recipe("", "tokens", init_from=name, stored=stored)
        recipe = build_recipe(tomllib.loads(text), Recipe, RULES)
        sensible(recipe, shape, stored)
        assert not isinstance(shape, BERTConfig) or recipe.objective.sentences == "none"
        header = text.splitlines()[0]
        assert " 0 " not in header and "0.00" not in header, header


def test_a_new_recipe_from_an_encoder_without_a_pair_task_passes_the_check(tmp_path: Path) -> None:
    """A BertForMaskedLM, as BGE, E5 and MiniLM begin; `--set` changes what is written, and is checked before it is."""
    (tmp_path / "bge").mkdir()
    config = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "vocab_size": 300,
        "hidden_size": 48,
    }
    config |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 96,
        "hidden_act": "gelu",
    }
    config |= {"max_position_embeddings": 128, "type_vocab_size": 2, "layer_norm_eps": 1e-12}
    (tmp_path / "bge" / "config.json").write_text(json.dumps(config))
    weights = {"bert.embeddings.word_embeddings.weight": np.zeros((300, 48), np.float32)}
    safetensors.numpy.save_file(weights, tmp_path / "bge" / "model.safetensors")
    given = ["--from", str(tmp_path / "bge"), "--data", "tokens/x", "--machine", "cpu"]
    out = str(tmp_path / "r.toml")
    done = CliRunner().invoke(main, ["recipe", "new", *given, "--set", "train.steps=70", "--out", out])
    assert done.exit_code == 0, done.output
    assert CliRunner().invoke(main, ["recipe", "check", out]).exit_code == 0
    recipe = load_recipe(out, Recipe, (), RULES)
    assert recipe.objective.sentences == "none" and recipe.train.steps == 70
    out = str(tmp_path / "s.toml")
    done = CliRunner().invoke(
        main, ["recipe", "new", *given, "--set", "train.sequence_length=256", "--out", out]
    )
    assert done.exit_code == 2 and "128 positions" in done.stderr and not Path(out).exists()
    done = CliRunner().invoke(main, ["recipe", "new", *given, "--out", str(tmp_path / "recipe")])
    assert done.exit_code == 2 and "recipe.toml" in done.stderr
