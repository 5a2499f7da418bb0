"""A bare text trains: a recipe is picked by its size and the machine, and why is said."""

import csv
import json
import os
import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.artifact import read_manifest
from throughline.core.recipe import load_recipe
from throughline.data.tokenizer import Tokenizer
from throughline.train.corpus import open_corpus
from throughline.train.recipes import own_text
from throughline.train.recipes.own_text import ON_GPU, TOKEN_BYTES, recipe_for_text, with_tokenizer
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import MOST_EPOCHS, resolve
from throughline.train.recipes.rules import RULES


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_longest_recipe_that_the_text_feeds(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No text is read more than four times; of a text that feeds a recipe no longer one would do the same."""
    text = tmp_path / "text.txt"
    text.write_text("some words that are said again " * 40)
    monkeypatch.setattr(own_text, "machine", lambda: SimpleNamespace(gpus=("card",) * gpus))
    lengths = []
    for size in (1e5, 5e6, 3e7, 1e8, 1e10):
        monkeypatch.setattr(own_text, "text_bytes", lambda *_, size=size: size)
        name, overrides = recipe_for_text(str(text), [])
        recipe = load_recipe(name, Recipe, overrides, RULES)
        tokens = recipe.train.steps * recipe.train.rows_per_step * recipe.train.sequence_length
        assert (
            tokens <= 1.01 * MOST_EPOCHS * size * (1 - recipe.data.validation_fraction) / TOKEN_BYTES
            or recipe.train.steps == own_text.LEAST_STEPS
        )
        assert name in (ON_GPU if gpus else own_text.ON_CPU) and f"recipe {name}" in capsys.readouterr().err
        lengths.append(ON_GPU.index(name))
    assert lengths == sorted(lengths) and lengths[0] == 0
    assert lengths[-1] == len(ON_GPU if gpus else own_text.ON_CPU) - 1


def test_a_text_trains_and_its_report_has_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time the same run goes on: its tokenizer is there. The page names no absolute path."""
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("".join(f"It is said that {n} is a number of things.\n\n" for n in range(4000)))
    small = [
        "train.steps=4",
        "train.eval_every_steps=2",
        "schedule.warmup_steps=1",
        "model.overrides.width=32",
    ]
    small += ["model.overrides.layers=1", "model.overrides.heads=2", "train.sequence_length=32"]
    words = ["train", "my.txt", *(word for one in small for word in ("--set", one))]
    for said in ("report: runs/my/report.html", "already trained"):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 0 and said in done.output, done.output
    page = Path("runs/my/report.html").read_text()
    assert "Samples" in page and "step 2" in page and "It is said that" in page and "my.txt (" in page
    assert str(tmp_path) not in page
    assert Tokenizer.load("runs/my").vocab_size == Tokenizer.load("runs/my/cache/tokenizer").vocab_size


def test_weights_take_no_picked_recipe(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("words")
    done = CliRunner().invoke(main, ["train", str(tmp_path / "my.txt"), "--init-from", "gpt2"])
    assert done.exit_code == 2 and "recipe new --from" in done.output


DOCUMENTS = [
    {"id": number, "subject": f"ticket {number}", "body": f"Der Kunde {number} fragt: 你好 😀"}
    for number in range(600)
]


def write_documents(folder: Path) -> dict[str, tuple[str, int]]:
    """Texts of every form: path, and the number of documents when `body` is read or each file is a document."""
    import pyarrow.parquet

    bodies = [record["body"] for record in DOCUMENTS]
    lines = [json.dumps(record, ensure_ascii=False) for record in DOCUMENTS]
    (folder / "docs.jsonl").write_text("\n".join(lines))
    with (folder / "docs.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, list(DOCUMENTS[0]))
        table.writeheader()
        table.writerows(DOCUMENTS)
    (folder / "docs.tsv").write_text(
        "id\tbody\n" + "".join(f"{n}\t{body}\n" for n, body in enumerate(bodies))
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(DOCUMENTS), folder / "docs.parquet")
    (folder / "parts").mkdir()
    for part in range(2):
        (folder / "parts" / f"{part}.jsonl").write_text("\n".join(lines[part * 300 :][:300]))
    (folder / "2024").mkdir()
    for part in range(3):
        (folder / "2024" / f"我的 notes {part}.txt").write_text("\n\n".join(bodies[part * 200 :][:200]))
    return {
        "docs.jsonl": ("data.field=body", 600),
        "docs.csv": ("data.field=body", 600),
        "docs.tsv": ("data.field=body", 600),
        "docs.parquet": ("data.field=body", 600),
        "parts": ("data.field=body", 600),
        "2024": ("data.documents=file", 3),
    }


def test_the_read_options_decide_what_the_tokenizer_and_the_store_are_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`train FILE --set data.field=body` of each form of text: every body is a document, and nothing else is read."""
    monkeypatch.chdir(tmp_path)
    for place, (option, documents) in write_documents(tmp_path).items():
        name, overrides = recipe_for_text(place, [option, "model.overrides.vocab_size=320"])
        recipe = with_tokenizer(
            resolve(load_recipe(name, Recipe, overrides, RULES)), tmp_path / "runs" / place
        )
        tokenizer = Tokenizer.load(recipe.data.tokenizer)
        assert any("unde" in piece for piece in tokenizer.vocab) and not any(
            "ticket" in piece for piece in tokenizer.vocab
        )
        corpus = open_corpus(recipe, tmp_path / "runs" / place)
        (store,) = (tmp_path / "runs" / place).glob("text-*")
        assert read_manifest(store).facts["documents"] == documents, place
        text = tokenizer.decode(corpus.train[0].read(0, 40))
        assert text.startswith(DOCUMENTS[0]["body"]), place
        before = os.stat(recipe.data.tokenizer).st_ino
        assert (
            os.stat(with_tokenizer(recipe_without(recipe), tmp_path / "runs" / place).data.tokenizer).st_ino
            == before
        )


def recipe_without(recipe: Recipe) -> Recipe:
    """The recipe before its tokenizer was trained."""
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"tokenizer": ""})})


def test_a_dry_run_of_a_text_trains_no_tokenizer_and_estimates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimates are within a fifth of what the run then reads; a field that is not there is found at once."""
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path)
    monkeypatch.setattr("throughline.data.new_tokenizer.train_tokenizer", None)
    done = CliRunner().invoke(main, ["train", "docs.csv", "--set", "data.field=body", "--dry-run", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    tokens = sum(len(record["body"].encode()) for record in DOCUMENTS) / TOKEN_BYTES
    assert found["train_tokens_in_store"] + found["validation_tokens"] == pytest.approx(tokens, rel=0.2)
    assert found["validation_tokens"] > 256, "a row and more"
    assert not Path("runs").exists()
    done = CliRunner().invoke(main, ["train", "docs.csv", "--dry-run"])
    assert done.exit_code == 2 and "body" in done.stderr and "data.field" in done.stderr


@pytest.mark.parametrize("place", ["docs.jsonl", "2024"])
def test_the_next_longer_command_runs_as_printed(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the text and how it is read; a directory called 2024 stays a name."""
    monkeypatch.chdir(tmp_path)
    option = write_documents(tmp_path)[place][0]
    done = CliRunner().invoke(main, ["train", place, "--set", option, "--dry-run"])
    (command,) = re.findall("next longer: throughline (.*)", done.stderr)
    assert option in command
    done = CliRunner().invoke(main, [*shlex.split(command), "--dry-run"])
    assert done.exit_code == 0 and "5,000 steps" in done.stdout, done.output


def test_a_bert_of_a_text_is_a_bert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--set model.family=bert` picks a recipe of an encoder, with a WordPiece tokenizer of its size."""
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path)
    settings = ["model.family=bert", "data.field=body", "model.overrides.vocab_size=100"]
    name, overrides = recipe_for_text("docs.jsonl", settings)
    recipe = with_tokenizer(resolve(load_recipe(name, Recipe, overrides, RULES)), tmp_path / "cache")
    assert name == "bert-shakespeare" and recipe.model.family == "bert"
    tokenizer = Tokenizer.load(recipe.data.tokenizer)
    assert (tokenizer.type, tokenizer.vocab_size) == ("wordpiece", 100) and tokenizer.mask_id is not None


def test_a_text_with_a_preset_is_refused_with_the_commands_that_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_documents(tmp_path)
    done = CliRunner().invoke(main, ["train", "2024", "--set", "model.preset=bert-base"])
    assert done.exit_code == 2 and "--sentences" in done.stderr and "--model bert-base" in done.stderr


def test_the_users_settings_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With steps of the user's own, evaluations and checkpoints follow them, and a setting is never overwritten."""
    monkeypatch.chdir(tmp_path)
    Path("my.txt").write_text("some words that are said again " * 4000)
    name, overrides = recipe_for_text("my.txt", ["train.steps=6000", "train.eval_rows=7"])
    train = load_recipe(name, Recipe, overrides, RULES).train
    assert (train.steps, train.eval_every_steps, train.eval_rows) == (6000, 1000, 7)
