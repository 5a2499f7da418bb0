"""Predictions made before their measurement: `predictions/*.json` beside the results, read for `plan validate --own`.

A file holds cases, each with what was predicted and, once measured, what was found; `prepared` is when it was predicted
and `digest` is of everything predicted, so that a prediction changed afterwards is seen.
"""

import hashlib
import json
import statistics
from pathlib import Path
from typing import Any

from ..core.console import amount, table
from ..core.errors import WrongUse

GOALS = {"seconds": 0.12, "bytes": 0.10}


def prediction_digest(cases: list[dict[str, Any]]) -> str:
    """SHA-256 of all cases as they were predicted: everything but what was measured since."""
    said = [{key: case[key] for key in case if key != "measured"} for case in cases]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def read_predictions(path: Path) -> dict[str, Any]:
    """One file. Raises WrongUse when a prediction is no longer the one that was made."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if prediction_digest(found["cases"]) != found["digest"]:
        raise WrongUse(
            "a prediction was changed after it was made", where=path, fix="git log shows what it was"
        )
    return found


def own_validation(folder: Path) -> tuple[dict[str, Any], list[str], bool]:
    """Facts and lines of `plan validate --own`, and whether both goals are met. Raises WrongUse without predictions."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise WrongUse(
            "no predictions here",
            where=folder,
            fix="a folder of *.json, such as benchmarks/results/predictions",
        )
    rows, cells = [], []
    for path in files:
        found = read_predictions(path)
        for case in found["cases"]:
            said, seen = case["predicted"], case.get("measured")
            row = {"file": path.name, "name": case["name"], "prepared": found["prepared"]}
            errors = {kind: said[kind] / seen[kind] - 1 for kind in GOALS} if seen else {}
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
    medians = {
        kind: statistics.median(abs(row["errors"][kind]) for row in measured) for kind in GOALS if measured
    }
    lines += ["", f"{len(measured)} of {len(rows)} predictions measured since"]
    lines += [
        f"median error in {'time' if kind == 'seconds' else 'memory'}: {median:.1%} (goal {GOALS[kind]:.0%})"
        for kind, median in medians.items()
    ]
    good = all(median <= GOALS[kind] for kind, median in medians.items())
    return {"predictions": rows, "medians": medians}, lines, good
