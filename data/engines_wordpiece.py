"""BERT's tokenizer in NumPy: the ids of the `tokenizers` library, in arrays.

1. Texts are laid end to end, a chunk at a time. ASCII goes through `bytes.translate`; any other character is
   replaced by what the library itself makes of it (normalised, and with spaces around what it splits off),
   asked once
   per character and kept: BERT's normaliser (clean, NFD, strip accents, lower case, spaces around CJK) works
   character
   by character. The exception, combining characters that survive it and may be reordered, sends a text to the
   library.
2. Words are the stretches between spaces and ASCII punctuation, found by boolean algebra over bytes.
3. Words are looked up in data/wordtable.py; new ones are cut by the greedy longest match of WordPiece.
"""

from __future__ import annotations

import json
import re
import unicodedata
from functools import cached_property
from typing import Any

import numpy as np

from .chunks import ChunkedEngine, distinct, laid_out
from .wordtable import Table, WordTable, counting

PUNCTUATION = b"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
SEPARATOR = "\n"
DELETED, LONGER, UNSEEN = 0, 0x110000, 0xFFFFFFFF  # images of characters that are no character
WHOLE, INSIDE = 0, 1  # the two roots: pieces that begin a word, and pieces that continue one ("##…")
NONE = np.int64(-1)
FEW = 8  # words left, the long ones: from here on a walk in step costs more than one word after the other
CODE_BITS = np.int64(21)  # of a character
FRAMED = re.compile("0([^01]*)1")


class WordPieceEngine(ChunkedEngine):
    """Made from the text of a tokenizer.json. Raises ValueError when that is no BERT tokenizer."""

    name = "wordpiece-numpy"
    safe_cut = re.compile(" ")

    def __init__(self, config: str):
        import tokenizers

        parsed = json.loads(config)
        self._check(parsed)
        self._config = config
        bare = parsed | {"model": parsed["model"] | {"vocab": {}}, "added_tokens": [], "post_processor": None}
        splitter = tokenizers.Tokenizer.from_str(json.dumps(bare))  # loading a vocabulary is slow
        self._normalizer, self._splitter = splitter.normalizer, splitter.pre_tokenizer
        self._table = WordTable(self._match)
        plain = "".join(map(chr, range(128))).replace("0", "").replace("1", "")
        images = {"0": "0", "1": "1"} | dict(zip(plain, self._image(plain)))
        drawn = [images[chr(code)] for code in range(128)]
        self._ascii = bytes(ord(image.strip() or " ") if image else 0 for image in drawn) + bytes(
            128
        )  # 0: deleted
        self._kinds = bytes(2 if code in PUNCTUATION else code in b" \n" for code in range(256))
        self._images = np.full(0x110000, UNSEEN, np.uint32)
        self._images[:128] = np.frombuffer(self._ascii[:128], np.uint8)
        self._longer: list[str] = []  # image LONGER + i is the i-th of these
        self._reordered = ""

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
            vocab,
            {token[len(prefix) :]: i for token, i in vocab.items() if token.startswith(prefix)},
            vocab[model["unk_token"]],
            model["max_input_chars_per_word"],
        )

    def _encode(self, pieces: list[str]) -> tuple[np.ndarray, np.ndarray]:
        found = super()._encode(pieces)
        if any(character in piece for character in self._reordered for piece in pieces):
            return self._by_library(pieces)
        return found

    def _words(self, pieces: list[str]) -> tuple[bytes, np.ndarray, np.ndarray, np.ndarray]:
        text = SEPARATOR.join(pieces) + SEPARATOR
        ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)) + 1)
        raw = text.encode().translate(self._ascii) if text.isascii() else b"\0"
        if 0 in raw:
            raw, ends = self._normalise(text, ends)
        kinds = np.frombuffer(raw.translate(self._kinds), np.uint8)
        word = kinds == 0
        mark = kinds == 2
        first, last = word.copy(), word.copy()
        first[1:] &= ~word[:-1]
        last[:-1] &= ~word[1:]
        starts = np.flatnonzero(first | mark)
        sizes = np.flatnonzero(last | mark)
        sizes -= starts
        sizes += 1
        return raw, starts, sizes, ends

    def _normalise(self, text: str, ends: np.ndarray) -> tuple[bytes, np.ndarray]:
        """The bytes of the normalised text, and where each piece (ending at character `ends`) ends in them."""
        codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
        images = self._images.take(codes)
        if images.max() == UNSEEN:
            self._meet(distinct(codes[images == UNSEEN]))
            images = self._images.take(codes)
        images[ends - 1] = ord(SEPARATOR)  # which nothing else becomes
        images = images[images != DELETED]
        long = np.flatnonzero(images >= LONGER)
        if len(long):
            which = images[long].astype(np.int64) - LONGER
            widths = np.fromiter(map(len, self._longer), np.int64, len(self._longer))
            sizes = np.ones(len(images), np.int64)
            sizes[long] = widths[which]
            images = np.repeat(images, sizes)
            blob = np.frombuffer("".join(self._longer).encode("utf-32-le"), np.uint32)
            images[laid_out(sizes, long)] = blob[laid_out(widths, which)]
        raw = images.tobytes().decode("utf-32-le").encode()
        return raw, np.flatnonzero(np.frombuffer(raw, np.uint8) == ord(SEPARATOR)) + 1

    def _image(self, characters: str) -> list[str]:
        """What the library makes of each character, with a space wherever it splits: asked with digits around
        it.

        No character but the digits themselves gives a 0 or a 1, and neither splits from letters.
        """
        normalised = self._normalizer.normalize_str("".join(f"0{character}1" for character in characters))
        split = " ".join(piece for piece, _ in self._splitter.pre_tokenize_str(normalised))
        images = FRAMED.findall(split)
        assert len(images) == len(characters)
        return images

    def _meet(self, codes: np.ndarray) -> None:
        """Learn characters not seen before."""
        characters = "".join(map(chr, codes.tolist()))
        for code, character, image in zip(codes.tolist(), characters, self._image(characters)):
            if image and unicodedata.combining(image[-1]):
                self._reordered += character
            if len(image) > 1:
                self._images[code] = LONGER + len(self._longer)
                self._longer.append(image)
            else:
                self._images[code] = ord(image) if image else DELETED

    @cached_property
    def _library(self) -> Any:
        import tokenizers

        library = tokenizers.Tokenizer.from_str(self._config)
        library.encode_special_tokens = True
        library.no_padding()
        library.no_truncation()
        return library

    def _by_library(self, pieces: list[str]) -> tuple[np.ndarray, np.ndarray]:
        found = [
            encoding.ids for encoding in self._library.encode_batch_fast(pieces, add_special_tokens=False)
        ]
        counts = np.fromiter(map(len, found), np.int64, len(found))
        return np.array([i for ids in found for i in ids], np.int32), counts


