"""BERT rows: google-research's rules for pairs, packed and unpacked rows of the same samples, any batch size,
any restart.
"""

import resource

import numpy as np
import pytest
from common import index_file
from throughline.core.artifact import read_manifest
from throughline.core.errors import Failed, WrongUse
from throughline.data.bert import PAIR
from throughline.data.dataset import DatasetOptions
from throughline.data.packing import computed_once
from throughline.data.samples import open_dataset
from throughline.data.store import TokenStore

# ids below FIRST are special; a token is FIRST + its position in the stream
CLS, SEP, MASK, FIRST = 1, 2, 3, 5


def make_store(path, documents, shards=1) -> TokenStore:
    first = 0
    path.mkdir(exist_ok=True)
    for number in range(shards):
        part = documents[number::shards]
        lengths = np.array([n for document in part for n in document])
        np.arange(FIRST + first, FIRST + first + lengths.sum(), dtype=np.int32).tofile(
            path / f"{number:05d}.bin"
        )
        index_file(path / f"{number:05d}.idx", lengths, np.cumsum([0, *map(len, part)]), "int32")
        first += int(lengths.sum())
    return TokenStore.open(path)


def sentences(seed, documents, most_sentences=30, most_tokens=25):
    rng = np.random.default_rng(seed)
    return [rng.integers(1, most_tokens, rng.integers(1, most_sentences)).tolist() for _ in range(documents)]


def options(length=64, **others) -> DatasetOptions:
    special = {
        "cls_id": CLS,
        "sep_id": SEP,
        "mask_id": MASK,
        "special_ids": tuple(range(FIRST)),
        "vocab_size": 200_000,
    }
    return DatasetOptions("bert", length, **(special | others))


def original(batch) -> np.ndarray:
    return np.where(batch["targets"] >= 0, batch["targets"], batch["input_ids"])


def pairs_of(store, **others):
    dataset = open_dataset(store, options(order="sequential", **others))
    return [
        (int(p["a"]), int(p["a_length"]), int(p["b"]), int(p["b_length"]), int(p["label"]))
        for p in dataset.pairs
    ]


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path / "store", sentences(0, 120), shards=2)


@pytest.mark.parametrize("empty", [False, True])
def test_a_random_sentence_of_a_lone_document_is_not_the_next_one(empty, tmp_path):
    """Of one document, where there is no other to draw from: every other sentence is drawn, those without a token
    before them too; in a shard of several documents nothing changes.
    """
    lengths = [3, 2, 0, 4, 1] if empty else [3, 2, 4, 1]
    for seed in range(3):
        store = make_store(tmp_path / f"{seed}", [lengths])
        starts = np.cumsum([0, *lengths])
        found = pairs_of(store, seed=seed, pair_copies=60, nsp="nsp")
        random = [(a + a_length, b) for a, a_length, b, _, label in found if label == 1]
        assert len(random) > 30
        inside = [(end, b) for end, b in random if end < starts[-1]]
        assert inside and all(b != end for end, b in inside)
        assert {b for _, b in random} == {*starts[:-1].tolist()}


def test_next_and_random_sentences(store):
    """B follows A in its document, or comes from another document of the shard; lengths never exceed S - 3."""
    longest = 24
    labels = []
    for a, a_length, b, b_length, label in pairs_of(store):
        assert a_length > 0 and b_length > 0 and a_length + b_length <= 61
        owner_a, owner_a_end, owner_b, owner_b_end = store.document_at(
            np.array([a, a + a_length - 1, b, b + b_length - 1])
        )
        assert owner_a == owner_a_end and owner_b == owner_b_end, "a segment stays in its document"
        if label == 0:
            assert owner_a == owner_b and 0 <= b - (a + a_length) <= 2 * longest
        else:
            assert owner_a != owner_b
        labels.append(label)
    assert 0.5 < np.mean(labels) < 0.75  # half, and the samples whose chunk is one sentence


def test_unused_sentences_go_back(tmp_path):
    """Without truncation the As and the following Bs of a document, in order, are exactly its text."""
    store = make_store(tmp_path, sentences(1, 200, most_sentences=6, most_tokens=6))
    covered = []
    for a, a_length, b, b_length, label in pairs_of(store):
        covered += list(range(a, a + a_length))
        if label == 0:
            covered += list(range(b, b + b_length))
    assert max(np.diff(store.document_starts)) <= 30, (
        "a document and sentences of another fit a row, so nothing is cut"
    )
    assert covered == list(range(store.tokens))


