"""WordPiece's greedy longest match, for many words at once: every word walks the same trie in step."""

from __future__ import annotations

import numpy as np

from .wordtable import Table, counting

WHOLE, INSIDE = 0, 1  # the two roots: pieces that begin a word, and pieces that continue one ("##…")
NONE = np.int64(-1)
FEW = 8  # words left, the long ones: from here on a walk in step costs more than one word after the other


class GreedyMatcher:
    """`begins` and `continues` map pieces, as UTF-8 bytes, to ids."""

    def __init__(self, begins: dict[bytes, int], continues: dict[bytes, int], unknown: int):
        self.unknown = unknown
        self._pieces, self._longest = (begins, continues), max(map(len, begins))
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

    def __call__(self, data: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(ids laid end to end, ids per word), int64: a word with a part that no piece matches is the unknown id.

        data: uint8; starts, lengths: int64 (words,), lengths above 0.
        """
        first = np.cumsum(lengths + 1) - lengths - 1  # in a copy where each word is followed by a byte of no piece
        text = np.full(int((lengths + 1).sum()), 0xFF, np.int64)
        places = np.repeat(first, lengths) + counting(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        text[places] = data[places + np.repeat(starts - first, lengths)]
        nobody = len(starts)
        word, place, end = np.arange(nobody), first.copy(), first + lengths
        node = np.full(nobody, WHOLE)
        best, best_end = np.full(nobody, NONE), place.copy()  # the longest piece seen on this walk, and where it stops
        found_words, found_ids = [], []
        failed = np.zeros(nobody + 1, bool)
        over = 0
        while len(word) - over > FEW:
            node = self._edges.find([(node << 8 | text[place]).view(np.uint64)])  # 0 where no piece goes on
            accepted = self._accepted[node]
            place += node > 0
            some = np.flatnonzero(accepted >= 0)
            best[some], best_end[some] = accepted[some], place[some]
            stuck = np.flatnonzero(node == 0)
            if not len(stuck):
                continue
            matched, unmatched = stuck[best[stuck] >= 0], stuck[best[stuck] < 0]
            found_words.append(word[matched])
            found_ids.append(best[matched])
            failed[word[unmatched]] = True
            node[matched], place[matched], best[matched] = INSIDE, best_end[matched], NONE
            done = np.concatenate([unmatched, matched[place[matched] == end[matched]]])
            word[done] = nobody  # stands at its end, where it is stuck for good
            place[done] = end[done]
            node[done] = WHOLE
            over = int(np.count_nonzero(word == nobody))
            if 4 * over > len(word):
                going = np.flatnonzero(word < nobody)
                word, place, end, node = word[going], place[going], end[going], node[going]
                best, best_end, over = best[going], best_end[going], 0
        lost = np.flatnonzero(failed[:nobody])
        left = word[word < nobody]
        failed[left] = True  # what was found of them is found again
        last = [self._one(data[starts[i] : starts[i] + lengths[i]].tobytes()) for i in left.tolist()]
        owners, ids = np.concatenate([*found_words, lost]), np.concatenate([*found_ids, np.full(len(lost), self.unknown)])
        kept = ~failed[owners]
        kept[len(kept) - len(lost) :] = True
        owners = np.concatenate([owners[kept], np.repeat(left, [len(part) for part in last])])
        ids = np.concatenate([ids[kept], *(np.array(part, np.int64) for part in last)])
        return ids[np.argsort(owners, kind="stable")], np.bincount(owners, minlength=len(starts))

    def _one(self, word: bytes) -> list[int]:
        """The same for a single word, over the dictionaries."""
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
                return [self.unknown]
        return ids
