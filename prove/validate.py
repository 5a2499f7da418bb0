"""Replay published measurements: every row of `published/*.json` predicted, beside what was reported.

A row names a model, a batch, a layout, the software and the cluster; what it does not say comes from the
`defaults` of its file. A row with `left_out` lacks a fact without which nothing can be predicted; it is listed
with its reason and does not count.
"""

import dataclasses
import json
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..core.console import table
from ..models.presets import preset
from ..planner.constants import FITTED, Constants
from ..planner.cost import step_seconds
from ..planner.hardware import Cluster, find_cluster
from ..planner.memory import capacity_bytes, device_terms, needed_bytes
from ..planner.software import Software, find_software
from ..planner.work import RECOMPUTES, SHARDINGS, Layouts, Work

PUBLISHED = Path(__file__).parents[1] / "planner" / "published"


@dataclass(frozen=True)
class Case:
    """One published run: phases of (steps, work, layout), and the seconds it took."""

    table: str
    name: str
    phases: tuple[tuple[float, Work, Layouts], ...]
    cluster: Cluster
    software: Software
    seconds: float
    reported: str
    left_out: str = ""


@dataclass(frozen=True)
class Replay:
    """A case and its prediction."""

    case: Case
    predicted: float  # seconds

    @property
    def error(self) -> float:
        """Relative error of the predicted time."""
        return self.predicted / self.case.seconds - 1


@cache
def published_cases() -> tuple[Case, ...]:
    """Every measured training run, in the order of the files' names."""
    return tuple(_case(name, row) for name, row in published_rows("steps"))


def _case(table: str, row: dict[str, Any]) -> Case:
    config = preset(row["model"], **row.get("override", {}))
    software = find_software(row["software"], row.get("compute", ""))
    if "every_logit" in row:
        software = dataclasses.replace(software, every_logit=row["every_logit"])
    phases = tuple(_phase(config, row | phase) for phase in row.get("phases", [{}]))
    if not (seconds := row.get("seconds")):  # a row that reports model TFLOP/s for each chip
        _, work, layouts = phases[0]
        flops = work.config.flops_per_token(work.length) * work.tokens
        seconds = flops / (row["tflops"] * 1e12 * layouts.world)
    cluster, left_out = find_cluster(row["on"]), row.get("left_out", "")
    return Case(table, row["name"], phases, cluster, software, seconds, row.get("reported", ""), left_out)


def _phase(config: Any, row: dict[str, Any]) -> tuple[float, Work, Layouts]:
    work = Work(config, row["rows"], row["length"], row.get("predicted", 1.0), row.get("fill", 1.0))
    names = ("tensor", "pipeline", "data", "context", "turns", "offload")
    layouts = Layouts(
        **{name: row.get(name, int(name != "offload")) for name in names},
        micro_rows=row.get("micro_rows") or row["rows"] / row.get("data", 1),
        sharding=SHARDINGS.index(row.get("sharding", "replicated")),
        recompute=RECOMPUTES.index(row.get("recompute", "none")),
    )
    return row.get("steps", 1), work, layouts


def predict(case: Case, constants: Constants = FITTED) -> float:
    """Seconds of the whole case."""
    return sum(
        steps * step_seconds(work, layouts, case.cluster, case.software, constants)
        for steps, work, layouts in case.phases
    )


def replay(constants: Constants = FITTED) -> list[Replay]:
    """Every case that counts, predicted."""
    return [Replay(case, predict(case, constants)) for case in published_cases() if not case.left_out]


def medians(replays: list[Replay]) -> dict[str, tuple[int, float, float]]:
    """Rows, median and largest absolute relative error of each table."""
    tables: dict[str, list[float]] = {}
    for found in replays:
        tables.setdefault(found.case.table, []).append(abs(found.error))
    return {name: (len(errors), statistics.median(errors), max(errors)) for name, errors in tables.items()}


