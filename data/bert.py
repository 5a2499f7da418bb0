"""BERT rows: [CLS] A [SEP] B [SEP], a pair to a row or packed without padding, masked anew each time.

Pairs are drawn once per store and shard. "nsp" follows google-research/bert (create_pretraining_data.py): a document
aims at S - 3 tokens, or with probability `short_fraction` at a random length from 2; whole sentences are gathered until
the aim is reached or the document ends; A is a random number of the first ones; B is the rest, or with probability 1/2
(always when the rest is empty) text from a random sentence of another document of the shard on, and then the unused
rest begins the next sample. Where the shard has one document alone that text is of the same one, from any of its
sentences but the one that follows A. The longer of A and B is shortened to S - 3, each token taken from its front or
back at random. "sop" (ALBERT, Lan et al. 2019) always takes the rest and swaps the two with probability 1/2. "none"
cuts documents into stretches of S - 2 tokens. All documents of a shard advance together, one sample a step: their draws
are keyed by (seed, copy, document, sentence).

Masks are drawn for every (seed, epoch, row). Of the maskable tokens of a segment `rate` are chosen (Devlin et al. 2018,
section 3.1 and appendix A.1); of the chosen, 80 % become [MASK], 10 % a random token, 10 % stay. A segment with n
maskable tokens has floor(rate * n + u) chosen, with u uniform in [0, 1), so the mean rate is exact at every length; at
least one (which matters under 7 tokens). The replacement is uniform over the vocabulary without its special ids. With
whole words, words are chosen in random order while they fit; the first that does not is taken with the
probability that keeps the mean.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import WrongUse
from .dataset import NO_TARGET, Batch, DatasetOptions
from .order import GOLDEN, below, bits, key, locate, mix, unit
from .packing import Placed, computed_once, lay_out, pack, split_documents
from .store import TokenStore

PAIR = np.dtype([("a", "<i8"), ("b", "<i8"), ("a_length", "<i4"), ("b_length", "<i4"), ("label", "<i4")])
IS_NEXT, IS_RANDOM = 0, 1  # labels of google-research/bert; for "sop" 1 means swapped


def sample_segments(
    part: TokenStore, first_token: int, first_document: int, options: DatasetOptions
) -> np.ndarray:
    """The samples of a shard's part of a store: PAIR records in text order. `a`, `b` are the first tokens of the
    segments, from the store's start (b_length 0: one segment, label NO_TARGET).
    """
    if options.nsp == "none":
        starts, lengths = split_documents(part.document_starts, options.sequence_length - 2)
        pairs = np.zeros(len(starts), PAIR)
        pairs["a"], pairs["a_length"], pairs["label"] = starts + first_token, lengths, NO_TARGET
        return pairs
    copies = [_walk(part, first_document, options, copy) for copy in range(options.pair_copies)]
    pairs = np.concatenate(copies)
    pairs["a"] += first_token
    pairs["b"] += first_token
    return pairs


def _walk(part: TokenStore, first_document: int, options: DatasetOptions, copy: int) -> np.ndarray:
    starts, bounds = part.sequence_starts, part.document_bounds
    documents = np.flatnonzero(np.diff(starts[bounds]) > 0)
    keys = key(options.seed, copy, documents + first_document, 3)
    most = options.sequence_length - 3
    short = unit(bits(keys, np.zeros(1))) < options.short_fraction
    aim = np.where(short, 2 + below(bits(keys, np.ones(1)), most - 1), most)
    here, end = bounds[documents], bounds[documents + 1]
    out, order = [], []
    while len(documents):
        draws = [bits(keys, (here + 1) * 8 + n) for n in range(6)]
        until = np.minimum(np.maximum(np.searchsorted(starts, starts[here] + aim), here + 1), end)
        sentences = until - here
        split = here + 1 + below(draws[0], np.maximum(sentences - 1, 1))
        split = np.minimum(split, until)
        lone = sentences == 1
        a, a_stop, b, b_stop = starts[here], starts[split], starts[split], starts[until]
        if options.nsp == "nsp":
            label = np.where(lone | (unit(draws[1]) < 0.5), IS_RANDOM, IS_NEXT)
            other, other_stop = _elsewhere(part, documents, split, aim - (a_stop - a), draws[2], draws[3])
            b, b_stop = np.where(label, other, b), np.where(label, other_stop, b_stop)
            until = np.where(label, split, until)
        else:
            label = np.where(lone, NO_TARGET, (unit(draws[1]) < 0.5).astype(np.int64))
        a, a_length, b, b_length = _shorten(a, a_stop, b, b_stop, most, draws[4], draws[5])
        out.append(_records(a, a_length, b, b_length, label, swap=(label == 1) & (options.nsp == "sop")))
        order.append(here)
        here = until
        left = here < end
        documents, keys, aim, here, end = documents[left], keys[left], aim[left], here[left], end[left]
    pairs = np.concatenate(out) if out else np.empty(0, PAIR)
    kept = pairs["a_length"] > 0
    return pairs[kept][np.argsort(np.concatenate(order)[kept], kind="stable")] if out else pairs


def _elsewhere(
    part: TokenStore,
    documents: np.ndarray,
    successors: np.ndarray,
    aim: np.ndarray,
    which: np.ndarray,
    where: np.ndarray,
) -> Any:
    """(start, stop) of whole sentences of another document from a random one on, `aim` tokens if it can. Where there is
    no other document they are of the same one, and do not begin with the sentence that follows A, its successor.
    """
    starts, bounds = part.sequence_starts, part.document_bounds
    filled = np.flatnonzero(np.diff(starts[bounds]) > 0)
    mine = np.searchsorted(filled, documents)
    if len(filled) > 1:
        mine = (mine + 1 + below(which, len(filled) - 1)) % len(filled)
    chosen = filled[mine]
    # sentences without a token begin where the next one does
    left = np.maximum(np.searchsorted(starts, starts[successors], "left"), bounds[chosen])
    right = np.minimum(np.searchsorted(starts, starts[successors], "right"), bounds[chosen + 1])
    in_reach = (chosen == documents) & (successors < bounds[chosen + 1])
    excluded = np.where(in_reach, right - left, 0)
    excluded = np.where(excluded < np.diff(bounds)[chosen], excluded, 0)
    first = bounds[chosen] + below(where, np.diff(bounds)[chosen] - excluded)
    first += np.where(first >= left, excluded, 0)
    last = np.maximum(np.searchsorted(starts, starts[first] + np.maximum(aim, 1)), first + 1)
    return starts[first], starts[np.minimum(last, bounds[chosen + 1])]


def _shorten(
    a: Any, a_stop: Any, b: Any, b_stop: Any, most: int, draw_a: np.ndarray, draw_b: np.ndarray
) -> Any:
    """Shorten the longer segment (B when equal) until both make `most`, from either end with odds 1/2."""
    length_a, length_b = a_stop - a, b_stop - b
    over = np.maximum(length_a + length_b - most, 0)
    gap = length_a - length_b
    level = np.minimum(np.abs(gap), over)  # first the longer one down to the other, then in turn, B first
    rest = over - level
    from_a = np.where(gap > 0, level, 0) + rest // 2
    from_b = np.where(gap < 0, level, 0) + rest - rest // 2
    front_a, front_b = _heads(from_a, draw_a), _heads(from_b, draw_b)
    return a + front_a, length_a - from_a, b + front_b, length_b - from_b


def _heads(tosses: np.ndarray, words: np.ndarray) -> np.ndarray:
    """How many of each count of fair coins show heads."""
    heads, left = np.zeros(len(tosses), np.int64), tosses.copy()
    while (left > 0).any():
        some = np.clip(left, 0, 63).astype(np.uint64)
        heads += np.bitwise_count(words & ((np.uint64(1) << some) - np.uint64(1))).astype(np.int64)
        left -= 63
        words = mix(words)
    return heads


def _records(a: Any, a_length: Any, b: Any, b_length: Any, label: Any, swap: Any) -> np.ndarray:
    out = np.empty(len(a), PAIR)
    out["a"], out["b"] = np.where(swap, b, a), np.where(swap, a, b)
    out["a_length"], out["b_length"] = np.where(swap, b_length, a_length), np.where(swap, a_length, b_length)
    out["label"] = np.where(out["b_length"] > 0, label, NO_TARGET)
    return out


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
        """(inputs, targets), int64 (T,), of tokens (T,) of segments laid end to end, a cacheful at a time: lengths
        (N,), keys uint64 (N,). A target is NO_TARGET where nothing was chosen.
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
        first = np.cumsum(candidates) - candidates
        quota = np.floor(self.options.mask_rate * candidates + unit(mix(keys ^ COUNT))).astype(np.int64)
        quota = np.minimum(np.maximum(quota, 1), candidates)
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


