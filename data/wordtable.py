"""A cache from words to token ids that NumPy reads a chunk at a time: what our own tokenizer engines share.

A word is a stretch of at most 32 UTF-8 bytes read as 1, 2 or 4 little-endian uint64s, the bytes after its end set to 0xFF,
which UTF-8 never contains: keys are exact, not hashes. Tables are open-addressed. Longer words go through a dict. New
words are handed to `solve`, once each; when LIMIT words are known all are forgotten, so memory is bounded (about 130 MB).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

LIMIT = 1 << 20
PADDING = 32  # bytes that must follow the last word of a chunk, so that whole keys can be read
WIDTHS = ((1, 8), (2, 16), (4, 32))  # uint64s in a key, bytes
COUNT_BITS = np.int64(31)  # a word's value is (where its ids begin in the pool) << 31 | (how many)
MULTIPLIERS = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
BLANK = np.array([(1 << 64) - (1 << 8 * n) if n < 8 else 0 for n in range(9)], np.uint64)  # ones after n bytes


class _Table:
    """Keys of `width` uint64s to values; 0 is no value."""

    def __init__(self, width: int):
        self.width = width
        self._make(15)

    def _make(self, bits: int) -> None:
        self.size = 0
        self._shift, self._mask = np.uint64(64 - bits), np.int64((1 << bits) - 1)
        self._keys = [np.zeros(1 << bits, np.uint64) for _ in range(self.width)]
        self._values = np.zeros(1 << bits, np.int64)

    def _slots(self, keys: list[np.ndarray]) -> np.ndarray:
        mixed = keys[0] * MULTIPLIERS[0]
        for key, multiplier in zip(keys[1:], MULTIPLIERS[1:]):
            mixed ^= key * multiplier
        mixed >>= self._shift
        return mixed.view(np.int64)

    def _same(self, slots: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        same = self._keys[0][slots] == keys[0]
        for mine, key in zip(self._keys[1:], keys[1:]):
            same &= mine[slots] == key
        return same

    def find(self, keys: list[np.ndarray]) -> np.ndarray:
        """The value of each key, 0 where it is unknown: int64."""
        slots = self._slots(keys)
        found = self._values[slots]
        wrong = np.flatnonzero(~self._same(slots, keys) & (found != 0))
        while len(wrong):
            slots[wrong] = (slots[wrong] + 1) & self._mask
            here = slots[wrong]
            found[wrong] = self._values[here]
            wrong = wrong[~self._same(here, [key[wrong] for key in keys]) & (found[wrong] != 0)]
        return found

    def add(self, keys: list[np.ndarray], values: np.ndarray) -> None:
        """Add keys that are not in the table and differ from each other."""
        if 3 * (self.size + len(values)) > len(self._values):
            used = np.flatnonzero(self._values)
            old_keys, old_values = [key[used] for key in self._keys], self._values[used]
            self._make(int(3 * (self.size + len(values))).bit_length() + 1)
            self.add(old_keys, old_values)
        slots, left = self._slots(keys), np.arange(len(values))
        while len(left):
            here = slots[left]
            free = self._values[here] == 0
            mine, here = left[free], here[free]
            self._values[here] = values[mine]  # of several that want one place the last one stays
            for column, key in zip(self._keys, keys):
                column[here] = key[mine]
            settled = np.zeros(len(left), bool)
            settled[free] = self._values[here] == values[mine]
            left = left[~settled]
            slots[left] = (slots[left] + 1) & self._mask
        self.size += len(values)


class WordTable:
    """Words to ids. `solve(words: list[bytes]) -> list of id sequences` is asked for words not yet known."""

    def __init__(self, solve: Callable[[list[bytes]], Sequence[Sequence[int]]]):
        self._solve = solve
        self.forget()

    def forget(self) -> None:
        """Empty the cache."""
        self._tables = [_Table(width) for width, _ in WIDTHS]
        self._long: dict[bytes, int] = {}
        self._pool = np.empty(1 << 16, np.int32)
        self._used = 0

    def encode(self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 laid end to end, how many ids each word has int64) of the words in `data`.

        data: uint8, PADDING bytes longer than the text; starts, lengths: int64 (words,), in bytes.
        """
        if sum(table.size for table in self._tables) + len(self._long) > LIMIT or self._used > 16 * LIMIT:
            self.forget()
        values = self._values(data, starts, lengths)
        counts = values & ((1 << COUNT_BITS) - 1)
        values >>= COUNT_BITS
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        if total == len(counts):
            return self._pool[values], counts
        values -= ends - counts
        return self._pool[np.repeat(values, counts) + np.arange(total)], counts

    def _values(self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        words = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))  # the 8 bytes from every byte on
        values = np.empty(len(starts), np.int64)
        least = 0
        for table, (width, most) in zip(self._tables, WIDTHS):
            inside = lengths <= most if least == 0 else (lengths > least) & (lengths <= most)
            chosen = np.flatnonzero(inside)
            if len(chosen):
                begin, size = (starts, lengths) if len(chosen) == len(starts) else (starts[chosen], lengths[chosen])
                keys = [words[begin + 8 * column] for column in range(width)]
                for column in range(width // 2, width):  # earlier ones are full: the word is longer than `least`
                    keys[column] |= BLANK[np.clip(size - 8 * column, 0, 8)]
                found = table.find(keys)
                missing = np.flatnonzero(found == 0)
                if len(missing):
                    found[missing] = self._learn(data, begin[missing], size[missing], table, [k[missing] for k in keys])
                values[chosen] = found
            least = most
        for place in np.flatnonzero(lengths > least):
            word = data[starts[place] : starts[place] + lengths[place]].tobytes()
            if word not in self._long:
                self._long[word] = int(self._store(self._solve([word]))[0])
            values[place] = self._long[word]
        return values

    def _learn(self, data, starts, lengths, table: _Table, keys: list[np.ndarray]) -> np.ndarray:
        raw = data.tobytes()
        words = [raw[start : start + length] for start, length in zip(starts.tolist(), lengths.tolist())]
        first = {word: place for place, word in reversed(list(enumerate(words)))}
        new = self._store(self._solve(list(first)))
        places = np.fromiter(first.values(), np.int64, len(first))
        table.add([key[places] for key in keys], new)
        known = dict(zip(first, new.tolist()))
        return np.fromiter(map(known.__getitem__, words), np.int64, len(words))

    def _store(self, solved: Sequence[Sequence[int]]) -> np.ndarray:
        """Put ids into the pool: the value of each word."""
        counts = np.fromiter(map(len, solved), np.int64, len(solved))
        total = int(counts.sum())
        while self._used + total > len(self._pool):
            self._pool = np.concatenate([self._pool, np.empty_like(self._pool)])
        self._pool[self._used : self._used + total] = [i for ids in solved for i in ids]
        begins = self._used + np.cumsum(counts) - counts
        self._used += total
        return (begins << COUNT_BITS) | counts
