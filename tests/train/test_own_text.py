"""A bare text trains: a recipe is picked by its size and the machine, and why is said."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.recipe import load_recipe
from throughline.data import new_tokenizer
from throughline.data.ingest import inputs
from throughline.data.tokenizer import Tokenizer
from throughline.train.recipes import new_recipe
from throughline.train.recipes.new_recipe import ON_GPU, TOKEN_BYTES, recipe_for_text
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import MOST_EPOCHS
from throughline.train.recipes.rules import RULES


@pytest.mark.parametrize("gpus", [0, 1])
def test_the_longest_recipe_that_the_text_feeds(
    gpus: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No text is read more than four times; of a text that feeds a recipe no longer one would do the same."""
    text = tmp_path / "text.txt"
    text.write_text("some words that are said again " * 40)
    monkeypatch.setattr(new_recipe, "machine", lambda: SimpleNamespace(gpus=("card",) * gpus))
    lengths = []
    for size in (1e5, 5e6, 3e7, 1e8, 1e10):
        monkeypatch.setattr(inputs, "expand_inputs", lambda _, size=size: [SimpleNamespace(bytes=size)])
        monkeypatch.setattr(new_tokenizer, "sample", lambda *_: iter([text.read_text()]))
        name, *overrides = recipe_for_text(str(text), tmp_path / "run", False)
        recipe = load_recipe(name, Recipe, overrides, RULES)
        tokens = recipe.train.steps * recipe.train.rows_per_step * recipe.train.sequence_length
        assert (
            tokens <= 1.01 * MOST_EPOCHS * size / TOKEN_BYTES or recipe.train.steps == new_recipe.LEAST_STEPS
        )
        assert name in (ON_GPU if gpus else new_recipe.ON_CPU) and f"recipe {name}" in capsys.readouterr().err
        assert Tokenizer.load(recipe.data.tokenizer).vocab_size <= recipe.model.overrides["vocab_size"]
        lengths.append(ON_GPU.index(name))
    assert lengths == sorted(lengths) and lengths[0] == 0
    assert lengths[-1] == len(ON_GPU if gpus else new_recipe.ON_CPU) - 1


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


def test_weights_take_no_picked_recipe(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("words")
    done = CliRunner().invoke(main, ["train", str(tmp_path / "my.txt"), "--init-from", "gpt2"])
    assert done.exit_code == 2 and "recipe new --from" in done.output
