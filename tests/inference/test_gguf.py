"""GGUF files: llama.cpp computes from them what torch computes, reads the same tokens, and generates, embeds
and batches behind the same protocols. Skipped where llama-cpp-python (a build of minutes) is not installed.
"""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from throughline.core.artifact import Input
from throughline.core.backend import BackendOptions, Span
from throughline.core.errors import Refused, WrongUse
from throughline.data.tokenizer import Tokenizer
from throughline.inference.backends import open_backend
from throughline.inference.gguf_export import BOUNDS, compare_gguf, export_gguf
from throughline.inference.gguf_writer import architecture_of, write_gguf
from throughline.inference.slots import generate
from throughline.inference.source import OpenedModel
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.init import build

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
pytest.importorskip("gguf")

SHAPES = {
    "gpt2": GPTConfig(vocab_size=97, sequence_length=64, layers=2, width=64, heads=4),
    "llama": GPTConfig(
        vocab_size=97, sequence_length=64, layers=2, width=64, heads=4, kv_heads=2, positions="rotary",
        norm="rmsnorm", gated=True, activation="silu", bias=False, tied=False, mlp_width=96,
    ),
    "bert": BERTConfig(vocab_size=97, sequence_length=64, layers=2, width=64, heads=4),
}  # fmt: skip


def opinionated(name: str):
    """A model whose matrices are large enough that positions, order and reordering show in every output."""
    import torch

    model = build(SHAPES[name], 1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.dim() == 2 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("precision", ["f32", "q8_0"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_llama_cpp_computes_what_torch_computes(name: str, precision: str, tmp_path: Path) -> None:
    model, file = opinionated(name), tmp_path / "model.gguf"
    write_gguf(model, None, file, precision)
    opened = OpenedModel(model, None, Input("here", "model", ""))
    found = compare_gguf(opened, file, model.config, precision)  # raises above its bound
    assert architecture_of(model.config) == name
    if precision == "f32":  # a wrong order of rows or positions costs whole nats
        assert next(iter(found.values())) < BOUNDS["f32"]
    other = dataclasses.replace(model.config, sequence_length=32)
    assert other != model.config


def test_what_llama_cpp_computes_otherwise_is_refused() -> None:
    with pytest.raises(Refused, match="tanh-GELU"):
        architecture_of(dataclasses.replace(SHAPES["gpt2"], activation="gelu"))


def test_an_artifact_tokenises_generates_and_shares_prompts(gpt_dir: Path, tmp_path: Path) -> None:
    """The tokens of llama.cpp's own tokenizer are ours, greedy text is torch's, alone and in a batch."""
    from throughline.inference.generation import Request

    report = export_gguf(gpt_dir, tmp_path / "gguf", "f32")
    assert report["mean_kl"] <= BOUNDS["f32"]
    options = BackendOptions(device="cpu", threads=1)
    torch_one, llama_one = (open_backend(path, options).causal for path in (gpt_dir, tmp_path / "gguf"))
    assert torch_one is not None and llama_one is not None and llama_one.name == "llamacpp"
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 300, 40)
    requests = [Request(prompt, 12), Request(prompt, 12), Request(rng.integers(0, 300, 5), 12)]
    answers = []
    for backend, slots in ((torch_one, 1), (llama_one, 1), (llama_one, 3)):
        ids: list[list[int]] = [[] for _ in requests]
        for number, delta in generate(backend, lambda ids: "", requests, slots):
            assert delta.token is not None
            ids[number].append(delta.token.id)
        answers.append(ids)
    assert answers[0] == answers[1] == answers[2]
    cache = llama_one.new_cache(2)  # a span written again over what was behind
    once = llama_one.step([Span(0, 0, prompt[:9], 1), Span(1, 0, prompt[:3], 0)], cache)
    again = llama_one.step([Span(0, 5, prompt[5:9], 1)], cache)
    np.testing.assert_allclose(once, again, atol=1e-3 * float(abs(once).max()))

    text = "The quick brown fox; naïve café 東京 🙂 again\n\n  and 12 again."
    expected = Tokenizer.load(gpt_dir).encode(text).tolist()
    model = llama_one._model
    vocab, buffer = llama_cpp.llama_model_get_vocab(model), (llama_cpp.llama_token * 200)()
    raw = text.encode()
    count = llama_cpp.llama_tokenize(vocab, raw, len(raw), buffer, 200, False, False)
    assert list(buffer)[:count] == expected


def test_a_dtype_or_runtime_of_its_own(gpt_dir: Path, tmp_path: Path) -> None:
    export_gguf(gpt_dir, tmp_path / "gguf", "f16")
    with pytest.raises(WrongUse, match="has its own precision"):
        open_backend(tmp_path / "gguf", BackendOptions(dtype="fp16"))
    with pytest.raises(WrongUse, match="does not run a GGUF"):
        open_backend(tmp_path / "gguf", BackendOptions(runtime="torch"))
