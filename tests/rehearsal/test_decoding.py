"""A GPT that answers on a GPU: which kernel reads the cache, decode steps as CUDA graphs, waits, and memory."""

from collections import Counter

import numpy as np
import pytest
import torch
from cases import CARDS, SMALL_CARD, Seen, card, model
from throughline.core.backend import Span
from throughline.core.errors import Refused
from throughline.inference.runtimes.torch_backend import TorchCausal, TorchEncoder
from throughline.inference.serving.generation import Job
from throughline.inference.serving.slots import SlotBatch
from throughline.models.init import build

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WINDOW = {"attention_window": 64, "attention_block": 32, "layer_pattern": "lg"}


def backend_of(family: str, precision: str, capability: int, **changes) -> TorchCausal:
    module = build(model(family, **changes), 0).to(card(capability), DTYPES[precision])
    return TorchCausal(module)


def spans(lengths: list[int], past: int = 0) -> list[Span]:
    return [Span(row, past, np.arange(length)) for row, length in enumerate(lengths)]


@pytest.mark.parametrize("family", ["gpt", "llama", "window", "sinks"])
@pytest.mark.parametrize(
    ("capability", "precision"),
    [(70, "fp16"), (75, "fp16"), (80, "bf16"), (80, "fp32"), (90, "bf16"), (100, "fp16")],
)
def test_steps_of_a_cache(capability, precision, family):
    """Prompts of several lengths are one call of a kernel with bounds, where there is one; single tokens a replay."""
    changes = {"window": WINDOW, "sinks": WINDOW | {"attention_sinks": True}}.get(family, {})
    backend = backend_of("gpt" if changes else family, precision, capability, **changes)
    bounded = capability >= 80 and precision != "fp32"
    cache = backend.new_cache(4)
    with Seen() as seen, torch.no_grad():  # in inference mode torch does not say which kernel it takes
        TorchCausal.step.__wrapped__(backend, spans([70, 3, 128]), cache)
    unbounded = set() if family == "sinks" else {"efficient"}  # sinks are plain products there
    assert seen.attention == ({"flash by bounds"} if bounded else unbounded), seen.attention
    assert not seen.waits
    backend.step(spans([1, 1, 1], 130), cache)
    with Seen() as seen:
        backend.step(spans([1, 1, 1], 131), cache)
    assert seen.counted["graphs"] == 1 and seen.counted["launches"] < 5, seen.counted
    assert not seen.waits and not seen.counted["waits"] and not backend.graphs.failures


def test_each_number_of_rows_and_places_is_captured_once():
    backend = backend_of("llama", "bf16", 80, sequence_length=1024)
    cache = backend.new_cache(6)
    for past in (10, 200, 300, 600, 1000):
        for rows in (1, 2, 3, 4, 5, 6):
            backend.step(spans([1] * rows, past), cache)
    assert sorted(cache.steps) == [(rows, seen) for rows in (1, 2, 4, 6) for seen in (256, 512, 1024)]


def test_what_cannot_be_captured_is_launched():
    """Experts ask the host how many tokens each has."""
    backend = backend_of("llama", "bf16", 80, experts=4, expert_width=64)
    cache = backend.new_cache(2)
    for past in (5, 6):
        assert backend.step(spans([1, 1], past), cache).shape[0] == 2
    assert backend.graphs.failures == 1


@pytest.mark.parametrize("family", ["bert", "gpt"])
def test_calls_of_an_encoder_are_replayed_from_the_third_on(family):
    encoder = TorchEncoder(build(model(family), 0).to(card(80), torch.bfloat16))
    ids, want = np.zeros((2, 16), np.int64), {"sentence_embedding", "last_embedding"}
    given = ids, ids, np.ones((2, 16), bool), np.zeros((2, 1), np.int64)
    launches = []
    for _ in range(3):
        with Seen() as seen:
            assert encoder.forward(*given, want).keys() == want
        launches.append((seen.counted["graphs"], seen.counted["launches"]))
    assert [graphs for graphs, _ in launches] == [0, 0, 1] and launches[2][1] < launches[0][1] / 4, launches


@pytest.fixture
def sound(monkeypatch):
    """Numbers of kernels that do not run are found to be some."""
    monkeypatch.setattr(torch, "isfinite", lambda x: torch.ones(x.shape, dtype=torch.bool))


def test_slots_answer_by_replays(sound):
    backend = backend_of("llama", "bf16", 90)
    batch = SlotBatch(backend, lambda ids: "", 4)
    for length in (3, 60, 20, 9, 5):
        batch.add(Job(np.arange(1, length + 1), 6))
    with Seen() as seen:
        while batch.busy:
            batch.step()
    assert not batch.failed and not backend.graphs.failures and seen.counted["graphs"] > 5
    files = Counter({place.split(":")[0]: count for place, count in seen.waits.items()})
    assert files.keys() == {"slots.py", "packed.py"} and files["packed.py"] == len(batch._cache.steps), (
        "chosen ids, and the making of a graph"
    )


def test_rows_are_as_many_as_fit():
    torch.cuda.set_device(SMALL_CARD)
    module = build(model("gpt", layers=12, width=768, heads=12), 0).to(f"cuda:{SMALL_CARD}", torch.bfloat16)
    backend = TorchCausal(module, gpu_memory=0.5)
    room = 2**30 - torch.cuda.memory_allocated(SMALL_CARD)
    assert backend.limits.rows == room // (256 * backend.token_bytes)
    cache = backend.new_cache(backend.limits.rows)
    assert torch.cuda.memory_allocated(SMALL_CARD) <= 2**30 and cache.rows == backend.limits.rows
    with pytest.raises(Refused, match="--gpu-memory"):
        TorchCausal(module, gpu_memory=0.01)


@pytest.mark.parametrize("capability", [75, 80])
def test_memory_that_is_missing_halves_the_batch(capability, monkeypatch, sound):
    backend = backend_of("llama", "fp16", capability)
    batch = SlotBatch(backend, lambda ids: "", 8)
    step, calls = backend.step, []

    def limited(spans, cache):
        calls.append(len(spans))
        if len(spans) > 3:
            torch.empty(10**12, dtype=torch.uint8, device=f"cuda:{CARDS[capability]}")
        return step(spans, cache)

    monkeypatch.setattr(backend, "step", limited)
    for start in range(8):
        batch.add(Job(np.arange(start + 1, start + 5), 3))
    while batch.busy:
        batch.step()
    assert not batch.failed and 0 < sum(count > 3 for count in calls) <= 3, calls
