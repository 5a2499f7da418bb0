"""The models of the inference tests, and a server of them under a watchdog."""

import contextlib
import importlib.util
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the module beside the tests
INFERENCE = Path(__file__).parents[1] / "inference" / "conftest.py"
spec = importlib.util.spec_from_file_location("inference_models", INFERENCE)
models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(models)
gpt_dir, bert_dir, gpt_onnx, bert_onnx = models.gpt_dir, models.bert_dir, models.gpt_onnx, models.bert_onnx


@dataclass
class Watched:
    """A server, and what has been seen of it since `begin`."""

    process: subprocess.Popen
    base: str
    port: int
    file: Path
    health_s: list[float] = field(default_factory=list)
    began_s: float = 0.0

    def begin(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # the peak begins anew
        self.began_s = time.monotonic()
        self.health_s.clear()

    @property
    def peak_mb(self) -> float:
        """Of the HTTP process."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1000

    @property
    def blocked_ms(self) -> float:
        """The longest turn of its event loop."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        turns = [tuple(map(float, line.split())) for line in lines]
        return 1000 * max([took for at, took in turns if at > self.began_s], default=0.0)

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)


def ask_health(server: Watched, ended: threading.Event) -> None:
    """Ask /health again and again, each time on a connection of its own."""
    while not ended.wait(0.01):
        began_s = time.monotonic()
        with contextlib.suppress(OSError), server.connect() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            while connection.recv(4096):
                pass
        server.health_s.append(time.monotonic() - began_s)


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """`with start("gpt=PATH", …) as server`: the command under the watchdog, and somebody who asks after its health."""

    @contextlib.contextmanager
    def started(*arguments: str, files: tuple[int, int] | None = None) -> Iterator[Watched]:
        file = tmp_path_factory.mktemp("watch") / "turns"
        words = [sys.executable, str(Path(__file__).with_name("watched.py")), str(file), "serve", *arguments]
        words += ["--port", "0", "--threads", "1", "--no-access-log"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        limit = (lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files)) if files else None
        process = subprocess.Popen(
            words, stderr=subprocess.PIPE, text=True, env=environment, preexec_fn=limit
        )
        ended = threading.Event()
        try:
            said = ""
            while not (found := re.search(r"serving .* at (http://127\.0\.0\.1:(\d+)/)", said)):
                line = process.stderr.readline()
                assert line, f"the server ended: {said}"
                said += line
            threading.Thread(target=lambda: [None for _ in process.stderr], daemon=True).start()
            server = Watched(process, found[1], int(found[2]), file)
            threading.Thread(target=ask_health, args=(server, ended), daemon=True).start()
            time.sleep(1.5)
            server.begin()
            yield server
        finally:
            ended.set()
            process.kill()
            process.wait()

    return started


@pytest.fixture(scope="session")
def judge_dir(bert_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT that ranks."""
    from safetensors.torch import save_file
    from throughline.inference.runtimes.source import open_model
    from throughline.models.bert import Head
    from throughline.models.huggingface import to_huggingface
    from throughline.models.init import build_with_head

    head = Head("sequence-classification", ("bad", "good"))
    fields, state = to_huggingface(build_with_head(open_model(bert_dir).model, head, 3))
    directory = tmp_path_factory.mktemp("judge") / "judge"
    directory.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(models.json.dumps(fields))
    (directory / "tokenizer.json").write_bytes((bert_dir / "tokenizer.json").read_bytes())
    return directory


@pytest.fixture(scope="session")
def wide_dirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A GPT with a chat template and a BERT, both of contexts that large requests fit."""
    home, gpt = tmp_path_factory.mktemp("wide"), models.gpt_tokenizer()
    small = {"layers": 1, "width": 32, "heads": 2}
    chat = models.build(models.GPTConfig(vocab_size=304, sequence_length=4096, tied=False, **small), 3)
    bert = models.build(models.BERTConfig(vocab_size=304, sequence_length=512, **small), 5)
    models.write_model(home / "chat", models.opinionated(chat), gpt)
    config = {"eos_token": "<|endoftext|>", "chat_template": models.TEMPLATE}
    (home / "chat" / "tokenizer_config.json").write_text(models.json.dumps(config))
    models.write_model(home / "masks", models.opinionated(bert), models.bert_tokenizer())
    return home / "chat", home / "masks"


@pytest.fixture(scope="session")
def bounds() -> SimpleNamespace:
    """What no request may go beyond."""
    # 64 MB are the budget of bodies; the tests of memory add nothing to it.
    return SimpleNamespace(blocked_ms=50, peak_mb=300 + 64, health_ms=100)


@pytest.fixture(scope="session")
def server(
    start: Callable, gpt_onnx: Path, bert_onnx: Path, judge_dir: Path, wide_dirs: Any
) -> Iterator[Any]:
    with start(
        f"gpt={gpt_onnx}",
        f"bert={bert_onnx}",
        f"judge={judge_dir}",
        *map(str, wide_dirs),
        "--max-tokens",
        "200",
    ) as found:
        yield found
