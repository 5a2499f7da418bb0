"""Token stores: Megatron's format to the byte, many shards as one stream, parts, and every way a store can be
broken.
"""

import itertools
import os
import struct
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import throughline.data.store as store_module
from common import index_file
from throughline.core.artifact import create_artifact
from throughline.core.errors import Refused, ThroughlineError, WrongUse
from throughline.data.shard import token_dtype
from throughline.data.store import TokenStore, partial


def read_megatron(prefix: Path) -> list[list[list[int]]]:
    """Documents of sequences of ids, read from the description of the format alone."""
    raw = Path(f"{prefix}.idx").read_bytes()
    magic, version, code, sequences, bounds = struct.unpack_from("<9sQBQQ", raw, 0)
    assert (magic, version) == (b"MMIDIDX\0\0", 1)
    kind = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[code]
    offset = 9 + 8 + 1 + 8 + 8
    lengths = struct.unpack_from(f"<{sequences}i", raw, offset)
    offset += 4 * sequences
    pointers = struct.unpack_from(f"<{sequences}q", raw, offset)
    offset += 8 * sequences
    first = struct.unpack_from(f"<{bounds}q", raw, offset)
    assert offset + 8 * bounds == len(raw), "nothing follows the document bounds"
    tokens = Path(f"{prefix}.bin").read_bytes()
    every = [list(struct.unpack_from(f"<{n}{kind}", tokens, p)) for n, p in zip(lengths, pointers)]
    return [every[a:b] for a, b in itertools.pairwise(first)]


def write_shard(prefix: Path, documents: list[list[list[int]]], dtype: str = "uint16") -> None:
    sequences = [sequence for document in documents for sequence in document]
    np.array([i for s in sequences for i in s], dtype).tofile(f"{prefix}.bin")
    bounds = np.cumsum([0, *(len(document) for document in documents)])
    index_file(f"{prefix}.idx", np.array([len(s) for s in sequences]), bounds, dtype)


def some_documents(seed: int, count: int) -> list[list[list[int]]]:
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(0, 500, rng.integers(0, 9)).tolist() for _ in range(rng.integers(1, 5))]
        for _ in range(count)
    ]


def flatten(documents) -> list[int]:
    return [i for document in documents for sequence in document for i in sequence]


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_a_reader_written_from_the_format_reads_ours(tmp_path, dtype):
    documents = some_documents(0, 20)
    write_shard(tmp_path / "a", documents, dtype)
    assert read_megatron(tmp_path / "a") == documents


def test_megatron_lm_reads_ours_and_we_read_its(tmp_path, monkeypatch, pytestconfig):
    """Byte for byte: the same documents written by Megatron-LM's builder and by us make the same two files."""
    checkout = pytestconfig.getoption("--megatron")
    if not checkout:
        pytest.skip("needs a Megatron-LM checkout: pytest --megatron PATH")
    module = load_megatron(Path(checkout), monkeypatch)
    documents = some_documents(1, 30)
    write_shard(tmp_path / "ours", documents)
    theirs = module.IndexedDataset(str(tmp_path / "ours"))
    assert theirs.document_indices.tolist() == np.cumsum([0, *map(len, documents)]).tolist()
    assert [theirs[i].tolist() for i in range(len(theirs))] == [s for d in documents for s in d]

    import torch

    builder = module.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for document in documents:
        ids = torch.tensor([i for sequence in document for i in sequence], dtype=torch.int32)
        builder.add_document(ids, [len(sequence) for sequence in document])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"theirs{suffix}").read_bytes() == (tmp_path / f"ours{suffix}").read_bytes()
    assert TokenStore.open(tmp_path / "theirs").read(0, 10).tolist() == flatten(documents)[:10]