class GreedyMatcher:
    """WordPiece's greedy longest match of many words at once: all walk the same trie in step.

    `begins` and `continues` map pieces to ids; a word of more than `most` characters is `unknown`.
    """

    # words up to here go one by one: a walk in step takes 1.2 ms however few they are, a word by itself 8 us
    alone = 96

    def __init__(self, begins: dict[str, int], continues: dict[str, int], unknown: int, most: int):
        self._unknown, self._most = unknown, most
        self._pieces, self._longest = (begins, continues), max(map(len, begins))
        pieces = [*begins, *continues]
        ids = np.array([*begins.values(), *continues.values()], np.int64)
        node = np.repeat(np.array([WHOLE, INSIDE]), [len(begins), len(continues)])
        text = np.frombuffer("".join(pieces).encode("utf-32-le"), np.uint32)
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        first = np.cumsum(sizes) - sizes
        accepted = [np.full(2, NONE)]  # per node: the id of the piece that ends there
        nodes, depth = 2, 0
        alive = np.flatnonzero(sizes > 0)
        self._edges = Table(1, 18)  # sparse: a search that finds nothing ends sooner
        while len(alive):
            edges, child = np.unique(
                node[alive] << CODE_BITS | text[first[alive] + depth], return_inverse=True
            )
            self._edges.put([edges.view(np.uint64)], nodes + np.arange(len(edges)))
            node[alive] = nodes + child
            depth += 1
            level = np.full(len(edges), NONE)
            ending = sizes[alive] == depth
            level[child[ending]] = ids[alive[ending]]
            accepted.append(level)
            nodes += len(edges)
            alive = alive[~ending]
        self._accepted = np.concatenate(accepted)
        self._inside = np.zeros(
            0x110000, np.int64
        )  # where a character leads from the root of continuing pieces, 0: nowhere
        codes = np.array([*map(ord, {piece[0] for piece in continues if piece})], np.int64)
        self._inside[codes] = self._edges.find([(INSIDE << CODE_BITS | codes).view(np.uint64)])

    def __call__(
        self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids laid end to end, ids per word), int64: a word with a part that no piece matches is the unknown
        id.

        data: uint8, UTF-8; starts, lengths: int64 (words,), in bytes, lengths above 0.
        """
        if len(starts) <= self.alone:
            found = self._one_by_one(data, starts, lengths)
            return np.concatenate([np.empty(0, np.int64), *found]), np.fromiter(
                map(len, found), np.int64, len(found)
            )
        text = _lines(data, starts, lengths)
        ends = np.flatnonzero(text == ord(SEPARATOR))
        nobody = len(starts)
        firsts = np.concatenate([[0], ends[:-1] + 1])
        failed = np.zeros(nobody + 1, bool)
        failed[:nobody] = ends - firsts > self._most
        word = np.flatnonzero(~failed[:nobody])
        place, end = firsts.take(word), ends.take(word)
        node = np.full(len(word), WHOLE)
        best, best_end = (
            np.full(len(word), NONE),
            place.copy(),
        )  # the longest piece seen on this walk, and where it stops
        found_words, found_ids = [], []
        over = 0
        while len(word) - over > FEW:
            node = self._edges.find(
                [(node << CODE_BITS | text.take(place)).view(np.uint64)]
            )  # 0 where no piece goes on
            accepted = self._accepted.take(node)
            place += node > 0
            some = np.flatnonzero(accepted >= 0)
            best[some], best_end[some] = accepted.take(some), place.take(some)
            stuck = np.flatnonzero(node == 0)
            if not len(stuck):
                continue
            ids, stops, owners = best.take(stuck), best_end.take(stuck), word.take(stuck)
            matched = ids >= 0
            found_words.append(owners[matched])
            found_ids.append(ids[matched])
            going_on = self._inside.take(text.take(stops))
            going_on[~matched] = 0
            ended = going_on == 0
            finish = end.take(stuck)
            failed[owners[ended & (stops < finish)]] = True
            owners[ended] = nobody  # stands at its end, where it is stuck for good
            ids = self._accepted.take(going_on)
            word[stuck], node[stuck], best[stuck] = owners, going_on, ids
            place[stuck] = np.where(ended, finish, stops + 1)
            best_end[stuck] = stops + (ids >= 0)
            over = int(np.count_nonzero(word == nobody))
            if 4 * over > len(word):
                going = np.flatnonzero(word < nobody)
                word, place, end, node = (
                    word.take(going),
                    place.take(going),
                    end.take(going),
                    node.take(going),
                )
                best, best_end, over = best.take(going), best_end.take(going), 0
        lost = np.flatnonzero(failed[:nobody])
        left = word[word < nobody]
        failed[left] = True  # what was found of them is found again
        last = self._one_by_one(data, starts[left], lengths[left])
        owners, ids = (
            np.concatenate([*found_words, lost]),
            np.concatenate([*found_ids, np.full(len(lost), self._unknown)]),
        )
        kept = ~failed[owners]
        kept[len(kept) - len(lost) :] = True
        owners = np.concatenate([owners[kept], np.repeat(left, [len(part) for part in last])])
        ids = np.concatenate([ids[kept], *last])
        return ids[np.argsort(owners, kind="stable")], np.bincount(owners, minlength=len(starts))

    def _one_by_one(self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
        """The ids of each word."""
        stops = starts + lengths
        words = [data[start:stop].tobytes().decode() for start, stop in zip(starts.tolist(), stops.tolist())]
        return [np.array(self._one(word), np.int64) for word in words]

    def _one(self, word: str) -> list[int]:
        """The same for a single word, over the dictionaries."""
        if len(word) > self._most:
            return [self._unknown]
        ids: list[int] = []
        start = 0
        while start < len(word):
            pieces = self._pieces[start > 0]
            for stop in range(min(len(word), start + self._longest), start, -1):
                if (found := pieces.get(word[start:stop])) is not None:
                    ids.append(found)
                    start = stop
                    break
            else:
                return [self._unknown]
        return ids


def _lines(data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """The characters of the words, each followed by SEPARATOR, which no piece holds: uint8 when all are
    ASCII, else uint32.
    """
    sizes = lengths + 1
    ends = np.cumsum(sizes)
    places = np.repeat(starts - ends + sizes, sizes)
    places += counting(int(ends[-1]))
    out = data.take(places)
    out[ends - 1] = ord(SEPARATOR)
    text = out.tobytes().decode()
    return out if text.isascii() else np.frombuffer(text.encode("utf-32-le"), np.uint32)