def replay_memory() -> list[tuple[str, float, float]]:
    """Name, predicted and reported GiB of every published figure of memory (`kind` memory).

    States are those of the mean process: a figure of a whole model divides them by the number of processes.
    """
    found = []
    for name, row in published_rows("memory"):
        case = _case(name, row | {"seconds": 1.0})
        _, work, layouts = case.phases[0]
        if row["terms"] == "states":
            size = work.config.parameter_count() * case.software.precision.state / layouts.world
        else:
            size = float(device_terms(work, layouts, case.software)["activations"])
        found.append((row["name"], size / 2**30, row["gib"]))
    return found


def replay_limits() -> list[tuple[str, bool, bool]]:
    """Name, whether it is predicted to fit, and whether it was reported to: every run, every published limit, and
    the step above each limit.
    """
    found = [(f"{case.table}: {case.name}", _fits(case), True) for case in published_cases()]
    for name, row in published_rows("limits"):
        for fields, fit in ((row, True), (row | row["above"], False)):
            case = _case(name, fields | {"seconds": 1.0})
            found.append((row["name"] + ("" if fit else ", one step above"), _fits(case), fit))
    return found


def _fits(case: Case) -> bool:
    capacity = capacity_bytes(case.cluster.chip.memory_gib)
    return all(needed_bytes(work, layouts, case.software) <= capacity for _, work, layouts in case.phases)


def published_rows(kind: str) -> list[tuple[str, dict[str, Any]]]:
    """The rows of all files of a kind, each with its file's name and defaults."""
    tables = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(PUBLISHED.glob("*.json"))
    }
    return [
        (name, table.get("defaults", {}) | row)
        for name, table in tables.items()
        if table.get("kind", "steps") == kind
        for row in table["rows"]
    ]


GOALS = {"mean of table medians": 0.06, "memory": 0.03}


def validation(all_rows: bool) -> tuple[dict[str, Any], list[str], bool]:
    """Facts and lines of `plan validate`, and whether every goal is met."""
    replays = replay()
    tables, memory, limits = medians(replays), replay_memory(), replay_limits()
    mean = statistics.mean(median for _, median, _ in tables.values())
    worst = max(abs(predicted / reported - 1) for _, predicted, reported in memory)
    wrong = [name for name, predicted, fit in limits if predicted != fit]
    rows = [
        {
            "table": found.case.table,
            "name": found.case.name,
            "reported": found.case.reported,
            "reported_seconds": found.case.seconds,
            "predicted_seconds": found.predicted,
            "error": found.error,
        }
        for found in replays
    ]
    shown = [
        (
            f"{row['table']}: {row['name']}",
            f"{row['reported_seconds']:.4g}",
            f"{row['predicted_seconds']:.4g}",
            f"{row['error']:+.1%}",
        )
        for row in rows
    ]
    lines = [*table(("row", "reported s", "predicted s", "error"), shown), ""] if all_rows else []
    outside = {row["table"]: row["left_out"] for _, row in published_rows("fit")}
    cells = [
        (name, count, f"{median:.1%}", f"{most:.1%}", f"{outside[name]:.1%}" if name in outside else "-")
        for name, (count, median, most) in tables.items()
    ]
    lines += table(("table", "rows", "median error", "largest", "left out of the fit"), cells)
    lines += ["", f"mean of the tables' medians: {mean:.1%} (goal 6 %)"]
    lines[-1] += f"; left out of the fit: {statistics.mean(outside.values()):.1%} (goal 10 %)"
    lines += [f"published GiB: {len(memory)} figures, largest error {worst:.1%} (goal 3 %)"]
    lines += [f"fits and does not fit: {len(limits) - len(wrong)} of {len(limits)} as reported"]
    skipped = [case for case in published_cases() if case.left_out]
    if all_rows:
        lines += [f"left out, {case.table}: {case.name}: {case.left_out}" for case in skipped]
    else:
        lines += [f"left out: {len(skipped)} rows that lack a fact (--rows names them)"]
    names = ("rows", "median", "largest")
    facts = {
        "tables": {name: dict(zip(names, found, strict=True)) for name, found in tables.items()},
        "mean_of_medians": mean,
        "left_out": outside,
        "memory_largest": worst,
        "limits_wrong": wrong,
        "rows": rows,
    }
    return facts, lines, mean <= GOALS["mean of table medians"] and worst <= GOALS["memory"] and not wrong
