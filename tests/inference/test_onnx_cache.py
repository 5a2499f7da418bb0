"""Rows of very different lengths: which of them lie apart, and that nothing but the time depends on it."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from throughline.core.backend import BackendOptions, Span
from throughline.inference.runtimes import onnx_cache
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.runtimes.onnx_cache import rows_apart


def read_bytes(rooms: dict[int, int], apart: set[int], token_bytes: int, weight_bytes: int) -> int:
    """What a decode step reads: the weights once for each call, every row of a call at its largest capacity."""
    calls = [[rooms[row]] for row in apart]
    calls += [rest] if (rest := [room for row, room in rooms.items() if row not in apart]) else []
    return sum(weight_bytes + token_bytes * len(call) * max(call) for call in calls)


@pytest.mark.parametrize("seed", range(20))
def test_the_rows_that_lie_apart_are_those_that_read_least(seed: int) -> None:
    """Against every subset of up to seven rows. From any present state a step reads at most a ninth more."""
    rng = np.random.default_rng(seed)
    rooms = {int(row): int(rng.choice([128, 256, 1024, 4096])) for row in rng.permutation(9)[: seed % 7 + 1]}
    weights = int(rng.choice([0, 1_000, 100_000, 10_000_000]))
    every = [set(s) for size in range(len(rooms) + 1) for s in itertools.combinations(rooms, size)]
    least = min(read_bytes(rooms, apart, 100, weights) for apart in every)
    found = rows_apart(rooms, set(), 100, weights)
    assert read_bytes(rooms, set(found), 100, weights) * onnx_cache.WORTH <= least
    for present in every:
        kept = rows_apart(rooms, present, 100, weights)
        assert read_bytes(rooms, set(kept), 100, weights) * onnx_cache.WORTH <= least


def test_one_long_row_lies_apart_when_the_others_pay_for_it() -> None:
    rooms = {0: 128, 1: 128, 2: 4096, 3: 128}
    assert rows_apart(rooms, set(), 1000, 1_000_000) == {2}  # 3 x 3,968 tokens of 1,000 bytes
    assert rows_apart(rooms, set(), 1000, 20_000_000) == set()
    assert rows_apart({2: 4096}, set(), 1000, 1) == set()
    assert rows_apart({}, set(), 1000, 1) == set()


def test_where_a_row_lies_changes_no_logits(gpt_onnx: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A random life of five rows: prompts in parts, answers, rows that end, are copied, saved and loaded. Each
    step's logits are those of the whole text alone, and rows did part and rejoin.
    """
    loaded = open_backend(gpt_onnx, BackendOptions(device="cpu", threads=1))
    backend = loaded.causal
    assert backend is not None
    monkeypatch.setattr(onnx_cache, "CAPACITY_STEP", 16)
    rng = np.random.default_rng(5)
    cache, texts = backend.new_cache(5), [np.zeros(0, np.int64) for _ in range(5)]
    parted, rejoined, before = 0, 0, set[int]()
    for turn in range(60):
        # weights that cost much bring rows back, weights that cost nothing part them
        backend.weight_bytes = (0, 30_000, 10**9)[turn // 7 % 3]
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
            alone = backend.forward(text, np.zeros(1, np.int64), ask, backend.new_cache(1))[0, 0]
            # fp32 sums in another order, as inference/graphs/parity.py explains
            np.testing.assert_allclose(logits, alone, atol=1e-4 * np.abs(alone).max())
        apart = set(cache.apart)
        parted += len(apart - before)
        rejoined += len({row for row in before - apart if len(texts[row])})
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
        before = set(cache.apart)
    assert parted > 5 and rejoined > 2, (parted, rejoined)
