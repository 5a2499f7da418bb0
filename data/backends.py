"""Who turns text into ids: an adapter for each library that encodes faster than `tokenizers`, the reference, against
which it is checked before it is used and now and then while it works.

Every backend has `name` and `encode_batch(list[str]) -> (ids int32 (tokens,), lengths int64 (texts,))`: lists of ids
would cost five to eight times the encoding. What it surely does otherwise than the reference (a `Tokenizer` itself) it
refuses when it is made (ValueError), or leaves to the reference text by text.
"""

import json
import tempfile
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..core.console import warn
from ..core.errors import Failed, MissingExtra, Refused, WrongUse
from ..core.files import read_json
from .tokenizer import Tokenizer

CACHE_BYTES = 256 << 20  # of text per gigatoken instance: its cache of words has no limit of its own
FEW_TEXTS = 200_000  # gigatoken one by one: a microsecond more each, but no half second to import awkward
UNSEEN, SAME, OTHER = range(3)  # what is known of a character


def _plain(config: dict[str, Any]) -> str:
    """A tokenizer.json without its added tokens: an encoder then has no special text to recognise.

    Raises ValueError for added tokens that are words of documents.
    """
    if any(not token["special"] for token in config.get("added_tokens") or []):
        raise ValueError("the tokenizer has added tokens that are not special")
    return json.dumps(config | {"added_tokens": [], "post_processor": None})


class Gigatoken:
    """The `gigatoken` package: byte-level BPE at over 100 MB per core-second, in one thread."""

    name = "gigatoken"

    def __init__(self, tokenizer: Tokenizer):
        self._config = _plain(tokenizer.config)
        self._few = FEW_TEXTS
        self._open()

    def _open(self) -> None:
        import gigatoken

        self._engine = gigatoken.Tokenizer.from_json(self._config)
        self._left = CACHE_BYTES

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if not texts:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        self._few -= len(texts)
        if self._few >= 0:
            found = list(map(self._engine.backend.encode, texts))
            ids, lengths = np.concatenate(found), np.fromiter(map(len, found), np.int64, len(found))
        else:
            layout = self._engine.encode_batch(texts, parallel=False).layout
            offsets = np.asarray(layout.offsets.data, np.int64)
            ids, lengths = np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)
        self._left -= sum(map(len, texts))
        if self._left < 0:
            self._open()
        return ids.view(np.int32), lengths


class Tokie:
    """The `tokie` package: BERT's WordPiece at over 40 MB per core-second. A call shares the machine's cores.

    Its Unicode is older. Both are asked about every character when it is first met, within a word, twice, and alone; a
    text with one that they encode differently goes to the reference.
    """

    name = "tokie"

    def __init__(self, tokenizer: Tokenizer):
        import tokie

        config = tokenizer.config
        _check_bert(config)
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(_plain(config))
            file.flush()
            self._engine: Any = tokie.Tokenizer.from_json(file.name)
        self._reference = tokenizer.encode_batch
        vocab = config["model"]["vocab"]
        single = [token for token in vocab if len(token) == 1 and f"##{token}" in vocab]
        letters = [token for token in single if unicodedata.category(token) == "Ll"]
        if not letters:
            raise ValueError("no small letter both begins and continues words, to try characters beside")
        self._letter, self._lowercase = min(letters), config["normalizer"]["lowercase"]
        self._known = np.full(0x110000, UNSEEN, np.uint8)
        self._meet(np.arange(128))

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        if not texts:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        ids, lengths = self._encode(texts)
        if odd := self._odd(texts):
            parts = split_ids(ids, lengths)
            right = split_ids(*self._reference([texts[place] for place in odd]))
            for place, part in zip(odd, right):
                parts[place], lengths[place] = part, len(part)
            ids = np.concatenate(parts)
        return ids, lengths

    def _encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = self._engine.encode_batch_flat(texts, add_special_tokens=False)
        return ids.view(np.int32), lengths.astype(np.int64)

    def _odd(self, texts: list[str]) -> list[int]:
        """Places of the texts that hold a character which the reference encodes otherwise."""
        codes = _codes("".join(texts))
        known = self._known[codes]
        if not known.all():
            self._meet(np.unique(codes[known == UNSEEN]))
            known = self._known[codes]
        if known.max(initial=SAME) == SAME:
            return []
        return [place for place, text in enumerate(texts) if (self._known[_codes(text)] == OTHER).any()]

    def _meet(self, codes: np.ndarray) -> None:
        letter, characters = self._letter, list(map(chr, codes.tolist()))
        texts = [f"{letter}{c}{letter}{c}{c} {c}" for c in characters]
        ours, theirs = split_ids(*self._encode(texts)), split_ids(*self._reference(texts))
        same = [np.array_equal(mine, right) for mine, right in zip(ours, theirs)]
        moved = [self._lowercase and _moves(c) for c in characters]
        self._known[codes] = np.where(np.array(same) & ~np.array(moved), SAME, OTHER)


