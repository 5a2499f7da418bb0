"""The cache of a GPT's graph: rows come, grow, are copied and end, and no row sees another."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_models import read
from throughline.core.backend import BackendOptions, Span
from throughline.inference.runtimes import onnx_causal
from throughline.inference.runtimes.backends import open_backend


def test_the_life_of_a_row_changes_no_logits(gpt_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random life of five rows: prompts in parts, answers, rows that end, are copied, saved and loaded. Each
    step's logits are those of the whole text alone, and the capacity did grow and shrink.
    """
    loaded = open_backend(gpt_onnx, BackendOptions(device="cpu", threads=1))
    backend = loaded.causal
    assert backend is not None
    monkeypatch.setattr(onnx_causal, "CAPACITY_STEP", 16)
    rng = np.random.default_rng(5)
    cache, texts = backend.new_cache(5), [np.zeros(0, np.int64) for _ in range(5)]
    capacities = [cache.capacity]
    for turn in range(60):
        spans = []
        for row in rng.permutation(5)[: rng.integers(1, 6)].tolist():
            wanted = int(rng.choice([1, 1, 1, 5, 40]))
            ids = rng.integers(0, 300, min(wanted, backend.context - len(texts[row])))
            if len(ids):
                spans.append(Span(row, len(texts[row]), ids, 1))
                texts[row] = np.concatenate([texts[row], ids])
        found = backend.step(spans, cache)
        for span, logits in zip(spans, found):
            text = texts[span.row][None]
            ask = np.array([[text.shape[1] - 1]])
            alone = read(backend, text, np.zeros(1, np.int64), ask, backend.new_cache(1))[0, 0]
            # fp32 sums in another order, as inference/graphs/parity.py explains
            np.testing.assert_allclose(logits, alone, atol=1e-4 * np.abs(alone).max())
        source, target = rng.permutation(5)[:2].tolist()
        tokens = int(rng.integers(0, len(texts[source]) + 1))
        change = turn % 5
        if change == 0 and tokens:
            backend.copy_row(cache, source, target, tokens)
            texts[target] = texts[source][:tokens]
        elif change == 2 and tokens:
            backend.load_row(cache, target, backend.save_row(cache, source, tokens), tokens)
            texts[target] = texts[source][:tokens]
        elif change in (1, 3):
            backend.free_row(cache, target)
            texts[target] = texts[target][:0]
        capacities.append(cache.capacity)
    steps = np.diff(capacities)
    assert (steps > 0).sum() > 2 and (steps < 0).sum() > 2, capacities


@pytest.mark.parametrize("path", ["gpt_onnx", "gpt_dir"])
def test_what_a_freed_row_held_reaches_nobody(path: str, request: pytest.FixtureRequest) -> None:
    """An overflow in a row ends with it: the next sequence there and the neighbour read with it are as alone."""
    loaded = open_backend(request.getfixturevalue(path), BackendOptions(device="cpu", threads=1))
    backend: Any = loaded.causal
    rng = np.random.default_rng(0)
    long, short, neighbour = (rng.integers(0, backend.vocab_size, length) for length in (40, 5, 30))
    cache, alone = backend.new_cache(2), backend.new_cache(2)
    backend.step([Span(0, 0, long)], cache)
    for store in (
        cache.stores.values() if path == "gpt_onnx" else (cache.keys_LBGTD[0], cache.values_LBGTD[0])
    ):
        store[0, :, 10:40] = np.nan
    backend.free_row(cache, 0)
    found = []
    for one in (cache, alone):
        backend.step([Span(0, 0, short), Span(1, 0, neighbour)], one)
        found.append(np.array(backend.step([Span(0, 5, short[:1]), Span(1, 30, neighbour[:1])], one)))
    np.testing.assert_array_equal(*found)
