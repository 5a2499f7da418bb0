"""`throughline train`, `report` and `compare` as a user meets them: one clear error, the right exit code,
nothing left behind.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from throughline.cli.main import main
from throughline.core.recipe import dump_toml
from throughline.train.recipes.recipe import Recipe


@pytest.fixture
def recipe(make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(dump_toml(make_recipe("gpt")))
    return "small.toml"


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_trains_reports_and_compares(recipe: str, tmp_path: Path) -> None:
    result = call("train", recipe, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["step"] == 6
    assert set(summary["validation"]) == {"loss", "perplexity", "tokens", "bits_per_byte"}
    (tmp_path / "runs/small/report.html").unlink()
    assert call("report", "runs/small").exit_code == 0
    assert (tmp_path / "runs/small/report.html").is_file()
    assert call("train", recipe, "--run-dir", "other", "--set", "train.micro_batch_rows=2").exit_code == 0
    assert call("compare", "runs/small", "other").exit_code == 0
    result = call("compare", "runs/small", "other", "--bound", "1e-12")
    assert result.exit_code == 3
    assert "differ by more than" in result.stderr
    (tmp_path / "runs/small").rename(tmp_path / "moved")
    assert call("report", "moved").exit_code == 0
    assert call("verify", "moved").exit_code == 0


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(recipe: str, tmp_path: Path) -> None:
    result = call("train", recipe, "--dry-run", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["tokens_to_train"] == 6 * 4 * 32
    assert facts["memory_bytes"] == sum(facts["memory"].values())
    assert not (tmp_path / "runs").exists()


def test_never_is_meant_for_the_first_start(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that its launcher starts again after a fault goes on, whatever was asked at first."""
    more = ("--resume", "never", "--set", "schedule.kind=constant")
    assert call("train", recipe, *more, "--set", "train.steps=2").exit_code == 0
    assert call("train", recipe, *more, "--set", "train.steps=4").exit_code == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    result = call("train", recipe, *more, "--set", "train.steps=4")
    assert result.exit_code == 0 and "resumed at step 2" in result.stderr, result.output


def test_the_profile_has_a_trace_and_time_per_class(recipe: str, tmp_path: Path) -> None:
    result = call("train", recipe, "--profile", "--set", "train.steps=12")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "runs/small/profile"
    assert json.loads((folder / "trace.json").read_text())["traceEvents"]
    facts = json.loads((folder / "kernels.json").read_text())
    classes = {row["class"]: row for row in facts["classes"]}
    kinds = {row["kind"]: row for row in facts["kinds"]}
    assert all(
        kinds[kind]["ms"] > 0 and kinds[kind]["planned_ms"] > 0 for kind in ("product", "attention", "memory")
    )
    assert {"matrix products", "attention", "norms", "optimizer", "loss"} <= set(classes)
    assert sum(row["share"] for row in classes.values()) == pytest.approx(100)


def test_a_run_shorter_than_what_is_profiled(recipe: str, tmp_path: Path) -> None:
    """Two profiled steps of six are counted as two (as often called as in a longer run); of four there is
    none.
    """
    calls = {}
    for steps in (6, 12):
        assert (
            call(
                "train", recipe, "--profile", "--set", f"train.steps={steps}", "--run-dir", str(steps)
            ).exit_code
            == 0
        )
        rows = json.loads((tmp_path / str(steps) / "profile" / "kernels.json").read_text())["classes"]
        calls[steps] = {row["class"]: row["calls"] for row in rows}["attention"]
    assert calls[6] == calls[12]
    result = call("train", recipe, "--profile", "--set", "train.steps=4", "--run-dir", "4")
    assert result.exit_code == 0 and "no profile" in result.stderr
    assert list((tmp_path / "4" / "profile").iterdir()) == []


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        (["train.stepz=5"], 2, "did you mean steps"),
        (["model.preset=gtp-toy"], 2, "did you mean gpt-toy"),
        (["data.train=nowhere"], 2, "nowhere"),
        (["model.preset=gpt-1t-megatron", "model.overrides={}"], 3, "the largest that fits"),
        (["model.overrides.vocab_size=5"], 3, "largest id"),
        (["train.device=cuda"], 2, "no CUDA device"),
    ],
)
def test_bad_input_is_one_clear_error_and_leaves_nothing(
    recipe: str, tmp_path: Path, settings: list[str], code: int, words: str
) -> None:
    import torch

    if "train.device=cuda" in settings and torch.cuda.is_available():
        pytest.skip("has a CUDA device")
    result = call("train", recipe, *(part for setting in settings for part in ("--set", setting)))
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert "fix:" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_bert_on_tokens_without_its_special_ones_is_told_how_to_make_them(
    recipe: str, tmp_path: Path
) -> None:
    result = call("train", recipe, "--set", "model.family=bert", "--run-dir", "bert")
    assert result.exit_code == 2
    assert (
        "no [CLS], [SEP], [MASK]: it is of type char" in result.stderr and "--type wordpiece" in result.stderr
    )
    assert not (tmp_path / "bert").exists()


def test_a_flipped_byte_in_a_store_is_refused(recipe: str, tmp_path: Path, gpt_store: Path) -> None:
    shutil.copytree(gpt_store, tmp_path / "store")
    tokens = tmp_path / "store/00000.bin"
    data = bytearray(tokens.read_bytes())
    data[1000] ^= 4
    tokens.write_bytes(data)
    result = call("train", recipe, "--set", "data.train=store")
    assert result.exit_code == 3
    assert "00000.bin" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_a_checkpoint_cut_in_half_is_refused_or_an_older_one_used(recipe: str, tmp_path: Path) -> None:
    assert call("train", recipe, "--set", "checkpoint.save_every_steps=3").exit_code == 0
    (tmp_path / "runs/small/manifest.json").unlink()
    cut = tmp_path / "runs/small/checkpoints/step-00000006/weights-00000.safetensors"
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    result = call("train", recipe, "--set", "checkpoint.save_every_steps=3")
    assert result.exit_code == 0, result.output
    assert "step-00000006/weights-00000.safetensors" in result.stderr
    assert "resumed at step 3" in result.stderr
    for step in (3, 6):
        cut = tmp_path / f"runs/small/checkpoints/step-0000000{step}/weights-00000.safetensors"
        cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    result = call("train", recipe, "--set", "checkpoint.save_every_steps=3")
    assert result.exit_code == 3
    assert "wrong size" in result.stderr
