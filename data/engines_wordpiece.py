"""BERT's tokenizer in NumPy: the ids of the `tokenizers` library, in arrays.

1. Texts are laid end to end, about CHUNK bytes at a time. ASCII goes through `bytes.translate`; any other character is
   replaced by what the library itself makes of it (normalised, and with spaces around what it splits off), asked once
   per character and kept: BERT's normaliser (clean, NFD, strip accents, lower case, spaces around CJK) works character
   by character. The exception, combining characters that survive it and may be reordered, sends a text to the library.
2. Words are the stretches between spaces and ASCII punctuation, found by boolean algebra over bytes.
3. Words are looked up in data/wordtable.py; new ones are cut by the greedy longest match of WordPiece.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator

import numpy as np

from .wordtable import PADDING, WordTable

CHUNK = 1 << 18  # characters worked on together: the temporaries stay in the cache
PUNCTUATION = b"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
SEPARATOR = "\n"


def cut(texts: list[str], size: int, breaks: str) -> Iterator[tuple[list[str], list[int]]]:
    """(pieces, which text each belongs to) in runs of about `size` characters.

    A text longer than that is cut before a character of `breaks`, wherever the next one stands.
    """
    pieces: list[str] = []
    owners: list[int] = []
    held = 0
    for owner, text in enumerate(texts):
        start = 0
        while True:
            stop = len(text)
            if stop - start > size:
                found = text.find(breaks, start + size)
                stop = found if found >= 0 else stop
            pieces.append(text[start:stop] if start or stop < len(text) else text)
            owners.append(owner)
            held += stop - start + 1
            if held >= size:
                yield pieces, owners
                pieces, owners, held = [], [], 0
            start = stop
            if start == len(text):
                break
    if pieces:
        yield pieces, owners


class WordPieceEngine:
    """Made from the text of a tokenizer.json. Raises ValueError when that is no BERT tokenizer."""

    name = "wordpiece-numpy"

    def __init__(self, config: str):
        import tokenizers

        self._library = tokenizers.Tokenizer.from_str(config)
        self._library.encode_special_tokens = True
        self._library.no_padding()
        self._library.no_truncation()
        self._check(json.loads(config))
        self._table = WordTable(self._solve)
        self._ascii = bytes(self._image(chr(code)).strip(" ").encode() .ljust(1)[0] for code in range(128)) + bytes(128)
        self._deleted = bytes(code for code in range(128) if self._image(chr(code)) == "")
        self._kinds = bytes(2 if code in PUNCTUATION else code == 32 for code in range(256))
        self._known = np.zeros(0x110000, bool)
        self._sizes = np.zeros(0x110000, np.uint8)
        self._places = np.zeros(0x110000, np.int32)
        self._blob = np.empty(0, np.uint8)
        self._reordered: set[str] = set()
        self._meet(np.arange(128))

    def _check(self, config: dict) -> None:
        model = config["model"]
        kinds = [(config.get(part) or {}).get("type") for part in ("normalizer", "pre_tokenizer")]
        if model.get("type") != "WordPiece" or kinds != ["BertNormalizer", "BertPreTokenizer"]:
            raise ValueError("not a WordPiece tokenizer with BERT's normalizer and pre-tokenizer")
        if any(not token["special"] for token in config.get("added_tokens", [])):
            raise ValueError("the tokenizer has added tokens that are not special")
        prefix = model["continuing_subword_prefix"]
        self._starts = {token.encode(): i for token, i in model["vocab"].items()}
        self._continuations = {
            token[len(prefix) :].encode(): i for token, i in model["vocab"].items() if token.startswith(prefix)
        }
        self._longest = max(map(len, self._starts))
        self._unknown = model["vocab"][model["unk_token"]]
        self._most_characters = model["max_input_chars_per_word"]

    def encode_batch(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 laid end to end, lengths int64 (texts,)); no special tokens are added or made out of text."""
        lengths = np.zeros(len(texts), np.int64)
        parts = []
        for pieces, owners in cut(texts, CHUNK, " "):
            ids, counts = self._encode(pieces)
            parts.append(ids)
            np.add.at(lengths, owners, counts)
        return np.concatenate([np.empty(0, np.int32), *parts]), lengths

    def _encode(self, pieces: list[str]) -> tuple[np.ndarray, np.ndarray]:
        text = SEPARATOR.join(pieces) + SEPARATOR
        if text.isascii():
            raw = text.encode().translate(self._ascii)
            ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)) + 1)
            if len(raw.translate(None, self._deleted)) < len(raw):
                raw, ends = self._normalise(text, ends)
        else:
            ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)) + 1)
            raw, ends = self._normalise(text, ends)
            if self._reordered and not self._reordered.isdisjoint(text):
                return self._by_library(pieces)
        data = np.frombuffer(raw + bytes(PADDING), np.uint8)
        kinds = np.frombuffer(raw.translate(self._kinds), np.uint8)
        word = kinds == 0
        mark = kinds == 2
        first, last = word.copy(), word.copy()
        first[1:] &= ~word[:-1]
        last[:-1] &= ~word[1:]
        starts = np.flatnonzero(first | mark)
        lengths = np.flatnonzero(last | mark) + 1 - starts
        ids, counts = self._table.encode(data, starts, lengths)
        before = np.concatenate([[0], np.cumsum(counts)])[np.searchsorted(starts, ends)]
        return ids, np.diff(before, prepend=0)

    def _normalise(self, text: str, ends: np.ndarray) -> tuple[bytes, np.ndarray]:
        """The bytes of the normalised text, and where each piece (ending at character `ends`) ends in them."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        if not (known := self._known[codes]).all():
            self._meet(np.unique(codes[~known]))
        sizes = self._sizes[codes]
        stops = np.cumsum(sizes, dtype=np.int64)
        source = self._places[codes] - (stops - sizes)
        out = self._blob[np.repeat(source, sizes) + np.arange(stops[-1])]
        return out.tobytes(), stops[ends - 1]

    def _image(self, character: str) -> str:
        """What the library makes of one character, with a space wherever it splits."""
        inner = self._library.normalizer.normalize_str(character)
        split = self._library.pre_tokenizer.pre_tokenize_str(f"x{inner}x")
        return " ".join(piece for piece, _ in split)[1:-1]

    def _meet(self, codes: np.ndarray) -> None:
        """Learn characters not seen before."""
        blob = [self._blob]
        used = len(self._blob)
        for code in codes.tolist():
            character = chr(code)
            image = chr(self._ascii[code]) if code < 128 and code not in self._deleted else self._image(character)
            if image and unicodedata.combining(image[-1]):
                self._reordered.add(character)
            raw = image.encode()
            self._known[code], self._sizes[code], self._places[code] = True, len(raw), used
            blob.append(np.frombuffer(raw, np.uint8))
            used += len(raw)
        self._blob = np.concatenate(blob)

    def _by_library(self, pieces: list[str]) -> tuple[np.ndarray, np.ndarray]:
        found = [encoding.ids for encoding in self._library.encode_batch_fast(pieces, add_special_tokens=False)]
        counts = np.fromiter(map(len, found), np.int64, len(found))
        return np.array([i for ids in found for i in ids], np.int32), counts

    def _solve(self, words: list[bytes]) -> list[list[int]]:
        return [self._pieces(word) for word in words]

    def _pieces(self, word: bytes) -> list[int]:
        """Greedy longest match first; the unknown id when some part is not in the vocabulary or the word is too long."""
        whole = self._starts.get(word)
        if whole is not None and len(word) <= self._most_characters:
            return [whole]
        if len(word) > self._most_characters and len(word.decode()) > self._most_characters:
            return [self._unknown]
        ids: list[int] = []
        start, entries = 0, self._starts
        while start < len(word):
            for stop in range(min(len(word), start + 4 * self._longest), start, -1):
                found = entries.get(word[start:stop])
                if found is not None:
                    ids.append(found)
                    break
            else:
                return [self._unknown]
            start, entries = stop, self._continuations
        return ids
