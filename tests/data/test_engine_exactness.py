"""gigatoken and tokie give the ids of the `tokenizers` library: on every script, every code point, and whatever is
nasty; what they do otherwise is refused or left to it.
"""

import bz2
import gzip
import json
import unicodedata

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from throughline.data.backends import NASTY, Characters, Gigatoken, Tokie, open_backend
from throughline.data.tokenizer import Tokenizer
from tokenizer_fixtures import TOKENIZERS
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


# every code point; of ideographs, Hangul and what is not assigned a sample
ALIKE = (
    (0x3400, 0x4DB0),
    (0x4E00, 0x9FF0),
    (0xAC00, 0xD7A0),
    (0xE000, 0xF8F0),
    (0x17000, 0x18800),
    (0x20000, 0x10FFF0),
)
CODES = [
    code for code in (*range(0xD800), *range(0xE000, 0x20000)) if not any(a <= code < b for a, b in ALIKE)
]
CODES += [code for first, last in ALIKE for code in (*range(first, min(last, 0x32000), 41), last)]


@pytest.fixture(scope="module")
def wordpiece(samples) -> Tokenizer:
    lines = (samples / "bert-base-uncased" / "vocab.txt").read_text("utf-8").splitlines()
    return bert_like({token: i for i, token in enumerate(lines)})


@pytest.fixture(scope="module")
def characters() -> Tokenizer:
    """A vocabulary of every assigned character, so that none hides in the unknown token."""
    found = (chr(code) for code in CODES if unicodedata.category(chr(code)) not in ("Cn", "Co", "Cs"))
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(t for c in found for t in (c, f"##{c}"))]
    return bert_like({token: i for i, token in enumerate(tokens)})


