"""BERT's dynamic masks: drawn anew for every (seed, epoch, row) by a counter-based generator (data/order.py).

Of the maskable tokens of a segment `rate` are chosen (Devlin et al. 2018, section 3.1 and appendix A.1); of
the chosen, 80 % become [MASK], 10 % a random token, 10 % stay. A segment with n maskable tokens has
floor(rate * n + u) chosen, with u uniform in [0, 1), so the mean rate is exact at every length; at least one
(which matters under 7 tokens). The replacement is uniform over the vocabulary without its special ids. With
whole words, words are chosen in random order while they fit; the first that does not is taken with the
probability that keeps the mean.
"""

from __future__ import annotations

import numpy as np

from .options import NO_TARGET, DatasetOptions
from .order import GOLDEN, below, bits, mix, unit

CHOOSE, COUNT = np.uint64(0x510E527FADE682D1), np.uint64(0x9B05688C2B3E6C1F)  # tell a key's draws apart
CACHEFUL = 1 << 14  # tokens masked together: the temporaries stay in the cache


class Masker:
    """Tables of one vocabulary, bool (vocab,): `special` is never masked, `continues` is inside a word."""

    def __init__(self, options: DatasetOptions):
        self.options = options
        size = options.vocab_size
        self.special = np.zeros(size, bool)
        named = (options.pad_id, options.cls_id, options.sep_id, options.mask_id, *options.special_ids)
        self.special[[i for i in named if i is not None and i < size]] = True
        self.ordinary = np.flatnonzero(~self.special)
        self.continues = np.zeros(size, bool)
        self.continues[list(options.continuation_ids)] = True

    def __call__(
        self, tokens: np.ndarray, lengths: np.ndarray, keys: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mask segments laid end to end, a cacheful at a time.

        tokens (T,) int64, special tokens included; lengths (N,) of the segments; keys (N,) uint64, one per
        segment. Returns (inputs, targets), both (T,) int64; targets is NO_TARGET where nothing was chosen.
        """
        inputs, targets = tokens.copy(), np.full(len(tokens), NO_TARGET, np.int64)
        ends = np.cumsum(lengths)
        first = 0
        while first < len(lengths):
            start = ends[first] - lengths[first]
            last = max(first + 1, int(np.searchsorted(ends, start + CACHEFUL, side="right")))
            part = slice(start, ends[last - 1])
            self._mask(inputs[part], targets[part], lengths[first:last], keys[first:last])
            first = last
        return inputs, targets

    def _mask(self, tokens: np.ndarray, targets: np.ndarray, lengths: np.ndarray, keys: np.ndarray) -> None:
        maskable = np.flatnonzero(~self.special[tokens])
        owner = np.repeat(np.arange(len(lengths)), lengths)
        segment = owner[maskable]
        column = (maskable - (np.cumsum(lengths) - lengths)[segment]).astype(np.uint64)
        words = bits(keys[segment], column)
        candidates = np.bincount(segment, minlength=len(lengths))
        first, quota = np.cumsum(candidates) - candidates, self._quota(candidates, keys)
        if self.options.whole_word:
            begins = ~self.continues[tokens[maskable]]
            begins[:1] = True
            begins[1:] |= (np.diff(maskable) > 1) | (np.diff(segment) > 0)
            chosen = _choose_words(np.flatnonzero(begins), segment, words, first, quota)
        else:
            chosen = _choose_tokens(segment, words, first, quota)
        places, words = maskable[chosen], mix(words[chosen] + GOLDEN)
        targets[places] = tokens[places]
        fate = words & np.uint64(0xFFFFFFFF)  # the low half decides, the high half draws the replacement
        tokens[places[fate < np.uint64(int(0.8 * 2**32))]] = self.options.mask_id
        other = fate >= np.uint64(int(0.9 * 2**32))
        tokens[places[other]] = self.ordinary[below(words[other], len(self.ordinary))]

    def _quota(self, candidates: np.ndarray, keys: np.ndarray) -> np.ndarray:
        quota = np.floor(self.options.mask_rate * candidates + unit(mix(keys ^ COUNT))).astype(np.int64)
        return np.minimum(np.maximum(quota, 1), candidates)


def _choose_tokens(
    segment: np.ndarray, words: np.ndarray, first: np.ndarray, quota: np.ndarray
) -> np.ndarray:
    """Which maskable tokens have the `quota` smallest draws of their segment, which begins at `first`."""
    ranked = _ranked(segment, words)
    drawn = quota > 0
    limit = np.zeros(len(quota), np.uint64)
    limit[drawn] = np.sort(ranked)[(first + quota - 1)[drawn]]
    return np.flatnonzero((ranked <= limit[segment]) & drawn[segment])


def _choose_words(
    begins: np.ndarray, segment: np.ndarray, words: np.ndarray, first: np.ndarray, quota: np.ndarray
) -> np.ndarray:
    """The same of whole words, which begin at `begins`, drawn until each segment's quota is met."""
    size = np.diff(np.append(begins, len(segment)))
    owner = segment[begins]
    order = np.argsort(_ranked(owner, words[begins]))
    before = np.cumsum(size[order]) - size[order] - first[owner[order]]
    room = quota[owner[order]] - before
    draw = unit(mix(words[begins][order] ^ CHOOSE))
    crossing = (room > 0) & (size[order] > room) & (draw * size[order] < room)
    taken = np.zeros(len(begins), bool)
    taken[order] = (size[order] <= room) | crossing
    return np.flatnonzero(np.repeat(taken, size))


def _ranked(segment: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Keys that sort by segment (fewer than 2**15 in a cacheful), then by draw."""
    return (segment.astype(np.uint64) << np.uint64(49)) | (words >> np.uint64(15))
