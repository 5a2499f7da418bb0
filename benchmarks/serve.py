"""Our server against plain FastAPI + transformers, LitServe and llama.cpp's server, on one file of requests:
python benchmarks/serve.py [--quick] [--clients 32] [--pairs 3]

Same random weights, same requests (serve_requests.jsonl, made once from a seed), greedy, no end-of-text token,
loopback, the load generator in this process. A peer runs at the best of its settings, found on a few requests
first and printed. llama.cpp is measured when `llama-server` is on the PATH, and otherwise said to be missing.
`http-*` is what HTTP adds to a bare call of the backend at one client.
"""

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import Claim, claim, finish, parser
from throughline.inference.load import COMMON, Ask, Seen, Target, load, summary

HERE = Path(__file__).parent
REQUESTS = HERE / "serve_requests.jsonl"
GOALS = {
    "gpt-vs-plain": 8.0,
    "gpt-vs-litserve": 1.5,
    "bert-vs-plain": 1.5,
    "bert-vs-litserve": 1.3,
    "gpt-int8-vs-litserve": 2.5,
    "bert-int8-vs-plain": 4.0,
    "gpt-vs-llamacpp": 1.0,
}


@dataclass(frozen=True)
class Case:
    """A kind of model with its endpoint and requests."""

    kind: str
    endpoint: str
    asks: list[Ask]


def requests() -> list[Case]:
    """The committed requests."""
    bodies = [json.loads(line) for line in REQUESTS.read_text().splitlines()]
    gpt = [Ask(body) for body in bodies if "prompt" in body]
    return [
        Case("gpt", "completions", gpt),
        Case("bert", "embeddings", [Ask(body) for body in bodies if "input" in body]),
    ]


def write_models(folder: Path, quick: bool) -> None:
    """A GPT of 30M parameters (quick: 5M) and a BERT of 25M, random, with word tokenizers that have no end of text."""
    import tokenizers
    from safetensors.torch import save_file
    from throughline.inference.export import export_onnx
    from throughline.inference.graph_options import GraphOptions
    from throughline.models.config import BERTConfig, GPTConfig
    from throughline.models.huggingface import to_huggingface
    from throughline.models.init import build
    from tokenizers import models, pre_tokenizers, processors

    width, layers = (256, 4) if quick else (512, 6)
    shape: dict[str, Any] = {
        "vocab_size": 16384,
        "sequence_length": 1024,
        "layers": layers,
        "width": width,
        "heads": width // 64,
    }
    names = ["<none>", "[CLS]", "[SEP]", *COMMON.split()]
    names += [f"unused{number}" for number in range(shape["vocab_size"] - len(names))]
    for kind, config in (("gpt", GPTConfig(**shape)), ("bert", BERTConfig(**shape, token_types=2))):
        directory = folder / kind
        directory.mkdir()
        fields, state = to_huggingface(build(config, 1))
        save_file(
            {name: tensor.contiguous() for name, tensor in state.items()}, directory / "model.safetensors"
        )
        (directory / "config.json").write_text(json.dumps(fields))
        words = tokenizers.Tokenizer(
            models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<none>")
        )
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if kind == "bert":
            words.add_special_tokens(["[CLS]", "[SEP]"])
            words.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
        words.save(str(directory / "tokenizer.json"))
        for precision in ("fp32", "int8"):
            with contextlib.suppress(Exception):  # said later: the claim is then missing
                export_onnx(directory, folder / f"{kind}-{precision}", GraphOptions("onnxruntime", precision))


@contextlib.contextmanager
def server(command: list[str], port: int, log: Path, copies: int = 1) -> Iterator[str]:
    """A server that is up when its port answers."""
    with log.open("w") as file:
        running = [subprocess.Popen(command, stdout=file, stderr=file) for _ in range(copies)]
    try:
        end = time.monotonic() + 180
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert time.monotonic() < end and all(one.poll() is None for one in running), log.read_text()[
                -2000:
            ]
            time.sleep(0.2)
        time.sleep(1.0 if copies == 1 else 8.0)  # the other workers
        yield f"http://127.0.0.1:{port}"
    finally:
        for one in running:
            one.terminate()
        for one in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(10)
            one.kill()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def wait_ready(base: str) -> None:
    """Ours listens at once and is ready later."""
    import urllib.error
    import urllib.request

    while True:
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(f"{base}/ready")
            return
        time.sleep(0.1)


@contextlib.contextmanager
def ours(path: Path, log: Path, threads: int) -> Iterator[str]:
    """Our server; 16 slots, all cores."""
    port = free_port()
    words = [sys.executable, "-m", "throughline.cli.main", "serve", f"model={path}", "--port", str(port)]
    words += ["--slots", "16", "--threads", str(threads), "--no-access-log", "--drain-wait", "0"]
    with server(words, port, log) as base:
        wait_ready(base)
        yield base


@contextlib.contextmanager
def peer(name: str, folder: Path, case: Case, settings: dict[str, Any]) -> Iterator[str]:
    """A peer with these settings."""
    port = free_port()
    words = [
        sys.executable,
        str(HERE / "serve_peers.py"),
        name,
        "--model",
        str(folder / case.kind),
        "--kind",
        case.kind,
    ]
    words += ["--port", str(port), "--threads", str(settings["threads"])]
    if name == "litserve":
        words += ["--batch", str(settings["batch"]), "--wait", str(settings["wait"])]
    with server(words, port, folder / f"{name}.log", settings.get("workers", 1)) as base:
        if name == "litserve":
            time.sleep(10)  # its port answers before its model does
        yield base


