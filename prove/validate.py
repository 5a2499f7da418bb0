"""Replay measurements beside their predictions: every row of `published/*.json`, and our own runs.

A published row names a model, a batch, a layout, the software and the cluster; what it does not say comes from the
`defaults` of its file. A row with `left_out` lacks a fact without which nothing can be predicted; it is listed with its
reason and does not count. A file of own predictions, made before their measurement, holds cases, each with what was
predicted and, once measured, what was found; `digest` is of all that was predicted, so that a change is seen.
"""

import dataclasses
import hashlib
import json
import math
import statistics
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from ..core.console import amount, table
from ..core.errors import WrongUse
from ..models.config import preset
from ..planner.cost import step_seconds
from ..planner.hardware import FITTED, Cluster, Constants, find_cluster
from ..planner.memory import capacity_bytes, device_terms, needed_bytes
from ..planner.serve import largest_service
from ..planner.work import RECOMPUTES, SHARDINGS, Layouts, Software, Work, find_software

FEWEST = 5  # rows that a band rests on
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
    memory_unsaid: bool = False  # its source does not say what is recomputed or held on the host

    @property
    def fitted(self) -> bool:
        """Whether the constants were fitted on it: half of the rows, by a hash of their names, and never the others."""
        return hashlib.sha256(f"{self.table}: {self.name}".encode()).digest()[0] % 2 == 0

    @property
    def experts(self) -> bool:
        """Whether its model has experts: these have constants of their own, and are judged apart."""
        return bool(getattr(self.phases[0][1].config, "experts", 0))


@dataclass(frozen=True)
class Replay:
    """A case and its prediction."""

    case: Case
    predicted: float  # seconds

    @property
    def error(self) -> float:
        return self.predicted / self.case.seconds - 1


@cache
def published_cases() -> tuple[Case, ...]:
    """Every measured training run, in the order of the files' names."""
    return tuple(_case(name, row) for name, row in published_rows("steps"))


def _case(table: str, row: dict[str, Any]) -> Case:
    config = preset(row["model"], **row.get("override", {}))
    software = find_software(row["software"], row.get("compute", ""))
    software = dataclasses.replace(software, **row.get("switches", {}))
    phases = tuple(_phase(config, row | phase) for phase in row.get("phases", [{}]))
    if not (seconds := row.get("seconds")):  # a row that reports model TFLOP/s for each chip
        _, work, layouts = phases[0]
        flops = work.config.flops_per_token(work.length) * work.tokens
        seconds = flops / (row["tflops"] * 1e12 * layouts.world)
    cluster, left_out = find_cluster(row["on"]), row.get("left_out", "")
    unsaid = row.get("memory_unsaid", False)
    reported = row.get("reported", "")
    return Case(table, row["name"], phases, cluster, software, seconds, reported, left_out, unsaid)


def _phase(config: Any, row: dict[str, Any]) -> tuple[float, Work, Layouts]:
    work = Work(config, row["rows"], row["length"], row.get("predicted", 1.0), row.get("fill", 1.0))
    names = ("tensor", "pipeline", "data", "context", "turns", "offload", "expert")
    layouts = Layouts(
        **{name: row.get(name, int(name != "offload")) for name in names},
        micro_rows=row.get("micro_rows") or row["rows"] / row.get("data", 1),
        sharding=SHARDINGS.index(row.get("sharding", "replicated")),
        recompute=RECOMPUTES.index(row.get("recompute", "none")),
    )
    return row.get("steps", 1), work, layouts


def predict(case: Case, constants: Constants = FITTED) -> float:
    """Seconds of the whole case."""
    cluster = dataclasses.replace(case.cluster, constants=constants)
    priced = partial(step_seconds, cluster=cluster, software=case.software)
    return sum(steps * priced(work, layouts) for steps, work, layouts in case.phases)


def replay() -> list[Replay]:
    """Every case that counts, predicted."""
    return [Replay(case, predict(case)) for case in published_cases() if not case.left_out]


def medians(replays: list[Replay]) -> dict[str, tuple[int, float, float]]:
    """Rows, median and largest absolute relative error of each table."""
    tables: dict[str, list[float]] = {}
    for found in replays:
        tables.setdefault(found.case.table, []).append(abs(found.error))
    return {name: (len(errors), statistics.median(errors), max(errors)) for name, errors in tables.items()}


def bands(replays: list[Replay]) -> dict[str, dict[str, Any]]:
    """What planner/bands.toml holds: for each program the number of rows left out of the fit, the 80 % quantile of
    their errors (5 % at least) and the chips of all its rows. A program with fewer than five left out has the widest of
    these, of all its rows, fitted or not, and of its family, the programs whose names begin alike; none when that has
    too few.
    """
    table = {}
    for name in sorted({found.case.software.name for found in replays}):
        own = [found for found in replays if found.case.software.name == name]
        family = [found for found in replays if _family(found.case.software.name) == _family(name)]
        left_out = [abs(found.error) for found in own if not found.case.fitted]
        others = [abs(found.error) for found in family if not found.case.fitted]
        widths = [_quantile(left_out)]
        if len(left_out) < FEWEST:
            widths += [_quantile(others), _quantile([abs(found.error) for found in own])]
        if len(others) >= FEWEST:
            chips = sorted({found.case.cluster.chip.key for found in own})
            wide = math.ceil(1e3 * max(0.05, *widths)) / 1e3
            table[name] = {"rows": len(left_out), "band": wide, "chips": chips}
    return table


