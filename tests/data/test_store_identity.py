"""A store's hash stands for its tokens, documents, tokenizer and the options that decide them, and for nothing else."""

import os
import shutil
from pathlib import Path

import pytest
from throughline.core.artifact import read_manifest
from throughline.data.ingest.readers import ReadOptions
from throughline.data.ingest.tokenize import Work, tokenize
from throughline.data.new_tokenizer import train_tokenizer

TEXT = "".join(f"paragraph {i} with some words\n\n" for i in range(2000))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("identity")
    (folder / "a.txt").write_text(TEXT)
    train_tokenizer([TEXT], "bpe", 300).save(folder / "bpe")
    return folder


def hash_of(text: Path, place: Path, out: Path, **settings) -> str:
    tokenize([str(text)], place / "bpe", out, shard_bytes=20_000, **settings)
    return read_manifest(out).hash


@pytest.fixture(scope="module")
def first(place: Path) -> str:
    return hash_of(place / "a.txt", place, place / "store")


def test_place_time_encoder_and_workers_leave_no_trace(place: Path, first: str, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.txt"
    shutil.copyfile(place / "a.txt", copy)
    os.utime(copy, (1, 1))
    assert hash_of(copy, place, tmp_path / "copied") == first
    assert hash_of(copy, place, tmp_path / "reference", work=Work(backend="tokenizers")) == first
    assert hash_of(copy, place, tmp_path / "many", work=Work(workers=7)) == first
    made = [read_manifest(tmp_path / name).facts["made"] for name in ("copied", "reference")]
    assert made[0]["plan"] == made[1]["plan"], "what it was made from is kept beside it"
    assert read_manifest(place / "store").facts["made"]["plan"] != made[0]["plan"]


def test_a_changed_byte_or_option_changes_it(place: Path, first: str, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text(TEXT.replace("paragraph 7 ", "paragraph 8 ", 1))
    assert hash_of(tmp_path / "b.txt", place, tmp_path / "changed") != first
    assert hash_of(place / "a.txt", place, tmp_path / "bare", append_eos=False) != first
    lines = ReadOptions(documents="line")  # the same tokens here: blank lines are no documents
    assert hash_of(place / "a.txt", place, tmp_path / "lines", options=lines) != first


def test_a_run_goes_on_over_the_same_text_tokenised_again(place: Path, tmp_path: Path) -> None:
    """From a copy elsewhere by another encoder into the same directory; over other text it is refused."""
    from click.testing import CliRunner
    from throughline.cli.main import main

    copy = tmp_path / "copy.txt"
    shutil.copyfile(place / "a.txt", copy)
    settings = {"data.train": tmp_path / "tokens", "train.device": "cpu", "train.eval_every_steps": 0}
    settings |= {"model.overrides.layers": 1, "model.overrides.width": 32, "model.overrides.heads": 2}
    settings |= {"train.sequence_length": 32, "train.batch_rows": 2, "schedule.warmup_steps": 1}
    settings |= {"data.validation_fraction": 0.0, "schedule.final_fraction": 0.1}

    def train(steps: int) -> str:
        given = {**settings, "train.steps": steps}
        sets = [word for key, value in given.items() for word in ("--set", f"{key}={value}")]
        run = ["train", "gpt-shakespeare", *sets, "--run-dir", str(tmp_path / "run")]
        return CliRunner().invoke(main, run).output

    hash_of(place / "a.txt", place, tmp_path / "tokens")
    assert "error" not in train(2)
    hash_of(copy, place, tmp_path / "tokens", overwrite=True, work=Work(backend="tokenizers"))
    assert "error" not in (said := train(4)), said
    assert read_manifest(tmp_path / "run").facts["step"] == 4
    copy.write_text(TEXT.replace("paragraph 7 ", "paragraph 8 ", 1))
    hash_of(copy, place, tmp_path / "tokens", overwrite=True)
    assert "the data have changed since the run was saved" in train(6)
