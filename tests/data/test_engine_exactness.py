"""Our NumPy engines give the ids of the `tokenizers` library: on every script, every code point, and whatever
is nasty.
"""

import bz2
import gzip
import json
from functools import lru_cache

import numpy as np
import pytest
import throughline.data.wordtable as wordtable
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from throughline.data.backends import NASTY
from throughline.data.engines_bpe import BPEEngine
from throughline.data.engines_wordpiece import WordPieceEngine
from tokenizers import models, normalizers, pre_tokenizers

MORE = (
    "'s's 're'll x's 'stuff ''s \n's \t't 'S a'b",
    "x \n\n  y\u00a0z \u3000 w  ",
    "a  ",
    "  a",
    "\n\n",
    "don't",
    "can't've",
    "'",
    "''",
    "' s",
    " 's",
    "\u302e\u302f a\U0001d165\U0001d16d",
    "a\x00b",
    "\x00" * 8 + "x",
    "word" * 200,
    "½" * 120 + " x",
    "é" * 101,
    "é" * 100,
    "x" * 100,
    "x" * 101,
    "한국어 각 힣",
    "ẍ ½ ０１",
    "Ω Å K",
    "\ufb1d",
    "xx0x1x01 10 0 1 11",
)


@pytest.fixture(scope="module")
def wordpiece(samples) -> str:
    lines = (samples / "bert-base-uncased" / "vocab.txt").read_text("utf-8").splitlines()
    return wordpiece_config({token: i for i, token in enumerate(lines)})


def wordpiece_config(vocab, **normalizer) -> str:
    library = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(**normalizer)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return library.to_str()


@pytest.fixture(scope="module")
def bpe(samples) -> str:
    folder = samples / "gpt2-bpe"
    lines = (folder / "vocab.bpe").read_text("utf-8").split("\n")[1:]
    library = tokenizers.Tokenizer(
        models.BPE(
            json.loads((folder / "encoder.json").read_text("utf-8")),
            [tuple(line.split()) for line in lines if line],
        )
    )
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<|endoftext|>"])
    return library.to_str()


@lru_cache(maxsize=8)
def library_of(config: str) -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer.from_str(config)
    library.encode_special_tokens = True
    return library


def reference(config: str, texts: list[str]) -> list[list[int]]:
    return [
        encoding.ids for encoding in library_of(config).encode_batch_fast(texts, add_special_tokens=False)
    ]


def same(engine, config: str, texts: list[str]) -> None:
    """The engine's ids equal the library's, text by text."""
    ids, lengths = engine.encode_batch(texts)
    expected = reference(config, texts)
    assert (ids.dtype, lengths.dtype) == (np.int32, np.int64)
    assert lengths.tolist() == [len(right) for right in expected]
    for text, stop, right in zip(texts, np.cumsum(lengths), expected):
        assert ids[stop - len(right) : stop].tolist() == right, repr(text[:200])


def both(wordpiece: str, bpe: str):
    yield WordPieceEngine(wordpiece), wordpiece
    yield walking(wordpiece), wordpiece
    yield BPEEngine(bpe), bpe


def walking(config: str) -> WordPieceEngine:
    """An engine that walks the trie however few the words are."""
    engine = WordPieceEngine(config)
    engine._match.alone = 0
    return engine


def test_nasty_texts(wordpiece, bpe):
    """One by one, all together, and again from the cache."""
    texts = [*NASTY, *MORE]
    for engine, config in both(wordpiece, bpe):
        for text in texts:
            same(engine, config, [text])
        same(engine, config, texts)
        same(engine, config, ["".join(texts), " ".join(texts)])
        assert [len(part) for part in engine.encode_batch([])] == [0, 0]


def test_every_language(wordpiece, bpe, shared):
    for engine, config in both(wordpiece, bpe):
        for path in sorted((shared / "data" / "multilingual").glob("*.json.gz")):
            data = json.loads(gzip.decompress(path.read_bytes()))["data"]
            texts = [paragraph["context"] for article in data[:12] for paragraph in article["paragraphs"]]
            assert len(texts) > 20
            same(engine, config, texts)