def rate(base: str, case: Case, asks: list[Ask], clients: int) -> dict[str, Any]:
    """Tokens per second and latencies of a run; every request must be answered."""
    target = Target(base, case.endpoint, "model")
    seen, took_s = load(target, asks, clients)
    assert all(one.status == 200 and not one.error for one in seen), next(
        s for s in seen if s.error or s.status != 200
    )
    return summary(seen, took_s, clients)


def best_settings(name: str, folder: Path, case: Case, clients: int, quick: bool) -> dict[str, Any]:
    """The fastest of a peer's settings on a quarter of the requests."""
    if name == "plain":
        grid = [
            {"workers": w, "threads": t}
            for w, t in ((2, 1), (1, 2)) + (() if quick else ((1, 1), (2, 2), (4, 1)))
        ]
    else:
        sizes, waits = ((8, 32), (0.01,)) if quick else ((8, 16, 32), (0.002, 0.05))
        grid = [{"threads": 2, "batch": batch, "wait": wait} for batch in sizes for wait in waits]
    some, found = case.asks[: max(8, len(case.asks) // 4)], []
    for settings in grid:
        with peer(name, folder, case, settings) as base:
            rate(base, case, some[:2], 1)  # warm
            found.append((rate(base, case, some, clients)["tokens_per_s"], settings))
    return max(found, key=lambda one: one[0])[1]


def http_overhead(folder: Path, log: Path, calls: int) -> tuple[list[float], list[float]]:
    """Milliseconds of an embedding of 8 words through HTTP and by the bare backend, in turn."""
    from throughline.core.backend import BackendOptions
    from throughline.data.tokenizer import Tokenizer
    from throughline.inference.backends import open_backend
    from throughline.inference.encoding import embed, frame

    path = folder / "bert-fp32"
    loaded, tokenizer = open_backend(path, BackendOptions("cpu", threads=1)), Tokenizer.load(path)
    encoder = loaded.encoder
    assert encoder is not None
    text = " ".join(COMMON.split()[:8])
    through, bare = [], []
    with ours(path, log, 1) as base:
        target = Target(base, "embeddings", "model")
        connection = target.connect()
        for _ in range(calls):
            seen: Seen = target.ask(connection, Ask({"input": text, "encoding_format": "base64"}))
            assert seen.status == 200
            through.append(1000 * seen.total_s)
            began_s = time.perf_counter()
            embed(encoder, [frame(tokenizer, text, encoder.context, encoder.vocab_size)], 0)
            bare.append(1000 * (time.perf_counter() - began_s))
    return through[calls // 10 :], bare[calls // 10 :]


def overhead_claims(folder: Path, log: Path, calls: int) -> list[Claim]:
    """p50 and p99 of what HTTP adds, against what is allowed."""
    through, bare = http_overhead(folder, log, calls)
    claims = []
    for share, allowed_ms in ((50, 1.0), (99, 3.0)):
        added = float(np.percentile(through, share)) - statistics.median(bare)
        bound = f"a bound; bare call {statistics.median(bare):.2f} ms"
        claims.append(
            claim(f"http-p{share}", [added], [allowed_ms], peer=bound, unit="ms", better="lower", goal=1.0)
        )
    return claims


def compare(
    name: str,
    us: Callable[[], dict[str, Any]],
    them: Callable[[], dict[str, Any]],
    peer_text: str,
    pairs: int,
    details: dict,
) -> Claim:
    """Tokens per second, in turn."""
    first, second = [], []
    for _ in range(pairs):
        first.append(us())
        second.append(them())
    details[name] = {"ours": first[-1], "theirs": second[-1]}
    rates = [[row["tokens_per_s"] for row in rows] for rows in (first, second)]
    return claim(name, *rates, peer=peer_text, unit="tokens/s", better="higher", goal=GOALS[name])


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--clients", type=int, default=32)
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--only", choices=("gpt", "bert", "http"), help="measure this part alone")
    chosen = options.parse_args()
    pairs, claims, details = 1 if chosen.quick else chosen.pairs, [], {}
    threads = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        write_models(folder, chosen.quick)
        if chosen.only in (None, "http"):
            claims += overhead_claims(folder, folder / "ours.log", 300 if chosen.quick else 3000)
        for case in requests():
            if chosen.only not in (None, case.kind):
                continue
            asks = case.asks[:16] if chosen.quick else case.asks

            def us(precision: str, case: Case = case, asks: list[Ask] = asks) -> dict[str, Any]:
                with ours(folder / f"{case.kind}-{precision}", folder / "ours.log", threads) as base:
                    rate(base, case, asks[:2], 1)
                    return rate(base, case, asks, chosen.clients)

            for name in ("plain", "litserve"):
                settings = best_settings(name, folder, case, chosen.clients, chosen.quick)
                print(f"{case.kind}: {name} at {settings}", file=sys.stderr)

                def them(
                    case: Case = case, asks: list[Ask] = asks, name: str = name, at: dict = settings
                ) -> dict[str, Any]:
                    with peer(name, folder, case, at) as base:
                        rate(base, case, asks[:2], 1)
                        return rate(base, case, asks, chosen.clients)

                said = f"{name} {settings}"
                claims.append(
                    compare(f"{case.kind}-vs-{name}", lambda: us("fp32"), them, said, pairs, details)
                )
                int8 = f"{case.kind}-int8-vs-{name}"
                if int8 in GOALS and (folder / f"{case.kind}-int8").exists():
                    claims.append(compare(int8, lambda: us("int8"), them, said, pairs, details))
        if shutil.which("llama-server") is None:
            print("gpt-vs-llamacpp: left out, llama-server is not on the PATH", file=sys.stderr)
    finish(
        "serve",
        claims,
        packages=("fastapi", "uvicorn", "transformers", "litserve", "onnxruntime"),
        details=details,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
