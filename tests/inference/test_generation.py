"""Generation: a batch whose answers are those of each request alone."""

from pathlib import Path

import numpy as np
import pytest
from throughline.core.backend import BackendOptions, Limits, Span
from throughline.core.errors import WrongUse
from throughline.data.tokenizer import Tokenizer
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.runtimes.sampling import Sampling
from throughline.inference.serving.generation import Job, TextDelta
from throughline.inference.serving.slots import SlotBatch, answer


@pytest.fixture(scope="module")
def tokenizer(gpt_dir: Path) -> Tokenizer:
    return Tokenizer.load(gpt_dir)


class RememberingBackend:
    """Logits that hash the whole history of a row, kept as ids in the cache: any mix-up of rows changes an
    answer.
    """

    name, device, dtype, vocab_size, context, token_bytes = "fake", "cpu", "fp32", 97, 400, 8
    limits = Limits()

    def new_cache(self, rows: int) -> np.ndarray:
        return np.full((rows, self.context), -1)

    def __init__(self) -> None:
        self.tokens_read = 0

    def step(self, spans: list[Span], cache: np.ndarray) -> np.ndarray:
        assert len({span.row for span in spans}) == len(spans)
        logits = []
        for span in spans:
            store = cache[span.row]
            store[span.past : span.past + len(span.ids)] = span.ids
            store[span.past + len(span.ids) :] = -1
            self.tokens_read += len(span.ids)
            for at in range(len(span.ids) - span.asked, len(span.ids)):
                history = store[: span.past + at + 1]
                assert (history >= 0).all()
                rng = np.random.default_rng(history.tolist())
                logits.append(rng.normal(size=self.vocab_size).astype(np.float32))
        return np.stack(logits) if logits else np.zeros((0, self.vocab_size))

    def copy_row(self, cache, source, target, tokens):
        cache[target] = -1
        cache[target, :tokens] = cache[source, :tokens]

    def free_row(self, cache, row):
        cache[row] = -1

    def save_row(self, cache, row, tokens):
        return cache[row, :tokens].copy()

    def load_row(self, cache, row, saved, tokens):
        cache[row] = -1
        cache[row, :tokens] = saved[:tokens]


def letters(ids: list[int]) -> str:
    return "".join(chr(33 + i) for i in ids)


def random_requests(rng: np.random.Generator, count: int) -> list[Job]:
    return [
        Job(
            rng.integers(0, 97, rng.integers(1, 150)),
            int(rng.integers(1, 30)),
            Sampling(
                temperature=float(rng.integers(0, 2)), seed=number, repetition_penalty=1 + 0.5 * (number % 2)
            ),
        )
        for number in range(count)
    ]


def answers_of(batch: SlotBatch) -> dict[int, str]:
    answers: dict[int, str] = {}
    while batch.busy:
        for sequence, delta in batch.step():
            answers[sequence.owner] = answers.get(sequence.owner, "") + delta.text
    return answers


def test_a_batch_gives_every_request_its_own_answer_whoever_comes_and_goes() -> None:
    rng = np.random.default_rng(3)
    requests = random_requests(rng, 24)
    alone = {}
    for number, request in enumerate(requests):
        batch = SlotBatch(RememberingBackend(), letters, 1)
        batch.add(request).owner = number
        alone |= answers_of(batch)
    for slots in (1, 2, 5):
        batch = SlotBatch(RememberingBackend(), letters, slots)
        waiting, cancelled, answers, live = list(enumerate(requests)), set(), {}, []
        while waiting or batch.busy:
            if waiting and rng.random() < 0.4:
                number, request = waiting.pop(0)
                live.append(batch.add(request))
                live[-1].owner = number
            if live and rng.random() < 0.03:
                gone = live[rng.integers(len(live))]
                batch.drop({gone.owner})
                cancelled.add(gone.owner)
            for sequence, delta in batch.step():
                answers[sequence.owner] = answers.get(sequence.owner, "") + delta.text
        assert cancelled and len(cancelled) < len(requests) / 2
        for number in set(alone) - cancelled:
            assert answers[number] == alone[number]
        assert all(alone[number].startswith(answers.get(number, "")) for number in cancelled)


