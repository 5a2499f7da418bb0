"""Byte-pair merging of many words at once: in every round each word makes its earliest learned merge, leftmost first."""

from __future__ import annotations

import numpy as np

from .wordtable import Table

NEVER = np.int32(2**31 - 1)  # the rank of a pair that was not learned
NARROWEST, WIDEST = 8, 1024  # words are rows of a matrix as wide as their length rounded up to a power of two


class Merger:
    """`vocab`: token to id, in the printable alphabet of byte-level BPE; `merges`: pairs of tokens, first learned first."""

    def __init__(self, vocab: dict[str, int], merges: list[tuple[str, str]], alphabet: list[str]):
        self._bytes = np.array([vocab[character] for character in alphabet], np.int32)  # by byte value
        left, right, made = (
            np.fromiter((vocab[token] for token in tokens), np.int64, len(merges))
            for tokens in ((a for a, _ in merges), (b for _, b in merges), (a + b for a, b in merges))
        )
        self._made = made.astype(np.int32)
        self._ranks = Table(1)
        self._ranks.put([self._key(left, right)], np.arange(1, len(merges) + 1))

    def __call__(self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids laid end to end int32, ids per word int64). Words (starts, lengths in bytes of `data`) have 1 to WIDEST bytes."""
        widths = np.maximum(1 << np.ceil(np.log2(lengths)).astype(np.int64), NARROWEST)
        counts = np.empty(len(starts), np.int64)
        rows = []
        for width in np.unique(widths):
            chosen = np.flatnonzero(widths == width)
            columns = np.arange(width)
            filled = columns < lengths[chosen, None]
            places = np.where(filled, starts[chosen, None] + columns, 0)
            tokens, counts[chosen] = self._merge(self._bytes[data[places]], lengths[chosen])
            rows.append((chosen, tokens))
        out = np.empty(int(counts.sum()), np.int32)
        begins = np.cumsum(counts) - counts
        for chosen, tokens in rows:
            filled = np.arange(tokens.shape[1]) < counts[chosen, None]
            out[(begins[chosen, None] + np.arange(tokens.shape[1]))[filled]] = tokens[filled]
        return out, counts

    @staticmethod
    def _key(left: np.ndarray, right: np.ndarray) -> np.ndarray:
        return (left.astype(np.uint64) << np.uint64(32)) + right.astype(np.uint64) + np.uint64(1)

    def _rank(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        found = self._ranks.find([self._key(left, right)])
        return np.where(found > 0, found - 1, NEVER).astype(np.int32)

    def _merge(self, tokens: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """tokens (words, width) int32, filled for `sizes`, to (merged tokens, how many)."""
        done, done_sizes = np.empty_like(tokens), np.empty_like(sizes)
        columns = np.arange(tokens.shape[1])
        pairs = columns[:-1] < sizes[:, None] - 1
        ranks = np.full(tokens.shape, NEVER, np.int32)
        ranks[:, :-1][pairs] = self._rank(tokens[:, :-1][pairs], tokens[:, 1:][pairs])
        rows = np.arange(len(tokens))
        while len(rows):
            best = ranks.argmin(axis=1)
            rank = ranks[np.arange(len(rows)), best]
            going = rank < NEVER
            if not going.all():
                over = ~going
                done[rows[over]], done_sizes[rows[over]] = tokens[over], sizes[over]
                rows, tokens, sizes, ranks = rows[going], tokens[going], sizes[going], ranks[going]
                best, rank = best[going], rank[going]
            every = np.arange(len(rows))
            shifted = np.minimum(columns + (columns > best[:, None]), columns[-1])
            tokens, ranks = np.take_along_axis(tokens, shifted, 1), np.take_along_axis(ranks, shifted, 1)
            sizes = sizes - 1
            tokens[every, best] = new = self._made[rank]
            ranks[every, best] = NEVER
            left = np.flatnonzero(best > 0)
            right = np.flatnonzero(best + 1 < sizes)
            fresh = self._rank(
                np.concatenate([tokens[left, best[left] - 1], new[right]]),
                np.concatenate([new[left], tokens[right, best[right] + 1]]),
            )
            ranks[left, best[left] - 1], ranks[right, best[right]] = fresh[: len(left)], fresh[len(left) :]
        return done, done_sizes