def google_rules(documents, length, short_fraction, rng):
    """google-research's walk over one document at a time, written plainly: (A, B, random?) lengths before
    shortening.
    """
    out = []
    for document in documents:
        aim = length - 3
        if rng.random() < short_fraction:
            aim = rng.integers(2, length - 3 + 1)
        chunk, i = [], 0
        while i < len(document):
            chunk.append(document[i])
            if i == len(document) - 1 or sum(chunk) >= aim:
                split = 1 if len(chunk) < 2 else int(rng.integers(1, len(chunk)))
                is_random = len(chunk) == 1 or rng.random() < 0.5
                if is_random:
                    i -= len(chunk) - split
                out.append((sum(chunk[:split]), is_random, len(chunk)))
                chunk = []
            i += 1
    return out


@pytest.mark.parametrize("short_fraction", [0.0, 0.1, 1.0])
def test_statistics_equal_a_plain_walk(tmp_path, short_fraction):
    """Number of samples and share of random ones against the plain walk of other draws: within 5 standard
    errors.
    """
    documents = sentences(2, 2000)
    store = make_store(tmp_path, documents)
    rng = np.random.default_rng(5)
    repeats = [google_rules(documents, 64, short_fraction, rng) for _ in range(4)]
    counts = [len(pairs) for pairs in repeats]
    ours = pairs_of(store, short_fraction=short_fraction)
    assert abs(len(ours) - np.mean(counts)) < 5 * max(np.std(counts), 0.004 * np.mean(counts))
    share = np.mean([is_random for pairs in repeats for _, is_random, _ in pairs])
    assert abs(np.mean([label for *_, label in ours]) - share) < 5 * (0.25 / len(ours)) ** 0.5


def test_sentence_order_objective(store):
    """label 1 = the two are swapped; a chunk of one sentence has no B and no label."""
    pairs = pairs_of(store, nsp="sop")
    swapped = [label for *_, b_length, label in pairs if b_length]
    assert abs(np.mean(swapped) - 0.5) < 4.5 * (0.25 / len(swapped)) ** 0.5
    for a, _, b, b_length, label in pairs:
        assert label == (-100 if b_length == 0 else int(a > b))
        if b_length:
            assert len(np.unique(store.document_at(np.array([a, b])))) == 1


def test_without_pairs_every_token_is_read_once(store):
    dataset = open_dataset(store, options(nsp="none"))
    batch = dataset.batch(0, dataset.rows)
    words = original(batch)
    assert "nsp_targets" not in batch and not batch["token_types"].any()
    assert sorted(words[words >= FIRST]) == list(range(FIRST, FIRST + store.tokens))


def test_rows_are_laid_out_as_bert_reads_them(store):
    dataset = open_dataset(store, options(order="sequential"))
    batch = dataset.batch(0, dataset.rows)
    words = original(batch)
    for row, pair in enumerate(dataset.pairs):
        a = list(range(FIRST + pair["a"], FIRST + pair["a"] + pair["a_length"]))
        b = list(range(FIRST + pair["b"], FIRST + pair["b"] + pair["b_length"]))
        line = [CLS, *a, SEP, *b, SEP]
        assert words[row].tolist() == line + [0] * (64 - len(line))
        assert batch["token_types"][row].tolist() == [0] * (len(a) + 2) + [1] * (len(b) + 1) + [0] * (
            64 - len(line)
        )
        assert batch["attention_mask"][row].sum() == len(line)
        assert batch["nsp_targets"][row] == pair["label"]


@pytest.mark.parametrize("nsp", ["nsp", "sop", "none"])
def test_packed_rows_hold_the_same_samples(store, nsp):
    packed = open_dataset(store, options(nsp=nsp, packing="packed"))
    single = open_dataset(store, options(nsp=nsp))
    assert packed.rows < single.rows
    batch, words = packed.batch(0, packed.rows), None
    words = original(batch)
    samples = []
    for row in range(packed.rows):
        for number in range(batch["document_ids"][row].max() + 1):
            inside = batch["document_ids"][row] == number
            assert batch["positions"][row, inside].tolist() == list(range(inside.sum()))
            label = -100 if nsp == "none" else batch["nsp_targets"][row, inside][0]
            samples.append((*words[row, inside].tolist(), int(label)))
            if nsp != "none":
                assert (batch["nsp_targets"][row, inside][1:] == -100).all()
    padding = batch["document_ids"] < 0
    assert (batch["targets"][padding] == -100).all() and (words[padding] == 0).all()
    other = single.batch(0, single.rows)
    labels = other.get("nsp_targets", np.full(single.rows, -100))
    plain = [(*w[m].tolist(), int(n)) for w, m, n in zip(original(other), other["attention_mask"], labels)]
    assert sorted(samples) == sorted(plain)


