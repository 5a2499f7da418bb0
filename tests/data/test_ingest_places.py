"""A tokenisation in odd places: links, disks without links, leavings of others, workers ended half-way, what
fits no format.
"""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pytest
from throughline.core.artifact import chain
from throughline.core.errors import Failed, Refused, WrongUse
from throughline.data.ingest import dedup as dedup_module
from throughline.data.ingest import tasks as tasks_module
from throughline.data.ingest import tokenize as tokenize_module
from throughline.data.ingest.readers import DocumentBatch, Reader, ReadOptions
from throughline.data.ingest.tasks import Encoder, run_task
from throughline.data.ingest.text import PIECE_BYTES
from throughline.data.ingest.tokenize import Work, make_plan, tokenize
from throughline.data.new_tokenizer import train_tokenizer
from throughline.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain, a compressed and a .jsonl file, two tokenizers, and the store `plain` of several shards."""
    import gzip

    folder = tmp_path_factory.mktemp("odd")
    blocks = [f"The cat {i} sat on a mat.\nIt saw {i % 7} dogs." for i in range(2000)]
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("\n\n".join(blocks))
    (folder / "corpus" / "b.txt.gz").write_bytes(gzip.compress("\n\n".join(blocks).encode(), mtime=0))
    (folder / "corpus" / "c.jsonl").write_text(
        "".join(json.dumps({"text": block}) + "\n" for block in blocks)
    )
    train_tokenizer(blocks, "bpe", 300).save(folder / "bpe")
    train_tokenizer(blocks, "wordpiece", 120).save(folder / "wp")
    run(folder, folder / "plain", shard_bytes=20_000)
    return folder


@pytest.fixture
def plain(place: Path) -> Path:
    return place / "plain"


def files_hash(store: Path) -> dict[str, str]:
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in store.iterdir()
        if file.name != "manifest.json"
    }


def run(place: Path, out: Path, tokenizer: str = "bpe", **settings) -> Path:
    tokenize([str(place / "corpus")], place / tokenizer, out, **settings)
    return out


def test_progress_counts_every_byte_once(place: Path, tmp_path: Path) -> None:
    """Ranges far below a block of reading, a compressed file, .jsonl: what a task tells adds up to its bytes."""
    tokenizer = Tokenizer.load(place / "bpe")
    plan = make_plan([str(place / "corpus")], tokenizer, ReadOptions(), None, False, 20_000)
    (tmp_path / "store").mkdir()
    for task in plan.tasks():
        told: list[int] = []
        run_task(tmp_path, plan, task, tokenizer, tokenizer, told.append)
        assert sum(told) == task.bytes and min(told) >= 0


STUCK = """
import os, time

real = os.replace
def replace(source, target):
    while str(target).endswith("00000.bin"):
        time.sleep(0.01)
    return real(source, target)
