"""WordPiece's greedy longest match, for many words at once: every word walks the same trie in step."""

from __future__ import annotations

import numpy as np

from .wordtable import Table

WHOLE, INSIDE = 0, 1  # the two roots: pieces that begin a word, and pieces that continue one ("##…")
NONE = np.int64(-1)


class GreedyMatcher:
    """`begins` and `continues` map pieces, as UTF-8 bytes, to ids."""

    def __init__(self, begins: dict[bytes, int], continues: dict[bytes, int], unknown: int):
        self.unknown = unknown
        pieces = [*begins, *continues]
        ids = np.array([*begins.values(), *continues.values()], np.int64)
        node = np.repeat(np.array([WHOLE, INSIDE]), [len(begins), len(continues)])
        text = np.frombuffer(b"".join(pieces), np.uint8)
        sizes = np.fromiter(map(len, pieces), np.int64, len(pieces))
        first = np.cumsum(sizes) - sizes
        accepted = [np.full(2, NONE)]  # per node: the id of the piece that ends there
        nodes, depth = 2, 0
        alive = np.flatnonzero(sizes > 0)
        self._edges = Table(1)
        while len(alive):
            edges, child = np.unique(node[alive] << 8 | text[first[alive] + depth], return_inverse=True)
            self._edges.put([(edges + 1).astype(np.uint64)], nodes + np.arange(len(edges)))
            node[alive] = nodes + child
            depth += 1
            level = np.full(len(edges), NONE)
            ending = sizes[alive] == depth
            level[child[ending]] = ids[alive[ending]]
            accepted.append(level)
            nodes += len(edges)
            alive = alive[~ending]
        self._accepted = np.concatenate(accepted)

    def __call__(self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids laid end to end, ids per word), int64: a word with a part that no piece matches is the unknown id.

        data: uint8; starts, lengths: int64 (words,), lengths above 0.
        """
        word = np.arange(len(starts))
        place, end = starts.copy(), starts + lengths
        node = np.zeros(len(starts), np.int64)
        best = np.full(len(starts), NONE)  # the longest piece seen on this walk, and where it stops
        best_end = place.copy()
        found_words, found_ids = [], []
        failed = np.zeros(len(starts), bool)
        while len(word):
            edge = np.where(place < end, node << 8 | data[place], NONE)  # PADDING bytes follow the text
            node = self._edges.find([(edge + 1).astype(np.uint64)])
            walks = node > 0
            place += 1
            accepted = np.where(walks, self._accepted[node], NONE)
            ends_here = accepted >= 0
            best = np.where(ends_here, accepted, best)
            best_end = np.where(ends_here, place, best_end)
            stuck = np.flatnonzero(~walks)
            if not len(stuck):
                continue
            failed[word[stuck[best[stuck] < 0]]] = True
            matched = stuck[best[stuck] >= 0]
            found_words.append(word[matched])
            found_ids.append(best[matched])
            node[matched], place[matched], best[matched] = INSIDE, best_end[matched], NONE
            going = walks
            going[matched] = place[matched] < end[matched]
            if len(stuck):
                word, place, end, node = word[going], place[going], end[going], node[going]
                best, best_end = best[going], best_end[going]
        owners, ids = np.concatenate([*found_words, np.empty(0, np.int64)]), np.concatenate([*found_ids, np.empty(0, np.int64)])
        kept = ~failed[owners]
        lost = np.flatnonzero(failed)
        owners = np.concatenate([owners[kept], lost])
        ids = np.concatenate([ids[kept], np.full(len(lost), self.unknown)])
        return ids[np.argsort(owners, kind="stable")], np.bincount(owners, minlength=len(starts))