@pytest.mark.parametrize("packing", ["windows", "packed"])
@pytest.mark.parametrize("whole_word", [False, True])
def test_batches_do_not_depend_on_the_batch_size(store, packing, whole_word):
    """Masks included, across the end of an epoch; the second epoch masks anew."""
    extra = {"whole_word": True, "continuation_ids": tuple(range(FIRST, 3000, 3))} if whole_word else {}
    dataset = open_dataset(store, options(packing=packing, **extra))
    start, count = dataset.rows - 20, 45
    whole = dataset.batch(start, count)
    for size in (1, 4, 33):
        parts = [dataset.batch(start + i, min(size, count - i)) for i in range(0, count, size)]
        for name, values in whole.items():
            assert np.array_equal(values, np.concatenate([part[name] for part in parts])), name
    if packing == "windows":
        epochs = [dataset.batch(epoch * dataset.rows, dataset.rows) for epoch in (0, 1)]
        rows = [
            {tuple(words): targets for words, targets in zip(original(e).tolist(), e["targets"].tolist())}
            for e in epochs
        ]
        assert rows[0].keys() == rows[1].keys()
        same = np.mean([rows[0][words] == rows[1][words] for words in rows[0]])
        assert same < 0.1  # equal only where a handful of tokens leave little choice


def test_copies_draw_other_pairs(store):
    one, three = pairs_of(store), pairs_of(store, pair_copies=3)
    assert three[: len(one)] != three[len(one) : 2 * len(one)]
    assert len(set(three)) > 1.8 * len(set(one))
    assert pairs_of(store, seed=1) != one == pairs_of(store)


def test_a_store_without_sentences_has_no_pairs(tmp_path):
    store = make_store(tmp_path, [[30]] * 20)
    with pytest.raises(WrongUse, match="sentences"):
        open_dataset(store, options())
    assert open_dataset(store, options(nsp="none")).rows == 20


def test_one_document_still_gives_both_kinds(tmp_path):
    labels = [label for *_, label in pairs_of(make_store(tmp_path, [[7] * 500]))]
    assert 0.3 < np.mean(labels) < 0.7


@pytest.mark.parametrize("packing", ["windows", "packed"])
def test_the_index_is_kept_and_a_damaged_one_made_again(store, tmp_path, packing):
    cache = tmp_path / "cache"
    plain = open_dataset(store, options(packing=packing))
    open_dataset(store, options(packing=packing), cache=cache)
    kept = sorted(path.name for path in cache.rglob("*") if path.is_file())
    assert kept == ["0.bin", "1.bin", "manifest.json"]
    again = open_dataset(store, options(packing=packing), cache=cache)
    assert np.array_equal(again.pairs, plain.pairs) and np.array_equal(again.ends, plain.ends)
    binary = next(cache.glob("*/0.bin"))
    raw = bytearray(binary.read_bytes())
    raw[50] ^= 1
    binary.write_bytes(raw)
    healed = open_dataset(store, options(packing=packing), cache=cache)
    assert np.array_equal(healed.pairs, plain.pairs)
    open_dataset(store, options(packing=packing, seed=4), cache=cache)
    made = [read_manifest(entry, "cache").facts["identity"]["what"] for entry in cache.iterdir()]
    assert made == ["bert rows"] * 2


def test_the_index_is_not_computed_when_it_is_kept(tmp_path):
    parts = [(np.zeros(3, PAIR), np.arange(3))]
    first = computed_once(tmp_path, {"a": 1}, (PAIR, np.dtype("<i8")), parts)

    def never():
        raise AssertionError("computed again")
        yield

    second = computed_once(tmp_path, {"a": 1}, (PAIR, np.dtype("<i8")), never())
    assert all(np.array_equal(a, b) for a, b in zip(first, second))


def test_a_full_disk_under_the_index_is_said(store, tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(Failed, match="file-size limit"):
            open_dataset(store, options(), cache=tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "cache").iterdir())
    assert open_dataset(store, options(), cache=tmp_path / "cache").rows
