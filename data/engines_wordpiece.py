"""BERT's tokenizer in NumPy: the ids of the `tokenizers` library, in arrays.

1. Texts are laid end to end, a chunk at a time. ASCII goes through `bytes.translate`; any other character is
   replaced by what the library itself makes of it (normalised, and with spaces around what it splits off), asked once
   per character and kept: BERT's normaliser (clean, NFD, strip accents, lower case, spaces around CJK) works character
   by character. The exception, combining characters that survive it and may be reordered, sends a text to the library.
2. Words are the stretches between spaces and ASCII punctuation, found by boolean algebra over bytes.
3. Words are looked up in data/wordtable.py; new ones are cut by the greedy longest match of WordPiece.
"""

from __future__ import annotations

import json
import re
import unicodedata
from functools import cached_property

import numpy as np

from .chunks import ChunkedEngine
from .greedy import GreedyMatcher
from .wordtable import PADDING, WordTable, counting

PUNCTUATION = b"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
SEPARATOR = "\n"
FRAMED = re.compile("0([^01]*)1")


class WordPieceEngine(ChunkedEngine):
    """Made from the text of a tokenizer.json. Raises ValueError when that is no BERT tokenizer."""

    name = "wordpiece-numpy"
    chunk = 1 << 19
    safe_cut = re.compile(" ")

    def __init__(self, config: str):
        import tokenizers

        parsed = json.loads(config)
        self._check(parsed)
        self._config = config
        bare = parsed | {"model": parsed["model"] | {"vocab": {}}, "added_tokens": [], "post_processor": None}
        splitter = tokenizers.Tokenizer.from_str(json.dumps(bare))  # loading a vocabulary is slow
        self._normalizer, self._splitter = splitter.normalizer, splitter.pre_tokenizer
        self._table = WordTable(self._solve)
        plain = "".join(map(chr, range(128))).replace("0", "").replace("1", "")
        images = {"0": "0", "1": "1"} | dict(zip(plain, self._image(plain)))
        drawn = [images[chr(code)] for code in range(128)]
        self._ascii = bytes(ord(image.strip() or " ") if image else 0 for image in drawn) + bytes(128)  # 0: deleted
        self._kinds = bytes(2 if code in PUNCTUATION else code == 32 for code in range(256))
        self._images = np.full(0x110000, -1, np.int32)  # where a character's image is in the blob << 4 | its bytes
        self._blob = np.frombuffer(self._ascii, np.uint8)
        self._images[:128] = np.arange(128) << 4 | [image != "" for image in drawn]
        self._reordered: set[str] = set()

    def _check(self, config: dict) -> None:
        model = config["model"]
        kinds = [(config.get(part) or {}).get("type") for part in ("normalizer", "pre_tokenizer")]
        if model.get("type") != "WordPiece" or kinds != ["BertNormalizer", "BertPreTokenizer"]:
            raise ValueError("not a WordPiece tokenizer with BERT's normalizer and pre-tokenizer")
        if any(not token["special"] for token in config.get("added_tokens", [])):
            raise ValueError("the tokenizer has added tokens that are not special")
        prefix = model["continuing_subword_prefix"]
        vocab: dict[str, int] = model["vocab"]
        self._match = GreedyMatcher(
            {token.encode(): i for token, i in vocab.items()},
            {token[len(prefix) :].encode(): i for token, i in vocab.items() if token.startswith(prefix)},
            vocab[model["unk_token"]],
        )
        self._most_characters = model["max_input_chars_per_word"]

    def _encode(self, pieces: list[str]) -> tuple[np.ndarray, np.ndarray]:
        text = SEPARATOR.join(pieces) + SEPARATOR
        if text.isascii():
            raw = text.encode().translate(self._ascii)
            ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)) + 1)
            if 0 in raw:
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
        images = self._images[codes]
        if images.min() < 0:
            self._meet(np.unique(codes[images < 0]))
            images = self._images[codes]
        sizes = images & 15
        stops = np.cumsum(sizes, dtype=np.int32)
        images >>= 4
        images -= stops - sizes
        out = self._blob[np.repeat(images, sizes) + counting(int(stops[-1]))]
        return out.tobytes(), stops[ends - 1].astype(np.int64)

    def _image(self, characters: str) -> list[str]:
        """What the library makes of each character, with a space wherever it splits: asked with digits around it.

        No character but the digits themselves gives a 0 or a 1, and neither splits from letters.
        """
        normalised = self._normalizer.normalize_str("".join(f"0{character}1" for character in characters))
        split = " ".join(piece for piece, _ in self._splitter.pre_tokenize_str(normalised))
        images = FRAMED.findall(split)
        assert len(images) == len(characters)
        return images

    def _meet(self, codes: np.ndarray) -> None:
        """Learn characters not seen before."""
        blob, used = [self._blob], len(self._blob)
        characters = [chr(code) for code in codes.tolist()]
        for code, character, image in zip(codes.tolist(), characters, self._image("".join(characters))):
            if image and unicodedata.combining(image[-1]):
                self._reordered.add(character)
            raw = image.encode()
            assert len(raw) < 16 and used < 1 << 27
            self._images[code] = used << 4 | len(raw)
            blob.append(np.frombuffer(raw, np.uint8))
            used += len(raw)
        self._blob = np.concatenate(blob)

    @cached_property
    def _library(self):
        import tokenizers

        library = tokenizers.Tokenizer.from_str(self._config)
        library.encode_special_tokens = True
        library.no_padding()
        library.no_truncation()
        return library

    def _by_library(self, pieces: list[str]) -> tuple[np.ndarray, np.ndarray]:
        found = [encoding.ids for encoding in self._library.encode_batch_fast(pieces, add_special_tokens=False)]
        counts = np.fromiter(map(len, found), np.int64, len(found))
        return np.array([i for ids in found for i in ids], np.int32), counts

    def _solve(self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, counts = self._match(data, starts, lengths)
        owners = np.repeat(np.arange(len(starts)), counts)
        for place in np.flatnonzero(lengths > self._most_characters).tolist():
            word = data[starts[place] : starts[place] + lengths[place]].tobytes()
            if len(word.decode()) > self._most_characters:
                first = np.searchsorted(owners, place)
                ids[first] = self._match.unknown
                owners[first + 1 : first + counts[place]] = -1
                counts[place] = 1
        return ids[owners >= 0], counts
