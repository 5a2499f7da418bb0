"""Metrics: what records contribute, as arrays, how it becomes a number, and its standard error."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from .items import Item

RESAMPLES = 1000
MOST_NATS = 300.0  # whose exponential is written
_RESAMPLE_CELLS = 1 << 17  # drawn indices held at a time: 1 MiB

Rows = np.ndarray  # (n, k): one line per record, k numbers each


@dataclass(frozen=True)
class Metric:
    """`aggregate` maps (..., n, k) to (...); `mean` marks a plain mean of k = 1, whose error has a closed form.
    `per` is the unit that is counted. `higher` is the better direction.
    """

    aggregate: Callable[[Rows], np.ndarray]
    per: str = "record"
    higher: bool = True
    mean: bool = False


def mean(rows: Rows) -> np.ndarray:
    """Of the first number of each line."""
    return rows[..., 0].mean(axis=-1)


def _exp(nats: np.ndarray) -> np.ndarray:
    """Capped: a page without blanks is one word of thousands of nats, and JSON has no infinity."""
    return np.exp(np.minimum(nats, MOST_NATS))


def per_unit(rows: Rows) -> np.ndarray:
    """The sum over units; lines are (sum, units)."""
    return rows[..., 0].sum(axis=-1) / rows[..., 1].sum(axis=-1)


def _perplexity(rows: Rows) -> np.ndarray:
    """exp of the negative log-probability per unit; lines are (log-probability, units)."""
    return _exp(-per_unit(rows))


def _f1_of(rows: Rows, label: int) -> np.ndarray:
    """F1 of one label; lines are (gold, predicted). 0 where nothing is right, as scikit-learn has it."""
    gold, predicted = rows[..., 0] == label, rows[..., 1] == label
    both = (gold & predicted).sum(axis=-1)
    total = gold.sum(axis=-1) + predicted.sum(axis=-1)
    return np.divide(2.0 * both, total, out=np.zeros(np.shape(total)), where=total > 0)


def _f1_macro(rows: Rows) -> np.ndarray:
    """Mean F1 over all labels; lines are (gold, predicted, choices)."""
    return np.mean([_f1_of(rows, label) for label in range(int(rows[..., 2].max()))], axis=0)


def _mcc(rows: Rows) -> np.ndarray:
    """Matthews' correlation of two labels; lines are (gold, predicted). 0 where either is constant."""
    centred = rows[..., :2] - rows[..., :2].mean(axis=-2, keepdims=True)
    spread = np.sqrt((centred**2).sum(axis=-2).prod(axis=-1))
    both = centred.prod(axis=-1).sum(axis=-1)
    return np.divide(both, spread, out=np.zeros(np.shape(both)), where=spread > 0)


MEANS = "acc centred acc_norm acc_bytes exact_match f1_words contains share_right p_at_1 p_at_10 pass@1"
MEANS += " prompt_level_strict_acc prompt_level_loose_acc"
METRICS: dict[str, Metric] = {
    **dict.fromkeys(MEANS.split(), Metric(mean, mean=True)),
    **dict.fromkeys(("inst_level_strict_acc", "inst_level_loose_acc"), Metric(per_unit, "instruction")),
    "brier_score": Metric(mean, higher=False, mean=True),
    "mcc": Metric(_mcc),
    "f1": Metric(lambda rows: _f1_of(rows, 1)),
    "f1_macro": Metric(_f1_macro),
    "mlm_accuracy": Metric(per_unit, "token"),
    "mlm_perplexity": Metric(_perplexity, "token", higher=False),
    "perplexity": Metric(lambda rows: _exp(-mean(rows)), higher=False),
    "word_perplexity": Metric(_perplexity, "word", higher=False),
    "byte_perplexity": Metric(_perplexity, "byte", higher=False),
    "token_perplexity": Metric(_perplexity, "token", higher=False),
    "adjusted_perplexity": Metric(_perplexity, "word", higher=False),
    "bits_per_byte": Metric(lambda rows: -per_unit(rows) / math.log(2), "byte", higher=False),
}


def metric_of(name: str) -> Metric:
    """The metric of this name, with or without that of a chain of filters; one that is not known is a mean."""
    return METRICS.get(name.partition(",")[0], Metric(mean, mean=True))


def aggregate(how: str | Metric, outcomes: Sequence[Sequence[float]]) -> tuple[float, float | None]:
    """(value, standard error) over records: sd / sqrt(n) of a mean, else by bootstrap (seed 0); None for one record."""
    metric = metric_of(how) if isinstance(how, str) else how
    # of lines of several lengths, which only a harness's own function reads, the shorter end in NaN
    rows = np.array(list(zip_longest(*outcomes, fillvalue=math.nan)), np.float64).T
    value = float(metric.aggregate(rows))
    if len(rows) < 2:
        return value, None
    if metric.mean:
        return value, float(rows[:, 0].std(ddof=1) / math.sqrt(len(rows)))
    return value, float(resampled(metric.aggregate, rows).std(ddof=1))


def resampled(function: Callable[[Rows], np.ndarray], rows: Rows) -> np.ndarray:
    """`function` over resamples of the lines of `rows`, drawn with replacement: (RESAMPLES,)."""
    generator = np.random.default_rng(0)
    at_once = max(1, _RESAMPLE_CELLS // rows.size)
    values = []
    for first in range(0, RESAMPLES, at_once):
        count = min(at_once, RESAMPLES - first)
        values.append(function(rows[generator.integers(len(rows), size=(count, len(rows)))]))
    return np.concatenate(values)


def random_baseline(name: str, items: Sequence[Item]) -> float | None:
    """What guessing scores: the mean of 1 / choices for accuracies, None where guessing has no meaning."""
    if not name.startswith("acc") or not items or not items[0].choices:
        return None
    return float(np.mean([1 / len(item.choices) for item in items]))
