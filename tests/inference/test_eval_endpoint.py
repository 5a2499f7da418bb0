"""`eval --url`: the scores of a model behind a server are those of its directory, and what a server can do wrong is
said.
"""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from small_models import opinionated_model
from throughline.core.errors import Failed, WrongUse
from throughline.data.tokenizer import Tokenizer
from throughline.eval import endpoint
from throughline.eval.session import Request, evaluate_one
from throughline.inference.runtimes.source import open_model
from throughline.models.config import GPTConfig
from throughline.models.huggingface import to_huggingface

pytest.importorskip("openai")
RECORDS = {
    "openbookqa": {"query": "The fox", "choices": ["jumps", "sleeps a while", "barks"], "gold": 1},
    "triviaqa": {"context": "Question: Who jumps?\nAnswer:", "answer": "fox", "aliases": ["fox", "the fox"]},
    "lambada_openai": {"text": "A model reads text and says which word is likely"},
}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A record of each task: several choices, a written answer, one word."""
    files = ("openbookqa/openbook_qa", "triviaqa/triviaqa_sm_sub", "lambada/lambada_test")
    for file, record in zip(files, RECORDS.values()):
        path = tmp_path / "data" / f"{file}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(record) + "\n")
    return tmp_path / "data"


def test_scores_through_a_server_equal_the_directorys(
    gpt_dir: Path, data_dir: Path, in_thread, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Log-probabilities within 1e-3 nats (another batch, another kernel), all else equal; asked again, no request is
    sent: the answers are stored.
    """
    asked = {"tasks": ",".join(RECORDS), "data_dir": data_dir, "window": 100}
    here, _ = evaluate_one(Request(gpt_dir, **asked, out=tmp_path / "here"))
    with in_thread.on_a_port_with(monkeypatch, [f"gpt={gpt_dir}"]) as (base, _):
        request = Request(
            Path("gpt"), **asked, out=tmp_path / "there", url=base, tokenizer=gpt_dir, against=str(gpt_dir)
        )
        there, _ = evaluate_one(request)
        assert max(there["against"]["largest_difference"].values()) < 1e-3
        with pytest.raises(WrongUse, match="no model 'absent'"):
            evaluate_one(Request(Path("absent"), **asked, url=base, model="absent", tokenizer=gpt_dir))
        monkeypatch.setattr(endpoint.Endpoint, "complete", lambda *_, **__: pytest.fail("asked again"))
        again, _ = evaluate_one(request)
    assert again == there
    for one, other in zip(here["tasks"], there["tasks"], strict=True):
        for name, metric in one["metrics"].items():
            assert metric["value"] == pytest.approx(other["metrics"][name]["value"], rel=1e-3), name
    texts = [
        [
            one
            for one in map(json.loads, (tmp_path / out / "scores" / "samples.jsonl").open())
            if one["task"] == "triviaqa"
        ]
        for out in ("here", "there")
    ]
    assert texts[0] == texts[1]


def test_a_long_text_loses_its_beginning() -> None:
    """Eight are read, and the last one is predicted alone, as of a directory."""
    reader = SimpleNamespace(of_prompt=lambda ids, last: (ids, last))
    scorer: Any = SimpleNamespace(window=8, reader=reader, of_tokens=lambda *found: found)
    assert endpoint.EndpointScorer._pair_score(scorer, tuple(range(10)), (10, 11)) == (tuple(range(3, 12)), 2)
    assert endpoint.EndpointScorer._pair_score(scorer, (0, 1), (2,)) == ((0, 1, 2), 1)


