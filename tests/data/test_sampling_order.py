"""The permutation behind sample order: a bijection for any size, without visible structure, the same for
ever.
"""

import tracemalloc

import numpy as np
import pytest
from throughline.data.order import below, bits, key, locate, permute, unit

PINNED_SMALL = [639, 527, 180, 599, 797, 731, 20, 172]
PINNED_LARGE = [872642975618, 492915508279, 324376011455, 706456213132]
PINNED_BITS = [1649491039368412813, 2286919937564896041]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 100, 4095, 4096, 4097, 65_537])
def test_is_a_bijection_of_any_range(n):
    for epoch in range(3):
        image = permute(np.arange(n), n, seed=7, epoch=epoch)
        assert sorted(image.tolist()) == list(range(n))


def test_an_element_needs_no_other_element():
    n = 3_000_000_019
    places = np.array([0, 1, 12_345, n // 2, n - 1])
    together = permute(places, n, 1, 2)
    assert [int(permute(places[i : i + 1], n, 1, 2)[0]) for i in range(5)] == together.tolist()
    assert ((together >= 0) & (together < n)).all()


def test_memory_does_not_grow_with_the_range():
    """A hundred places of 10**17: a few kilobytes, not an entry per sample."""
    places = np.arange(100) * 10**15
    permute(places, 10**17, 0, 0)
    tracemalloc.start()
    permute(places, 10**17, 1, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000


def test_every_order_of_four_is_equally_likely():
    drawn = [tuple(permute(np.arange(4), 4, 0, epoch)) for epoch in range(12_000)]
    counts = np.unique(drawn, axis=0, return_counts=True)[1]
    assert len(counts) == 24
    assert (
        (counts - 500) ** 2 / 500
    ).sum() < 65  # chi-square, 23 degrees of freedom: 65 is exceeded once in 1e5


@pytest.mark.parametrize("n", [100_003, 1 << 17])
def test_no_visible_structure(n):
    """Place against image, neighbours and epochs: within what a random permutation shows (bounds at 1 in 1e5
    or less).
    """
    image = permute(np.arange(n), n, seed=3, epoch=0).astype(float)
    table = np.histogram2d(np.arange(n), image, bins=32)[0]
    chi_square = ((table - table.mean()) ** 2 / table.mean()).sum()
    assert chi_square < 961 + 4.5 * (2 * 961) ** 0.5
    steps = np.histogram(np.diff(image) % n, bins=64, range=(0, n))[0]
    assert ((steps - steps.mean()) ** 2 / steps.mean()).sum() < 63 + 4.5 * (2 * 63) ** 0.5 + 10
    for lag in (1, 2, 3, 8, 64, 1024):
        assert abs(np.corrcoef(image[:-lag], image[lag:])[0, 1]) < 4.5 / n**0.5
    later = permute(np.arange(n), n, seed=3, epoch=1)
    assert abs(np.corrcoef(image, later)[0, 1]) < 4.5 / n**0.5
    assert (image == later).sum() < 12  # Poisson with mean 1


def test_the_order_is_pinned():
    """These numbers may never change: a resumed run would read other rows."""
    assert permute(np.arange(8), 1000, seed=1, epoch=2).tolist() == PINNED_SMALL
    assert permute(np.arange(4), 10**12, seed=1, epoch=2).tolist() == PINNED_LARGE
    assert [int(word) for word in bits(key(5, 6), np.arange(2))] == PINNED_BITS


def test_seed_epoch_and_purpose_give_other_keys():
    parts = [(0, 0), (0, 1), (1, 0), (1, 1), (2**40, 0), (0, 2**40), (0, 0, 0)]
    assert len({int(key(*part)[0]) for part in parts}) == len(parts)


def test_draws_are_uniform():
    words = bits(key(9), np.arange(200_000))
    counts = np.bincount(below(words, 100), minlength=100)
    assert ((counts - 2000) ** 2 / 2000).sum() < 99 + 4.5 * (2 * 99) ** 0.5
    assert abs(unit(words).mean() - 0.5) < 4.5 * (1 / 12 / 200_000) ** 0.5
    assert unit(words).min() >= 0 and unit(words).max() < 1


def test_positions_run_through_epochs():
    epochs, rows = locate(position=7, count=10, rows=5, seed=0, shuffled=False)
    assert epochs.tolist() == [1, 1, 1, 2, 2, 2, 2, 2, 3, 3]
    assert rows.tolist() == [2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    epochs, rows = locate(0, 20, 5, 0, shuffled=True)
    assert all(sorted(rows[epochs == epoch]) == list(range(5)) for epoch in range(4))
