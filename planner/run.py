"""A whole run from the time of its steps: days, money, energy and carbon, and what failures and production add.

A benchmark's days are steps x seconds. A run stops when any of its nodes fails, so its time between failures is a
node's over their number. With saves that take D seconds, a restart of R, failures every M on average and saves every T
of training, a stretch of T needs M exp(R / M) (exp((T + D) / M) - 1) seconds (Daly 2006, equation 20), and the best T
is about sqrt(2 D M) (Young 1974).
"""

import dataclasses
import math
import statistics
from dataclasses import dataclass
from typing import Any

from ..core.errors import WrongUse, did_you_mean
from ..core.files import shipped_table
from .cost import step_seconds
from .search import Candidate, Search, band

SECONDS_PER_DAY = 86400.0
PRODUCTION = 1.25  # a long run as reported takes longer than its benchmark by this (docs/planning.md)
RESTART_S = 300.0  # to find the fault, start elsewhere and read; our launcher takes 5 s (docs/results.md)
REPAIR_DAYS = 3.0  # that a failed node is away
SHORT = 0.01  # chance that more nodes are away at once than there are spares
SAVED_BYTES = 12  # of a parameter in a checkpoint: fp32 weight and two moments
PAUSE_S = 0.1  # that training waits for a save beside the copy: docs/results.md, save-pause
WRITTEN_GB_S = 1.0  # to storage by a node, while training goes on; set
BETWEEN_STEPS = 64  # sizes of a growing batch that are priced; more of them change days by less than 0.1 %
Ramp = tuple[int, int, int]  # rows of the first batch, rows added each time, rows until it is whole


@dataclass(frozen=True)
class Goodput:
    """Of a run on nodes that fail."""

    between_failures_s: float
    save_every_s: float
    share: float
    spare_nodes: int


def node_failures() -> dict[str, float]:
    """Published failures of a node in a day, by the name of the run."""
    rows = shipped_table(__file__, "failures.toml").items()
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


@dataclass(frozen=True)
class Run:
    """How long it is, and what stops it."""

    tokens: float = 0.0
    ramp: Ramp | None = None
    failures: float = 0.0  # 0: the median of the published rates
    save_s: float = 0.0  # 0: reckoned
    restart_s: float = RESTART_S
    repair_days: float = REPAIR_DAYS
    production: bool = False
    grid: float = 0.0  # g of CO2 a kWh


def grid_intensity(name: str) -> float:
    """Grams of CO2 a kWh of a number, or of a country of grids.toml. Raises WrongUse."""
    grids = shipped_table(__file__, "grids.toml")
    try:
        value = grids.get(name) or float(name)
    except ValueError:
        value = -1.0
    if 0 <= value <= 2000:
        return value
    fix = did_you_mean(name, list(grids), "0 to 2000 g a kWh, or one of " + ", ".join(grids))
    raise WrongUse(f"no grid {name!r}", where="--grid", fix=fix)


def nodes_of(search: Search) -> int:
    """Whole ones."""
    return -(-search.world // search.cluster.chips_per_node)


def run_seconds(search: Search, candidate: Candidate, run: Run) -> float:
    """Seconds of all steps, with the batch growing where it does."""
    work, ramp = search.work, run.ramp
    rows = run.tokens / work.length
    if ramp is None:
        return rows / work.rows * candidate.seconds
    unit = candidate.layouts.data * candidate.layouts.micro_rows
    sizes = range(ramp[0], work.rows, ramp[1]) or [work.rows]
    growing = min(rows, ramp[2])
    priced = sizes[:: max(1, len(sizes) // BETWEEN_STEPS)]
    seconds = 0.0
    for size in priced:  # a size that the layout cannot share out is computed with some processes idle
        small = dataclasses.replace(work, rows=max(unit, -(-size // unit) * unit))
        once = step_seconds(small, candidate.layouts, search.cluster, search.software)
        seconds += growing / len(priced) / size * once
    return seconds + (rows - growing) / work.rows * candidate.seconds


def saves_of(search: Search, candidate: Candidate, run: Run) -> tuple[float, float, float, float]:
    """What goodput asks of a run: seconds of a save's copy and a restart, days of a repair, seconds to write."""
    cluster, config = search.cluster, search.work.config
    owned = float(candidate.layouts.owned_parameters(config, search.software))
    copied = SAVED_BYTES * owned / (cluster.host_gb_s * 1e9)
    written = SAVED_BYTES * config.parameter_count() / (nodes_of(search) * WRITTEN_GB_S * 1e9)
    return run.save_s or PAUSE_S + copied, run.restart_s, run.repair_days, written


def run_facts(search: Search, candidate: Candidate, run: Run) -> dict[str, Any]:
    """Days, with failures and a span by band and rates, money, energy and carbon; nothing without tokens."""
    if not run.tokens:
        return {}
    cluster, world, nodes = search.cluster, search.world, nodes_of(search)
    factor = PRODUCTION if run.production else 1.0
    days = run_seconds(search, candidate, run) / SECONDS_PER_DAY * factor
    rates = (run.failures,) * 3 if run.failures else usual_failures()
    saves, wide = saves_of(search, candidate, run), band(search)
    low, usual, high = (goodput(nodes, rate, *saves) for rate in rates)
    expected = days / max(usual.share, 1e-9)
    hours = expected * 24 * (world + usual.spare_nodes * min(cluster.chips_per_node, world))
    kwh = hours * cluster.watts_per_chip / 1e3 if cluster.watts_per_chip else None
    return {
        "days": days,
        "expected_days": expected,
        "days_low": days * (1 - wide) / max(low.share, 1e-9),
        "days_high": days * (1 + wide) / max(high.share, 1e-9),
        "goodput": usual.share,
        "failures_a_day": nodes * rates[1],
        "save_every_minutes": usual.save_every_s / 60,
        "save_seconds": saves[0],
        "spare_nodes": usual.spare_nodes,
        "cost": hours * cluster.price_per_chip_hour if cluster.price_per_chip_hour else None,
        "currency": cluster.currency,
        "kwh": kwh,
        "co2_kg": kwh * run.grid / 1e3 if kwh is not None and run.grid else None,
        "production": factor,
    }


def run_lines(facts: dict[str, Any]) -> list[str]:
    """The same in words."""
    if not facts:
        return []
    spares = f"{facts['spare_nodes']} spare node{'s' * (facts['spare_nodes'] != 1)}"
    lines = [
        f"expected: {facts['expected_days']:.3g} days ({facts['days_low']:.3g} to {facts['days_high']:.3g}), "
        f"{facts['goodput']:.1%} of them training: {facts['failures_a_day']:.2g} failures a day, a save every "
        f"{facts['save_every_minutes']:.3g} minutes, {spares}"
    ]
    if facts["cost"]:
        lines += [f"cost with spares: {facts['cost']:,.0f} {facts['currency']}"]
    if facts["kwh"]:
        carbon = f", {facts['co2_kg'] / 1e3:,.3g} t of CO2" if facts["co2_kg"] is not None else ""
        lines += [f"energy of the machines: {facts['kwh'] / 1e3:,.3g} MWh{carbon}"]
    if (factor := facts["production"]) != 1:
        lines += [f"production: days are {factor:g} times the benchmark's, as long runs were reported"]
    return lines
