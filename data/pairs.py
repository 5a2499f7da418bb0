"""BERT's segments: the stretches of text of each sample, computed once per store and shard (data/cache.py).

"nsp" follows google-research/bert (create_pretraining_data.py): a document aims at S - 3 tokens, or with
probability `short_fraction` at a random length from 2; whole sentences are gathered until the aim is reached
or the document ends; A is a random number of the first ones; B is the rest, or with probability 1/2 (always
when the rest is empty) text from a random sentence of another document on, and then the unused rest goes back
and begins the next sample. The longer of A and B is shortened to S - 3, each token taken from its front or
back at random. "sop" (ALBERT, Lan et al. 2019) always takes the rest and swaps the two with probability 1/2.
"none" cuts documents into stretches of S - 2 tokens.

A random next comes from another document of the same shard (of the same document when the shard has one). All
documents of a shard advance together, one sample a step, so the pass is vectorised: the draws of a document
are keyed by (seed, copy, document, sentence) and depend on no other document.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..core.errors import WrongUse
from .options import NO_TARGET, DatasetOptions
from .order import below, bits, key, mix, unit
from .packing import split_documents
from .store import TokenStore

PAIR = np.dtype([("a", "<i8"), ("b", "<i8"), ("a_length", "<i4"), ("b_length", "<i4"), ("label", "<i4")])
IS_NEXT, IS_RANDOM = 0, 1  # labels of google-research/bert; for "sop" 1 means swapped


def sample_segments(
    part: TokenStore, first_token: int, first_document: int, options: DatasetOptions
) -> np.ndarray:
    """The samples of a shard's part of a store: PAIR records in text order, offsets from the store's start.

    `a`, `b` are the first tokens of the segments, lengths in tokens (b_length 0: one segment, label
    NO_TARGET).
    """
    if options.nsp == "none":
        return _stretches(part.document_starts, options.sequence_length - 2, first_token)
    copies = [_walk(part, first_document, options, copy) for copy in range(options.pair_copies)]
    pairs = np.concatenate(copies) if copies else np.empty(0, PAIR)
    pairs["a"] += first_token
    pairs["b"] += first_token
    return pairs


def check_sentences(store: TokenStore, options: DatasetOptions) -> None:
    """Raise WrongUse when pairs are asked of a store whose documents are not divided into sentences."""
    if options.nsp != "none" and store.sequences <= store.documents:
        raise WrongUse(
            f'nsp = "{options.nsp}" needs sentences, this store has none',
            why=f"{store.sequences:,} sequences in {store.documents:,} documents: one each",
            fix='tokenise again with sentences kept as sequences, or set nsp = "none"',
        )


def _stretches(bounds: np.ndarray, capacity: int, first_token: int) -> np.ndarray:
    starts, lengths = split_documents(bounds, capacity)
    out = np.zeros(len(starts), PAIR)
    out["a"], out["a_length"], out["label"] = starts + first_token, lengths, NO_TARGET
    return out


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
            other, other_stop = _elsewhere(part, documents, aim - (a_stop - a), draws[2], draws[3])
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
    part: TokenStore, documents: np.ndarray, aim: np.ndarray, which: np.ndarray, where: np.ndarray
) -> Any:
    """(start, stop) of whole sentences of another document from a random one on, `aim` tokens if it can."""
    starts, bounds = part.sequence_starts, part.document_bounds
    filled = np.flatnonzero(np.diff(starts[bounds]) > 0)
    mine = np.searchsorted(filled, documents)
    if len(filled) > 1:
        mine = (mine + 1 + below(which, len(filled) - 1)) % len(filled)
    chosen = filled[mine]
    first = bounds[chosen] + below(where, np.diff(bounds)[chosen])
    last = np.minimum(
        np.maximum(np.searchsorted(starts, starts[first] + np.maximum(aim, 1)), first + 1), bounds[chosen + 1]
    )
    return starts[first], starts[last]


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
