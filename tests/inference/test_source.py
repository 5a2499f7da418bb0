"""Wherever a trained model lies, run, checkpoint, model artifact or ONNX artifact, it opens as the same
model.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from small_models import read
from throughline.cli.main import main
from throughline.core.artifact import chain, create_artifact
from throughline.core.errors import Refused, WrongUse
from throughline.inference.exports.export import export_onnx
from throughline.inference.exports.handover import export_huggingface
from throughline.inference.runtimes import source
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.runtimes.source import find_model, open_model
from throughline.train.checkpoints.run_directory import locate


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT trained for two steps by the command line, on a few lines of text."""
    at = tmp_path_factory.mktemp("run")
    (at / "text.txt").write_text(
        "\n\n".join(f"line {i} of a text that repeats itself, number {i * i}." for i in range(300))
    )
    shape = {"model.overrides.layers": 2, "model.overrides.width": 32, "train.sequence_length": 32}
    length = {
        "train.steps": 2,
        "schedule.warmup_steps": 0,
        "train.compile": "off",
        "data.train": at / "tokens",
    }
    settings = [f"{key}={value}" for key, value in (shape | length).items()]
    for words in (
        [
            "data",
            "tokenizer",
            at / "text.txt",
            "--type",
            "bpe",
            "--vocab-size",
            "300",
            "--out",
            at / "tokenizer",
        ],
        ["data", "tokenize", at / "text.txt", "--tokenizer", at / "tokenizer", "--out", at / "tokens"],
        [
            "train",
            "gpt-shakespeare",
            "--run-dir",
            at / "run",
            *(word for setting in settings for word in ("--set", setting)),
        ],
    ):
        result = CliRunner().invoke(main, [str(word) for word in words])
        assert result.exit_code == 0, result.output
    return at / "run"


def test_run_checkpoint_and_exports_are_one_model(trained_run: Path, tmp_path: Path) -> None:
    checkpoint = trained_run / "checkpoints" / (trained_run / "checkpoints" / "latest").read_text().strip()
    export_onnx(trained_run, tmp_path / "onnx")
    export_huggingface(checkpoint, tmp_path / "model")
    ids, ask = np.arange(20)[None] % 250, np.arange(20)[None]
    logits = []
    for path in (trained_run, checkpoint, tmp_path / "model", tmp_path / "onnx"):
        loaded = open_backend(path)
        backend = loaded.causal
        logits.append(read(backend, ids, np.zeros(1, np.int64), ask, backend.new_cache(1)))
        assert loaded.tokenizer is not None
    for other in logits[1:]:
        # fp32 sums in another order, see parity.BOUND
        np.testing.assert_allclose(other, logits[0], atol=1e-4)
    kinds = [item.kind for _, item, unchanged in chain(tmp_path / "onnx") if unchanged]
    assert kinds[0] == "checkpoint" and "tokens" in kinds and "foreign" in kinds  # back to the text


def test_a_run_in_sixteen_bits_is_handed_on_in_them(
    trained_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its masters are fp32, in which a processor computes."""
    kept = source.read_manifest

    def told(path: Path) -> Any:
        manifest = kept(path)
        manifest.facts["precision"] = "bf16"
        return manifest

    monkeypatch.setattr(source, "read_manifest", told)
    export_huggingface(trained_run, tmp_path / "model")
    stored = [find_model(path).stored_dtype("cpu") for path in (trained_run, tmp_path / "model")]
    assert stored == ["fp32", "bf16"]


def test_a_checkpoint_cut_in_half_is_refused(trained_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "checkpoint"
    shutil.copytree(next((trained_run / "checkpoints").glob("step-*")), copy)
    weights = next(copy.glob("weights-*.safetensors"))
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(Refused, match="wrong size"):
        open_model(copy)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"manifest.json": "tokens"}, "artifact of kind tokens"),
        ({"manifest.json": "tokenizer"}, "artifact of kind tokenizer"),
        ({"adapter_config.json": "{}"}, "merge it first"),
        ({"recipe.toml": "", "metrics.jsonl": ""}, "no checkpoint yet"),
        ({}, "it is empty"),
    ],
)
def test_what_is_no_model_is_called_what_it_is(tmp_path: Path, files: dict[str, str], said: str) -> None:
    place = tmp_path / "place"
    if kind := files.get("manifest.json"):
        with create_artifact(place, kind) as draft:
            (draft.path / "file").write_text("x")
    else:
        place.mkdir()
        for name, text in files.items():
            (place / name).write_text(text)
    with pytest.raises(WrongUse) as refused:
        open_model(place)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("bert-base-uncased", True),
        ("runs/my-gpt", False),
        ("/models/gpt2", False),
        ("../gpt2", False),
    ],
)
def test_a_name_of_the_hub_is_answered_with_its_download(name: str, asked: bool) -> None:
    for opened in (
        lambda: open_model(name),
        lambda: locate(Path(name).absolute()),
    ):  # of a recipe's init_from
        with pytest.raises(WrongUse) as refused:
            opened()
        assert (f"hf download {name} --local-dir" in refused.value.fix) == asked
