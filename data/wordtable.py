"""A cache from words to token ids that NumPy reads a chunk at a time: what our own tokenizer engines share.

A word is a stretch of at most 32 UTF-8 bytes read as 1, 2 or 4 little-endian uint64s, the bytes after its end
set to 0xFF, which UTF-8 never contains: keys are exact, not hashes. Tables are open-addressed. Longer words
go through a dict. New words are handed to `solve`, once each; when LIMIT words are known all are forgotten,
so memory is bounded (about 130 MB).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

LIMIT = 1 << 20
PADDING = 32  # bytes that must follow the last word of a chunk, so that whole keys can be read
WIDTHS = ((1, 8), (2, 16), (4, 32))  # uint64s in a key, bytes
COUNT_BITS = np.int64(31)  # a word's value is (where its ids begin in the pool) << 31 | (how many)
MULTIPLIERS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)
# ones after the bytes that a word of n bytes has in column c of its key
BLANKS = np.array(
    [[2**64 - 256 ** min(max(n - 8 * c, 0), 8) & 2**64 - 1 for n in range(33)] for c in range(4)], np.uint64
)


_counted = np.arange(1 << 20)


def counting(count: int) -> np.ndarray:
    """The numbers below `count`, int64, to be read only: making them anew costs as much as using them."""
    global _counted
    if count > len(_counted):
        _counted = np.arange(2 * count)
    return _counted[:count]


class Table:
    """Keys of `width` uint64s to values; 0 is no value."""

    def __init__(self, width: int, bits: int = 17):
        self.width = width
        self._make(bits)  # 2 ** bits slots to begin with

    def _make(self, bits: int) -> None:
        self.size = 0
        self._shift, self._mask = np.uint64(64 - bits), np.int64((1 << bits) - 1)
        self._keys = [np.zeros(1 << bits, np.uint64) for _ in range(self.width)]
        self.values = np.zeros(1 << bits, np.int64)

    def _mixed(self, keys: list[np.ndarray]) -> np.ndarray:
        mixed = keys[0] * MULTIPLIERS[0]
        for key, multiplier in zip(keys[1:], MULTIPLIERS[1:]):
            mixed ^= key * multiplier
        return mixed

    def _same(self, slots: np.ndarray, keys: list[np.ndarray]) -> np.ndarray:
        same = self._keys[0].take(slots) == keys[0]  # `take`: half as long as an index in brackets
        for mine, key in zip(self._keys[1:], keys[1:]):
            same &= mine.take(slots) == key
        return same

    def _probe(self, keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(the slot that holds each key, or the free one where the search for it ends; the value there)."""
        slots = (self._mixed(keys) >> self._shift).view(np.int64)
        values = self.values.take(slots)
        wrong = np.flatnonzero(~self._same(slots, keys))
        wrong = wrong[values.take(wrong) != 0]
        while len(wrong):
            here = (slots.take(wrong) + 1) & self._mask
            slots[wrong] = here
            values[wrong] = found = self.values.take(here)
            wrong = wrong[~self._same(here, [key.take(wrong) for key in keys]) & (found != 0)]
        return slots, values

    def find(self, keys: list[np.ndarray]) -> np.ndarray:
        """The value of each key, 0 where it is unknown: int64."""
        return self._probe(keys)[1]

    def claim(self, keys: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """(slot of each key, places of keys that are all different and every new one among them), int64.

        Keys may come several times. The value of a new one is negative until it is set.
        """
        first, count = 0, len(keys[0])
        while first < count:  # as many at once as leave half of the slots free even if all are new
            room = len(self.values) // 2 - self.size
            if room < len(self.values) // 8:
                used = np.flatnonzero(self.values)
                old_keys, old_values = [key[used] for key in self._keys], self.values[used]
                self._make(len(self.values).bit_length() + 1)
                self.put(old_keys, old_values)
                continue
            self._insert([key[first : first + room] for key in keys])
            first += room
        slots, _ = self._probe(keys)
        marks = -1 - counting(count)
        self.values[slots] = marks
        return slots, np.flatnonzero(self.values.take(slots) == marks)

    def _insert(self, keys: list[np.ndarray]) -> None:
        slots, left = (self._mixed(keys) >> self._shift).view(np.int64), counting(len(keys[0]))
        while len(left):
            here = slots.take(left)
            free = self.values.take(here) == 0
            taking, taken = left[free], here[free]
            self.values[taken] = -1 - taking  # of several that want one slot the last one gets it
            self.size += int(np.count_nonzero(self.values.take(taken) == -1 - taking))
            for column, key in zip(self._keys, keys):
                column[taken] = key.take(taking)
            left = left[~self._same(here, [key.take(left) for key in keys])]
            slots[left] = (slots.take(left) + 1) & self._mask

    def put(self, keys: list[np.ndarray], values: np.ndarray) -> None:
        """Set the values of keys that differ from each other; no value is 0."""
        slots, _ = self.claim(keys)  # may make `values` anew
        self.values[slots] = values


Solver = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


class WordTable:
    """Words to ids. `solve(data, starts, lengths) -> (ids laid end to end, ids per word)` is asked for words
    not yet known.
    """

    def __init__(self, solve: Solver):
        self._solve = solve
        self.forget()

    def forget(self) -> None:
        """Empty the cache."""
        self._tables = [Table(width) for width, _ in WIDTHS]
        self._long: dict[bytes, int] = {}
        self._pool = np.empty(1 << 16, np.int32)
        self._used = 0

    def encode(
        self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """(ids int32 laid end to end, ids per word int64) of the words in `data`, each one id or more.

        data: uint8, PADDING bytes longer than the text; starts, lengths: int64 (words,), in bytes.
        """
        if sum(table.size for table in self._tables) + len(self._long) > LIMIT or self._used > 16 * LIMIT:
            self.forget()
        values = self._values(data, starts, lengths)
        counts = values & ((1 << COUNT_BITS) - 1)
        values >>= COUNT_BITS
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        if total > len(counts):
            values -= ends - counts
            values = np.repeat(values, counts)
            values += counting(total)
        return self._pool.take(values), counts

    def _values(self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        words = np.ndarray((len(data) - 7,), "<u8", data, strides=(1,))  # the 8 bytes from every byte on
        values = np.empty(len(starts), np.int64)
        unknown = []  # per table: places of the words it does not know, their slots, one place of each of them
        least = 0
        for table, (width, most) in zip(self._tables, WIDTHS):
            chosen = np.flatnonzero((lengths > least) & (lengths <= most))
            begin, size = starts.take(chosen), lengths.take(chosen)
            keys = [words[begin + 8 * column if column else begin] for column in range(width)]
            for column in range(width // 2, width):  # earlier ones are full: the word is longer than `least`
                keys[column] |= BLANKS[column].take(size)
            values[chosen] = found = table.find(keys)
            missing = np.flatnonzero(found == 0)
            if len(missing):
                slots, first = table.claim([key.take(missing) for key in keys])
                unknown.append((table, chosen[missing], slots, first))
            least = most
        longer = np.flatnonzero(lengths > least)
        texts = [
            data[start : start + size].tobytes()
            for start, size in zip(starts[longer].tolist(), lengths[longer].tolist())
        ]
        new_texts = {text: place for place, text in zip(longer.tolist(), texts) if text not in self._long}
        if unknown or new_texts:
            rest = np.fromiter(new_texts.values(), np.int64, len(new_texts))
            places = np.concatenate([*(where[first] for _, where, _, first in unknown), rest])
            new = self._store(*self._solve(data, starts[places], lengths[places]))
            for table, where, slots, first in unknown:
                table.values[slots[first]], new = new[: len(first)], new[len(first) :]
                values[where] = table.values[slots]
            self._long.update(zip(new_texts, new.tolist()))
        values[longer] = np.fromiter(map(self._long.__getitem__, texts), np.int64, len(texts))
        return values

    def _store(self, ids: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Put ids into the pool: the value of each word."""
        while self._used + len(ids) > len(self._pool):
            self._pool = np.concatenate([self._pool, np.empty_like(self._pool)])
        self._pool[self._used : self._used + len(ids)] = ids
        begins = self._used + np.cumsum(counts) - counts
        self._used += len(ids)
        return (begins << COUNT_BITS) | counts
