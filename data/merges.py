"""Byte-pair merging of many words at once: in every round each word makes its earliest learned merge, leftmost first."""

from __future__ import annotations

import numpy as np

from .chunks import laid_out
from .wordtable import Table, counting

NEVER = np.int64(2**31 - 1)  # the rank of a pair that was not learned
WIDEST = 512  # bytes of a word: the rounds are as many as the longest word has merges


class Merger:
    """`vocab`: token to id, in the printable alphabet of byte-level BPE; `merges`: pairs of tokens, first learned first."""

    def __init__(self, vocab: dict[str, int], merges: list[tuple[str, str]], alphabet: list[str]):
        self._bytes = np.array([vocab[character] for character in alphabet], np.int32)  # by byte value
        count = len(merges)
        left = np.fromiter((vocab[first] for first, _ in merges), np.int64, count)
        right = np.fromiter((vocab[second] for _, second in merges), np.int64, count)
        self._made = np.fromiter((vocab[first + second] for first, second in merges), np.int32, count)
        self._ranks = Table(1)
        self._ranks.put([self._key(left, right)], np.arange(1, count + 1))

    def __call__(self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids laid end to end int32, ids per word int64). Words (starts, lengths in bytes of `data`) have 1 to WIDEST bytes."""
        first = np.cumsum(lengths) - lengths
        tokens = self._bytes[data[np.repeat(starts - first, lengths) + counting(int(lengths.sum()))]]
        ranks = np.full(len(tokens), NEVER)  # of the pair that each token makes with the next one of its word
        ranks[:-1] = self._rank(tokens[:-1], tokens[1:])
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
            place, new = place[going], self._made[rank[going]]
            tokens[place] = new
            kept[place + 1] = False
            place = np.cumsum(kept)[place] - 1
            tokens, ranks = tokens[kept], ranks[kept]
            words, sizes = words[going], sizes[going] - 1
            first = np.cumsum(sizes) - sizes
            left = np.flatnonzero(place > first)
            right = np.flatnonzero(place + 1 < first + sizes)
            fresh = self._rank(
                np.concatenate([tokens[place[left] - 1], new[right]]),
                np.concatenate([new[left], tokens[place[right] + 1]]),
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
