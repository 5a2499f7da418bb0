"""Which runtime is fastest for a model here: a measurement of two seconds, on the calls that serving makes."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...core.backend import Span
from ...core.console import say
from ...core.errors import ThroughlineError
from .loaded import Loaded

SECONDS = 2.0
TOKENS = 64
MAX_CALLS, MIN_CALLS = 200, 5


def fastest(candidates: Sequence[tuple[str, Callable[[], Loaded]]]) -> Loaded:
    """Open each candidate, measure it, return the fastest and say so. One that cannot run is left out.

    Raises what the last candidate raised when none can run.
    """
    found: list[tuple[float, str, Loaded]] = []
    failed: ThroughlineError | None = None
    for name, opening in candidates:
        try:
            loaded = opening()
            times_s = measure(call_of(loaded), SECONDS / len(candidates))
        except ThroughlineError as error:
            failed = error
            say(f"{name}: {error.what}")
            continue
        found.append((float(np.median(times_s)), name, loaded))
    if not found:
        assert failed is not None
        raise failed
    found.sort(key=lambda entry: entry[0])
    times = ", ".join(f"{name} {seconds * 1e3:.1f} ms" for seconds, name, _ in found)
    say(f"backend: {found[0][1]} ({times})")
    return found[0][2]


def call_of(loaded: Loaded, tokens: int = TOKENS) -> Callable[[], Any]:
    """One decode step after so many tokens, or one text of them."""
    rng = np.random.default_rng(0)
    tokens = min(tokens, loaded.config.sequence_length - 1)
    ids = rng.integers(0, loaded.config.vocab_size, (1, tokens))
    if loaded.encoder is not None:
        encoder, ask = loaded.encoder, np.zeros((1, 0), np.int64)
        return lambda: encoder.forward(ids, np.zeros_like(ids), np.ones(ids.shape, bool), ask)
    backend = loaded.causal
    assert backend is not None
    cache = backend.new_cache(1)
    backend.step([Span(0, 0, ids[0], 0)], cache)
    return lambda: backend.step([Span(0, tokens, ids[0, :1], 1)], cache)


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
