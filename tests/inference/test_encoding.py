"""Batches of texts: who is in one, how it is parted, and that parts change no answer."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from throughline.core.backend import BackendOptions, Limits
from throughline.inference.runtimes.backends import open_backend
from throughline.inference.serving import encoding
from throughline.inference.serving.encoding import (
    BATCH_TOKENS,
    Encoding,
    batch_limits,
    embed,
    encode_batch,
    in_lanes,
    take_batch,
)


class Summing:
    """An encoder whose embedding of a text is the sum of its ids and the number of its masked places."""

    name, device, dtype, vocab_size, context = "summing", "cpu", "fp32", 100, 512
    limits = Limits(rows=3)

    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.calls: list[tuple[tuple[int, int], int]] = []
        self.together = threading.Barrier(lanes)

    def lane(self):
        return self

    def forward(self, ids_BS, types_BS, mask_BS, ask_BN, want=None):
        self.together.wait(10)  # raises when the calls of a batch come one after the other
        self.calls.append((ids_BS.shape, threading.get_ident()))
        sums = np.stack([(ids_BS * mask_BS).sum(1), mask_BS.sum(1)], axis=1).astype(np.float32)
        return {"sentence_embedding": sums, "last_hidden_state": sums[:, None]}


def texts_of(lengths: list[int]) -> list[Encoding]:
    rng = np.random.default_rng(0)
    return [Encoding(rng.integers(1, 100, length)) for length in lengths]


def test_a_batch_in_lanes_answers_as_one_call_in_the_order_of_its_texts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(encoding, "_lanes", ThreadPoolExecutor(2))  # also where one core is all there is
    texts = texts_of([30, 4, 17, 5, 29, 6])
    two = Summing(2)
    for text, one, other in zip(texts, encode_batch(Summing(1), texts, 0), encode_batch(two, texts, 0)):
        assert one["sentence_embedding"].tolist() == [text.ids.sum(), len(text.ids)]
        assert other["sentence_embedding"].tolist() == one["sentence_embedding"].tolist()
    shapes, threads = zip(*two.calls)
    assert sorted(shapes) == [(2, 30), (4, 17)]  # the short ones are not padded to the long ones
    assert len(set(threads)) == 2


def test_parts_have_about_as_many_tokens_and_none_is_empty() -> None:
    assert in_lanes([10, 10], 2) == [slice(0, 1), slice(1, 2)]
    assert in_lanes([5, 5, 20], 2) == [slice(0, 2), slice(2, 3)]
    assert in_lanes([7], 4) == [slice(0, 1)]
    rng = np.random.default_rng(1)
    for _ in range(200):
        lengths = np.sort(rng.integers(1, 512, rng.integers(1, 40))).tolist()
        lanes = int(rng.integers(1, 9))
        parts = in_lanes(lengths, lanes)
        assert [one for part in parts for one in lengths[part]] == lengths
        assert 1 <= len(parts) <= lanes and all(lengths[part] for part in parts)
        assert max(sum(lengths[part]) for part in parts) <= sum(lengths) / lanes + lengths[-1]


def test_a_batch_is_the_first_text_and_those_nearest_in_length() -> None:
    texts = texts_of([100, 500, 101, 99, 8, 102, 98, 97, 103, 104, 105, 96])
    cpu, cuda = (Limits(tokens=BATCH_TOKENS[device]) for device in ("cpu", "cuda"))
    batch = [texts[i] for i in take_batch(dict(enumerate(texts)), cpu)]
    longest = max(len(text.ids) for text in batch)
    assert batch[0] is texts[0] and longest * len(batch) <= BATCH_TOKENS["cpu"]
    near = sorted(abs(len(text.ids) - 100) for text in texts)[: len(batch)]
    assert sorted(abs(len(text.ids) - 100) for text in batch) == near
    assert len(take_batch(dict(enumerate(texts)), cuda)) > len(batch)
    assert len(take_batch(dict(enumerate(texts_of([5000, 5000]))), cpu)) == 1  # one too long goes alone


def test_no_batch_is_beyond_what_the_runtime_takes() -> None:
    """A runtime of three rows a call: four short texts are two calls, and the device's tokens count beside it."""
    summing = Summing(1)
    assert batch_limits(summing) == Limits(3, BATCH_TOKENS["cpu"])
    embed(summing, texts_of([4, 30, 17, 5, 29, 600, 500]), 0)
    assert [shape for shape, _ in summing.calls] == [(3, 17), (2, 30), (1, 500), (1, 600)]


def test_lanes_of_a_graph_have_one_thread_each_and_the_same_answers(bert_onnx) -> None:
    """The parts of a batch run in a session of one thread that is opened once; one text does not need it."""
    encoder = open_backend(bert_onnx, BackendOptions("cpu", threads=2)).encoder
    assert encoder is not None and encoder.lanes == 2
    texts = [Encoding(text.ids % 50) for text in texts_of([30, 4, 17, 5])]
    alone = [encode_batch(encoder, [text], 0)[0]["sentence_embedding"] for text in texts]
    assert encoder._lane is None
    together = [answer["sentence_embedding"] for answer in encode_batch(encoder, texts, 0)]
    np.testing.assert_allclose(together, alone, atol=1e-5)  # fp32 sums in another order
    lane = encoder.lane()
    assert lane is encoder._lane is encoder.lane() and lane is not encoder
    assert lane.session.get_session_options().intra_op_num_threads == 1
    single = open_backend(bert_onnx, BackendOptions("cpu", threads=1)).encoder
    assert single is not None and single.lane() is single
