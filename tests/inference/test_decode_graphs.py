"""Decode steps as they are captured on a GPU, and what is asked of a kernel with bounds, computed on a CPU; what a row
of the cache held reaches nobody; `--context`.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from small_models import GPT, LLAMA, opinionated_model
from throughline.core.backend import BackendOptions, Span
from throughline.core.errors import Refused, WrongUse
from throughline.inference.runtimes import torch_backend
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.runtimes.packed import DecodeGraphs
from throughline.inference.runtimes.torch_backend import TorchCausal, rows_that_fit
from throughline.models import attention_cuda
from throughline.models.config import GPTConfig

SHAPES = {
    "gpt": {},
    "llama": LLAMA | {"kv_heads": 2},
    "alibi": {"positions": "alibi"},
    "band": {"attention_window": 8, "attention_block": 4, "layer_pattern": "lg"},
    "stretches": {"attention_window": 8, "attention_kind": "fixed", "attention_block": 4},
    "capped": {"attention_softcap": 5.0},
    "sinks": {"attention_sinks": True},
}


def model_of(shape: str):
    return opinionated_model(GPTConfig(**vars(GPT) | SHAPES[shape]))


def with_graphs(model) -> tuple[TorchCausal, list[int]]:
    """A backend that takes steps of single tokens as a GPU would capture them, and how often they were replayed."""
    backend, replays = TorchCausal(model), []

    def capture(run, stream, pool):
        return lambda: (replays.append(1), run())

    backend.graphs = DecodeGraphs(model, backend._attentions, capture)
    return backend, replays


def answers(backend: TorchCausal, rounds: int = 6) -> list[np.ndarray]:
    """Logits of prompts of four lengths, and of single tokens: of all rows, of some, and in another order."""
    rng, past = np.random.default_rng(0), [30, 1, 17, 9]
    ids, cache = rng.integers(0, 97, (4, 80)), backend.new_cache(5)
    found = [backend.step([Span(row, 0, ids[row, :length]) for row, length in enumerate(past)], cache)]
    for turn in range(rounds):
        rows = ([0, 1, 2, 3], [3, 1], [2])[turn % 3]
        found.append(backend.step([Span(row, past[row], ids[row, past[row], None]) for row in rows], cache))
        for row in rows:
            past[row] += 1
    more = [
        Span(row, past[row], ids[row, past[row] : past[row] + count], 1) for row, count in ((2, 1), (0, 5))
    ]
    return [*found, backend.step(more, cache)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_captured_step_is_a_launched_one(shape: str) -> None:
    model = model_of(shape)
    backend, replays = with_graphs(model)
    for found, expected in zip(answers(backend), answers(TorchCausal(model)), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())
    assert len(replays) == 6 and not backend.graphs.failures


def test_a_full_row_and_parts_of_prompts_are_launched() -> None:
    backend, replays = with_graphs(model_of("gpt"))
    cache, ids = backend.new_cache(2), np.arange(80)
    backend.step([Span(0, 0, ids, 0), Span(1, 0, ids[:3], 0)], cache)
    backend.step([Span(1, 3, ids[3:4])], cache)  # a step of two rows would write behind the first
    backend.step([Span(1, 4, ids[4:5], 0)], cache)
    assert not replays
    backend.free_row(cache, 0)
    backend.step([Span(1, 4, ids[4:5])], cache)
    assert len(replays) == 1


def attend_cache(q_TAD, k_RPGD, v_RPGD, bounds_N, seen_R, longest, most_seen, window, sinks=None):
    """What the kernel computes, run by run; a place that it may not look at is no number."""
    found, ends = [], bounds_N.tolist()
    assert longest == max(stop - start for start, stop in pairwise(ends)) and most_seen >= max(seen_R)
    for row, (start, stop) in enumerate(pairwise(ends)):
        seen, count = int(seen_R[row]), stop - start
        k, v = (x[row, :seen].repeat_interleave(q_TAD.shape[1] // x.shape[2], 1) for x in (k_RPGD, v_RPGD))
        own = torch.arange(seen - count, seen)[:, None] - torch.arange(seen)
        mask = (own >= 0) & (own < (window or seen))
        q, k, v = (x.transpose(0, 1) for x in (q_TAD[start:stop], k, v))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, -torch.inf)
        sink = torch.full((len(q),), -torch.inf) if sinks is None else sinks
        shares = torch.cat((scores, sink[:, None, None].expand(-1, count, 1)), -1).softmax(-1)[..., :-1]
        found.append((shares @ v).transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("graphs", [False, True], ids=["launched", "captured"])
def test_a_kernel_with_bounds_is_asked_for_the_same(shape, graphs, monkeypatch) -> None:
    """Whole steps of prompts and single tokens as runs over the rows, of all layers that such a kernel computes."""
    model, calls = model_of(shape), []
    expected = answers(TorchCausal(model))
    monkeypatch.setattr(attention_cuda, "has_flash", lambda q: True)
    monkeypatch.setattr(attention_cuda, "attend_cache", lambda *a: (calls.append(1), attend_cache(*a))[1])
    backend = with_graphs(model)[0] if graphs else TorchCausal(model)
    for found, wanted in zip(answers(backend), expected, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())
    assert len(calls) == (16 if shape in ("gpt", "llama", "band", "sinks") else 0)


def test_a_row_that_moves_meets_nothing_of_the_one_before(gpt_dir: Path, gpt_onnx: Path) -> None:
    """A long sequence that has gone wrong leaves; a short one takes its row, beside a longer neighbour."""
    for path in (gpt_dir, gpt_onnx):
        backend = open_backend(path, BackendOptions("cpu", threads=1)).causal
        ids, cache = np.arange(50), backend.new_cache(3)
        lengths = (40, 45, 5)
        backend.step([Span(row, 0, ids[:length]) for row, length in enumerate(lengths)], cache)
        stores = (
            cache.stores.values()
            if hasattr(cache, "stores")
            else (
                cache.keys_LBGTD[:, 0],
                cache.values_LBGTD[:, 0],
            )
        )
        for store in stores:
            (store[0, :, :40] if hasattr(cache, "stores") else store[:, :, :40])[...] = np.nan
        backend.copy_row(cache, 2, 0, 5)
        backend.free_row(cache, 2)
        found = backend.step([Span(0, 5, ids[5:6]), Span(1, 45, ids[45:46])], cache)
        alone = backend.step([Span(0, 0, ids[:6])], backend.new_cache(1))
        np.testing.assert_allclose(found[:1], alone, atol=1e-4 * np.abs(alone).max())


def test_a_shorter_context(gpt_dir: Path, gpt_onnx: Path) -> None:
    for path in (gpt_dir, gpt_onnx):
        backend = open_backend(path, BackendOptions("cpu", context=24)).causal
        assert backend.context == 24
    assert open_backend(gpt_dir, BackendOptions("cpu", context=24)).causal.new_cache(2).places == 24
    with pytest.raises(WrongUse, match="shorter context"):
        open_backend(gpt_onnx, BackendOptions("cpu", context=4096))


def test_rows_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 10 GiB of which 9 are free, with 2 of weights."""
    monkeypatch.setattr(torch_backend.torch.cuda, "mem_get_info", lambda device: (9 << 30, 10 << 30))
    monkeypatch.setattr(torch_backend.torch.cuda, "memory_allocated", lambda device: 2 << 30)
    device, gib = torch.device("cuda:0"), 1 << 30
    assert [rows_that_fit(device, gib, share) for share in (0.9, 0.5, 1.0)] == [7, 3, 8]
    with pytest.raises(Refused, match="--context"):
        rows_that_fit(device, 4 * gib, 0.5)
