"""Random text of many scripts: ids are those of transformers, text is the library's decoding however it is made."""

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from throughline.data.text_stream import TextStream
from throughline.data.tokenizer import BREAK, Tokenizer
from tokenizer_fixtures import TOKENIZERS, WORDS

SCRIPTS = {
    "Latin": (0x41, 0x24F),
    "Greek": (0x370, 0x3FF),
    "Cyrillic": (0x400, 0x4FF),
    "Armenian": (0x531, 0x58A),
    "Hebrew": (0x591, 0x5F4),
    "Arabic": (0x600, 0x6FF),
    "Syriac": (0x700, 0x74F),
    "Devanagari": (0x900, 0x97F),
    "Bengali": (0x980, 0x9FB),
    "Tamil": (0xB82, 0xBFA),
    "Telugu": (0xC00, 0xC7F),
    "Sinhala": (0xD82, 0xDF4),
    "Thai": (0xE01, 0xE5B),
    "Lao": (0xE81, 0xEDF),
    "Tibetan": (0xF00, 0xFDA),
    "Georgian": (0x10A0, 0x10FF),
    "Hangul": (0xAC00, 0xD7A3),
    "Ethiopic": (0x1200, 0x137C),
    "Cherokee": (0x13A0, 0x13FD),
    "Khmer": (0x1780, 0x17F9),
    "Mongolian": (0x1820, 0x18AA),
    "Kana": (0x3041, 0x30FF),
    "Han": (0x4E00, 0x9FFF),
    "Gothic": (0x10330, 0x1034A),
    "Cuneiform": (0x12000, 0x12399),
}
EMOJI = (
    "\U0001f600",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",  # a family joined by ZWJ
    "\U0001f1e9\U0001f1ea",  # a flag
    "\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f",  # a flag by tags
    "\U0001f44d\U0001f3fd",  # a skin tone
    "\u2764\ufe0f\u200d\U0001f525",
    "1\ufe0f\u20e3",
)
CONTROLS = (
    *map(chr, range(32)),
    *map(chr, range(127, 160)),
    *"\u00ad\u200b\u200e\u200f\u2028\u2029\u2060\ufeff\ufffd\uffff",
)
ORDINARY = (" ", "  ", "\n", "\n\n", "\t", ". ", ", ", "'t", "\u3002", "\u2581", *WORDS)

pieces = st.one_of(
    st.one_of(
        [st.text(st.characters(min_codepoint=a, max_codepoint=b), max_size=6) for a, b in SCRIPTS.values()]
    ),
    st.sampled_from([*EMOJI, *CONTROLS]),
    st.sampled_from(ORDINARY),
)
texts = st.lists(pieces, max_size=12).map("".join)


@lru_cache
def opened(kind: str) -> tuple[Tokenizer, Any, list[str]]:
    """Our tokenizer of this type, transformers' and its added tokens."""
    transformers = pytest.importorskip("transformers")
    library = TOKENIZERS[kind]()
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library)
    added = [token.content for token in library.get_added_tokens_decoder().values()]
    return Tokenizer(library.to_str()), theirs, added


def streamed(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...], skip: bool) -> str:
    stream = TextStream(tokenizer, stop, skip_special_tokens=skip)
    text = ""
    for token_id in ids:
        text += stream.push(token_id)
        if stream.stopped:
            return text
    return text + stream.finish()


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@settings(max_examples=80)
@given(text=texts, special=st.lists(st.integers(0, 20), max_size=3), data=st.data())
def test_text_and_ids_are_those_of_the_library(
    kind: str, text: str, special: list[int], data: st.DataObject
) -> None:
    tokenizer, theirs, added = opened(kind)
    for number in special:  # special tokens that the text spells
        place = data.draw(st.integers(0, len(text)))
        text = text[:place] + added[number % len(added)] + text[place:]
    plain = theirs(text, add_special_tokens=False).input_ids
    assert tokenizer.parse(text) == plain
    before, behind = tokenizer.framing
    framed = theirs(text).input_ids
    if plain[: len(before)] != before and plain[len(plain) - len(behind) :] != behind and framed:
        assert tokenizer.encode_prompt(text).tolist() == framed
    unparsed = theirs(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert tokenizer.encode(text).tolist() == tokenizer.encode_batch([text])[0].tolist() == unparsed
    for skip in (True, False):
        whole = theirs.decode(framed, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(framed, skip) == whole
        assert streamed(tokenizer, framed, (), skip) == whole
        found = tokenizer.pieces(framed, skip_special_tokens=skip)
        assert len(found) == len(framed) and "".join(found) == whole
        if whole:
            start = data.draw(st.integers(0, len(whole) - 1))
            stop = whole[start : start + data.draw(st.integers(1, 4))]
            assert streamed(tokenizer, framed, (stop,), skip) == whole[: whole.index(stop)]


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@settings(max_examples=60)
@given(data=st.data())
def test_an_answer_continues_its_prompt(kind: str, data: st.DataObject) -> None:
    """Of any ids: the text of an answer is what the library's decoding of all adds to that of the prompt, but for a
    prompt that ends inside a character, which the answer may complete.
    """
    tokenizer, _, _ = opened(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=2, max_size=24))
    cut = data.draw(st.integers(1, len(ids) - 1))
    for skip in (True, False):
        begin, whole = tokenizer.decode(ids[:cut], skip), tokenizer.decode(ids, skip)
        answer = "".join(tokenizer.pieces(ids[cut:], ids[:cut], skip))
        if begin and not begin.endswith("\ufffd") and whole.startswith(begin):
            assert answer == whole[len(begin) :]


@settings(max_examples=60)
@given(text=texts)
def test_bytes_of_tokens_join_to_the_text(text: str) -> None:
    """Of tokenizers that lose nothing, joined before they are decoded."""
    for kind in ("byte-level", "sentencepiece"):
        tokenizer, _, _ = opened(kind)
        ids = tokenizer.encode(text).tolist()
        joined = b"".join(map(tokenizer.token_bytes, ids))
        blank = " " if kind == "sentencepiece" and ids and not text.startswith("\n\n") else ""
        expected = (blank + text).replace("\u2581", " ") if kind == "sentencepiece" else text
        assert joined.decode().replace(" ", "") == expected.replace(" ", "")


def test_the_mark_of_a_forged_token_is_no_text() -> None:
    """What a chat template marks with is never a part of an encoded text."""
    tokenizer, _, added = opened("sentencepiece")
    for name in added:
        marked = f"the {name[0]}{BREAK}{name[1:]} and"
        assert tokenizer.parse(marked) == tokenizer.encode(f"the {name} and").tolist()