def bert_like(vocab, **normalizer) -> Tokenizer:
    library = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(**normalizer)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.add_special_tokens(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"])
    return Tokenizer(library.to_str())


@pytest.fixture(scope="module")
def bpe(samples) -> Tokenizer:
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
    return Tokenizer(library.to_str())


@pytest.fixture(scope="module", params=["wordpiece", "characters", "bpe"])
def engine(request):
    """(encoder, its tokenizer)"""
    tokenizer = request.getfixturevalue(request.param)
    return (Gigatoken if request.param == "bpe" else Tokie)(tokenizer), tokenizer


def same(engine, texts: list[str]) -> None:
    """The encoder's ids equal the library's, text by text."""
    encoder, tokenizer = engine
    ids, lengths = encoder.encode_batch(texts)
    expected, expected_lengths = tokenizer.encode_batch(texts)
    assert (ids.dtype, lengths.dtype) == (np.int32, np.int64)
    assert lengths.tolist() == expected_lengths.tolist()
    stops = np.cumsum(lengths)
    for text, start, stop in zip(texts, stops - lengths, stops):
        assert ids[start:stop].tolist() == expected[start:stop].tolist(), repr(text[:200])


def test_nasty_texts(engine):
    """One by one, all together, and again from the cache."""
    texts = [*NASTY, *MORE]
    for text in texts:
        same(engine, [text])
    same(engine, texts)
    same(engine, ["".join(texts), " ".join(texts)])
    assert [len(part) for part in engine[0].encode_batch([])] == [0, 0]


def test_every_language(engine, shared):
    for path in sorted((shared / "data" / "multilingual").glob("*.json.gz")):
        data = json.loads(gzip.decompress(path.read_bytes()))["data"]
        texts = [paragraph["context"] for article in data[:12] for paragraph in article["paragraphs"]]
        assert len(texts) > 20
        same(engine, texts)


def test_a_novel(engine, samples):
    path = sorted((samples / "novels").glob("*.bz2"))[0]
    text = bz2.decompress(path.read_bytes()).decode("utf-8", "replace")[:200_000]
    same(engine, [text, *text.split("\n\n")])


def test_every_code_point(engine):
    """Each one between letters, doubled, and after a blank, 64 to a text."""
    texts = [
        " ".join(f"a{c}b{c}{c}" for c in map(chr, CODES[first : first + 64]))
        for first in range(0, len(CODES), 64)
    ]
    same(engine, texts)


def test_any_text(engine):
    letters = st.sampled_from(
        "aZé 'stmdlrve \n\t\u00a0\u3000.,!0½½中한ไ\u0301\u302e\u1b44\U00016ff0\x00\x7f\x1c\x85😀"
    )
    text = st.one_of(st.text(letters, max_size=30), st.text(max_size=30))

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(st.lists(text, max_size=6))
    def check(texts):
        same(engine, texts)

    check()


def test_a_cased_vocabulary(wordpiece):
    tokenizer = bert_like(wordpiece.vocab, lowercase=False)
    same((Tokie(tokenizer), tokenizer), [*NASTY, *MORE])


def test_marks_that_may_change_places_are_left_to_the_reference(wordpiece):
    """Kept where accents are stripped, and ordered by a newer Unicode in the reference: of 60,000 random texts 5."""
    assert Tokie(wordpiece)._odd(["a\u0301", "\U00016ff0\U0001d165", "x\u1b44"]) == [1, 2]
    assert not Tokie(bert_like(wordpiece.vocab, lowercase=False))._odd(["x\u1b44"])


def test_tokenizers_of_another_kind_are_refused(wordpiece, bpe):
    model, normalizer = wordpiece.config["model"], wordpiece.config["normalizer"]
    for tokenizer, change in (
        (wordpiece, {"normalizer": None}),
        (wordpiece, {"normalizer": normalizer | {"strip_accents": False}}),
        (wordpiece, {"normalizer": normalizer | {"handle_chinese_chars": False}}),
        (wordpiece, {"normalizer": normalizer | {"clean_text": False}}),
        (wordpiece, {"pre_tokenizer": {"type": "Whitespace"}}),
        (wordpiece, {"model": model | {"max_input_chars_per_word": 50}}),
        (wordpiece, {"model": model | {"vocab": {"[UNK]": 0, "a": 1}}}),
        (wordpiece, {"added_tokens": [wordpiece.config["added_tokens"][0] | {"special": False}]}),
        (bpe, {"added_tokens": [bpe.config["added_tokens"][0] | {"special": False, "content": "<tool>"}]}),
    ):
        changed = Tokenizer(json.dumps(tokenizer.config | change), {})
        with pytest.raises(ValueError):
            (Tokie if tokenizer is wordpiece else Gigatoken)(changed)


def test_a_table_of_characters_is_refused_where_it_would_differ() -> None:
    """It knows neither normalisers nor added tokens that are words of documents."""
    tokenizer = Tokenizer(TOKENIZERS["characters"]().to_str())
    tool = tokenizer.config["added_tokens"][0] | {"special": False, "content": "<tool>", "id": 400}
    lowercase = {"normalizer": {"type": "Lowercase"}}
    for change in ({"added_tokens": [*tokenizer.config["added_tokens"], tool]}, lowercase):
        with pytest.raises(ValueError):
            Characters(Tokenizer(json.dumps(tokenizer.config | change)))


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
def test_backends_equal_the_reference_on_every_type(kind: str) -> None:
    """With dropout in the file and special tokens that take blanks; words that are not special go to the reference."""
    config = json.loads(TOKENIZERS[kind]().to_str())
    if config["model"]["type"] == "BPE":
        config["model"]["dropout"] = 0.5
    special = [token for token in config["added_tokens"] if token["special"]]
    texts = [*NASTY, *(f"the {token['content']} \n and" for token in config["added_tokens"])]
    for added in (config["added_tokens"], [token | {"lstrip": True, "rstrip": True} for token in special]):
        tokenizer = Tokenizer(json.dumps(config | {"added_tokens": added}))
        ids, lengths = open_backend(tokenizer).encode_batch(texts)
        expected, expected_lengths = tokenizer.encode_batch(texts)
        assert np.array_equal(ids, expected) and np.array_equal(lengths, expected_lengths)