@contextmanager
def serving(model: dict[str, Any], answer: Callable[[dict], tuple[int, dict]]) -> Iterator[str]:
    """The address of a server with one model, described so, whose completions are those of a function."""

    class Server(BaseHTTPRequestHandler):
        def say(self, status: int, body: dict) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self) -> None:
            self.say(200, {"data": [{"id": "gpt", "object": "model"} | model]})

        def do_POST(self) -> None:
            self.say(*answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (
            [(500, {}), (200, {"choices": [{"text": "", "index": 0, "logprobs": None}]})],
            "no log-probabilities",
        ),
        ([(401, {"error": {"message": "wrong key"}})], "wrong key"),
    ],
)
def test_a_server_that_cannot_is_named(
    answers: list[tuple[int, dict]], message: str, gpt_dir: Path, tmp_path: Path
) -> None:
    """A fault of the server is asked again; a server without log-probabilities of prompts and one that refuses the
    key end in one error of ours.
    """
    left = iter(answers)
    with serving({"max_model_len": 128}, lambda _: next(left)) as url:
        request = Request(
            Path("gpt"), "lambada_openai", limit=1, out=tmp_path, url=url, tokenizer=gpt_dir, clients=1
        )
        with pytest.raises(Failed, match="server") as caught:
            evaluate_one(request)
    assert message in str(caught.value)