class BERTPairs:
    """Sentence pairs (or stretches) of a store, fixed for `pair_copies` passes over the text, which are an epoch; order
    and masks are drawn for (seed, epoch). A packed row holds whole pairs of one shard, kept apart.
    """

    def __init__(self, store: TokenStore, options: DatasetOptions, cache: Path | None = None):
        if options.nsp != "none" and store.sequences <= store.documents:
            what = f'nsp = "{options.nsp}" needs sentences, this store has none'
            why = f"{store.sequences:,} sequences in {store.documents:,} documents: one each"
            fix = "throughline data tokenize TEXT --tokenizer TOKENIZER --sentences --out TOKENS,\n"
            fix += "or train without pairs: --set objective.sentences=none"
            raise WrongUse(what, why=why, fix=fix)
        self.store, self.options, self.mask = store, options, Masker(options)
        identity = {"what": "bert rows", "store": store.content_identity(), "length": options.sequence_length}
        identity |= {"packed": options.packing == "packed", "nsp": options.nsp}
        if options.nsp != "none":
            identity |= {"seed": options.seed, "copies": options.pair_copies, "short": options.short_fraction}
            identity |= {"random": "without the successor"}  # which the indices of older versions had
        self.pairs, self.ends = computed_once(cache, identity, (PAIR, np.dtype("<i8")), self._index())
        self.rows = len(self.ends)
        if not self.rows:
            why = f"{store.tokens:,} tokens"
            raise WrongUse(
                "too little text for one training row", where=store.place, why=why, fix="give more text"
            )

    @cached_property
    def tokens(self) -> int:
        return int(_row_lengths(self.pairs).sum())

    def _index(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Per shard: its pairs row by row, and the end of each row among all pairs."""
        pairs_before, documents_before = 0, 0
        for first_token, part in self.store.parts():
            pairs = sample_segments(part, first_token, documents_before, self.options)
            ends = np.arange(1, len(pairs) + 1)
            if self.options.packing == "packed":
                order, ends = pack(_row_lengths(pairs), self.options.sequence_length)
                pairs = pairs[order]
            yield pairs, ends + pairs_before
            pairs_before, documents_before = pairs_before + len(pairs), documents_before + part.documents

    def batch(self, position: int, count: int) -> Batch:
        options, length = self.options, self.options.sequence_length
        epochs, rows = locate(position, count, self.rows, options.seed, options.order == "shuffled")
        packed = options.packing == "packed"
        places, owner = lay_out(self.ends, rows) if packed else (rows, np.arange(count))
        pairs = self.pairs[places]
        sizes = _row_lengths(pairs)
        placed = Placed(sizes, owner, count, length)
        tokens, types = _assemble(self.store, pairs, sizes, placed.within, options)
        inputs, targets = self.mask(tokens, sizes, key(options.seed, epochs[owner], places, 4))
        batch = {
            "input_ids": placed.rows(inputs, options.pad_id, np.int64),
            "targets": placed.rows(targets, NO_TARGET, np.int64),
            "token_types": placed.rows(types, 0, np.int64),
        }
        if packed:
            batch["positions"] = placed.rows(placed.within, 0, np.int64)
            batch["document_ids"] = placed.rows(placed.numbers, -1, np.int32)
        else:
            batch["attention_mask"] = placed.rows(True, False, bool)
        if options.nsp != "none":
            labels = pairs["label"].astype(np.int64)
            if packed:  # (B, S): the label stands at each [CLS]
                labels = np.where(placed.within == 0, np.repeat(labels, sizes), NO_TARGET)
                labels = placed.rows(labels, NO_TARGET, np.int64)
            batch["nsp_targets"] = labels
        return batch


def _row_lengths(pairs: np.ndarray) -> np.ndarray:
    """Tokens of each sample with its special ones."""
    return pairs["a_length"].astype(np.int64) + pairs["b_length"] + 2 + (pairs["b_length"] > 0)


def _assemble(
    store: TokenStore, pairs: np.ndarray, sizes: np.ndarray, within: np.ndarray, options: DatasetOptions
) -> Any:
    """(tokens, token types) of samples laid end to end, int64; `within`: each token's place in its own."""
    starts = np.cumsum(sizes) - sizes
    after_a = np.repeat(pairs["a_length"].astype(np.int64) + 1, sizes)  # where the first [SEP] stands
    in_b = within > after_a
    b = np.repeat(pairs["b"], sizes) - after_a - 1
    source = np.where(in_b, b, np.repeat(pairs["a"] - 1, sizes)) + within
    special = (within == 0) | (within == after_a)
    special[starts + sizes - 1] = True
    source[special] = 0
    tokens = store.take(source)
    tokens[special] = options.sep_id
    tokens[starts] = options.cls_id
    return tokens, in_b.astype(np.int64)
