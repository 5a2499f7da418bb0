"""Continuous batching: what is known of a prompt is not computed again, prompts can be asked for their
probabilities, and a step of many rows equals the rows alone on every backend.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import opinionated_model, read
from throughline.core.backend import ALL, BackendOptions, CausalBackend, Span, log_softmax
from throughline.core.errors import WrongUse
from throughline.core.scorer import common
from throughline.data.tokenizer import Tokenizer
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.runtimes.sampling import Sampling, choose
from throughline.inference.runtimes.torch_backend import TorchCausal
from throughline.inference.serving import slots
from throughline.inference.serving.channel import Open
from throughline.inference.serving.generation import Guide, Job, TextDelta, look_up
from throughline.inference.serving.slots import SlotBatch
from throughline.inference.serving.worker import open_draft
from throughline.models.config import GPTConfig

CPU = BackendOptions(device="cpu", threads=1)


class Counting:
    """A backend that counts the tokens it reads."""

    def __init__(self, backend: CausalBackend) -> None:
        self._backend, self.tokens, self.widest, self.calls = backend, 0, 0, 0

    def __getattr__(self, name: str):
        return getattr(self._backend, name)

    def step(self, spans: list[Span], cache):
        self.calls += 1
        self.tokens += sum(len(span.ids) for span in spans)
        self.widest = max([self.widest, *(len(span.ids) for span in spans)])
        return self._backend.step(spans, cache)


@pytest.fixture(scope="module", params=["torch", "onnxruntime"])
def backend(request, gpt_dir: Path, gpt_onnx: Path) -> CausalBackend:
    loaded = open_backend(gpt_dir if request.param == "torch" else gpt_onnx, CPU)
    assert loaded.causal is not None and loaded.causal.name == request.param
    return loaded.causal


def run(batch: SlotBatch, *requests: Job, guide: Guide | None = None) -> list[list[TextDelta]]:
    """All answers, as deltas; `guide` is the first one's."""
    answers: list[list[TextDelta]] = [[] for _ in requests]
    for number, request in enumerate(requests):
        batch.add(request, guide if number == 0 else None).owner = number
    while batch.busy:
        for sequence, delta in batch.step():
            answers[sequence.owner].append(delta)
    return answers


def ids_of(deltas: list[TextDelta]) -> list[int]:
    return [delta.token.id for delta in deltas if delta.token]


def nothing(ids: list[int]) -> str:
    return ""


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


