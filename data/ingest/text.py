"""What happens to dirty text: one stated policy, every case counted, nothing lost in silence.

| found                        | done                                                      | counted as      |
|------------------------------|-----------------------------------------------------------|-----------------|
| byte-order mark at the start | removed                                                   | `bom`           |
| front matter of Markdown     | kept; removed with `skip_front_matter`                    | `front_matter`  |
| CRLF line ends               | become LF                                                 | `crlf`          |
| CR alone as a line end       | becomes LF                                                | `cr`            |
| NUL                          | becomes U+FFFD                                            | `nul`, `replaced` |
| invalid UTF-8, a lone surrogate in JSON | each bad part becomes U+FFFD                   | `replaced`      |
| hard-wrapped lines           | kept; with `unwrap`, lines of a paragraph join by a space | `unwrapped`     |
| a document of white space    | left out, if no longer than a piece                       | `empty`         |
| a long document              | encoded in pieces cut before white space: same tokens     | `long`          |
| a long run without any space | cut at PIECE_BYTES: the one case where tokens can differ   | `forced_cuts`   |

More than `MAX_REPLACED` replaced characters, a file that is not text, and a corpus without text are errors. Sentences
are split by rule.
"""

import codecs
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import AnyStr

from ...core.errors import Failed

PIECE_BYTES = 1 << 20  # longer documents go to the tokenizer in pieces: no line's length takes memory
MAX_REPLACED = 0.001  # of all characters; one replaced character is always forgiven
BINARY_SHARE, BINARY_LEAST = 0.1, 64  # a first block with more bad characters than both is not text
COUNTS = ("bom", "front_matter", "crlf", "cr", "nul", "replaced", "unwrapped", "empty", "long", "forced_cuts")

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_HARD_WRAP = re.compile(r"(?<=\S)[ \t]*\n[ \t]*(?=\S)")
# a piece is cut behind a character, before white space
_HARD_WRAP_GOING_ON = re.compile(r"(?:(?<=\S)|\A)[ \t]*\n[ \t]*(?=\S)")
_MAGIC = {
    b"\x1f\x8b": "gzip data: name it .gz",
    b"\x28\xb5\x2f\xfd": "zstandard data: name it .zst",
    b"BZh": "bzip2 data: name it .bz2",
    b"PAR1": "a parquet file: name it .parquet",
    b"PK\x03\x04": "a zip archive: unpack it first",
    b"%PDF": "a PDF: extract its text first",
    codecs.BOM_UTF16_LE: "UTF-16: convert it with iconv -f utf-16 -t utf-8",
    codecs.BOM_UTF16_BE: "UTF-16: convert it with iconv -f utf-16 -t utf-8",
}