def test_a_novel(wordpiece, bpe, samples):
    path = sorted((samples / "novels").glob("*.bz2"))[0]
    text = bz2.decompress(path.read_bytes()).decode("utf-8", "replace")[:200_000]
    for engine, config in both(wordpiece, bpe):
        same(engine, config, [text, *text.split("\n\n")])


def test_every_code_point(wordpiece, bpe):
    """Each one between letters, doubled, and after a blank; of ideographs, Hangul and what is not assigned a
    sample.
    """
    alike = [
        (0x3400, 0x4DB0),
        (0x4E00, 0x9FF0),
        (0xAC00, 0xD7A0),
        (0xE000, 0xF8F0),
        (0x17000, 0x18800),
        (0x20000, 0x10FFF0),
    ]
    codes = [*range(0xD800), *range(0xE000, 0x20000)]
    for first, last in alike:
        codes = [code for code in codes if not first <= code < last] + [
            *range(first, min(last, 0x32000), 41),
            last,
        ]
    texts = [
        " ".join(f"a{c}b{c}{c}" for c in map(chr, codes[first : first + 512]))
        for first in range(0, len(codes), 512)
    ]
    for engine, config in both(wordpiece, bpe):
        same(engine, config, texts)


@pytest.mark.parametrize("make", [WordPieceEngine, walking, BPEEngine])
def test_any_text(make, wordpiece, bpe):
    config = bpe if make is BPEEngine else wordpiece
    engine = make(config)
    letters = st.sampled_from("aZé 'stmdlrve \n\t\u00a0\u3000.,!0½½中한ไ\u0301\u302e\x00\x1c\x85😀")
    text = st.one_of(st.text(letters, max_size=30), st.text(max_size=30))

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.lists(text, max_size=6))
    def check(texts):
        same(engine, config, texts)

    check()


@pytest.mark.parametrize(
    "normalizer",
    [{"lowercase": False}, {"lowercase": True, "strip_accents": False}, {"handle_chinese_chars": False}],
)
def test_other_settings_of_berts_normalizer(wordpiece, normalizer):
    vocab = tokenizers.Tokenizer.from_str(wordpiece).get_vocab()
    config = wordpiece_config(vocab, **normalizer)
    for make in (WordPieceEngine, walking):
        same(make(config), config, [*NASTY, *MORE])


def test_texts_longer_than_a_chunk_and_chunks_of_any_size(wordpiece, bpe, monkeypatch):
    """Cutting a text, a full cache that is emptied, and words longer than any key change nothing."""
    rng = np.random.default_rng(0)
    pieces = [*"ab é中'", " ", "  ", "\n", ".", "word", "'s", "½", "ß", "x" * 40, "\u3000", " \n "]
    texts = ["".join(rng.choice(pieces, size)) for size in (5, 900, 0, 300, 1)] + [
        "a" * 600,
        "é" * 600,
        " " * 600,
    ]
    monkeypatch.setattr(wordtable, "LIMIT", 50)
    for size in (1, 100):
        monkeypatch.setattr(BPEEngine, "chunk", size)
        monkeypatch.setattr(WordPieceEngine, "chunk", size)
        for engine, config in both(wordpiece, bpe):
            same(engine, config, texts)


def test_tokenizers_of_another_kind_are_refused(wordpiece, bpe):
    for config, change in (
        (wordpiece, {"normalizer": None}),
        (wordpiece, {"added_tokens": [json.loads(wordpiece)["added_tokens"][0] | {"special": False}]}),
        (bpe, {"pre_tokenizer": {"type": "Whitespace"}}),
        (bpe, {"pre_tokenizer": json.loads(bpe)["pre_tokenizer"] | {"add_prefix_space": True}}),
        (bpe, {"normalizer": {"type": "NFC"}}),
        (bpe, {"model": json.loads(bpe)["model"] | {"ignore_merges": True}}),
    ):
        with pytest.raises(ValueError):
            (WordPieceEngine if config is wordpiece else BPEEngine)(json.dumps(json.loads(config) | change))
