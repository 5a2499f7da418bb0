"""Every family goes a user's way from a directory of its own: text or vectors, a score, a graph, a file of llama.cpp's,
the directory again, and a server.
"""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from click.testing import CliRunner
from model_directories import bert_tokenizer, gpt_tokenizer, write_model
from small_models import opinionated_model
from throughline.cli.main import main
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.families import families


def tables() -> ModuleType:
    """The tiny models that are compared with transformers."""
    file = Path(__file__).parents[1] / "models" / "test_models_transformers.py"
    spec = importlib.util.spec_from_file_location("test_models_transformers", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TABLES = tables()
PROMPT, NEW = "The quick brown", 12
DECODERS = {kind: fields for fields, kind in reversed(TABLES.DECODERS.values())}
ENCODERS = {kind: fields for fields, kind in reversed(TABLES.ENCODERS.values())}


def test_none_is_left_out() -> None:
    assert DECODERS.keys() | ENCODERS.keys() | {"bert"} == families().keys()


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each family, with a tokenizer."""
    folder, words = tmp_path_factory.mktemp("families"), bert_tokenizer()
    for kind, fields in DECODERS.items():
        config = GPTConfig.from_dict(fields | {"vocab_size": 304, "sequence_length": 64})
        write_model(folder / kind, opinionated_model(config), gpt_tokenizer())
    for kind, fields in ENCODERS.items():
        # positions of a RoBERTa begin behind the id of padding, which is 0 here
        fields = fields | ({"position_offset": 1} if "position_offset" in fields else {})
        config = BERTConfig.from_dict(fields | {"vocab_size": words.get_vocab_size(), "sequence_length": 64})
        write_model(folder / kind, opinionated_model(config), words)
    return folder


@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_a_directory_is_planned(kind: str, directories: Path) -> None:
    """Layouts of all axes are priced, ranked and told."""
    told = said("plan", directories / kind, "--on", "dgx-h100", "--gpus", 8, "--rows", 64)
    assert "D8 micro" in told
    assert kind == "bloom" or "tensor x 2" in told


def said(*words: object) -> str:
    done = CliRunner().invoke(main, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_writes_the_same_text_from_whatever_it_becomes(
    kind: str, directories: Path, tmp_path: Path
) -> None:
    """Greedy text of torch, of the graph, and of the directory that is written back."""
    how = ("--prompt", PROMPT, "--max-tokens", NEW, "--temperature", 0)
    path = directories / kind
    text = said("generate", path, *how)
    said("export", path, "--to", "huggingface", "--out", tmp_path / "again", "--no-bench")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["model_type"] == kind
    assert said("generate", tmp_path / "again", *how) == text
    said("export", path, "--to", "onnx", "--out", tmp_path / "graph", "--no-bench")
    assert said("generate", tmp_path / "graph", *how) == text


@pytest.mark.slow
@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_embeds_alike_from_whatever_it_becomes(
    kind: str, directories: Path, tmp_path: Path
) -> None:
    path, texts = directories / kind, tmp_path / "texts.txt"
    texts.write_text("A model reads text.\nThe lazy dog jumps again and again.\n")
    said("export", path, "--to", "huggingface", "--out", tmp_path / "again", "--no-bench")
    said("export", path, "--to", "onnx", "--out", tmp_path / "graph", "--no-bench")
    found = []
    for number, place in enumerate((path, tmp_path / "again", tmp_path / "graph")):
        said("embed", place, texts, "--out", tmp_path / f"{number}.npy")
        found.append(np.load(tmp_path / f"{number}.npy"))
    for other in found[1:]:  # float32
        np.testing.assert_allclose(found[0], other, atol=1e-5)


def test_one_server_has_them_all(directories: Path, in_thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder's completion is the text of `generate`; an encoder gives a vector and a masked word."""
    texts = {
        kind: said(
            "generate", directories / kind, "--prompt", PROMPT, "--max-tokens", NEW, "--temperature", 0
        )
        for kind in DECODERS
    }

    async def body(running) -> None:
        for kind, text in texts.items():
            answer = await running.complete(model=kind, prompt=PROMPT, max_tokens=NEW)
            assert PROMPT + answer["choices"][0]["text"] == text.removesuffix("\n"), kind
        for kind in ENCODERS:
            given = {"model": kind, "input": "A model reads text."}
            answer = await running.client.post("/v1/embeddings", json=given)
            assert len(answer.json()["data"][0]["embedding"]) == ENCODERS[kind]["width"], kind
            masked = {"model": kind, "input": "A model [MASK] text."}
            answer = await running.client.post("/v1/fill-mask", json=masked)
            assert answer.status_code == 200, answer.text

    specs = [f"{kind}={directories / kind}" for kind in (*DECODERS, *ENCODERS)]
    in_thread.run_with(monkeypatch, specs, body)
