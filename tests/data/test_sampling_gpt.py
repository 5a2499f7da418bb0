"""GPT rows: the right tokens, each sample once an epoch, the same rows for any batch size, rank count and
restart.
"""

import queue

import numpy as np
import pytest
from common import index_file
from throughline.core.errors import WrongUse
from throughline.data.dataset import DatasetOptions, Loader
from throughline.data.packing import pack
from throughline.data.samples import open_dataset
from throughline.data.store import TokenStore


def make_store(path, sizes, shards=1, seed=0) -> TokenStore:
    """One sequence per document. A token is its own position in the stream, so a row tells where it came
    from.
    """
    first = 0
    for number, part in enumerate(np.array_split(np.asarray(sizes), shards)):
        np.arange(first, first + part.sum(), dtype=np.int32).tofile(path / f"{number:05d}.bin")
        index_file(path / f"{number:05d}.idx", part, np.arange(len(part) + 1), "int32")
        first += int(part.sum())
    return TokenStore.open(path)


def options(length=16, **others) -> DatasetOptions:
    return DatasetOptions("gpt", length, **others)


def all_ways(store):
    yield open_dataset(store, options())
    yield open_dataset(store, options(order="sequential"))
    yield open_dataset(store, options(random_offsets=True, seed=3))
    yield open_dataset(store, options(separate_documents=True))
    yield open_dataset(store, options(packing="best_fit"))


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path, np.random.default_rng(0).integers(1, 60, 150), shards=3)


def test_sequential_windows_cover_the_stream_without_overlap(store):
    dataset = open_dataset(store, options(order="sequential"))
    assert dataset.rows == (store.tokens - 1) // 16
    batch = dataset.batch(0, dataset.rows)
    assert batch["input_ids"].ravel().tolist() == list(range(dataset.rows * 16))
    assert (batch["targets"] == batch["input_ids"] + 1).all()


def test_a_shuffled_epoch_has_every_window_once(store):
    dataset = open_dataset(store, options())
    first = dataset.batch(0, dataset.rows)["input_ids"][:, 0]
    second = dataset.batch(dataset.rows, dataset.rows)["input_ids"][:, 0]
    assert sorted(first) == sorted(second) == list(range(0, dataset.rows * 16, 16))
    assert first.tolist() != second.tolist()
    assert (
        open_dataset(store, options(seed=1)).batch(0, 50)["input_ids"].tolist()
        != dataset.batch(0, 50)["input_ids"].tolist()
    )


def test_random_offsets_cut_each_epoch_at_another_phase(store):
    dataset = open_dataset(store, options(random_offsets=True))
    phases = set()
    for epoch in range(40):
        first = dataset.batch(epoch * dataset.rows, dataset.rows)["input_ids"][:, 0]
        assert len(np.unique(first)) == dataset.rows and len(np.unique(first % 16)) == 1
        phases.add(int(first[0] % 16))
    assert len(phases) >= 10  # 40 draws of 16: under 10 distinct once in 1e7


def test_separate_documents_against_a_loop(store):
    dataset = open_dataset(store, options(separate_documents=True, order="sequential"))
    batch = dataset.batch(0, dataset.rows)
    begins = set(store.document_starts.tolist())
    for row in range(dataset.rows):
        document, position = 0, -1
        for column in range(16):
            token = row * 16 + column
            starts = token in begins and column > 0
            document, position = document + starts, 0 if starts else position + 1
            assert (batch["document_ids"][row, column], batch["positions"][row, column]) == (
                document,
                position,
            )
            assert batch["targets"][row, column] == (-100 if token + 1 in begins else token + 1)


def test_best_fit_predicts_every_token_within_its_document_once(store):
    dataset = open_dataset(store, options(packing="best_fit", pad_id=9))
    batch = dataset.batch(0, dataset.rows)
    real = batch["document_ids"] >= 0
    begins = set(store.document_starts.tolist())
    expected = [token for token in range(store.tokens) if token + 1 not in begins]
    assert sorted(batch["input_ids"][real]) == expected
    assert (batch["targets"][real] == batch["input_ids"][real] + 1).all()
    assert (batch["targets"][~real] == -100).all() and (batch["input_ids"][~real] == 9).all()
    assert real.mean() > 0.97
    owner = np.searchsorted(store.document_starts, batch["input_ids"], side="right")
    for row in range(dataset.rows):
        for piece in range(batch["document_ids"][row].max() + 1):
            columns = batch["document_ids"][row] == piece
            assert len(np.unique(owner[row, columns])) == 1
            assert batch["positions"][row, columns].tolist() == list(range(columns.sum()))


