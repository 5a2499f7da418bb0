"""Mixtures: several datasets read by weight, exact over any prefix, the position still one integer.

Weights become whole numbers out of PERIOD (or their exact ratio, when it needs a smaller period), so the
choice repeats and any position is found at once. Within a period the next sample comes from the dataset whose
share is most urgent (Tijdeman 1980, the chairman assignment problem), which keeps every prefix within one
sample of its share, for any number of datasets: simple rounding does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from ..core.console import warn
from ..core.errors import WrongUse
from .options import Batch, Dataset

PERIOD = 10_000


class Mixture:
    """`weights` over `datasets` of one kind; `shares` are those really used. An epoch has all their rows.

    A dataset whose rows are used up begins its next epoch, so a weight may repeat or leave out part of its
    text.
    """

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float]):
        if len(weights) != len(datasets) or any(not weight > 0 or math.isinf(weight) for weight in weights):
            why = f"{len(datasets)} stores, weights {list(weights)}"
            raise WrongUse("a mixture needs one positive weight for each store", why=why)
        self.datasets = list(datasets)
        self._counts = _whole(weights)
        self._table = _schedule(self._counts)
        self.shares = [count / sum(self._counts) for count in self._counts]
        asked = [weight / sum(weights) for weight in weights]
        if far := [(a, b) for a, b in zip(asked, self.shares) if abs(a - b) > 0.01 * a]:
            warn(
                f"a share of {far[0][0]:.3g} in the mixture is rounded to {far[0][1]:.3g}: "
                f"shares are whole parts of {PERIOD:,}"
            )
        self.rows = sum(dataset.rows for dataset in datasets)

    def taken(self, position: int) -> np.ndarray:
        """How many of the first `position` samples come from each dataset, int64 (datasets,)."""
        period = len(self._table)
        counts = np.bincount(self._table[: position % period], minlength=len(self.datasets))
        return counts + np.array(self._counts) * (position // period)

    def batch(self, position: int, count: int) -> Batch:
        sources = self._table[np.arange(position, position + count) % len(self._table)]
        before = self.taken(position)
        out: Batch = {}
        for index in np.unique(sources):
            rows = np.flatnonzero(sources == index)
            part = self.datasets[index].batch(int(before[index]), len(rows))
            for name, values in part.items():
                if name not in out:
                    out[name] = np.empty((count, *values.shape[1:]), values.dtype)
                out[name][rows] = values
        return out


def _whole(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole numbers in their exact ratio, or (each at least 1) out of PERIOD if it needs more."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = math.lcm(*(fraction.denominator for fraction in exact))
    whole = [int(fraction * scale) for fraction in exact]
    whole = [number // math.gcd(*whole) for number in whole]
    if sum(whole) <= PERIOD:
        return tuple(whole)
    ideal = [fraction / sum(exact) * PERIOD for fraction in exact]
    rounded = [max(1, int(number)) for number in ideal]
    by_rest = sorted(range(len(ideal)), key=lambda i: int(ideal[i]) - ideal[i])
    for step in range(max(0, PERIOD - sum(rounded))):
        rounded[by_rest[step % len(ideal)]] += 1
    return tuple(rounded)


@lru_cache(maxsize=16)
def _schedule(counts: tuple[int, ...]) -> np.ndarray:
    """The dataset of each sample of one period, int64: an earliest-deadline schedule in exact arithmetic."""
    period, kinds = sum(counts), len(counts)
    given = [0] * kinds
    table = np.empty(period, np.int64)
    scale = 2 * kinds - 2 or 1
    for step in range(1, period + 1):
        best, deadline = -1, 0.0
        for kind, count in enumerate(counts):
            owed = count * step - given[kind] * period  # its share so far less what it gave, times the period
            if kinds == 1 or owed * scale >= period:
                due = (period * (scale - 1) / scale - owed) / count
                if best < 0 or due < deadline:
                    best, deadline = kind, due
        given[best] += 1
        table[step - 1] = best
    return table