class Forms:
    """What other servers answer, as their source says, with the figures of a model of ours."""

    def __init__(self, directory: Path) -> None:
        self.model, self.tokenizer = open_model(directory).model.eval(), Tokenizer.load(directory)

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> list[list[float]]:
        """Behind each id those of all tokens."""
        return self.model.head(self.model.hidden(torch.tensor([ids])))[0].log_softmax(-1).tolist()

    def name(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def vllm(self, asked: dict) -> tuple[int, dict]:
        """vLLM 0.12's: `echo` has the prompt's tokens before the generated one; the first has none, and the likeliest
        stands behind the token itself, both by their texts.
        """
        assert asked["echo"] and asked["logprobs"] == 1 and asked["max_tokens"] == 1
        rows = self.logprobs(asked["prompt"])
        ids = [*asked["prompt"], max(range(len(rows[-1])), key=rows[-1].__getitem__)]
        tops: list[dict[str, float] | None] = [None]
        for row, token in zip(rows, ids[1:], strict=True):
            best = max(range(len(row)), key=row.__getitem__)
            tops.append({self.name(token): row[token], self.name(best): row[best]})
        told = {"tokens": list(map(self.name, ids)), "top_logprobs": tops, "text_offset": [0] * len(ids)}
        told["token_logprobs"] = [None, *(row[token] for row, token in zip(rows, ids[1:], strict=True))]
        return 200, {"choices": [{"index": 0, "text": "", "logprobs": told, "prompt_logprobs": None}]}

    def llama_server(self, asked: dict) -> tuple[int, dict]:
        """llama.cpp's: of the generated token alone, chosen with the bias and told without it."""
        row = self.logprobs(asked["prompt"])[-1]
        ((token, bias),) = asked["logit_bias"].items()
        assert not asked.get("echo") and bias > max(row) - min(row)
        best = max(range(len(row)), key=row.__getitem__)
        content = {"id": int(token), "token": self.name(int(token)), "logprob": row[int(token)]}
        content["top_logprobs"] = [{"id": best, "token": self.name(best), "logprob": row[best]}]
        return 200, {"choices": [{"index": 0, "text": "", "logprobs": {"content": [content]}}]}


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("vllm", {"owned_by": "vllm", "max_model_len": 102}),
        ("llama_server", {"owned_by": "llamacpp", "meta": {"n_ctx": 102, "n_ctx_train": 160}}),
    ],
)
def test_the_forms_of_other_servers_are_read(
    form: str, told: dict, gpt_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    """Every token within 1e-4 nats of the directory's (another batch); the window is what is served, less two."""
    asked = {"tasks": "openbookqa,lambada_openai", "data_dir": data_dir, "tokenizer": gpt_dir}
    asked |= {"window": 100, "bound": 1e-4, "against": str(gpt_dir)}
    with serving(told, getattr(Forms(gpt_dir), form)) as url:
        found, _ = evaluate_one(Request(Path("gpt"), **asked, url=url, out=tmp_path / "scores"))
    assert found["scorer"]["window"] == 100
    assert len(found["against"]["largest_difference"]) == 2


LLAMA_SERVER = """
import sys, time, xllamacpp
given = xllamacpp.CommonParams()
given.model.path, given.hostnames, given.port = sys.argv[1], ["127.0.0.1"], int(sys.argv[2])
given.ui, given.n_parallel, given.n_ctx = False, 2, 320
given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
given.cache_type_k = given.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
given.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
server = xllamacpp.Server(given)
time.sleep(600)
"""
PYTHON_SERVER = "--logits_all True --n_ctx 160 --n_threads 1 --type_k 0 --type_v 0 --model_alias gpt"
NEEDS = {
    "llama-server": ("xllamacpp",),
    "llama_cpp.server": ("llama_cpp", "sse_starlette", "starlette_context", "pydantic_settings"),
}


@contextmanager
def llama_cpp(name: str, file: Path) -> Iterator[str]:
    """The address of one of llama.cpp's servers with this file, its cache in fp32 as its weights."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", LLAMA_SERVER, str(file), str(port)]
    if name == "llama_cpp.server":
        command = [sys.executable, "-m", name, "--model", str(file), "--port", str(port)]
        command += PYTHON_SERVER.split()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < end:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("bos", [False, True], ids=["plain", "bos"])
@pytest.mark.parametrize("server", NEEDS)
def test_llama_cpps_own_servers_give_the_same_scores(
    server: str, bos: bool, gpt_dir: Path, data_dir: Path, tmp_path: Path
) -> None:
    """A Llama, whose activation llama.cpp computes in fp32 (GELU it looks up in fp16), with and without the habit of a
    BOS: every token within 1e-4 nats, and the same written answer. Of an answer the ASCII characters count: what is no
    UTF-8, as random weights write it, is left out by one server and marked by the other.
    """
    for package in NEEDS[server]:
        if find_spec(package) is None:
            pytest.skip(f"{server} needs {package}, which is not installed")
    pytest.importorskip("gguf")
    from throughline.inference.exports.export import Judging
    from throughline.inference.exports.gguf_export import export_gguf

    shape = {"positions": "rotary", "norm": "rmsnorm", "activation": "silu", "gated": True, "bias": False}
    shape |= {"layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "tied": False, "sequence_length": 160}
    config = GPTConfig(vocab_size=Tokenizer.load(gpt_dir).vocab_size, **shape)
    fields, state = to_huggingface(opinionated_model(config))
    directory = tmp_path / "llama"
    directory.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(fields))
    tokenizer = json.loads((gpt_dir / "tokenizer.json").read_text())
    if bos:
        end = "<|endoftext|>"
        pieces = [{"SpecialToken": {"id": end, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        tokenizer["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": pieces}
        tokenizer["post_processor"]["special_tokens"] = {end: {"id": end, "ids": [0], "tokens": [end]}}
        (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": end, "eos_token": end}))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    export_gguf(directory, tmp_path / "gguf", "f32", judging=Judging(bench=False))
    asked = {"tasks": ",".join(RECORDS), "data_dir": data_dir, "window": 100, "bound": 1e-4}
    here, _ = evaluate_one(Request(directory, **asked, out=tmp_path / "here"))
    with llama_cpp(server, tmp_path / "gguf" / "model.gguf") as url:
        name = "gpt" if server == "llama_cpp.server" else str(tmp_path / "gguf" / "model.gguf")
        asked |= {"url": url, "tokenizer": directory, "against": str(directory)}
        there, _ = evaluate_one(Request(Path("served"), model=name, **asked, out=tmp_path / "there"))
    assert here["scorer"]["bos"] == there["scorer"]["bos"] == bos
    assert len(there["against"]["largest_difference"]) == 2
    texts = []
    for out in ("here", "there"):
        samples = map(json.loads, (tmp_path / out / "scores" / "samples.jsonl").open())
        (text,) = [one["answers"][0] for one in samples if one["task"] == "triviaqa"]
        texts.append(text.encode("ascii", "ignore").replace(b"\x00", b""))
    assert texts[0] == texts[1] and len(texts[0]) > 4