def test_packing_uses_every_piece_once_and_hardly_pads():
    rng = np.random.default_rng(1)
    for lengths, least in (
        (rng.integers(1, 129, 5000), 0.99),
        (rng.integers(1, 20, 777), 0.98),
        (np.full(10, 128), 1.0),
    ):
        order, ends = pack(lengths, 128)
        assert sorted(order) == list(range(len(lengths)))
        used = np.add.reduceat(lengths[order], np.concatenate([[0], ends[:-1]]))
        assert used.max() <= 128 and used.sum() / (128 * len(ends)) >= least
    assert [len(part) for part in pack(np.empty(0, np.int64), 128)] == [0, 0]


def test_batches_do_not_depend_on_the_batch_size(store):
    for dataset in all_ways(store):
        count = dataset.rows + 7
        whole = dataset.batch(5, count)
        for size in (1, 3, 64):
            parts = [dataset.batch(5 + start, min(size, count - start)) for start in range(0, count, size)]
            for name, values in whole.items():
                assert np.array_equal(values, np.concatenate([part[name] for part in parts])), name


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 3), (2, 1), (3, 2), (8, 1)])
def test_one_epoch_over_ranks_and_workers_sees_every_sample_once(store, ranks, workers):
    dataset = open_dataset(store, options())
    per_rank = dataset.rows // (ranks * 2)  # global batches of 2 a rank; what is left over is read directly
    seen = []
    for rank in range(ranks):
        with Loader(dataset, 2, rank=rank, world=ranks, workers=workers, ahead=3) as loader:
            for _ in range(per_rank):
                seen += next(loader)["input_ids"][:, 0].tolist()
            assert loader.position == per_rank * ranks * 2
    rest = dataset.rows - per_rank * ranks * 2
    seen += dataset.batch(dataset.rows - rest, rest)["input_ids"][:, 0].tolist()
    assert sorted(seen) == list(range(0, dataset.rows * 16, 16))


def test_resume_on_other_rank_counts_reads_the_same_samples(store):
    """Global batches of 8: 5 steps on 1 rank, 7 on 2, 4 on 1 again, against 16 uninterrupted."""
    dataset = open_dataset(store, options())

    def run(position, ranks, steps):
        loaders = [
            Loader(dataset, 8 // ranks, position=position, rank=rank, world=ranks) for rank in range(ranks)
        ]
        batches = [np.concatenate([next(loader)["input_ids"] for loader in loaders]) for _ in range(steps)]
        positions = {loader.position for loader in loaders}
        for loader in loaders:
            loader.close()
        return batches, positions.pop()

    whole, end = run(0, 1, 16)
    first, position = run(0, 1, 5)
    second, position = run(position, 2, 7)
    third, position = run(position, 1, 4)
    assert position == end == 128
    assert np.array_equal(np.stack(whole), np.stack(first + second + third))


def test_batches_are_made_before_they_are_asked_for():
    """Two workers with two ahead each: with the first batch taken, four more are made while nobody asks."""
    made: queue.Queue[int] = queue.Queue()

    class Tells:
        rows = 10

        def batch(self, position, count):
            made.put(position)
            return {"x": np.arange(position, position + count)}

    with Loader(Tells(), 2, workers=2, ahead=2) as loader:
        next(loader)
        assert sorted(made.get(timeout=60) for _ in range(5)) == [0, 2, 4, 6, 8] and made.empty()


def test_an_error_in_a_worker_arrives_in_its_turn(store):
    class Breaks:
        rows = 10

        def batch(self, position, count):
            if position >= 4:
                raise OSError(5, "disk gone")
            return {"x": np.arange(position, position + count)}

    with Loader(Breaks(), 2) as loader:
        assert [next(loader)["x"].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
        with pytest.raises(OSError, match="disk gone"):
            next(loader)


def test_too_little_text_is_said(tmp_path):
    store = make_store(tmp_path, [1, 1, 1])
    for kind in ({}, {"random_offsets": True}, {"packing": "best_fit"}):
        with pytest.raises(WrongUse, match="too little text"):
            open_dataset(store, options(**kind))


@pytest.mark.parametrize(
    "wrong",
    [
        {"sequence_length": 0},
        {"packing": "packed"},
        {"random_offsets": True, "order": "sequential"},
        {"family": "bert"},
        {"family": "bert", "packing": "best_fit"},
    ],
)
def test_options_that_contradict_each_other_are_refused(store, wrong):
    with pytest.raises(WrongUse, match="do not fit together"):
        open_dataset(store, DatasetOptions(**({"family": "gpt", "sequence_length": 16} | wrong)))