def _check_bert(config: dict[str, Any]) -> None:
    """Raise ValueError for what tokie does not read in a tokenizer.json."""
    normalizer, splitter = config.get("normalizer") or {}, config.get("pre_tokenizer") or {}
    if normalizer.get("type") != "BertNormalizer" or splitter.get("type") != "BertPreTokenizer":
        raise ValueError("the normalizer and the pre-tokenizer are not BERT's")
    usual = normalizer["clean_text"] and normalizer["handle_chinese_chars"]
    if not usual or normalizer.get("strip_accents") not in (None, normalizer["lowercase"]):
        raise ValueError("the normalizer has settings that BERT's has not")
    model = config["model"]
    if model["continuing_subword_prefix"] != "##" or model["max_input_chars_per_word"] != 100:
        raise ValueError("the WordPiece has settings that BERT's has not")


def _moves(character: str) -> bool:
    """Whether a mark that is kept as an accent goes may change places with its neighbours, by their Unicode."""
    parts = unicodedata.normalize("NFD", character)
    return any(unicodedata.combining(part) and unicodedata.category(part) != "Mn" for part in parts)


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def split_ids(ids: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The ids of each text, from those of all laid end to end."""
    return np.split(ids, np.cumsum(lengths)[:-1])


class Characters:
    """Characters through a table over code points."""

    name = "char-numpy"

    def __init__(self, tokenizer: Tokenizer):
        config = tokenizer.config
        _plain(config)
        if config.get("normalizer") is not None:
            raise ValueError("the tokenizer normalises text")
        vocab = {token: i for token, i in config["model"]["vocab"].items() if len(token) == 1}
        self._table = np.full(0x110000, -1 if tokenizer.unk_id is None else tokenizer.unk_id, np.int32)
        self._table[[ord(character) for character in vocab]] = list(vocab.values())

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return self._table[_codes("".join(texts))], np.fromiter(map(len, texts), np.int64, len(texts))


SAMPLE_BYTES = 1 << 15  # 10 ms of the reference
WATCH_EVERY = 1 << 24  # characters of a backend at work between two looks at it
WATCHED = 1 << 13  # characters of a look at most: a few ms of the reference

# What breaks tokenizers: contractions, runs of white space, digits, scripts, marks, emoji, controls, literal
# special text.
NASTY: list[str] = read_json(Path(__file__).with_name("nasty.json"))


class Backend(Protocol):
    """What encodes a batch."""

    name: str

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]: ...


class Watched:
    """A backend at work. One text in WATCH_EVERY characters the reference encodes too; if not alike, Failed."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer):
        self.name, self._backend, self._tokenizer = backend.name, backend, tokenizer
        self._since, self._turn = WATCH_EVERY, 0

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, lengths = self._backend.encode_batch(texts)
        self._since += sum(map(len, texts))
        if texts and self._since >= WATCH_EVERY and self._backend is not self._tokenizer:
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
        if why := _difference_of(text, found, self._tokenizer.encode_batch([text])[0]):
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
    """The backend `name`, or with "auto" the fast one if it is installed and agrees with the reference on NASTY and the
    first texts of `sample` (without `check` unasked). A named one that differs is Refused, with "auto" warned of;
    raises MissingExtra when it is not installed, WrongUse when it cannot encode this tokenizer.
    """
    make = BACKENDS.get(tokenizer.type)
    fast = getattr(make, "name", "")
    if name not in ("auto", "tokenizers", fast):
        what = f"backend {name} cannot encode {tokenizer.type}"
        fix = f"use auto or one of: {', '.join(filter(None, (fast, 'tokenizers')))}"
        raise WrongUse(what, where="--backend", fix=fix)
    if name == "tokenizers" or make is None:
        return tokenizer
    try:
        backend = make(tokenizer)
    except ImportError as error:
        if name != "auto":
            raise MissingExtra(fast, "this backend", fast) from error
        return tokenizer
    except Exception as error:  # a library that cannot load this tokenizer says so in its own way
        what = f"backend {fast} cannot load this tokenizer"
        if name != "auto":
            fix = "use --backend auto or tokenizers"
            raise WrongUse(what, where="--backend", why=str(error), fix=fix) from error
        warn(f"{what} ({error}); the tokenizers library encodes")
        return tokenizer
    if not check or not (why := difference(backend, tokenizer, sample)):
        return backend
    what = f"backend {fast} differs from the tokenizers library"
    if name != "auto":
        raise Refused(what, why=why, fix="use --backend tokenizers")
    warn(f"{what} and is not used: {why}")
    return tokenizer


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
