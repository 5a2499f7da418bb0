"""How fast a model answers here: p50, p95 and p99 of the calls that serving makes, per batch and length."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from ..core.backend import CausalBackend
from .backends import Loaded

SECONDS_PER_CASE = 1.0  # measured time per line of the table
MAX_CALLS, MIN_CALLS = 200, 5


def latency_table(loaded: Loaded, seconds: float = SECONDS_PER_CASE) -> list[dict[str, Any]]:
    """Rows {backend, what, batch, tokens, calls, p50_ms, p95_ms, p99_ms, tokens_per_s}, on random ids.

    A GPT: reading a prompt of `tokens`, and decoding one token per row after `tokens` of context. A BERT: the hidden states,
    embedding and one masked position of `tokens`.
    """
    backend = loaded.causal or loaded.encoder
    assert backend is not None
    rows = []
    for what, batch, tokens, call in _cases(loaded):
        times_s = measure(call, seconds)
        p50, p95, p99 = (float(np.percentile(times_s, q)) for q in (50, 95, 99))
        made = batch * (1 if what == "decode" else tokens)
        rows.append({
            "backend": backend.name, "what": what, "batch": batch, "tokens": tokens, "calls": len(times_s),
            "p50_ms": p50 * 1e3, "p95_ms": p95 * 1e3, "p99_ms": p99 * 1e3, "tokens_per_s": made / p50,
        })  # fmt: skip
    return rows


def measure(call: Callable[[], object], seconds: float) -> list[float]:
    """Wall seconds of single calls, after two that warm up."""
    call(), call()
    times_s: list[float] = []
    end = time.perf_counter() + seconds
    while len(times_s) < MIN_CALLS or (time.perf_counter() < end and len(times_s) < MAX_CALLS):
        start = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start)
    return times_s


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


def latency_lines(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Header and cells of the table for people."""
    header = ["backend", "what", "batch", "tokens", "p50 ms", "p95 ms", "p99 ms", "tokens/s"]
    keys = ("backend", "what", "batch", "tokens", "p50_ms", "p95_ms", "p99_ms", "tokens_per_s")
    return header, [[row[key] for key in keys] for row in rows]
