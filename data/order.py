"""Order as arithmetic: a keyed permutation of range(n), and the counter-based draws of all that is random.

`permute` is an unbalanced Feistel network over the bits of n with cycle walking: a bijection of range(n) for
every key, O(1) memory, any element by itself. Each round adds (multiplier * half + addend) >> shift, a
strongly universal hash keyed per round; 6 rounds leave no visible structure (24 for small n, whose halves are
short; measured by tests/data/test_sampling_order.py; it is no cipher). `bits` is SplitMix64 (Steele, Lea and
Flood 2014) read by counter: word i of a key needs no other word. Neither depends on NumPy's generators, whose
streams may change between versions.
"""

from functools import lru_cache

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
ROUNDS = 6
SMALL, SMALL_ROUNDS = 1 << 12, 24  # short halves mix less in a round
BLOCK = 1 << 13  # ids permuted together: the temporaries stay in the cache


def mix(words: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: a bijection of uint64 in which every output bit depends on every input bit."""
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def key(*parts: int | np.ndarray) -> np.ndarray:
    """A uint64 key from whole numbers (seed, epoch, row, purpose); arrays are broadcast, a key an entry."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        if not isinstance(part, np.ndarray):
            part = np.array([int(part) & 0xFFFFFFFFFFFFFFFF], np.uint64)
        state = mix((state + GOLDEN) ^ mix(np.atleast_1d(part).astype(np.uint64) + GOLDEN))
    return state


def bits(keys: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """Random uint64 words: number `counters` of the stream of `keys` (broadcast together)."""
    return mix(keys + (counters.astype(np.uint64) + np.uint64(1)) * GOLDEN)


def below(words: np.ndarray, bound: np.ndarray | int) -> np.ndarray:
    """Whole numbers in [0, bound), int64, from random words; bound < 2**32, bias below bound / 2**32."""
    high = (words >> np.uint64(32)) * np.asarray(bound).astype(np.uint64)
    return (high >> np.uint64(32)).astype(np.int64)


def unit(words: np.ndarray) -> np.ndarray:
    """Numbers in [0, 1), float64, from random words."""
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(indices: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Where the permutation of range(n) keyed by (seed, epoch) sends each index: int64, same length."""
    indices = np.asarray(indices, np.int64)
    out = np.empty(len(indices), np.int64)
    if n < 2:
        out[:] = indices
        return out
    schedule = _schedule(seed, epoch, SMALL_ROUNDS if n < SMALL else ROUNDS)
    for start in range(0, len(indices), BLOCK):
        block = _feistel(indices[start : start + BLOCK].astype(np.uint64), n, schedule)
        outside = np.flatnonzero(block >= n)
        while len(outside):  # cycle walking: under half of the domain lies outside, the rest at least halves
            block[outside] = _feistel(block[outside], n, schedule)
            outside = outside[block[outside] >= n]
        out[start : start + BLOCK] = block
    return out


@lru_cache(maxsize=64)
def _schedule(seed: int, epoch: int, rounds: int) -> list[np.ndarray]:
    """Two rounds a line: odd multiplier and addend of the first, of the second."""
    words = bits(key(seed, epoch, 1), np.arange(2 * rounds)).reshape(-1, 4)
    words[:, ::2] |= np.uint64(1)
    return list(words)


def _feistel(words: np.ndarray, n: int, schedule: list[np.ndarray]) -> np.ndarray:
    width = max(2, int(n - 1).bit_length())
    low, high = width // 2, width - width // 2
    low_bits, low_mask = np.uint64(low), np.uint64((1 << low) - 1)
    to_high, to_low = np.uint64(64 - high), np.uint64(64 - low)
    for first, first_add, second, second_add in schedule:
        words = words ^ ((((words & low_mask) * first + first_add) >> to_high) << low_bits)
        words ^= ((words >> low_bits) * second + second_add) >> to_low
    return words


def locate(position: int, count: int, rows: int, seed: int, shuffled: bool) -> tuple[np.ndarray, np.ndarray]:
    """(epochs, rows), int64 (count,), of places position .. position + count in all epochs on end."""
    places = np.arange(position, position + count, dtype=np.int64)
    epochs, inside = places // rows, places % rows
    if shuffled and count:
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            chosen = epochs == epoch
            inside[chosen] = permute(inside[chosen], rows, seed, epoch)
    return epochs, inside