def answers_by_backend(path: Path, requests: list[Job], slots: int) -> list[list[int]]:
    loaded = open_backend(path, BackendOptions(device="cpu", threads=1))
    assert loaded.causal is not None
    ids: list[list[int]] = [[] for _ in requests]
    for number, _, delta in answer(SlotBatch(loaded.causal, lambda ids: "", slots, prefix_bytes=0), requests):
        assert delta.token is not None
        ids[number].append(delta.token.id)
    return ids


def test_batched_answers_equal_single_ones_on_both_backends(gpt_dir: Path, gpt_onnx: Path) -> None:
    """64 greedy tokens and sampled ones, in torch and in ONNX Runtime, alone and together: one answer per
    request.
    """
    rng = np.random.default_rng(1)
    requests = [Job(rng.integers(0, 300, length), 64) for length in (1, 20, 90)]
    requests += [Job(rng.integers(0, 300, 70), 40, Sampling(top_p=0.9, seed=seed)) for seed in range(3)]
    expected = answers_by_backend(gpt_dir, requests, 1)
    assert [len(ids) for ids in expected] == [64, 64, 64, 40, 40, 40]
    assert all(len(set(ids)) > 5 for ids in expected)  # the answers do have content
    for path, slots in ((gpt_dir, 6), (gpt_onnx, 1), (gpt_onnx, 2), (gpt_onnx, 6)):
        assert answers_by_backend(path, requests, slots) == expected


def test_finish_reasons() -> None:
    """The end token, a stop string and the limit each say so, and the end token is no text."""
    prompt = np.arange(5)
    backend = RememberingBackend()

    def run(end_ids: tuple[int, ...] = (), **kwargs) -> list[TextDelta]:
        batch = SlotBatch(backend, letters, 8, end_ids=end_ids)
        return [delta for _, _, delta in answer(batch, [Job(prompt, 20, **kwargs)])]

    plain = run()
    assert [delta.finish for delta in plain] == [None] * 19 + ["length"]
    text, third = "".join(delta.text for delta in plain), plain[2].token.id
    assert text[2] not in text[:2]
    ended = run(end_ids=(third,))
    assert ended[-1].finish == "stop" and "".join(delta.text for delta in ended) == text[:2]
    stopped = run(stop=(text[2:4],))
    assert stopped[-1].finish == "stop" and "".join(delta.text for delta in stopped) == text[:2]


def test_probabilities_are_those_of_the_model() -> None:
    request = Job(np.arange(4), 3, Sampling(temperature=2.0, top_k=3, seed=1), logprobs=5)
    for _, _, delta in answer(SlotBatch(RememberingBackend(), letters, 8), [request]):
        values = dict(delta.token.top)
        assert len(values) == 5 and list(values.values()) == sorted(values.values(), reverse=True)
        assert delta.token.logprob == values[delta.token.id]  # top-k 3 chose among the five
        assert sum(np.exp(value) for value in values.values()) < 1


@pytest.mark.parametrize(
    ("prompt", "tokens", "message"),
    [([], 5, "empty"), ([1], 0, "max_tokens is 0"), ([1] * 10, 391, "longer than the model's context")],
)
def test_requests_that_cannot_fit_are_refused(prompt: list[int], tokens: int, message: str) -> None:
    with pytest.raises(WrongUse, match=message):
        SlotBatch(RememberingBackend(), letters, 1).add(Job(np.array(prompt, np.int64), tokens))


def test_padding_rows_of_the_vocabulary_are_never_chosen() -> None:
    """A model's vocabulary may be padded beyond the tokenizer's: those ids mean nothing."""
    requests = [Job(np.arange(3), 50, Sampling(seed=seed, repetition_penalty=1.1)) for seed in range(4)]
    batch = SlotBatch(RememberingBackend(), letters, 8, vocab_size=10)
    ids = {delta.token.id for _, _, delta in answer(batch, requests)}
    assert ids == set(range(10))
