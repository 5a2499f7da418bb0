"""Continuous batching: what is known of a prompt is not computed again, prompts can be asked for their
probabilities, and a step of many rows equals the rows alone on every backend.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from batches import CPU, Counting, ids_of, nothing, run
from small_models import opinionated_model, read
from throughline.core.backend import BackendOptions, CausalBackend, Span, log_softmax
from throughline.core.scorer import common
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.runtimes.sampling import Sampling
from throughline.inference.runtimes.torch_backend import TorchCausal
from throughline.inference.serving.generation import Job
from throughline.inference.serving.slots import SlotBatch
from throughline.models.config import GPTConfig


def test_a_step_of_many_rows_equals_each_row_alone(backend: CausalBackend) -> None:
    """Single tokens, parts of prompts with and without a past, rows left out, in no order: the logits of
    `forward` row by row.
    """
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 300, length) for length in (40, 3, 100, 17, 64, 128)]
    cache = backend.new_cache(7)
    before = [39, 2, 60, 0, 63, 20]
    for row, (ids, past) in enumerate(zip(texts, before)):
        if past:
            assert backend.step([Span(row, 0, ids[:past], 0)], cache).shape[0] == 0
    spans = [
        Span(row, before[row], texts[row][before[row] :], asked)
        for row, asked in ((5, 3), (0, 1), (3, 17), (4, 1), (2, 0))
    ]
    found = backend.step(spans, cache)
    expected = []
    for span in spans:
        ids = texts[span.row][None]
        ask = np.arange(ids.shape[1])[None, ids.shape[1] - span.asked :]
        expected.append(read(backend, ids, np.zeros(1, np.int64), ask, backend.new_cache(1))[0])
    whole = np.concatenate(expected)
    assert found.shape == whole.shape == (22, backend.vocab_size)
    # fp32 sums in another order, as inference/graphs/parity.py explains
    np.testing.assert_allclose(found, whole, atol=1e-4 * np.abs(whole).max())
    late = backend.step([Span(1, 2, texts[1][2:], 1)], cache)  # row 1 took no part, and lost nothing
    alone = read(backend, texts[1][None], np.zeros(1, np.int64), np.array([[2]]), backend.new_cache(1))[0]
    np.testing.assert_allclose(late, alone, atol=1e-4 * np.abs(alone).max())


def test_a_prompt_asked_n_times_is_read_once(backend: CausalBackend) -> None:
    counting = Counting(backend)
    prompt = np.random.default_rng(1).integers(0, 300, 100)
    requests = [Job(prompt, 2, Sampling(seed=seed)) for seed in range(5)]
    answers = run(SlotBatch(counting, nothing, 5), *requests)
    # the prompt, its last token for each of the others, and one decode step of each
    assert counting.tokens == 100 + 4 * 1 + 5
    assert sorted(deltas[0].cached_tokens for deltas in answers) == [0, 99, 99, 99, 99]
    for request, deltas in zip(requests, answers):
        assert ids_of(run(SlotBatch(backend, nothing, 1), request)[0]) == ids_of(deltas)


def test_a_conversation_goes_on_where_it_was(backend: CausalBackend) -> None:
    """The prompt and the answer of a finished request are the beginning of a later one."""
    counting = Counting(backend)
    batch = SlotBatch(counting, nothing, 2)
    rng = np.random.default_rng(2)
    first = Job(rng.integers(0, 300, 50), 20)
    answer = ids_of(run(batch, first)[0])
    counting.tokens = 0
    second = Job(np.concatenate((first.prompt_ids, answer, rng.integers(0, 300, 10))), 5)
    again = run(batch, second)[0]
    # the last token of an answer is never read: nothing needed what comes after it
    assert again[0].cached_tokens == 50 + 19 and counting.tokens == 1 + 10 + 4
    assert ids_of(again) == ids_of(run(SlotBatch(backend, nothing, 1), second)[0])


def test_what_is_kept_is_bounded(backend: CausalBackend) -> None:
    """With room for 100 tokens the second sequence of 60 drives the first one out."""
    batch = SlotBatch(backend, nothing, 1, prefix_bytes=100 * backend.token_bytes)
    prompts = [np.random.default_rng(seed).integers(0, 300, 60) for seed in (1, 2)]
    reused = [run(batch, Job(prompts[i], 1))[0][0].cached_tokens for i in (0, 0, 1, 1, 0)]
    assert reused == [0, 59, 0, 59, 0]


def test_a_long_prompt_does_not_hold_up_the_others(backend: CausalBackend) -> None:
    """While somebody decodes, at most 64 tokens of a prompt are read in a step, and each step decodes."""
    counting = Counting(backend)
    batch = SlotBatch(counting, nothing, 3)
    batch.add(Job(np.arange(5), 12)).owner = 0
    batch.step()
    counting.widest = 0
    batch.add(Job(np.random.default_rng(3).integers(0, 300, 120), 3)).owner = 1
    steps = [[sequence.owner for sequence, _ in batch.step()] for _ in range(4)]
    assert steps == [[0], [0, 1], [0, 1], [0, 1]] and counting.widest == 64


@pytest.mark.parametrize("asked", [0, 3])
def test_prompts_have_probabilities(backend: CausalBackend, asked: int) -> None:
    """Of a prompt longer than a chunk, beside others, and though its prefix is known: equal to the logits."""
    rng = np.random.default_rng(4)
    prompt = rng.integers(0, 300, 120)
    logits = read(backend, prompt[None], np.zeros(1, np.int64), np.arange(120)[None], backend.new_cache(1))
    expected = log_softmax(logits[0].astype(np.float64))
    batch = SlotBatch(backend, nothing, 3)
    run(batch, Job(prompt, 1))
    echo = Job(prompt, 0, prompt_logprobs=asked)
    (deltas, plain, one) = run(batch, echo, Job(prompt, 4), Job(prompt[:1], 0, prompt_logprobs=1))
    assert [(delta.token, delta.finish) for delta in deltas] == [(None, "length")]
    tokens = deltas[0].prompt
    assert tokens is not None and [token.id for token in tokens] == prompt.tolist()
    assert tokens[0].logprob is None and plain[0].prompt is None
    given = [token.logprob for token in tokens[1:]]
    np.testing.assert_allclose(given, expected[np.arange(119), prompt[1:]], atol=1e-3)
    for place, token in enumerate(tokens[1:]):
        assert [i for i, _ in token.top] == np.argsort(-expected[place])[:asked].tolist()
    assert one[0].prompt is not None and [token.id for token in one[0].prompt] == [prompt[0]]


def test_a_guide_decides_what_may_come(backend: CausalBackend) -> None:
    class Alternating:
        def __init__(self) -> None:
            self.taken: list[int] = []

        def allowed(self) -> np.ndarray:
            return np.isin(np.arange(backend.vocab_size), (7, 8) if len(self.taken) % 2 else (5,))

        def accept(self, token_id: int) -> bool:
            self.taken.append(token_id)
            return len(self.taken) == 4

    guided = Job(np.arange(9), 50, Sampling(seed=3))
    free = Job(np.arange(9), 6, Sampling(seed=3))
    deltas, others = run(SlotBatch(backend, nothing, 2), guided, free, guide=Alternating())
    ids = ids_of(deltas)
    assert ids[::2] == [5, 5] and set(ids[1::2]) <= {7, 8} and deltas[-1].finish == "stop"
    assert ids_of(others) == ids_of(run(SlotBatch(backend, nothing, 1), free)[0])


def test_common_beginnings() -> None:
    cases = ([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 2, 4, 5], 2), ([], [1], 0), ([1, 2], [1, 2, 3], 2)
    for one, other, expected in cases:
        assert common((np.array(one), np.array(other))) == expected


def test_a_long_row_leaves_no_capacity_behind(gpt_onnx: Path) -> None:
    """ONNX Runtime attends over the capacity: it shrinks when the longest row goes, and keeps the others."""
    backend = open_backend(gpt_onnx, CPU).causal
    assert backend is not None
    import throughline.inference.runtimes.onnx_causal as module

    batch = SlotBatch(backend, nothing, 2)
    cache = batch._cache
    backend._resize(cache, 16)
    step, module.CAPACITY_STEP = module.CAPACITY_STEP, 16
    try:
        long, short = run(batch, Job(np.arange(100), 2), Job(np.arange(5), 12))
        assert cache.capacity == 32 or cache.capacity == 16
    finally:
        module.CAPACITY_STEP = step
    assert len(ids_of(long)) == 2
    assert ids_of(short) == ids_of(run(SlotBatch(backend, nothing, 1), Job(np.arange(5), 12))[0])


def test_half_precision_weights_stay_so(gpt_dir: Path) -> None:
    loaded = open_backend(gpt_dir, BackendOptions(device="cpu", dtype="bf16"))
    backend = loaded.causal
    assert backend is not None and backend.dtype == "bf16"
    cache = backend.new_cache(1)
    assert cache.keys_LBGTD.dtype == torch.bfloat16
    assert backend.step([Span(0, 0, np.arange(4), 1)], cache).dtype == np.float32


@pytest.mark.parametrize(("kind", "sinks"), [("sliding", False), ("sliding", True), ("fixed", False)])
def test_a_pattern_is_kept_in_a_step_of_many(kind: str, sinks: bool) -> None:
    """Parts of prompts and single tokens together, of a model with windows in every second layer: as read whole."""
    window = {"attention_window": 8, "attention_kind": kind, "attention_block": 4, "layer_pattern": "lg"}
    model = opinionated_model(
        GPTConfig(
            vocab_size=97, sequence_length=64, layers=3, width=32, heads=4, attention_sinks=sinks, **window
        )
    )
    backend, rng = TorchCausal(model), np.random.default_rng(0)
    texts = rng.integers(0, 97, (4, 40))
    cache = backend.new_cache(4)
    for past, tokens in (
        ((0, 0, 0, 0), (20, 7, 33, 1)),
        ((20, 7, 33, 1), (1, 30, 1, 1)),
        ((21, 37, 34, 2), (1,) * 4),
    ):
        spans = [Span(row, past[row], texts[row, past[row] : past[row] + tokens[row]]) for row in range(4)]
        found = backend.step(spans, cache)
        for span, logits in zip(spans, found):
            with torch.inference_mode():
                whole = model.head(
                    model.hidden(torch.from_numpy(texts[span.row, None, : span.past + len(span.ids)]))
                )
            np.testing.assert_allclose(logits, whole[0, -1], atol=1e-4 * float(whole.abs().max()))