def clean(raw: bytes, counts: Counter[str], unwrap: bool = False, going: bool = False) -> str:
    """Decode a stretch of UTF-8 by the policy above; with `going` a document that was cut goes on in it."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("utf-8", "replace")
        counts["replaced"] += text.count("\ufffd") - raw.count(b"\xef\xbf\xbd")
    if b"\0" in raw:
        found = text.count("\0")
        counts["nul"] += found
        counts["replaced"] += found
        text = text.replace("\0", "\ufffd")
    if b"\r" in raw:
        text = with_line_feeds(text, "\r\n", "\r", "\n", counts)
    if unwrap:
        text, joined = (_HARD_WRAP_GOING_ON if going else _HARD_WRAP).subn(" ", text)
        counts["unwrapped"] += joined
    return text


def clean_string(text: str, counts: Counter[str], unwrap: bool = False) -> str:
    """The same policy for a string that a JSON or parquet reader has decoded already."""
    if not text.isascii():
        text, found = _LONE_SURROGATE.subn("\ufffd", text)
        counts["replaced"] += found
    if "\0" in text or "\r" in text or unwrap:
        return clean(text.encode(), counts, unwrap)
    return text


def with_line_feeds(
    text: AnyStr, pair: AnyStr, single: AnyStr, line_feed: AnyStr, counts: Counter[str]
) -> AnyStr:
    """The text with LF for CRLF and for CR alone, each counted."""
    pairs = text.count(pair)
    counts["crlf"] += pairs
    counts["cr"] += text.count(single) - pairs
    return text.replace(pair, line_feed).replace(single, line_feed)


def line_feed_blocks(blocks: Iterable[bytes], counts: Counter[str]) -> Iterator[bytes]:
    """The blocks of a text with LF as the only line end, wherever it was cut."""
    held = b""  # a CR, of which an LF may be the next block's first byte
    for block in blocks:
        block = held + block
        held = b"\r" if block.endswith(b"\r") else b""
        block = block.removesuffix(b"\r")
        if b"\r" in block:
            block = with_line_feeds(block, b"\r\n", b"\r", b"\n", counts)
        if block:
            yield block
    if held:
        counts["cr"] += 1
        yield b"\n"


# As pandoc reads it: the first line is --- (+++ for TOML), the next one is not blank, a line --- or ... (+++) ends it.
_YAML = rb"---[ \t]*\n(?![ \t]*\n)(?:.*\n)*?(?:---|\.\.\.)[ \t]*(?:\n|\Z)"
_TOML = rb"\+\+\+[ \t]*\n(?![ \t]*\n)(?:.*\n)*?\+\+\+[ \t]*(?:\n|\Z)"
_FRONT_MATTER = re.compile(_YAML + rb"|" + _TOML)


def strip_front_matter(head: bytes, counts: Counter[str]) -> bytes:
    """Remove the front matter from the first bytes of a Markdown file, whose lines end with LF."""
    found = _FRONT_MATTER.match(head)
    if found is None:
        return head
    counts["front_matter"] += 1
    return head[found.end() :]


def strip_bom(head: bytes, counts: Counter[str]) -> bytes:
    """Remove a UTF-8 byte-order mark from the first bytes of a file."""
    if head.startswith(codecs.BOM_UTF8):
        counts["bom"] += 1
        return head[len(codecs.BOM_UTF8) :]
    return head


def utf8_bytes(texts: list[str]) -> int:
    """The length of all texts in UTF-8."""
    return sum(len(text) if text.isascii() else len(text.encode()) for text in texts)


def check_is_text(head: bytes, where: str, at_start: bool) -> None:
    """Raise Failed when a file's or byte range's first block, cut anywhere, is not text."""
    sample = head[: 1 << 16]
    text = sample.decode("utf-8", "replace")
    bad = max(text.count("\ufffd") - sample.count(b"\xef\xbf\xbd") - 1, 0) + text.count("\0")
    kind = next((what for magic, what in _MAGIC.items() if sample.startswith(magic)), "") if at_start else ""
    if bad <= max(BINARY_SHARE * len(text), BINARY_LEAST) and not (bad and kind):
        return
    fix = "leave the file out, or convert it to UTF-8 (iconv -f latin1 -t utf-8)"
    why = f"{bad:,} of the first {len(text):,} characters are no UTF-8 text"
    raise Failed("not a text file", where=where, why=why, fix=f"this looks like {kind}" if kind else fix)


def check_replaced(replaced: int, characters: int, limit: float, where: str) -> None:
    """Raise Failed when more than `limit` of the characters had to be replaced."""
    if replaced > max(1.0, limit * characters):
        share = f"{replaced / characters:.2%}, limit {limit:.2%}"
        why = f"{replaced:,} of {characters:,} characters are invalid UTF-8 or NUL ({share})"
        fix = "convert the text (iconv -f latin1 -t utf-8), or accept it: --max-replaced of throughline data"
        raise Failed("too many characters had to be replaced", where=where, why=why, fix=fix)


def cut_place(window: bytes) -> tuple[int, bool]:
    """(offset to cut a long document at, whether tokens can differ); `window`: its next PIECE_BYTES bytes. The cut
    falls before the last white space after a character, where every pre-tokenizer that splits there begins a token.
    """
    place = space = newline = len(window)
    while True:
        space = window.rfind(b" ", 0, place) if space >= place else space
        newline = window.rfind(b"\n", 0, place) if newline >= place else newline
        if (place := max(space, newline)) <= 0:
            break
        while place and window[place - 1] in b" \t\n\r\x0b\x0c":  # to the beginning of the run of white space
            place -= 1
        before = window[max(place - 4, 0) : place].decode("utf-8", "replace")
        if before and not before[-1].isspace():
            return place, False
    place = len(window)
    while place > len(window) - 4 and window[place - 1] & 0xC0 == 0x80:  # not inside a character
        place -= 1
    if window[place - 1] >= 0xC0:
        place -= 1
    return place, True


# A run of marks is tried once, from its beginning and whole: a megabyte of dots would take hours otherwise.
_ENDS = re.compile(
    # the next begins with a capital or an uncased letter
    r"(?<![.!?…])[.!?…]++[\"'”’»)\]]*+(?=\s+[\"'“‘«(\[]*[^\W\d_a-z])"
    r"|[。！？]+[”’」』）]*|(?<![।۔؟])[।۔؟]++(?=\s)"  # Chinese and Japanese; Hindi, Urdu, Arabic
    r"|(?=\n[ \t]*\n)"
)
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\[\"'“‘])(?:[A-Z]|Mr|Mrs|Ms|Dr|Prof|St|Mt|Rev|Gen|Col|Capt|Lt|Sgt|Hon|Messrs|Esq|Jr|Sr|vs|No|Nos|Vol|Fig|Figs|Eq|cf|ca|pp|ed|e\.g|i\.e"
    r"|Jan|Feb|Mar|Apr|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)\.$"
)
_LONGEST_ABBREVIATION = 12


def split_sentences(text: str) -> list[str]:
    """The sentences of `text`, stripped. Joined by spaces they hold every character but white space.

    One ends after . ! ? … (closing quotes and brackets included) before white space and what can begin another, after
    the full stops of scripts without spaces, and at a blank line; not after known abbreviations, initials, ellipses.
    """
    sentences = []
    start = 0
    for found in _ENDS.finditer(text):
        end = found.end()
        before = text[max(start, end - _LONGEST_ABBREVIATION) : end]
        if before.endswith(".") and _ABBREVIATION.search(before):
            continue
        if sentence := text[start:end].strip():
            sentences.append(sentence)
        start = end
    if last := text[start:].strip():
        sentences.append(last)
    return sentences
