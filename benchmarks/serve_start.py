"""The servers of `serve.py`, started and ended: ours and its peers, each with its settings."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

PEERS = Path(__file__).with_name("serve_peers.py")
SLOTS = 32  # of ours: as many as clients
THREADS = os.cpu_count() or 1
Settings = dict[str, Any]


@dataclass
class Running:
    """A server with its processes: where it is, and what its requests say beside the others'."""

    base: str
    processes: list[psutil.Process]
    extra: dict[str, Any]

    def hold(self, held: bool) -> None:
        """Stop all of its processes, or let them go on."""
        for root in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in (root, *root.children(recursive=True)):
                    one.suspend() if held else one.resume()


@contextlib.contextmanager
def server(
    words: list[str],
    log: Path,
    ready: str,
    copies: int = 1,
    extra: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[Running]:
    """Processes of one server at a free port. They are ready when this path is answered with 200, or, where it is
    no path, when each of them has written this word.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("w") as file:
        words = [*words, "--port", str(port)]
        how: Any = {"stdout": file, "stderr": file, "env": environment}
        started = [subprocess.Popen(words, **how) for _ in range(copies)]
    running = Running(f"http://127.0.0.1:{port}", [psutil.Process(one.pid) for one in started], extra or {})

    def is_ready() -> bool:
        if not ready.startswith("/"):
            return log.read_text().count(ready) == copies
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            return urllib.request.urlopen(f"{running.base}{ready}").status == 200
        return False

    try:
        end = time.monotonic() + 300
        while not is_ready():
            fault = log.read_text()[-2000:]
            assert time.monotonic() < end and all(one.poll() is None for one in started), fault
            time.sleep(0.1)
        yield running
    finally:
        running.hold(False)
        family = [child for root in running.processes if root.is_running() for child in root.children(True)]
        for one in started:
            one.terminate()
        for one in started:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(10)
            one.kill()
        for child in family:  # LitServe's stay behind, and look for work without rest
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def ours(path: Path, threads: int = THREADS) -> Any:
    """Our server."""
    words = [sys.executable, "-m", "throughline.cli.main", "serve", f"model={path}", "--drain-wait", "0"]
    words += ["--slots", str(SLOTS), "--threads", str(threads), "--no-access-log"]
    return server(words, path.parent / "ours.log", "/ready")


def peer(name: str, folder: Path, kind: str, settings: Settings) -> Any:
    """plain or litserve with these settings."""
    words = [sys.executable, str(PEERS), name, "--model", str(folder / kind)]
    words += ["--kind", kind, "--threads", str(settings["threads"])]
    if name == "plain":
        return server(words, folder / "plain.log", "serving", settings["workers"])
    words += ["--batch", str(settings["batch"]), "--wait", str(settings["wait"])]
    return server(words, folder / "litserve.log", "/health")


def llama(folder: Path, settings: Settings) -> Any:
    """One of llama.cpp's servers with these settings."""
    model, threads, slots = (
        str(folder / "gpt-q8_0" / "model.gguf"),
        str(settings["threads"]),
        settings["slots"],
    )
    log, extra = folder / "llama.log", {"ignore_eos": True}
    if settings["server"] == "llama_cpp.server":
        words = [sys.executable, "-m", "llama_cpp.server", "--model", model, "--n_ctx", "640"]
        return server([*words, "--n_threads", threads], log, "/v1/models")
    if settings["server"] == "xllamacpp":
        words = [sys.executable, str(PEERS), "xllamacpp", "--kind", "gpt", "--model", model]
        return server([*words, "--threads", threads, "--batch", str(slots)], log, "/health", extra=extra)
    words = [settings["server"], "-m", model, "-np", str(slots), "-c", str(640 * slots), "-t", threads]
    return server([*words, "-tb", threads], log, "/health", extra=extra)


def vllm(folder: Path, python: Path, settings: Settings) -> Any:
    """vLLM's server for CPUs, in the environment of this interpreter, with these settings."""
    words = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "gpt")]
    words += ["--served-model-name", "model", "--host", "127.0.0.1", "--dtype", settings["dtype"]]
    words += ["--max-num-seqs", str(SLOTS), "--max-model-len", "640"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": settings["cores"]}
    environment["VLLM_NO_USAGE_STATS"] = "1"
    return server(words, folder / "vllm.log", "/health", extra={"ignore_eos": True}, environment=environment)


def vllm_version(python: Path) -> str:
    """Of vLLM in the environment of this interpreter."""
    asked = "from importlib.metadata import version; print(version('vllm-cpu'))"
    return subprocess.check_output([str(python), "-c", asked], text=True).strip()


def llama_grid(quick: bool) -> list[Settings]:
    """Which servers of llama.cpp are here: its own program; its own C++ server inside a Python package, which is built
    for any processor; and llama-cpp-python's, built for this one, which answers one request after another.
    """
    many: list[Settings] = [{"threads": THREADS, "slots": slots} for slots in ((32,) if quick else (16, 32))]
    if found := os.environ.get("LLAMA_SERVER") or shutil.which("llama-server"):
        return [{"server": found} | settings for settings in many]
    grid: list[Settings] = []
    if find_spec("xllamacpp"):
        grid += [{"server": "xllamacpp"} | settings for settings in many]
    if all(map(find_spec, ("llama_cpp", "sse_starlette", "starlette_context", "pydantic_settings"))):
        grid.append({"server": "llama_cpp.server", "threads": THREADS, "slots": 1})
    return grid