def load_megatron(checkout: Path, monkeypatch):
    """indexed_dataset.py alone: its package's `__init__` files and cloud helpers want a GPU stack, so they
    are stubbed.
    """
    import importlib.util

    path = checkout / "megatron" / "core" / "datasets" / "indexed_dataset.py"
    if not path.is_file():
        pytest.skip(f"{checkout} has no {path.relative_to(checkout)}")
    stubs = {
        "megatron": {},
        "megatron.core": {},
        "megatron.core.datasets": {},
        "megatron.core.datasets.object_storage_utils": dict.fromkeys(
            (
                "S3Config",
                "ObjectStorageConfig",
                "cache_index_file",
                "dataset_exists",
                "get_index_cache_path",
                "get_object_storage_access",
                "parse_s3_path",
            ),
            object,
        )
        | {"is_object_storage_path": lambda path: False},
        "megatron.core.msc_utils": {
            "MultiStorageClientFeature": types.SimpleNamespace(is_enabled=lambda: False),
            "maybe_msc": object,
        },
        "megatron.core.utils": {"log_single_rank": lambda *args, **kwargs: None},
    }
    for name, members in stubs.items():
        stub = types.ModuleType(name)
        stub.__dict__.update(members)
        monkeypatch.setitem(sys.modules, name, stub)
    sys.modules["megatron.core.msc_utils"].maybe_msc = types.SimpleNamespace(open=open, os=os)
    spec = importlib.util.spec_from_file_location("megatron_indexed_dataset", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def three_shards(tmp_path):
    """A foreign directory of three shards, the middle one empty, and its documents."""
    documents = [some_documents(2, 40), [], some_documents(3, 30)]
    for number, part in enumerate(documents):
        write_shard(tmp_path / f"{number:05d}", part)
    return tmp_path, [document for part in documents for document in part]


@pytest.mark.parametrize("in_memory", [True, False])
def test_shards_read_as_one_stream(three_shards, monkeypatch, in_memory):
    """The same answers from arrays in memory and from bisection of the mapped index."""
    if not in_memory:
        monkeypatch.setattr(store_module, "DOCUMENTS_IN_MEMORY", 0)
    path, documents = three_shards
    store, flat = TokenStore.open(path), flatten(documents)
    assert (store.tokens, store.documents) == (len(flat), len(documents))
    assert store.sequences == sum(map(len, documents)) and store.facts["foreign"]
    assert store.read(0, store.tokens).tolist() == flat
    starts = np.random.default_rng(0).integers(0, len(flat) - 30, 200)
    assert store.windows(starts, 30).tolist() == [flat[a : a + 30] for a in starts]
    assert store.take(starts).tolist() == [flat[a] for a in starts]
    sizes = [sum(map(len, document)) for document in documents]
    begins = np.cumsum([0, *sizes])
    assert store.document_start(np.arange(len(documents) + 1)).tolist() == begins.tolist()
    owners = np.repeat(np.arange(len(documents)), sizes)
    assert store.document_at(np.arange(len(flat))).tolist() == owners.tolist()
    assert np.diff(store.sequence_starts).tolist() == [len(s) for d in documents for s in d]
    for wrong in ((-1, 3), (0, len(flat) + 1)):
        with pytest.raises(IndexError):
            store.read(*wrong)


def test_a_store_made_anew_is_read_anew(tmp_path):
    for number in (1, 2):
        write_shard(tmp_path / "next", [[[number] * 5]])
        for suffix in (".bin", ".idx"):
            os.replace(tmp_path / f"next{suffix}", tmp_path / f"00000{suffix}")
        assert TokenStore.open(tmp_path / "00000").read(0, 5).tolist() == [number] * 5


def test_shards_beyond_99999_come_last(tmp_path):
    for number in (99_998, 99_999, 100_000, 100_001):
        write_shard(tmp_path / f"{number:05d}", [[[number % 1000]]])
    assert TokenStore.open(tmp_path).read(0, 4).tolist() == [998, 999, 0, 1]


def test_parts_of_a_store_share_nothing_and_cut_at_documents(three_shards):
    path, documents = three_shards
    store, flat = TokenStore.open(path), flatten(documents)
    begins = np.cumsum([0, *(sum(map(len, document)) for document in documents)]).tolist()
    for fraction in (0.1, 0.37, 0.5, 0.9):
        left, right = store.view(0, fraction), store.view(fraction, 1)
        assert left.tokens in begins and abs(left.tokens - fraction * len(flat)) < 40
        assert left.read(0, left.tokens).tolist() + right.read(0, right.tokens).tolist() == flat
        assert left.documents + right.documents == len(documents)
        assert (
            right.document_starts.tolist()
            == [b - left.tokens for b in begins if b >= left.tokens][-right.documents - 1 :]
        )
        nested = right.view(0.5, 1)
        assert nested.read(0, nested.tokens).tolist() == flat[len(flat) - nested.tokens :]
        rejoined = [part.read(0, part.tokens).tolist() for _, part in right.parts()]
        assert list(itertools.chain(*rejoined)) == right.read(0, right.tokens).tolist()
        assert [sum(map(len, rejoined[:n])) for n in range(len(rejoined))] == [
            first for first, _ in right.parts()
        ]


def test_a_part_of_a_store_of_many_documents_is_cut_without_its_whole_index(three_shards, monkeypatch):
    """A billion documents would take 8 GB in every process of a run that holds out its end."""
    path, _ = three_shards
    fractions = [(0, 0.1), (0.1, 0.9), (0.3, 0.4), (0.5, 0.58), (0.9, 1)]
    expected = [TokenStore.open(path).view(*pair)._cuts for pair in fractions]
    monkeypatch.setattr(store_module, "DOCUMENTS_IN_MEMORY", 0)
    for name in ("sequence_starts", "document_bounds", "document_starts"):
        monkeypatch.setattr(TokenStore, name, property(lambda self: pytest.fail("the whole index was read")))
    assert [TokenStore.open(path).view(*pair)._cuts for pair in fractions] == expected


def test_one_document_is_cut_at_a_sequence_or_a_token(tmp_path):
    write_shard(tmp_path / "sentences", [[[1] * 40, [2] * 50, [3] * 10]])
    store = TokenStore.open(tmp_path / "sentences")
    assert (store.view(0, 0.85).tokens, store.view(0.85, 1).sequences) == (90, 1)
    write_shard(tmp_path / "whole", [[list(range(100))]])
    store = TokenStore.open(tmp_path / "whole")
    left, right = store.view(0, 0.85), store.view(0.85, 1)
    assert (left.tokens, right.read(0, 2).tolist(), right.documents, right.sequences) == (85, [85, 86], 1, 1)
    assert right.sequence_starts.tolist() == [0, 15] == right.document_starts.tolist()
    with pytest.raises(WrongUse, match="empty part"):
        store.view(0.5, 0.5001)


def test_megatrons_choice_of_dtype():
    assert [token_dtype(n).name for n in (30_522, 65_499, 65_500, 250_000)] == [
        "uint16",
        "uint16",
        "int32",
        "int32",
    ]


def damage(path: Path, how: str) -> None:
    idx, binary = path / "00000.idx", path / "00000.bin"
    if how == "missing bin":
        binary.unlink()
    elif how == "cut bin":
        binary.write_bytes(binary.read_bytes()[:-2])
    elif how == "cut index":
        idx.write_bytes(idx.read_bytes()[:-9])
    elif how == "not an index":
        idx.write_bytes(b"hello" * 20)
    elif how == "flipped byte":
        raw = bytearray(binary.read_bytes())
        raw[len(raw) // 2] ^= 1
        binary.write_bytes(raw)


@pytest.mark.parametrize("how", ["missing bin", "cut bin", "cut index", "not an index", "flipped byte"])
@pytest.mark.parametrize("ours", [True, False])
def test_a_damaged_store_is_refused_by_name(tmp_path, how, ours):
    """A flipped byte shows only in a store with a manifest; everything else also in a foreign one."""
    path = tmp_path / "store"
    if ours:
        with create_artifact(path, "tokens") as draft:
            write_shard(draft.path / "00000", some_documents(4, 10))
            draft.facts["vocab_size"] = 500
        write_shard(path / "00001", some_documents(5, 3))  # no file of the artifact
        assert TokenStore.open(path).facts["vocab_size"] == 500 and TokenStore.open(path).documents == 10
    else:
        path.mkdir()
        write_shard(path / "00000", some_documents(4, 10))
    damage(path, how)
    if how == "flipped byte" and not ours:
        TokenStore.open(path)
        return
    with pytest.raises(Refused) as caught:
        TokenStore.open(path)
    assert "00000" in str(caught.value)


def test_what_is_no_store_is_said(tmp_path):
    with pytest.raises(WrongUse, match="no token store"):
        TokenStore.open(tmp_path)
    partial(tmp_path / "begun").mkdir()
    for path in (tmp_path / "begun", partial(tmp_path / "begun")):
        with pytest.raises(Refused, match="unfinished"):
            TokenStore.open(path)
    write_shard(tmp_path / "empty", [])
    with pytest.raises(ThroughlineError, match="empty"):
        TokenStore.open(tmp_path / "empty")
