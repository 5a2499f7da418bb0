"""Text tokenised while it is read: the rows of a store, any batch size, restart from one integer, honest
limits.
"""

import gzip
import itertools

import numpy as np
import pytest
from throughline.core.errors import Failed, Refused, WrongUse
from throughline.data import stream as stream_module
from throughline.data.loader import Loader
from throughline.data.options import DatasetOptions
from throughline.data.readers import ReadOptions
from throughline.data.stream import Text, TextStream
from throughline.data.tokenizer import Tokenizer
from throughline.data.train_tokenizer import train_tokenizer
from tokenizers import Tokenizer as Library
from tokenizers import models, pre_tokenizers

LINES = ReadOptions(documents="line")


@pytest.fixture
def words() -> Tokenizer:
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
def corpus(tmp_path, monkeypatch):
    """Words w1 to w2403, in units of 1,000 bytes."""
    monkeypatch.setattr(stream_module, "UNIT_BYTES", 1000)
    monkeypatch.setattr(stream_module, "ROWS_IN_UNIT", 1)
    write(tmp_path / "a.txt", 1, 1500)
    write(tmp_path / "b.txt", 1501, 900)
    with gzip.open(tmp_path / "c.txt.gz", "wt") as file:
        file.write("w2401 w2402\nw2403\n")
    return tmp_path


def open_text(corpus, words, **others) -> Text:
    names = [str(corpus / name) for name in ("a.txt", "b.txt", "c.txt.gz")]
    return Text(names, words, LINES, sequence_length=16, **others)


def open_stream(corpus, words, cache=None, **options) -> TextStream:
    return TextStream(open_text(corpus, words), DatasetOptions("gpt", 16, **options), cache)


def test_a_pass_reads_every_word_once_but_a_row_a_unit(corpus, words):
    text = open_text(corpus, words)
    stream = TextStream(text, DatasetOptions("gpt", 16))
    assert stream.rows == 0, "not known before the first pass"
    stream.batch(0, 700)  # more than a pass
    batch = stream.batch(0, stream.rows)
    counts = np.bincount(batch["targets"].ravel(), minlength=2404)[1:2404]
    units = len(text.tasks)
    assert units > 5 and counts.max() == 1 and (counts == 0).sum() <= units * 16
    joined = zip(batch["input_ids"].ravel(), batch["targets"].ravel())
    assert all(b == a + 1 for a, b in joined if a > 0 and b > 0)
    order = batch["input_ids"][:, 0]
    assert order.tolist() != sorted(order), "rows are drawn within a unit"