def test_what_begins_otherwise_is_passed_over(
    backend: CausalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many that are kept only those whose beginnings are worth a copy are compared token by token: of a small model
    thousands fit, and each answer would cost more than the one before. Ids of 32 bits find those of 64.
    """
    batch = SlotBatch(backend, nothing, 1)
    prompts = [np.random.default_rng(seed).integers(0, 300, 40).astype(np.int32) for seed in range(20)]
    for prompt in prompts:
        run(batch, Job(prompt, 1))
    compared = []
    monkeypatch.setattr(slots, "common", lambda rows: compared.append(len(rows[0])) or common(rows))
    assert run(batch, Job(prompts[3], 1))[0][0].cached_tokens == 39
    assert compared == [40, 40], "when it began and when it was to be kept"


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


def drafting(gpt_dir: Path, noise: float) -> CausalBackend:
    """The model itself with a shorter context and weights that are off by so many of their deviations."""
    draft = open_backend(gpt_dir, BackendOptions("cpu", runtime="torch", context=90)).causal
    assert isinstance(draft, TorchCausal)
    with torch.no_grad():
        for number, parameter in enumerate(draft.model.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter += noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
    return draft


@pytest.mark.parametrize("seed", range(6))
def test_guessing_ahead_changes_no_token(
    backend: CausalBackend, gpt_dir: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of every kind side by side, to prompts that repeat themselves: tokens, texts and ends are those of single
    steps, and what is kept of a finished answer serves the next one. The text so far guesses, or a model that is right
    always, at times or hardly ever.
    """
    monkeypatch.setattr(slots, "GUESSING_ROWS", 4)
    draw = np.random.default_rng(seed)

    def prompt() -> np.ndarray:
        part = draw.integers(1, 300, draw.integers(2, 9))
        return np.concatenate([draw.integers(1, 300, 3), np.tile(part, draw.integers(1, 5))])

    end = int(draw.integers(1, 300))
    kinds: list[dict] = [{}, {}, {}, {"stop": ("e",)}, {"stop_ids": (end,), "min_tokens": 9}]
    kinds += [
        {"sampling": Sampling(temperature=0.8, seed=7)},
        {"sampling": Sampling(0, frequency_penalty=0.5)},
    ]
    jobs = [Job(prompt(), int(draw.integers(1, 60)), **kind) for kind in kinds]
    jobs += [Job(np.concatenate([jobs[0].prompt_ids, jobs[0].prompt_ids]), 20), Job(prompt(), 30, logprobs=1)]

    def decode(ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)

    def answers(speculate: int, draft: CausalBackend | None = None) -> tuple[list, int, float]:
        counting = Counting(backend)
        batch = SlotBatch(counting, decode, 4, eos_id=0, speculate=speculate, draft=draft)
        found = run(batch, *jobs) + run(batch, *jobs[::-1])
        assert not batch.failed
        told = [
            (ids_of(deltas), "".join(delta.text for delta in deltas), deltas[-1].finish, len(deltas))
            for deltas in found
        ]
        return told, counting.calls, batch.right / max(batch.guessed, 1)

    plain, steps, _ = answers(0)
    for speculate in (1, 8):
        told, fewer, _ = answers(speculate)
        assert told == plain and fewer <= steps
    noise = (0.0, 0.02, 5.0)[seed % 3]
    told, fewer, right = answers(4, drafting(gpt_dir, noise))
    assert told == plain and fewer <= steps - (noise < 1)
    # Greedy guesses at drawn tokens are wrong at times, and the last guesses of a text that ends count as wrong.
    assert right > 0.5 if noise == 0 else right < 0.9


def test_guesses_that_nobody_checked_are_another_text(
    backend: CausalBackend, gpt_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault that the test above would see."""
    job = Job(np.arange(5), 40)
    plain = ids_of(run(SlotBatch(backend, nothing, 1), job)[0])
    batch = SlotBatch(backend, nothing, 1, prefix_bytes=0, speculate=4, draft=drafting(gpt_dir, 5.0))
    assert ids_of(run(batch, job)[0]) == plain and 0 <= batch.right < batch.guessed

    def unchecked(logits_NV: np.ndarray, choosers: list) -> np.ndarray:
        ids_N = choose(logits_NV, choosers)
        guesses = batch._live[0].guesses
        ids_N[: len(guesses)] = guesses
        return ids_N

    monkeypatch.setattr(slots, "choose", unchecked)
    assert ids_of(run(batch, job)[0]) != plain


@pytest.mark.parametrize("has_draft", [True, False])
def test_guessing_that_fails_ends_by_its_name(
    has_draft: bool,
    backend: CausalBackend,
    gpt_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A fault of the draft model or of the look-up is told once, as what it is, and costs no token."""
    draft = drafting(gpt_dir, 0.0) if has_draft else None
    calls = iter([[7, 7], MemoryError("no room"), MemoryError("no room")])  # a wrong guess first

    def failing(_: Any, most: int) -> list[int]:
        if isinstance(found := next(calls) if most else [], Exception):
            raise found
        return found

    if draft is not None:
        draft.step = Counts  # takes no spans
    else:
        monkeypatch.setattr(slots, "look_up", failing)
    batch = SlotBatch(backend, nothing, 1, speculate=4, draft=draft)
    (deltas,) = run(batch, Job(np.arange(5), 9))
    assert ids_of(deltas) == ids_of(run(SlotBatch(backend, nothing, 1), Job(np.arange(5), 9))[0])
    told = capsys.readouterr().err
    assert told.count("nothing is guessed ahead from here on") == 1
    assert ("the draft model failed" in told) == has_draft == ("the look-up failed" not in told)


def test_a_server_counts_what_its_draft_model_guesses(
    gpt_onnx: Path, gpt_dir: Path, in_thread, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []

    async def body(found) -> None:
        texts.append((await found.complete(prompt="The quick", max_tokens=20))["choices"][0]["text"])
        remote = found.remote()
        assert (remote.guessed > 0) == (remote.right > 0) == (len(texts) == 2)
        page = (await found.client.get("/metrics")).text
        assert f'throughline_guessed_right_total{{model="gpt"}} {float(remote.right)}' in page

    in_thread.run_with(monkeypatch, [f"gpt={gpt_onnx}"], body)
    in_thread.run_with(monkeypatch, [f"gpt={gpt_onnx}"], body, speculate=4, draft=gpt_dir)
    assert texts[0] == texts[1]


def test_a_draft_model_of_another_vocabulary_is_refused(
    gpt_dir: Path, chat_dir: Path, bert_dir: Path
) -> None:
    tokenizer = Tokenizer.load(gpt_dir)
    with pytest.raises(WrongUse, match=r"(?s)another vocabulary.*im_start.*same tokenizer"):
        open_draft(Open("gpt", str(gpt_dir), 1, CPU, 4, str(chat_dir)), tokenizer)
    with pytest.raises(WrongUse, match="needs a GPT"):
        open_draft(Open("gpt", str(gpt_dir), 1, CPU, 4, str(bert_dir)), tokenizer)


class Counts:
    """A model that counts to seven again and again."""

    device, vocab_size, context, token_bytes, limits = "cpu", 7, 1000, 0, ALL

    def new_cache(self, rows: int) -> None:
        self.calls = 0

    def step(self, spans: list[Span], cache: None) -> np.ndarray:
        self.calls += 1
        last = np.concatenate([span.ids[len(span.ids) - span.asked :] for span in spans])
        return np.eye(7, dtype=np.float32)[(last + 1) % 7]

    def free_row(self, cache: None, row: int) -> None:
        pass


def test_good_guesses_save_steps() -> None:
    """From the second round on all are right: the prompt's step, a single one, then nine tokens a step."""
    model = Counts()
    (deltas,) = run(SlotBatch(model, nothing, 1, speculate=8), Job(np.arange(7), 100))
    assert ids_of(deltas) == [i % 7 for i in range(100)]
    assert model.calls == 2 + math.ceil(98 / 9)


class Sums:
    """A model whose next token is the sum of all that its cache row holds."""

    device, vocab_size, context, token_bytes, limits = "cpu", 11, 200, 0, ALL

    def new_cache(self, rows: int) -> np.ndarray:
        return np.zeros((rows, self.context), np.int64)

    def step(self, spans: list[Span], cache: np.ndarray) -> np.ndarray:
        sums = []
        for span in spans:
            end = span.past + len(span.ids)
            cache[span.row, span.past : end] = span.ids
            sums += cache[span.row, :end].cumsum()[end - span.asked :].tolist()
        return np.eye(11, dtype=np.float32)[np.array(sums, np.int64) % 11]

    def copy_row(self, cache: np.ndarray, source: int, target: int, tokens: int) -> None:
        cache[target, :tokens] = cache[source, :tokens]

    def free_row(self, cache: np.ndarray, row: int) -> None:
        cache[row] = 0


def test_a_draft_model_keeps_up_with_rows_that_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is right at all times, of answers that end one after another: no guess is wrong."""
    monkeypatch.setattr(slots, "GUESSING_ROWS", 3)
    jobs = [Job(np.arange(1, 2 + size), size) for size in (4, 30, 9, 50, 17, 2, 33)]
    batch = SlotBatch(Sums(), nothing, 3, speculate=4, draft=Sums())
    answers = [ids_of(deltas) for deltas in run(batch, *jobs)]
    assert answers == [ids_of(deltas) for deltas in run(SlotBatch(Sums(), nothing, 3), *jobs)]
    assert batch.right == batch.guessed > 80


def test_a_guess_is_what_came_after_the_longest_known_end() -> None:
    assert look_up(np.array([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]), 2) == [9, 2]
    assert look_up(np.array([5, 6, 7, 5, 6, 8, 5, 6]), 4) == [8, 5, 6, 8]
    assert look_up(np.array([1, 1, 1]), 3) == [1, 1, 1]
    assert look_up(np.array([1, 2, 3]), 3) == look_up(np.array([4]), 3) == []