def _family(software: str) -> str:
    return software.partition("-")[0]


def _quantile(errors: list[float]) -> float:
    return sorted(errors)[math.ceil(0.8 * len(errors)) - 1] if errors else 0.0


def replay_memory() -> list[tuple[str, float, float]]:
    """Name, predicted and reported GiB of every published figure of memory; states are those of the mean process."""
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
    """Name, whether it is said to fit, and whether it did: every run, every limit, and the step above each limit."""
    cases = [case for case in published_cases() if not case.memory_unsaid]
    found = [(f"{case.table}: {case.name}", _fits(case), True) for case in cases]
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
    found = []
    for path in sorted(PUBLISHED.glob("*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))
        if rows.get("kind", "steps") == kind:
            found += [(path.stem, rows.get("defaults", {}) | row) for row in rows["rows"]]
    return found


# mean of the tables' medians; GiB; median of a program's rows left out; bias of the H100's; throughput of engines
GOALS = {"tables": 0.06, "memory": 0.03, "left out": 0.08, "h100": 0.05, "throughput": 0.10}


def by_program(replays: list[Replay]) -> dict[str, dict[str, float]]:
    """For each program: rows left out of the fit, their median error, their bias, and the share inside its band."""
    found = {}
    for name, row in bands(replays).items():
        errors = [item.error for item in replays if item.case.software.name == name and not item.case.fitted]
        if errors:
            inside = sum(abs(error) <= row["band"] for error in errors) / len(errors)
            found[name] = {
                "rows": len(errors),
                "median": statistics.median(map(abs, errors)),
                "bias": statistics.median(errors),
                "band": row["band"],
                "inside": inside,
            }
    return found


def production_factor(table: str = "") -> tuple[int, float]:
    """Rows of long runs as reported, of one table or all, and the median of reported over predicted seconds."""
    rows = [(name, row) for name, row in published_rows("production") if table in ("", name)]
    cases = [_case(name, row) for name, row in rows]
    return len(cases), statistics.median(case.seconds / predict(case) for case in cases)


def validation(all_rows: bool) -> tuple[dict[str, Any], list[str], bool]:
    """Facts and lines of `plan validate`, and whether every goal is met."""
    replays = replay()
    halves = [[item for item in replays if item.case.fitted == fitted] for fitted in (True, False)]
    tables, memory, limits = medians(replays), replay_memory(), replay_limits()
    programs, apart = by_program(replays), [medians(half) for half in halves]
    mixed = [item.error for item in replays if item.case.experts and not item.case.fitted]
    dense = [item for item in replays if not item.case.experts]
    wrong = [name for name, predicted, fit in limits if predicted != fit]
    judged = [item for item in dense if not item.case.fitted]
    on_h100 = [item.error for item in judged if item.case.cluster.chip.key.startswith("h100")]
    h100 = statistics.median(on_h100)
    engines = [abs(error) for _, error in throughput_errors()]
    reached = {
        "tables": statistics.mean(median for _, median, _ in medians(dense).values()),
        "memory": max(abs(predicted / reported - 1) for _, predicted, reported in memory),
        "left out": max(row["median"] for row in by_program(dense).values() if row["rows"] >= FEWEST),
        "h100": abs(h100),
        "throughput": statistics.median(engines),
    }
    rows, shown = [], []
    for item in replays:
        case = item.case
        said = {name: getattr(case, name) for name in ("table", "name", "fitted", "reported")}
        times = {"reported_seconds": case.seconds, "predicted_seconds": item.predicted, "error": item.error}
        rows.append(said | times)
        half = "fitted" if case.fitted else "left out"
        cells = f"{case.seconds:.4g}", f"{item.predicted:.4g}", f"{item.error:+.1%}"
        shown.append((f"{case.table}: {case.name}", half, *cells))
    lines: list[str] = []
    if all_rows:
        lines += [*table(("row", "half", "reported s", "predicted s", "error"), shown), ""]
    by_table: list[tuple] = []
    for name, (count, _, most) in tables.items():
        sides = [f"{half[name][1]:.1%} ({half[name][0]})" if name in half else "-" for half in apart]
        by_table.append((name, count, *sides, f"{most:.1%}"))
    lines += table(("median error of", "rows", "fitted", "left out", "largest"), by_table)
    told: list[tuple] = []
    for name, row in programs.items():
        wide = f"{row['band']:.1%}", f"{row['inside']:.0%}"
        told.append((name, row["rows"], f"{row['median']:.1%}", f"{row['bias']:+.1%}", *wide))
    lines += ["", *table(("program, rows left out", "rows", "median", "bias", "band", "inside"), told)]
    runs, factor = production_factor()
    skipped = [case for case in published_cases() if case.left_out]
    lines += [
        "",
        f"mean of the tables' medians: {reached['tables']:.1%} (goal 6 %)",
        f"largest median of a program's rows left out: {reached['left out']:.1%} (goal 8 %, of {FEWEST} rows or more)",
        f"bias on the H100, rows left out: {h100:+.1%} (goal 5 %)",
        f"models with experts, rows left out: {len(mixed)}, median {statistics.median(map(abs, mixed)):.1%}, bias "
        f"{statistics.median(mixed):+.1%} (three constants are theirs alone; in no goal above)",
        f"long runs as reported: {factor:.2f} times the prediction ({runs} rows)",
        f"engines under full load: {len(engines)} figures, median {reached['throughput']:.1%} (goal 10 %), none fitted",
        f"published GiB: {len(memory)} figures, largest error {reached['memory']:.1%} (goal 3 %)",
        f"fits and does not fit: {len(limits) - len(wrong)} of {len(limits)} as reported",
    ]
    if all_rows:
        lines += [f"not counted, {case.table}: {case.name}: {case.left_out}" for case in skipped]
    else:
        lines += [f"not counted: {len(skipped)} rows that lack a fact (--rows names them)"]
    names = ("rows", "median", "largest")
    facts = {
        "tables": {name: dict(zip(names, found, strict=True)) for name, found in tables.items()},
        "programs": programs,
        "reached": reached,
        "production": factor,
        "limits_wrong": wrong,
        "rows": rows,
    }
    return facts, lines, all(reached[name] <= goal for name, goal in GOALS.items()) and not wrong


def throughput_errors() -> list[tuple[str, float]]:
    """Name and relative error of every published throughput of an engine under full load (`kind` throughput)."""
    found = []
    for _, row in published_rows("throughput"):
        config, cluster = preset(row["model"], **row["override"]), find_cluster(row["on"])
        for (length, new), reported in zip(row["tokens"], row["tokens_per_second"], strict=True):
            service = largest_service(config, cluster, length, new, row["precision"], row["tensor"])
            name = f"{row['model']} on {row['tensor']} x {cluster.chip.key}, {length} and {new} tokens"
            found.append((name, (service.tokens_per_second if service else 0.0) / reported - 1))
    return found


OWN_GOALS = {"seconds": 0.12, "bytes": 0.10}  # of medians


def prediction_digest(cases: list[dict[str, Any]]) -> str:
    """SHA-256 of all cases as they were predicted: everything but what was measured since."""
    said = [{key: case[key] for key in case if key != "measured"} for case in cases]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def read_predictions(path: Path) -> dict[str, Any]:
    """One file. Raises WrongUse when a prediction is no longer the one that was made."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if prediction_digest(found["cases"]) != found["digest"]:
        text = "a prediction was changed after it was made"
        raise WrongUse(text, where=path, fix="git log shows what it was")
    return found


def own_validation(folder: Path) -> tuple[dict[str, Any], list[str], bool]:
    """Facts and lines of `plan validate --own`, and whether both goals are met. Raises WrongUse without predictions."""
    files = sorted(folder.glob("*.json"))
    if not files:
        fix = "a folder of *.json, such as benchmarks/results/predictions"
        raise WrongUse("no predictions here", where=folder, fix=fix)
    rows, cells = [], []
    for path in files:
        found = read_predictions(path)
        for case in found["cases"]:
            said, seen = case["predicted"], case.get("measured")
            row = {"file": path.name, "name": case["name"], "prepared": found["prepared"]}
            errors = {kind: said[kind] / seen[kind] - 1 for kind in OWN_GOALS} if seen else {}
            rows.append(row | {"predicted": said, "measured": seen, "errors": errors})
            shown = ("not yet", "-", "-", "not yet", "-")
            if seen:
                wrong = [f"{errors[kind]:+.1%}" for kind in ("seconds", "bytes")]
                time, size = f"{seen['seconds']:.4g}", amount(seen["bytes"], "B")
                shown = (time, wrong[0], f"{seen['spread']:.1%}", size, wrong[1])
            name, size = f"{path.stem}: {case['name']}", amount(said["bytes"], "B")
            cells.append((name, f"{said['seconds']:.4g}", *shown[:3], size, *shown[3:]))
    header = ("prediction", "s/step", "measured", "error", "repeats differ", "memory", "measured", "error")
    lines, measured = table(header, cells), [row for row in rows if row["measured"]]
    medians = {}
    for kind in OWN_GOALS if measured else ():
        medians[kind] = statistics.median(abs(row["errors"][kind]) for row in measured)
    lines += ["", f"{len(measured)} of {len(rows)} predictions measured since"]
    lines += [
        f"median error in {'time' if kind == 'seconds' else 'memory'}: {median:.1%} (goal {OWN_GOALS[kind]:.0%})"
        for kind, median in medians.items()
    ]
    good = all(median <= OWN_GOALS[kind] for kind, median in medians.items())
    return {"predictions": rows, "medians": medians}, lines, good
