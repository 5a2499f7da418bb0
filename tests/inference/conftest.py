"""Small models with tokenizers, written once per session as Hugging Face directories: what every inference
test starts from.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType

import pytest
from safetensors.torch import save_file
from throughline.core.backend import BackendOptions, CausalBackend
from throughline.inference.runtimes.backends import open_backend
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.huggingface import to_huggingface
from throughline.models.init import build

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside the tests

from model_directories import bert_tokenizer, gpt_tokenizer, opinionated, write_model

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def gpt_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2-shaped model with random weights, large enough in its initial values to have opinions."""
    tokenizer = gpt_tokenizer()
    config = GPTConfig(vocab_size=304, sequence_length=160, layers=2, width=48, heads=4, tied=False)
    return write_model(tmp_path_factory.mktemp("gpt") / "gpt", opinionated(build(config, 3)), tokenizer)


@pytest.fixture(scope="session")
def bert_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT-shaped model with random weights and both heads."""
    tokenizer = bert_tokenizer()
    config = BERTConfig(
        vocab_size=tokenizer.get_vocab_size(), sequence_length=64, layers=2, width=48, heads=4
    )
    return write_model(tmp_path_factory.mktemp("bert") / "bert", opinionated(build(config, 5)), tokenizer)


@pytest.fixture
def chat_dir(gpt_dir: Path, tmp_path: Path) -> Path:
    """The GPT with a chat template and its two marks as special tokens."""
    directory = tmp_path / "chat"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        (directory / name).symlink_to(gpt_dir / name)
    tokenizer = json.loads((gpt_dir / "tokenizer.json").read_text())
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [
        {"id": 300 + i, "content": content} | usual
        for i, content in enumerate(("<|im_start|>", "<|im_end|>"))
    ]
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


KINDS = ["byte-level", "sentencepiece"]  # of tokenizers, over which the tests of texts run


@pytest.fixture(scope="session", params=KINDS)
def text_dir(request: pytest.FixtureRequest) -> Path:
    """A GPT with a byte-level tokenizer, and one with a SentencePiece-style tokenizer."""
    return request.getfixturevalue(
        {"byte-level": "gpt_dir", "sentencepiece": "sentencepiece_dir"}[request.param]
    )


@pytest.fixture(scope="session")
def text_onnx(text_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as an ONNX artifact."""
    from throughline.inference.exports.export import export_onnx

    out = tmp_path_factory.mktemp("onnx") / "text-onnx"
    export_onnx(text_dir, out)
    return out


@pytest.fixture(params=KINDS)
def talking_dir(request: pytest.FixtureRequest) -> Path:
    """The models of `text_dir` with a chat template."""
    return request.getfixturevalue(
        {"byte-level": "chat_dir", "sentencepiece": "sentencepiece_dir"}[request.param]
    )


@pytest.fixture
def ask_texts(
    text_dir: Path, text_onnx: Path, in_thread, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Runs an async test body against a server with the model of `text_dir` in ONNX and in torch."""
    specs = [f"gpt={text_onnx}", f"torch={text_dir}"]
    return lambda body, **limits: in_thread.run_with(monkeypatch, specs, body, **limits)


@pytest.fixture
def judge_dir(bert_dir: Path, tmp_path: Path) -> Path:
    """The BERT with a head of two classes."""
    from throughline.inference.runtimes.source import open_model
    from throughline.models.bert import Head
    from throughline.models.init import build_with_head

    head = Head("sequence-classification", ("bad", "good"))
    fields, state = to_huggingface(build_with_head(open_model(bert_dir).model, head, 3))
    state["classifier.weight"] = state["classifier.weight"] * 30  # shares away from a half
    directory = tmp_path / "judge"
    directory.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(fields))
    (directory / "tokenizer.json").write_bytes((bert_dir / "tokenizer.json").read_bytes())
    return directory


@pytest.fixture(scope="session")
def gpt_onnx(gpt_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GPT as an ONNX artifact."""
    from throughline.inference.exports.export import export_onnx

    out = tmp_path_factory.mktemp("onnx") / "gpt-onnx"
    export_onnx(gpt_dir, out)
    return out


@pytest.fixture(scope="session")
def bert_onnx(bert_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The BERT as an ONNX artifact."""
    from throughline.inference.exports.export import export_onnx

    out = tmp_path_factory.mktemp("onnx") / "bert-onnx"
    export_onnx(bert_dir, out)
    return out


@pytest.fixture(scope="session")
def in_thread() -> ModuleType:
    """`in_thread.py` beside this file: a server in the test's own process."""
    spec = importlib.util.spec_from_file_location("in_thread", Path(__file__).with_name("in_thread.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["in_thread"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def start_server() -> Callable[..., AbstractContextManager[tuple[subprocess.Popen, str]]]:
    """`with start_server("gpt=PATH", "--slots", "2") as (process, base_url)`: the real command on a free port;
    keyword arguments are variables of its environment.
    """

    @contextmanager
    def start(*arguments: str, **variables: str) -> Iterator[tuple[subprocess.Popen, str]]:
        words = [
            sys.executable,
            "-m",
            "throughline.cli.main",
            "serve",
            *arguments,
            "--port",
            "0",
            "--threads",
            "1",
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
        process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            said = ""
            while not (found := re.search(r"serving .* at (https?://127\.0\.0\.1:\d+/)", said)):
                line = process.stderr.readline()
                assert line, f"the server ended: {said}"
                said += line
            process.said = []  # read on: a full pipe would hold the server up
            threading.Thread(target=lambda: process.said.extend(process.stderr), daemon=True).start()
            yield process, found[1]
        finally:
            process.kill()
            process.wait()

    return start


@pytest.fixture
def ask(
    gpt_onnx: Path, bert_onnx: Path, gpt_dir: Path, in_thread, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Runs an async test body against a server with a GPT in ONNX and in torch, and a BERT."""
    specs = [f"gpt={gpt_onnx}", f"torch={gpt_dir}", f"bert={bert_onnx}"]
    return lambda body, **limits: in_thread.run_with(monkeypatch, specs, body, **limits)


@pytest.fixture(scope="module", params=["torch", "onnxruntime"])
def backend(request, gpt_dir: Path, gpt_onnx: Path) -> CausalBackend:
    """The same model by torch and by ONNX Runtime."""
    options = BackendOptions(device="cpu", threads=1)
    loaded = open_backend(gpt_dir if request.param == "torch" else gpt_onnx, options)
    assert loaded.causal is not None and loaded.causal.name == request.param
    return loaded.causal
