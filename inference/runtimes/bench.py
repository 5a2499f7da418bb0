"""How fast a model answers here: p50, p95 and p99 of the calls that serving makes, per batch and length."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ...core.backend import CausalBackend
from ...core.console import cell
from ...core.hardware import machine
from ...core.page import Bar, Part, page
from .choice import measure
from .loaded import Loaded
from .roofline import floor_ms, reported

SECONDS_PER_CASE = 1.0  # measured time per line of the table
WORTH = 1.1  # times the speed from which another file to keep and a longer start pay


def latency_table(loaded: Loaded, seconds: float = SECONDS_PER_CASE) -> list[dict[str, Any]]:
    """Rows {backend, what, batch, tokens, calls, p50_ms, p95_ms, p99_ms, tokens_per_s}, on random ids.

    A GPT: reading a prompt of `tokens`, and decoding one token per row after `tokens` of context. A BERT: the
    hidden states, embedding and one masked position of `tokens`.
    """
    backend = loaded.causal or loaded.encoder
    assert backend is not None
    rows = []
    for what, batch, tokens, call in _cases(loaded):
        times_s = measure(call, seconds)
        p50, p95, p99 = (float(np.percentile(times_s, q)) for q in (50, 95, 99))
        made = batch * (1 if what == "decode" else tokens)
        rows.append(
            {
                "backend": backend.name,
                "what": what,
                "batch": batch,
                "tokens": tokens,
                "calls": len(times_s),
                "p50_ms": p50 * 1e3,
                "p95_ms": p95 * 1e3,
                "p99_ms": p99 * 1e3,
                "tokens_per_s": made / p50,
            }
        )
        rows[-1] |= _beside(loaded, what, batch, tokens)
    return rows


def _beside(loaded: Loaded, what: str, batch: int, tokens: int) -> dict[str, Any]:
    """What this GPU cannot go below, and what NVIDIA reported for a T4, where either is known."""
    found: dict[str, Any] = {}
    backend = loaded.backend
    if backend.device != "cpu":
        gpu = machine().gpus[int(backend.device.partition(":")[2] or 0)]
        if gpu.chip is not None:
            sizes = (batch, tokens, backend.dtype, what == "decode")
            found["floor_ms"] = floor_ms(loaded.config, gpu.chip, *sizes)
    if row := reported(loaded.config, batch, tokens):
        found["t4_tensorrt_fp16_ms"] = row.get("fp16_ms")
    return found


def latency_page(rows: list[dict[str, Any]]) -> str:
    """The medians as bars, and the whole table, as an HTML page."""
    longest = max(row["p50_ms"] for row in rows)
    header, cells = latency_lines(rows)
    shown = [[cell(value) for value in row] for row in cells]
    bars = []
    for row in rows:
        model = f"{row['model']}: " if "model" in header else ""
        name = f"{model}{row['backend']} {row['what']} {row['batch']} x {row['tokens']}"
        bars.append(Bar(name, row["p50_ms"] / longest, text=f"{row['p50_ms']:.2f} ms"))
    return page("Latency", [Part("Medians", bars=bars), Part("All figures", header=header, rows=shown)])


def _cases(loaded: Loaded) -> Iterator[tuple[str, int, int, Callable[[], object]]]:
    rng = np.random.default_rng(0)
    context, vocab_size = loaded.config.sequence_length, loaded.config.vocab_size
    lengths = sorted({min(length, context - 1) for length in (32, 128)})
    if loaded.causal is not None:
        backend = loaded.causal
        for tokens in lengths:
            yield "prefill", 1, tokens, _causal_call(backend, rng.integers(0, vocab_size, (1, tokens)), 0)
        for batch in (1, 8):
            yield (
                "decode",
                batch,
                lengths[-1],
                _causal_call(backend, rng.integers(0, vocab_size, (batch, 1)), lengths[-1]),
            )
    if loaded.encoder is not None:
        encoder = loaded.encoder
        for batch in (1, 8):
            for tokens in lengths:
                ids = rng.integers(0, vocab_size, (batch, tokens))
                arguments = (
                    ids,
                    np.zeros_like(ids),
                    np.ones(ids.shape, bool),
                    np.zeros((batch, 1), np.int64),
                )
                yield "encode", batch, tokens, partial(encoder.forward, *arguments)


def _causal_call(backend: CausalBackend, ids: np.ndarray, past: int) -> Callable[[], object]:
    cache, pasts = backend.new_cache(len(ids)), np.full(len(ids), past)
    ask = np.full((len(ids), 1), ids.shape[1] - 1)
    return partial(backend.forward, ids, pasts, ask, cache)


def verdicts(rows: list[dict[str, Any]]) -> list[str]:
    """A line for each further model or backend: how fast it is beside the first of the table, by the geometric mean
    of the medians that both have, and that it is not worth it below `WORTH`.
    """

    def of(row: dict[str, Any]) -> tuple[str, str]:
        return row.get("model", ""), row["backend"]

    cases = {(of(row), row["what"], row["batch"], row["tokens"]): row["p50_ms"] for row in rows}
    first, lines = of(rows[0]), []
    for one in dict.fromkeys(of(row) for row in rows):
        pairs = [
            (cases[first, *case], p50)
            for (whose, *case), p50 in cases.items()
            if whose == one != first and (first, *case) in cases
        ]
        if pairs:
            speed = float(np.exp(np.mean([np.log(before / now) for before, now in pairs])))
            name = one[1] if one[1] != first[1] else one[0]
            verdict = "" if speed >= WORTH else ": not worth it here"
            lines.append(f"{name} has {speed:.2f} times the speed of {first[1]}{verdict}")
    return lines


def latency_lines(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Header and cells of the table for people."""
    header = ["backend", "what", "batch", "tokens", "p50 ms", "p95 ms", "p99 ms", "tokens/s"]
    keys = ["backend", "what", "batch", "tokens", "p50_ms", "p95_ms", "p99_ms", "tokens_per_s"]
    for key, title in (("floor_ms", "floor ms"), ("t4_tensorrt_fp16_ms", "T4 TensorRT ms")):
        if any(row.get(key) for row in rows):
            header, keys = [*header, title], [*keys, key]
    if len({row.get("model") for row in rows}) > 1:
        header, keys = ["model", *header], ["model", *keys]
    return header, [[row.get(key) for key in keys] for row in rows]
