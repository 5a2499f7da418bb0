"""GPT-2's tokenizer in NumPy: the ids of the `tokenizers` library, in arrays.

The pattern of GPT-2 (Radford et al. 2019, encoder.py),

    's|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+

looks at most two characters ahead and one back once runs of a class are known, so where words begin is
boolean algebra over the classes of a chunk's characters (letter, number, space, other blank, symbol, end of a
text). The class of a character is what the library's own pattern makes of it, asked once and kept. Words go
through data/wordtable.py, new ones through `Merger`.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import Any

import numpy as np

from .chunks import ChunkedEngine, distinct, laid_out
from .wordtable import Table, WordTable, counting

LETTER, NUMBER, SYMBOL, SPACE, BLANK, END, UNSEEN = range(
    7
)  # a space joins what follows it, other blanks do not
SEPARATOR = "\n"
NEVER = np.int64(2**31 - 1)  # the rank of a pair that was not learned
WIDEST = 512  # bytes of a word: the rounds are as many as the longest word has merges


class BPEEngine(ChunkedEngine):
    """Made from the text of a tokenizer.json. Raises ValueError when that does not split as GPT-2 does."""

    name = "bpe-numpy"
    safe_cut = re.compile(r"(?<=\w) ")  # a word surely begins at such a space

    def __init__(self, config: str):
        from tokenizers.pre_tokenizers import ByteLevel

        parsed = json.loads(config)
        _check(parsed)
        self._split = ByteLevel(add_prefix_space=False).pre_tokenize_str
        self._config = parsed
        merges = [
            tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in parsed["model"]["merges"]
        ]
        self._merge = Merger(parsed["model"]["vocab"], merges, _alphabet())
        self._table = WordTable(self._solve)
        self._classes = np.full(0x110000, UNSEEN, np.uint8)
        self._meet(np.arange(128))
        self._ascii = self._classes[:128].tobytes() + bytes(128)

    def _words(self, pieces: list[str]) -> tuple[bytes, np.ndarray, np.ndarray, np.ndarray]:
        text = SEPARATOR.join(pieces) + SEPARATOR
        raw = text.encode()
        ends = (
            np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)) + 1) - 1
        )  # each piece's separator
        if len(raw) == len(text):
            codes = np.frombuffer(raw, np.uint8)
            classes = np.frombuffer(bytearray(raw.translate(self._ascii)), np.uint8)
        else:
            codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
            classes = self._classes[codes]
            if classes.max() == UNSEEN:
                self._meet(distinct(codes[classes == UNSEEN]))
                classes = self._classes[codes]
        classes[ends] = END
        begins = _begins(classes)
        _split_contractions(codes, begins)
        places = np.flatnonzero(begins)
        words = classes[places] != END
        stops = np.append(places[1:], len(codes))[words]
        starts = places[words]
        if len(raw) > len(text):
            sizes = 1 + (codes >= 0x80).view(np.uint8) + (codes >= 0x800) + (codes >= 0x10000)
            offsets = np.cumsum(sizes, dtype=np.int64)
            starts, stops = offsets[starts] - sizes[starts], offsets[stops - 1]
            ends = offsets[ends]
        return raw, starts, stops - starts, ends

    def _meet(self, codes: np.ndarray) -> None:
        """Learn the classes of characters: which of a letter, a number and a symbol the library joins each
        to.
        """
        self._classes[codes] = BLANK
        for kind, before in ((LETTER, "a"), (NUMBER, "1"), (SYMBOL, "!")):
            split = self._split("".join(f"\n{before}{chr(code)}" for code in codes.tolist()))
            begins = np.zeros(3 * len(codes) + 1, bool)
            begins[[start for _, (start, _) in split]] = True
            self._classes[codes[~begins[2:-1:3]]] = kind
        if 32 in codes:
            self._classes[32] = SPACE

    @cached_property
    def _library(self) -> Any:
        """Takes each text as one word; loading it is slow, so only when a word is long."""
        import tokenizers

        whole = self._config | {"added_tokens": [], "post_processor": None}
        whole["pre_tokenizer"] = whole["pre_tokenizer"] | {"use_regex": False}
        library = tokenizers.Tokenizer.from_str(json.dumps(whole))
        library.no_padding()
        library.no_truncation()
        return library

    def _solve(
        self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        short = lengths <= WIDEST
        if short.all():
            return self._merge(data, starts, lengths)
        counts = np.empty(len(starts), np.int64)
        some, counts[short] = self._merge(data, starts[short], lengths[short])
        places = np.flatnonzero(~short)
        words = [data[starts[place] : starts[place] + lengths[place]].tobytes().decode() for place in places]
        found = [
            np.array(e.ids, np.int32)
            for e in self._library.encode_batch_fast(words, add_special_tokens=False)
        ]
        counts[places] = [len(ids) for ids in found]
        out = np.empty(int(counts.sum()), np.int32)
        out[laid_out(counts, np.flatnonzero(short))] = some
        out[laid_out(counts, places)] = np.concatenate(found)
        return out, counts


def _check(config: dict[str, Any]) -> None:
    split = config.get("pre_tokenizer") or {}
    if split.get("type") != "ByteLevel" or not split.get("use_regex", True) or split.get("add_prefix_space"):
        raise ValueError("the pre-tokenizer is not GPT-2's")
    model = config["model"]
    if model.get("type") != "BPE" or config.get("normalizer") is not None or model.get("dropout"):
        raise ValueError("not a plain byte-level BPE")
    if any(
        model.get(part)
        for part in ("continuing_subword_prefix", "end_of_word_suffix", "ignore_merges", "unk_token")
    ):
        raise ValueError("the BPE has options that GPT-2's has not")
    if any(not token["special"] for token in config.get("added_tokens", [])):
        raise ValueError("the tokenizer has added tokens that are not special")
    if any(character not in model["vocab"] for character in _alphabet()):
        raise ValueError("the vocabulary lacks some of the 256 bytes")


def _alphabet() -> list[str]:
    """The printable character that stands for each byte value (GPT-2's bytes_to_unicode)."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = iter(range(256, 512))
    return [chr(value if value in printable else next(others)) for value in range(256)]


def _begins(classes: np.ndarray) -> np.ndarray:
    """Where words begin, but for contractions: bool, from the class of each character; the end of a text
    counts as a word.
    """
    before = np.empty_like(classes)
    before[0], before[1:] = END, classes[:-1]
    solid = classes <= SYMBOL
    blank = ~solid & (classes != END)
    begins = solid & (classes != before) & (before != SPACE)
    begins |= classes == END
    before_blank = np.zeros_like(blank)
    before_blank[1:] = blank[:-1]
    before_solid = np.zeros_like(blank)
    before_solid[:-1] = solid[1:]
    begins |= blank & (
        ~before_blank | before_solid
    )  # \s+(?!\S) leaves the last blank of a run to what follows
    return begins


def _split_contractions(codes: np.ndarray, begins: np.ndarray) -> None:
    """'s 't 'm 'd 're 've 'll at the beginning of a word are words of their own: mark where what follows them
    begins.
    """
    marks = np.flatnonzero((codes == ord("'")) & begins)
    marks = marks[marks < len(codes) - 2]  # the last character is a separator
    one, two = codes[marks + 1], codes[marks + 2]
    short = (one == ord("s")) | (one == ord("t")) | (one == ord("m")) | (one == ord("d"))
    long = ((two == ord("e")) & ((one == ord("r")) | (one == ord("v")))) | (
        (two == ord("l")) & (one == ord("l"))
    )
    begins[marks[short | long] + 1] = False
    begins[marks[short] + 2] = True
    begins[marks[long] + 3] = True


class Merger:
    """Byte-pair merging of many words at once: in every round each word makes its earliest learned merge,
    leftmost first.

    `vocab`: token to id, in the printable alphabet of byte-level BPE; `merges`: pairs of tokens, first
    learned first.
    """

    def __init__(self, vocab: dict[str, int], merges: list[tuple[str, str]], alphabet: list[str]):
        self._bytes = np.array([vocab[character] for character in alphabet], np.int32)  # by byte value
        count = len(merges)
        left = np.fromiter((vocab[first] for first, _ in merges), np.int64, count)
        right = np.fromiter((vocab[second] for _, second in merges), np.int64, count)
        self._made = np.fromiter((vocab[first + second] for first, second in merges), np.int32, count)
        self._ranks = Table(1, 18)  # sparse: a search that finds nothing ends sooner
        self._ranks.put([self._key(left, right)], np.arange(1, count + 1))
        self._of_bytes = self._rank(
            np.repeat(self._bytes, 256), np.tile(self._bytes, 256)
        )  # by two byte values

    def __call__(
        self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids laid end to end int32, ids per word int64). Words (starts, lengths in bytes of `data`) have 1
        to WIDEST bytes.
        """
        first = np.cumsum(lengths) - lengths
        text = data.take(np.repeat(starts - first, lengths) + counting(int(lengths.sum())))
        tokens = self._bytes.take(text)
        ranks = np.full(len(text), NEVER)  # of the pair that each token makes with the next one of its word
        ranks[:-1] = self._of_bytes.take(text[:-1].astype(np.int64) << 8 | text[1:])
        ranks[first[1:] - 1] = NEVER
        words, sizes = np.arange(len(starts)), lengths.copy()
        done, counts = [], np.empty(len(starts), np.int64)
        while len(words):
            least = np.minimum.reduceat(ranks << 32 | counting(len(ranks)), first)
            rank, place = least >> 32, least & 0xFFFFFFFF
            going = rank < NEVER
            kept = np.repeat(going, sizes)
            done.append((words[~going], tokens[~kept]))
            counts[words[~going]] = sizes[~going]
            place, new = place[going], self._made.take(rank[going])
            tokens[place] = new
            kept[place + 1] = False
            place = np.cumsum(kept).take(place) - 1
            tokens, ranks = tokens[kept], ranks[kept]
            words, sizes = words[going], sizes[going] - 1
            first = np.cumsum(sizes) - sizes
            left = np.flatnonzero(place > first)
            right = np.flatnonzero(place + 1 < first + sizes)
            fresh = self._rank(
                np.concatenate([tokens.take(place[left] - 1), new.take(right)]),
                np.concatenate([new.take(left), tokens.take(place[right] + 1)]),
            )
            ranks[place] = NEVER
            ranks[place[left] - 1], ranks[place[right]] = fresh[: len(left)], fresh[len(left) :]
        out = np.empty(int(counts.sum()), np.int32)
        for some, ids in done:
            out[laid_out(counts, some)] = ids
        return out, counts

    @staticmethod
    def _key(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return (left.astype(np.uint64) << np.uint64(32)) + right.astype(np.uint64) + np.uint64(1)

    def _rank(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        found = self._ranks.find([self._key(left, right)])
        return np.where(found > 0, found - 1, NEVER)
