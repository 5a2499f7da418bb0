"""Mixtures: every prefix within one sample of its share, each dataset read in its own order, any batch size."""

import numpy as np
import pytest
from throughline.core.errors import WrongUse
from throughline.data.dataset import PERIOD, Mixture


class Counter:
    """A dataset whose sample at position p is p."""

    def __init__(self, rows=10):
        self.rows = rows

    def batch(self, position, count):
        return {
            "place": np.arange(position, position + count),
            "pair": np.arange(2 * count).reshape(count, 2),
        }


WEIGHTS = [
    [1, 1],
    [0.7, 0.3],
    [0.5, 0.3, 0.2],
    [5, 3, 1, 1],
    [0.9, 0.05, 0.03, 0.02],
    [1, 2, 3, 4, 5, 6, 7],
    [0.123456789, 0.7654321, 0.3],
    [1e12, 7, 3e11],
    [1.0],
]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_every_prefix_is_exact_to_within_one_sample(weights):
    mixture = Mixture([Counter() for _ in weights], weights)
    shares = np.array(mixture.shares)
    assert np.abs(shares - np.array(weights) / np.sum(weights)).max() <= len(weights) / PERIOD
    period = len(mixture._table)
    for position in [*range(200), *range(0, 3 * period, 97), 10**12 + 12_345]:
        taken = mixture.taken(position)
        assert taken.sum() == position
        if position < 10**9:  # floats hold the product exactly enough
            assert np.abs(taken - shares * position).max() < 1


def test_each_dataset_is_read_in_its_order_whatever_the_batches():
    mixture = Mixture([Counter(), Counter(), Counter()], [0.5, 0.3, 0.2])
    whole = mixture.batch(1234, 300)["place"]
    parts = np.concatenate([mixture.batch(1234 + start, 7)["place"] for start in range(0, 300, 7)])
    assert whole.tolist() == parts[:300].tolist()
    sources = mixture._table[np.arange(1234, 1534) % len(mixture._table)]
    for index, before in enumerate(mixture.taken(1234)):
        mine = whole[sources == index]
        assert mine.tolist() == list(range(int(before), int(before) + len(mine)))


@pytest.mark.parametrize("weights", [[1], [1, 0], [1, -2], [1, float("nan")], [1, float("inf")]])
def test_wrong_weights_are_refused(weights):
    with pytest.raises(WrongUse, match="weight"):
        Mixture([Counter(), Counter()], weights)


def test_a_share_that_has_to_be_rounded_is_said(capsys):
    Mixture([Counter(), Counter()], [0.7, 0.3])
    Mixture([Counter(), Counter()], [0.123456789, 0.7654321])
    assert not capsys.readouterr().err
    Mixture([Counter(), Counter()], [1e-6, 1])
    assert "a share of 1e-06 in the mixture is rounded to 0.0001" in capsys.readouterr().err