def test_the_units_hold_the_text_of_a_store(corpus, words):
    """Tokens and documents of the units one after the other, of the held-out end, and of all at once."""
    text = open_text(corpus, words, held_out=0.2)
    whole = text.store(text.plan.tasks())
    units = [text.store([task]) for task in text.tasks]
    end = text.held_out()
    assert whole.read(0, whole.tokens).tolist() == [
        t for store in (*units, end) for t in store.read(0, store.tokens).tolist()
    ]
    assert (
        whole.documents == sum(store.documents for store in (*units, end)) == -(-1500 // 7) + -(-900 // 7) + 2
    )
    assert abs(end.tokens / whole.tokens - 0.2) < 0.02
    assert end.read(0, 1)[0] == 1 + sum((store.tokens - store.documents) for store in units), (
        "it begins where the units end"
    )


@pytest.mark.parametrize(
    "options", [{}, {"random_offsets": True}, {"packing": "best_fit"}, {"separate_documents": True}]
)
def test_any_batch_size_and_any_restart_gives_the_same_rows(corpus, words, options):
    whole = open_stream(corpus, words, **options).batch(0, 700)
    again = open_stream(corpus, words, **options)
    parts = [again.batch(first, 7) for first in range(0, 700, 7)]
    for name, values in whole.items():
        assert np.array_equal(values, np.concatenate([part[name] for part in parts])), name
    assert again.rows and again.rows < 350, "the 700 rows are several passes"
    first, second = whole["input_ids"][: again.rows], whole["input_ids"][again.rows : 2 * again.rows]
    assert not np.array_equal(first, second)
    if not options.get("random_offsets"):
        assert sorted(map(tuple, first)) == sorted(map(tuple, second))
    with Loader(open_stream(corpus, words, **options), 4, position=320, rank=1, world=2, workers=2) as loader:
        assert np.array_equal(next(loader)["input_ids"], whole["input_ids"][324:328])


def test_a_restart_reads_only_where_it_stands(corpus, words, monkeypatch):
    cache = corpus / "cache"
    first = open_stream(corpus, words, cache=cache)
    whole = first.batch(0, 300)
    later = open_stream(corpus, words, cache=cache)
    assert later.rows == first.rows, "known before anything is read"
    units = []
    tokenise = Text.store
    monkeypatch.setattr(
        Text, "store", lambda self, tasks: units.append(tasks[0].index) or tokenise(self, tasks)
    )
    assert np.array_equal(later.batch(290, 5)["input_ids"], whole["input_ids"][290:295])
    assert len(units) <= 2
    assert open_stream(corpus, words, cache=cache, packing="best_fit").rows == 0, (
        "other rows have other counts"
    )


def bert(tokenizer: Tokenizer, **others) -> DatasetOptions:
    return DatasetOptions(
        "bert",
        64,
        vocab_size=tokenizer.vocab_size,
        special_ids=tuple(tokenizer.special_ids),
        pad_id=tokenizer.pad_id,
        cls_id=tokenizer.cls_id,
        sep_id=tokenizer.sep_id,
        mask_id=tokenizer.mask_id,
        **others,
    )


@pytest.mark.parametrize(
    "options", [{}, {"nsp": "sop", "packing": "packed"}, {"nsp": "none", "packing": "packed"}]
)
def test_bert_rows_come_from_text_too(corpus, options):
    paragraphs = [" ".join(f"Sentence {i} of {n} is here." for i in range(n % 9 + 2)) for n in range(400)]
    (corpus / "t.txt").write_text("\n\n".join(paragraphs))
    tokenizer = train_tokenizer(paragraphs, "wordpiece", 120)
    pairs = options.get("nsp") != "none"

    def stream() -> TextStream:
        text = Text([str(corpus / "t.txt")], tokenizer, ReadOptions(), sequence_length=64, sentences=pairs)
        assert len(text.tasks) > 5
        return TextStream(text, bert(tokenizer, **options))

    whole, again = stream().batch(0, 2000), stream()
    parts = [again.batch(first, 40) for first in range(0, 2000, 40)]
    for name, values in whole.items():
        assert np.array_equal(values, np.concatenate([part[name] for part in parts])), name
    assert 100 < again.rows < 1000 and ("nsp_targets" in whole) == pairs
    masked = whole["targets"] >= 0
    assert 0.1 < masked.sum() / (whole["input_ids"] != tokenizer.pad_id).sum() < 0.2
    words = np.where(masked, whole["targets"], whole["input_ids"])
    rows = {}
    for row, words_of, targets in zip(itertools.count(), words[: 2 * again.rows], whole["targets"]):
        rows.setdefault(words_of.tobytes(), []).append((row, targets))
    twice = [found for found in rows.values() if len(found) == 2]
    assert len(twice) > 0.9 * again.rows, "the second pass has the rows of the first"
    assert np.mean([np.array_equal(a[1], b[1]) for a, b in twice]) < 0.2, "and masks them anew"


def test_text_that_changed_is_refused(corpus, words):
    stream = open_stream(corpus, words)
    stream.batch(0, 2)
    write(corpus / "b.txt", 1, 10)
    with pytest.raises(Refused, match="changed"):
        stream.batch(0, 400)


def test_dirty_text_is_held_to_the_policy(corpus, words, capsys):
    raw = bytearray((corpus / "a.txt").read_bytes())
    raw[50] = 0xFF
    (corpus / "a.txt").write_bytes(raw)
    open_stream(corpus, words).batch(0, 200)
    assert capsys.readouterr().err.count("replaced by U+FFFD") == 1
    raw[50:60] = b"\xff" * 10
    (corpus / "a.txt").write_bytes(raw)
    with pytest.raises(Failed, match="too many characters"):
        open_stream(corpus, words).batch(0, 200)


def test_a_unit_that_holds_little_but_the_end_of_a_long_document(corpus, words):
    """Of the second thousand bytes only a document of five words begins there: it gives no row, and training
    goes on.
    """
    long = ("w1 " * 700)[:1989]
    (corpus / "t.txt").write_text(f"{long}\nw5 w6 w7 w8 w9\n" + "w11 w12 w13 w14 w15 w16 w17\n" * 100)
    text = Text([str(corpus / "t.txt")], words, LINES, sequence_length=16)
    assert text.store([text.tasks[1]]).tokens == 6
    stream = TextStream(text, DatasetOptions("gpt", 16))
    batch = stream.batch(0, 200)
    assert stream.rows < 200 and (batch["input_ids"] == 11).any() and not (batch["input_ids"] == 5).any()


def test_limits_are_said(corpus, words, monkeypatch):
    with pytest.raises(WrongUse, match="too little text"):
        text = Text([str(corpus / "c.txt.gz")], words, LINES, sequence_length=16)
        TextStream(text, DatasetOptions("gpt", 16)).batch(0, 2)
    with pytest.raises(WrongUse, match="no part of the text can be held out"):
        Text([str(corpus / "c.txt.gz")], words, LINES, sequence_length=16, held_out=0.1).held_out()
    with pytest.raises(WrongUse, match="no such input"):
        Text([str(corpus / "absent.txt")], words, LINES, sequence_length=16)
    with pytest.raises(WrongUse, match="sentences"):
        text = Text([str(corpus / "a.txt")], words, LINES, sequence_length=16, sentences=True)
        TextStream(text, DatasetOptions("bert", 16, vocab_size=4000, cls_id=1, sep_id=2, mask_id=3)).batch(
            0, 2
        )
    monkeypatch.setattr(stream_module, "MOST_WHOLE_BYTES", 10)
    with pytest.raises(WrongUse, match="while training"):
        open_stream(corpus, words)
