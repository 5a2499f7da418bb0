"""Text tokenised while it is read: every token a target once, any batch size, restart from one integer, honest limits."""

import gzip

import numpy as np
import pytest
from throughline.core.errors import Refused, WrongUse
from throughline.data import stream as stream_module
from throughline.data.backends import Reference
from throughline.data.inputs import expand_inputs
from throughline.data.loader import Loader
from throughline.data.readers import ReadOptions
from throughline.data.stream import TextStream
from throughline.data.tokenizer import Tokenizer
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers


@pytest.fixture
def words(tmp_path) -> Tokenizer:
    """One id a word: word w17 is id 17; 0 is the end of a document."""
    vocab = {"<|endoftext|>": 0} | {f"w{i}": i for i in range(1, 4000)}
    library = Library(models.WordLevel(vocab, unk_token="<|endoftext|>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<|endoftext|>"])
    return Tokenizer(library.to_str())


def write(path, first, count, per_line=7) -> None:
    names = [f"w{i}" for i in range(first, first + count)]
    path.write_text("".join(" ".join(names[i : i + per_line]) + "\n" for i in range(0, count, per_line)))


@pytest.fixture
def corpus(tmp_path):
    write(tmp_path / "a.txt", 1, 1500)
    write(tmp_path / "b.txt", 1501, 900)
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("w2401 w2402\nw2403\n")
    return tmp_path


def open_stream(corpus, words, monkeypatch, length=16, cache=None, unit=1000) -> TextStream:
    monkeypatch.setattr(stream_module, "UNIT_BYTES", unit)
    sources = expand_inputs([str(corpus / name) for name in ("a.txt", "b.txt", "c.txt.gz")])
    return TextStream(sources, words, Reference(words), ReadOptions(documents="line"), length, cache=cache)


def test_every_token_is_a_target_once_a_pass(corpus, words, monkeypatch):
    stream = open_stream(corpus, words, monkeypatch)
    assert stream.rows == 0
    stream.batch(0, 700)  # more than a pass
    batch = stream.batch(0, stream.rows)
    targets = batch["targets"][batch["targets"] >= 0]
    counts = np.bincount(targets, minlength=2404)
    firsts = len(stream._units)  # the first word of a unit follows nothing, so it is no target
    assert (counts[1:2404] == 0).sum() <= firsts and counts[1:2404].max() == 1
    assert counts[0] == -(-1500 // 7) + -(-900 // 7) + 2
    followed = {(a, b) for a, b in zip(batch["input_ids"].ravel(), batch["targets"].ravel()) if b > 0 and a > 0}
    assert all(b == a + 1 for a, b in followed)


def test_any_batch_size_and_any_restart_gives_the_same_rows(corpus, words, monkeypatch, tmp_path):
    whole = open_stream(corpus, words, monkeypatch).batch(0, 700)
    again = open_stream(corpus, words, monkeypatch)
    parts = np.concatenate([again.batch(first, 7)["input_ids"] for first in range(0, 700, 7)])
    assert np.array_equal(whole["input_ids"], parts)
    assert again.rows and again.rows < 350, "the 700 rows are several passes"
    first, second = whole["input_ids"][: again.rows], whole["input_ids"][again.rows : 2 * again.rows]
    assert sorted(map(tuple, first)) == sorted(map(tuple, second)) and not np.array_equal(first, second)
    with Loader(open_stream(corpus, words, monkeypatch), 4, position=320, rank=1, world=2, workers=2) as loader:
        assert np.array_equal(next(loader)["input_ids"], whole["input_ids"][324:328])


def test_a_restart_reads_only_where_it_stands(corpus, words, monkeypatch):
    cache = corpus / "cache"
    first = open_stream(corpus, words, monkeypatch, cache=cache)
    whole = first.batch(0, 300)
    later = open_stream(corpus, words, monkeypatch, cache=cache)
    assert later.rows == first.rows, "known before anything is read"
    units = []
    tokenise = TextStream._unit
    monkeypatch.setattr(TextStream, "_unit", lambda self, index: units.append(index) or tokenise(self, index))
    assert np.array_equal(later.batch(290, 5)["input_ids"], whole["input_ids"][290:295])
    assert len(set(units)) <= 2 < len(later._units)


def test_a_position_names_its_place_in_the_text(corpus, words, monkeypatch):
    stream = open_stream(corpus, words, monkeypatch)
    assert stream.place(0) == (0, str(corpus / "a.txt"), 0)
    stream.batch(0, 400)
    number, path, byte = stream.place(stream.rows + 20)
    assert number == 1 and path.endswith("a.txt") and byte > 0


def test_text_that_changed_is_refused(corpus, words, monkeypatch):
    stream = open_stream(corpus, words, monkeypatch)
    stream.batch(0, 2)
    write(corpus / "b.txt", 1, 10)
    with pytest.raises(Refused, match="changed"):
        stream.batch(0, 400)


def test_limits_are_said(corpus, words, monkeypatch):
    monkeypatch.setattr(stream_module, "MOST_WHOLE_BYTES", 10)
    with pytest.raises(WrongUse, match="while training"):
        open_stream(corpus, words, monkeypatch)
    (corpus / "tiny.txt").write_text("w1\n")
    sources = expand_inputs([str(corpus / "tiny.txt")])
    short = TextStream(sources, words, Reference(words), ReadOptions(documents="line"), 16)
    assert short.batch(0, 2)["targets"].tolist() == [[0] + [-100] * 15] * 2