os.replace = replace
"""


def test_workers_that_are_ended_leave_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One worker is in the middle of a shard (it is made to wait there) when another meets a bad line."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text('{"text": "fine"}\n' * 999)
    (tmp_path / "in" / "b.jsonl").write_text('{"tex\n')
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(STUCK)
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path / "start"), os.environ.get("PYTHONPATH", "")])
    )
    with pytest.raises(Failed, match=r"b\.jsonl"):
        tokenize(
            [str(tmp_path / "in")], place / "bpe", tmp_path / "out", shard_bytes=10_000, work=Work(workers=2)
        )
    assert sorted(os.listdir(tmp_path)) == ["in", "start"]


def test_a_store_traces_back_from_anywhere(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative inputs, a saved dataset among them, and a relative --out."""
    import datasets

    (tmp_path / "t.txt").write_text("some text")
    datasets.Dataset.from_dict({"text": ["a row", "another"]}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    tokenize(["../t.txt", "../saved"], os.path.relpath(place / "bpe"), "../tokens")
    monkeypatch.chdir("/")
    assert [(item.path, same) for _, item, same in chain(tmp_path / "tokens")] == [
        (str(place / "bpe"), True),
        (str(tmp_path / "t.txt"), True),
        (str(tmp_path / "saved"), True),
    ]
    (tmp_path / "saved" / "more").write_text("x")
    assert [same for *_, same in chain(tmp_path / "tokens")] == [True, True, False]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_filled_where_it_leads(place: Path, plain: Path, tmp_path: Path, there: bool) -> None:
    for folder in ("disk", "disk/tokens") if there else ("disk",):
        (tmp_path / folder).mkdir()
    (tmp_path / "out").symlink_to("disk/tokens")
    run(place, tmp_path / "out", shard_bytes=20_000)
    assert files_hash(tmp_path / "disk" / "tokens") == files_hash(plain) and (tmp_path / "out").is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["disk", "out"] and os.listdir(tmp_path / "disk") == ["tokens"]


def test_a_store_is_replaced_on_a_disk_without_links(
    place: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")  # of a file system that has no hard links

    monkeypatch.setattr(os, "link", link)
    run(place, tmp_path / "out", tokenizer="wp")
    run(place, tmp_path / "out", shard_bytes=20_000, overwrite=True)
    assert files_hash(tmp_path / "out") == files_hash(plain) and os.listdir(tmp_path) == ["out"]


def test_a_sentence_without_end_takes_no_more_memory_than_a_piece(place: Path) -> None:
    """It is ended where a piece ends; no word of it is lost."""
    tokenizer = Tokenizer.load(place / "wp")
    encode = Encoder(tokenizer, tokenizer, sentences=True)
    piece, found = " word" * (PIECE_BYTES // 10), []
    for number in range(7):
        ids, lengths, documents = encode(DocumentBatch([piece], continues=number < 6))
        assert len(encode._tail) < 2 * PIECE_BYTES
        found.append((len(ids), lengths.tolist(), documents.tolist()))
    total = 7 * len(tokenizer.encode(piece))
    assert sum(size for size, *_ in found) == total == sum(n for _, lengths, _ in found for n in lengths)
    assert [documents for *_, documents in found] == [[]] * 6 + [
        [sum(len(lengths) for _, lengths, _ in found)]
    ]


def test_what_the_format_cannot_hold_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A document of 2^31 tokens, whose length has no place in the index, and shards beyond counting."""
    writer = tasks_module.ShardWriter(tmp_path, 0, np.dtype(np.uint16))
    writer.write(np.ones(3, np.int32), np.array([2**31 - 1]), np.ones(1, np.int64))
    with pytest.raises(Failed, match="too long"):
        writer.write(np.ones(3, np.int32), np.array([5, 2**31]), np.ones(2, np.int64))
    writer.close()
    monkeypatch.setattr(tokenize_module, "MOST_SHARDS", 10)
    with pytest.raises(WrongUse, match=r"too many shards(.|\n)*give at least"):
        run(place, tmp_path / "out", shard_bytes=64)
    assert not os.listdir(tmp_path)


def test_an_input_that_grows_while_it_is_read_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By tokenising and by removing duplicates; nothing of it is committed."""

    real = Reader.read

    def growing(*arguments):
        yield from real(*arguments)
        with open(tmp_path / "t.txt", "a") as file:
            file.write("and more")

    (tmp_path / "t.txt").write_text("some text here\n\n" * 50)
    monkeypatch.setattr(Reader, "read", growing)
    for work in (
        lambda: tokenize([str(tmp_path / "t.txt")], place / "bpe", tmp_path / "out"),
        lambda: dedup_module.dedup([str(tmp_path / "t.txt")], tmp_path / "out", ReadOptions()),
    ):
        with pytest.raises(Refused, match=r"changed while it was read(.|\n)*t\.txt"):
            work()
    assert os.listdir(tmp_path) == ["t.txt"] and (tmp_path / "t.txt").stat().st_size > 50 * 16


def test_documents_without_a_token_are_counted_as_empty(place: Path, tmp_path: Path) -> None:
    """BERT's normaliser leaves nothing of a zero-width space: the document goes, and that is said."""
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in ("The cat.", "\u200b", " ", "A mat."))
    )
    for sentences in (False, True):
        manifest = tokenize(
            [str(tmp_path / "t.jsonl")], place / "wp", tmp_path / f"out-{sentences}", sentences=sentences
        )
        assert manifest.facts["documents"] == 2 and manifest.facts["made"]["counts"]["empty"] == 2
