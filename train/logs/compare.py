"""Two runs compared step by step: did they train the same model?"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import Refused, WrongUse
from .metrics import FILE, read_metrics

FIGURES = ("loss", "grad_norm")


@dataclass(frozen=True)
class Difference:
    """The step at which one figure of two runs differs most, relative to the larger; inf where one alone is
    not finite.
    """

    name: str
    steps: int
    alone: int  # steps that one run alone logged, and that nothing is compared with
    difference: float
    step: int
    first: float | None
    second: float | None


def compare_runs(first: Path | str, second: Path | str) -> list[Difference]:
    """The largest relative difference of each figure over the steps that both runs logged.

    Raises WrongUse when one has no metrics or they share no step.
    """
    tables = []
    for run in (first, second):
        if not (Path(run) / FILE).is_file():
            fix = f"give the directory of a run, which has a {FILE}, or of scores, which `throughline eval` names"
            raise WrongUse("no metrics to compare", where=run, fix=fix)
        tables.append({record["step"]: record for record in read_metrics(run) if "loss" in record})
    steps = sorted(set(tables[0]) & set(tables[1]))
    if not steps:
        raise WrongUse("the runs logged no step in common", where=f"{first}, {second}")
    return [_largest(name, steps, *tables) for name in FIGURES]


def _largest(name: str, steps: list[int], first: dict[int, Any], second: dict[int, Any]) -> Difference:
    def difference(step: int) -> float:
        a, b = first[step][name], second[step][name]
        if a is None or b is None:
            return 0.0 if a == b else float("inf")
        return abs(a - b) / max(abs(a), abs(b), 1e-300)

    worst = max(steps, key=difference)  # the first of several
    pair = first[worst][name], second[worst][name]
    return Difference(name, len(steps), len(set(first) ^ set(second)), difference(worst), worst, *pair)


def check_bound(comparison: list[Difference], bound: float, first: Path | str, second: Path | str) -> None:
    """Raise Refused naming the figure and the step when a difference is above the bound."""
    above = [row for row in comparison if not row.difference <= bound]
    if above:
        raise Refused(
            f"the runs differ by more than the relative bound {bound:g}",
            where=f"{first}, {second}",
            why="\n".join(
                f"{row.name} by {row.difference:.3g} at step {row.step:,}: {row.first}, {row.second}"
                for row in above
            ),
        )
