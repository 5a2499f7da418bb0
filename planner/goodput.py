"""What failures cost a run: how often to save, the share of time that trains, spare nodes.

A run stops when any of its nodes fails, so its time between failures is a node's over the number of nodes. With saves
that take D seconds, a restart of R, failures every M on average and saves every T of training, a stretch of T needs
M exp(R / M) (exp((T + D) / M) - 1) seconds (Daly 2006, equation 20), and the best T is about sqrt(2 D M) (Young 1974).
"""

import math
import statistics
from dataclasses import dataclass

from .constants import shipped_table

SECONDS_PER_DAY = 86400.0
PRODUCTION = 1.25  # a long run as reported takes longer than its benchmark by this (docs/planning.md)
RESTART_S = (
    300.0  # to find the fault, start elsewhere and read; our launcher alone takes 5 s (docs/results.md)
)
REPAIR_DAYS = 3.0  # that a failed node is away
SHORT = 0.01  # chance that more nodes are away at once than there are spares


@dataclass(frozen=True)
class Goodput:
    """A run on nodes that fail: seconds between failures and between saves, the share of time that trains."""

    between_failures_s: float
    save_every_s: float
    share: float
    spare_nodes: int


def node_failures() -> dict[str, float]:
    """Published failures of a node in a day, by the name of the run."""
    rows = shipped_table("failures.toml").items()
    return {name: row["interruptions"] / row["nodes"] / row["days"] for name, row in rows}


def usual_failures() -> tuple[float, float, float]:
    """Failures of a node in a day: the least, the median and the most that were published."""
    rates = sorted(node_failures().values())
    return rates[0], statistics.median(rates), rates[-1]


def save_interval(save_s: float, between_failures_s: float) -> float:
    """Seconds of training between two saves that lose least (Daly 2006, equation 37, the higher-order estimate)."""
    if save_s >= 2 * between_failures_s:
        return between_failures_s
    part = save_s / (2 * between_failures_s)
    return math.sqrt(2 * save_s * between_failures_s) * (1 + math.sqrt(part) / 3 + part / 9) - save_s


def trained_share(every_s: float, save_s: float, restart_s: float, between_failures_s: float) -> float:
    """Share of the time that trains, of a run that saves after every `every_s` seconds of training."""
    mean = between_failures_s
    if (every_s + save_s + restart_s) / mean > 500:  # it would never get past its first stretch
        return 0.0
    return every_s / (mean * math.exp(restart_s / mean) * math.expm1((every_s + save_s) / mean))


def goodput(
    nodes: int, failures: float, save_s: float, restart_s: float, repair_days: float, written_s: float = 0.0
) -> Goodput:
    """A run on so many nodes, each of which fails `failures` times a day; a save takes `written_s` to be written."""
    between = SECONDS_PER_DAY / (nodes * failures)
    every = max(save_interval(save_s, between), written_s)
    share = trained_share(every, save_s, restart_s, between)
    return Goodput(between, every, share, spare_nodes(nodes * failures * repair_days))


def spare_nodes(away: float) -> int:
    """Nodes to hold ready when `away` are away on average, Poisson: the fewest that are too few in one case of 100."""
    if away > 500:  # the sum below would underflow; the normal distribution is the same
        return math.ceil(away + statistics.NormalDist().inv_cdf(1 - SHORT) * math.sqrt(away))
    spares, term = 0, math.exp(-away)
    covered = term
    while covered < 1 - SHORT:
        spares += 1
        term *= away / spares
        covered += term
    return spares
