"""The libraries that encode faster than `tokenizers` does, each behind the same call, and characters by table.

What an encoder surely does otherwise than the reference it refuses when it is made (ValueError), or leaves to
the reference text by text; `open_backend` compares it with the reference besides.
"""

import json
import tempfile
import unicodedata
from typing import Any

import numpy as np

from .tokenizer import Tokenizer

CACHE_BYTES = 256 << 20  # of text per gigatoken instance: its cache of words has no limit of its own
FEW_TEXTS = 200_000  # gigatoken one by one: a microsecond more each, but no half second to import awkward
UNSEEN, SAME, OTHER = range(3)  # what is known of a character


def _plain(config: dict[str, Any]) -> str:
    """A tokenizer.json without its added tokens: an encoder then has no special text to recognise."""
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

    It has an older Unicode than the reference has, whose characters without a meaning it drops or splits
    otherwise. Both are asked about every character when it is first met, within a word, twice, and alone; a
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
        odd = self._odd(texts)
        if odd:
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
        same = [
            np.array_equal(mine, right) and not (self._lowercase and _moves(c))
            for c, mine, right in zip(characters, ours, theirs)
        ]
        self._known[codes] = np.where(same, SAME, OTHER)


def _check_bert(config: dict[str, Any]) -> None:
    """Raise ValueError for what tokie does not read in a tokenizer.json."""
    normalizer, splitter = config.get("normalizer") or {}, config.get("pre_tokenizer") or {}
    if normalizer.get("type") != "BertNormalizer" or splitter.get("type") != "BertPreTokenizer":
        raise ValueError("the normalizer and the pre-tokenizer are not BERT's")
    if normalizer.get("strip_accents") not in (None, normalizer["lowercase"]) or not (
        normalizer["clean_text"] and normalizer["handle_chinese_chars"]
    ):
        raise ValueError("the normalizer has settings that BERT's has not")
    model = config["model"]
    if model["continuing_subword_prefix"] != "##" or model["max_input_chars_per_word"] != 100:
        raise ValueError("the WordPiece has settings that BERT's has not")


def _moves(character: str) -> bool:
    """Whether a mark that is kept as an accent goes may change places with its neighbours, by their Unicode."""
    return any(
        unicodedata.combining(part) and unicodedata.category(part) != "Mn"
        for part in unicodedata.normalize("NFD", character)
    )


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le"), np.uint32)


def split_ids(ids: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The ids of each text, from those of all laid end to end."""
    return np.split(ids, np.cumsum(lengths)[:-1])


class Characters:
    """Characters through a table over code points."""

    name = "char-numpy"

    def __init__(self, tokenizer: Tokenizer):
        vocab = {token: i for token, i in tokenizer.config["model"]["vocab"].items() if len(token) == 1}
        self._table = np.full(0x110000, -1 if tokenizer.unk_id is None else tokenizer.unk_id, np.int32)
        self._table[[ord(character) for character in vocab]] = list(vocab.values())

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return self._table[_codes("".join(texts))], np.fromiter(map(len, texts), np.int64, len(texts))
