"""Who turns text into ids: one adapter, and a library for each type of tokenizer, which is checked against the
reference before it is used and now and then while it works.

Every backend has `name` and `encode_batch(list[str]) -> (ids int32 (tokens,), lengths int64 (texts,))`: flat
arrays, because Python lists of ids cost five to eight times the encoding itself. The reference is the
`tokenizers` library.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ..core.console import warn
from ..core.errors import Failed, MissingExtra, Refused, WrongUse
from .encoders import Characters, Gigatoken, Tokie, split_ids
from .tokenizer import Tokenizer

SAMPLE_BYTES = 1 << 15  # 10 ms of the reference
WATCH_EVERY = 1 << 24  # characters of a backend at work between two looks at it
WATCHED = 1 << 13  # characters of a look at most: a few ms of the reference

# What breaks tokenizers: contractions, runs of white space, digits, scripts, marks, emoji, controls, literal
# special text.
NASTY = (
    "",
    " ",
    "\n",
    "  \n\t ",
    "a",
    "Hello, world!",
    "I'm we'll they've it's 'tis DON'T I'LL 'S ''s",
    "x  y   z    \n\n\n  w \t\t v",
    "tabs\tand\r\ncarriage\rreturns",
    " leading",
    "trailing ",
    "under_score __dunder__ snake_case CamelCase",
    "1234567890 3.14 1,000 2e-5 ½ ²³ ١٢٣",
    "<|endoftext|>",
    "a<|endoftext|>b",
    "[CLS] [SEP] [MASK][PAD] [UNK]",
    "[mask] ##ing # ## ###",
    "<s></s><pad><unk>",
    "<|unk|>",
    "naïve café résumé ÀÉÎ ẞ ß ﬁ ﬀ Ǆ İ ı",
    "e\u0301 a\u0308 n\u0303 \u0301",
    "日本語のテキスト",
    "中文字符",
    "한국어",
    "𠀀𠀁",
    "שלום עולם",
    "مرحبا بالعالم",
    "नमस्ते",
    "สวัสดีครับ",
    "Ελληνικά ΟΔΟΣ Σ ς Русский Ёё Ўў",
    "😀👨‍👩‍👧‍👦🏳️‍🌈 👍🏽 ©®™",
    "\u00a0no\u00a0break\u2003em\u3000wide\u2028line\u2029para\u0085nel",
    "\u200bzero\u200cwidth\u200d\ufeff\u00adsoft",
    "\x00\x01\x07\x1b\x1c\x1f\x7f\x80\x9f",
    "\ufffd\ufffe\uffff\ue000\U000f0000\U0010ffff",
    "!?.,;:\"'`~@#$%^&*()-_=+[]{}|\\/<>",
    "“quotes” ‘single’ — – … « » ‹ ›",
    "http://example.org/a?b=c&d=%20#e mail@example.org",
    "if (x != y) { return a[i] <<= 2; } // code\n\tx += 1;",
    "a" * 300,
    "ab" * 150 + " " + "-" * 200,
    " " * 100 + "x" + "\n" * 50,
    "Supercalifragilisticexpialidocious antidisestablishmentarianism",
    "x" * 99 + " " + "y" * 100 + " " + "z" * 101,
    "é" * 120,
    "ｆｕｌｌ ｗｉｄｔｈ",
    "T\u0307 ﷽ ꙮ \u1e9e\u0130",
    "\t\x0b\x0c\x1d \x1e",
)


class Backend(Protocol):
    """What encodes a batch."""

    name: str

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]: ...


class Reference:
    """The `tokenizers` library itself."""

    name = "tokenizers"

    def __init__(self, tokenizer: Tokenizer):
        self.encode_batch = tokenizer.encode_batch


class Watched:
    """A backend at work. One text in WATCH_EVERY characters the reference encodes too; if not alike, Failed."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer):
        self.name, self._backend, self._reference = backend.name, backend, tokenizer.encode_batch
        self._since, self._turn = WATCH_EVERY, 0

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = self._backend.encode_batch(texts)
        self._since += sum(map(len, texts))
        if texts and self._since >= WATCH_EVERY and not isinstance(self._backend, Reference):
            self._since = 0
            self._check(texts, ids, lengths)
        return ids, lengths

    def _check(self, texts: list[str], ids: np.ndarray, lengths: np.ndarray) -> None:
        self._turn += 1
        place = self._turn * 7919 % len(texts)  # another place each time
        text, end = texts[place], int(lengths[: place + 1].sum())
        found = ids[end - int(lengths[place]) : end]
        if len(text) > WATCHED:  # of a long one, a stretch by itself
            text = text[len(text) // 2 :][:WATCHED]
            found = self._backend.encode_batch([text])[0]
        if why := _difference_of(text, found, self._reference([text])[0]):
            what = f"backend {self.name} differs from the tokenizers library"
            fix = "take another one: --backend tokenizers, with --overwrite where work has been done"
            raise Failed(what, where=f"a text of {len(text):,} characters", why=why, fix=fix)


# by type of tokenizer; what is not here the reference encodes
BACKENDS: dict[str, Callable[[Tokenizer], Backend]] = {
    "bpe": Gigatoken,
    "wordpiece": Tokie,
    "char": Characters,
}


def open_backend(
    tokenizer: Tokenizer, name: str = "auto", sample: Sequence[str] = (), check: bool = True
) -> Backend:
    """The backend `name`, or with "auto" the fast one if it is installed and agrees with the reference.

    It is checked on NASTY and on the first texts of `sample`, unless `check` is off. Raises Refused when a
    named backend differs (with "auto" a warning, and the reference), MissingExtra when it is not installed,
    WrongUse when it cannot encode this tokenizer.
    """
    make = BACKENDS.get(tokenizer.type)
    fast = getattr(make, "name", "")
    if name not in ("auto", "tokenizers", fast):
        what = f"backend {name} cannot encode {tokenizer.type}"
        fix = f"use auto or one of: {', '.join(filter(None, (fast, 'tokenizers')))}"
        raise WrongUse(what, where="--backend", fix=fix)
    if name == "tokenizers" or make is None:
        return Reference(tokenizer)
    try:
        backend = make(tokenizer)
    except ImportError as error:
        if name != "auto":
            raise MissingExtra(fast, "this backend", fast) from error
        return Reference(tokenizer)
    except Exception as error:  # a library that cannot load this tokenizer says so in its own way
        what = f"backend {fast} cannot load this tokenizer"
        if name != "auto":
            fix = "use --backend auto or tokenizers"
            raise WrongUse(what, where="--backend", why=str(error), fix=fix) from error
        warn(f"{what} ({error}); the tokenizers library encodes")
        return Reference(tokenizer)
    if not check or not (why := difference(backend, tokenizer, sample)):
        return backend
    what = f"backend {fast} differs from the tokenizers library"
    if name != "auto":
        raise Refused(what, why=why, fix="use --backend tokenizers")
    warn(f"{what} and is not used: {why}")
    return Reference(tokenizer)


def difference(backend: Backend, tokenizer: Tokenizer, sample: Sequence[str] = ()) -> str:
    """Where `backend` and the reference disagree, in words; empty when they agree on NASTY and the sample."""
    texts = list(NASTY)
    size = 0
    for text in sample:
        size += len(text)
        if size > SAMPLE_BYTES:
            break
        texts.append(text)
    try:
        ids, lengths = backend.encode_batch(texts)
    except Exception as error:
        return f"it fails: {type(error).__name__}: {error}"
    expected, expected_lengths = tokenizer.encode_batch(texts)
    if np.array_equal(ids, expected) and np.array_equal(lengths, expected_lengths):
        return ""
    for text, ours, theirs in zip(texts, split_ids(ids, lengths), split_ids(expected, expected_lengths)):
        if why := _difference_of(text, ours, theirs):
            return why
    return "the number of texts differs"


def _difference_of(text: str, ours: np.ndarray, theirs: np.ndarray) -> str:
    """How the ids of one text differ, from shortly before the first that does; empty when they are the same."""
    if np.array_equal(ours, theirs):
        return ""
    common = min(len(ours), len(theirs))
    unequal = np.flatnonzero(ours[:common] != theirs[:common])
    first = max(0, int(unequal[0] if len(unequal) else common) - 6)
    here, place = slice(first, first + 12), f" from token {first} on" if first else ""
    return f"{text[:60]!r} gives {ours[here].tolist()}{place}, the reference {theirs[here].tolist()}"
