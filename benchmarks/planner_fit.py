"""Fit the planner's constants on one half of the published rows: errors on both halves, before and after.

    python benchmarks/planner_fit.py [--serve | --experts]

Soft L1 on the log error of the predicted time (a row that is 30 % off pulls little more than one that is 6 % off),
every table with the same weight, and a weak pull towards the constants as they stand.
"""

import argparse
import collections
import json
from dataclasses import asdict, fields, replace

import numpy as np
from throughline.models.config import ModelConfig, preset
from throughline.planner.hardware import FITTED, Cluster, Constants, find_cluster
from throughline.planner.serve import FITTED as SERVE
from throughline.planner.serve import ServeConstants, forward_seconds
from throughline.prove.validate import (
    Case,
    Replay,
    medians,
    predict,
    published_cases,
    published_rows,
)

KNEE = 0.03  # relative error beyond which a row pulls linearly
MEASURED = ("issue_s", "start_s", "link_fraction")  # not touched by a fit on published rows
OF_EXPERTS = ("expert_fraction", "expert_issue_s", "expert_overlap")  # fitted on models with experts alone
PULL = 0.05  # weight of one doubling of a constant against one table


def published_latencies() -> list[tuple[Cluster, ModelConfig, int, int, str, float]]:
    """Machine, model, length, batch, precision and seconds of every published engine latency."""
    return [
        (
            find_cluster(row["on"]),
            preset(row["model"]),
            row["length"],
            batch,
            precision,
            milliseconds / 1e3,
        )
        for _, row in published_rows("latency")
        for precision in ("fp16", "int8")
        for batch, milliseconds in zip(row["batch"], row[precision + "_ms"], strict=True)
        if milliseconds
    ]


def latency_errors(constants: ServeConstants = SERVE) -> dict[str, list[float]]:
    """Relative errors of every published latency, by chip."""
    errors: dict[str, list[float]] = {}
    for cluster, config, length, batch, precision, seconds in published_latencies():
        predicted = forward_seconds(config, cluster, batch, length, length, precision, constants)
        errors.setdefault(cluster.chip.key, []).append(predicted / seconds - 1)
    return errors


def fit(cases: list[Case], evaluations: int, names: list[str]) -> Constants:
    """The constants, those of these names as they suit these cases best."""
    from scipy.optimize import least_squares  # by the fits alone: no dependency of the package

    counts = collections.Counter(case.table for case in cases)
    weights = np.array([counts[case.table] ** -0.5 for case in cases])
    start = np.log([getattr(FITTED, name) for name in names])

    def residuals(logs: np.ndarray) -> np.ndarray:
        constants = replace(FITTED, **dict(zip(names, np.exp(logs))))
        errors = np.array([np.log(predict(case, constants) / case.seconds) for case in cases])
        soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + (errors / KNEE) ** 2) - 1))
        return np.concatenate([weights * soft, PULL * (logs - start) / np.log(2)])

    ceiling = [0.0 if name.endswith(("fraction", "overlap")) else np.inf for name in names]
    bounds = (np.full(len(names), -np.inf), ceiling)
    found = least_squares(residuals, start, bounds=bounds, max_nfev=evaluations, diff_step=1e-3, x_scale=0.2)
    return replace(FITTED, **dict(zip(names, map(float, np.exp(found.x)))))


def table_medians(cases: list[Case], constants: Constants) -> dict[str, float]:
    """Median absolute error of each table."""
    replays = [Replay(case, predict(case, constants)) for case in cases]
    return {name: median for name, (_, median, _) in medians(replays).items()}


def fit_serve(rows: list) -> ServeConstants:
    """The constants of `plan serve` on these latencies, every chip with the same weight."""
    from scipy.optimize import least_squares

    counts = collections.Counter(on.chip.key for on, *_ in rows)
    weights = np.array([counts[on.chip.key] ** -0.5 for on, *_ in rows])
    names = [field.name for field in fields(ServeConstants)]
    start = np.log([getattr(SERVE, name) for name in names])

    def residuals(logs: np.ndarray) -> np.ndarray:
        constants = ServeConstants(**dict(zip(names, np.exp(logs))))
        predicted = [forward_seconds(c, on, b, n, n, p, constants) for on, c, n, b, p, _ in rows]
        errors = np.log(np.array(predicted) / [seconds for *_, seconds in rows])
        soft = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + (errors / 0.08) ** 2) - 1))
        return np.concatenate([weights * soft, PULL * (logs - start)])

    found = least_squares(residuals, start, max_nfev=20, diff_step=1e-3, x_scale=0.2)
    return ServeConstants(**dict(zip(names, map(float, np.exp(found.x)))))


def serve_errors() -> tuple[ServeConstants, float, dict[str, float], float]:
    """Constants, median error, and with each chip left out: its median, and that of all rows."""
    rows = published_latencies()
    shipped = fit_serve(rows)
    inside = np.median(np.abs(np.concatenate(list(latency_errors(shipped).values()))))
    outside, every = {}, []
    for key in sorted({on.chip.key for on, *_ in rows}):
        others = fit_serve([row for row in rows if row[0].chip.key != key])
        errors = np.abs(latency_errors(others)[key])
        outside[key] = float(np.median(errors))
        every += list(errors)
    return shipped, float(inside), outside, float(np.median(every))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--serve", action="store_true", help="Fit `plan serve` instead.")
    parser.add_argument("--experts", action="store_true", help="Fit what is of models with experts instead.")
    arguments = parser.parse_args()
    if arguments.serve:
        constants, median, left_out, every = serve_errors()
        print(
            json.dumps(
                {
                    "benchmark": "planner_fit",
                    "constants": asdict(constants),
                    "median": median,
                    "left out": left_out,
                    "left out, all rows": every,
                }
            )
        )
        return
    others = [field.name for field in fields(Constants) if field.name not in (*MEASURED, *OF_EXPERTS)]
    names = list(OF_EXPERTS) if arguments.experts else others
    cases = [case for case in published_cases() if not case.left_out and case.experts == arguments.experts]
    halves = {
        "fitted": [case for case in cases if case.fitted],
        "left out": [c for c in cases if not c.fitted],
    }
    fitted = fit(halves["fitted"], 20, names)
    tables = {
        half: {
            name: table_medians(rows, constants) for name, constants in (("shipped", FITTED), ("fit", fitted))
        }
        for half, rows in halves.items()
    }
    mean = {
        half: {name: float(np.mean(list(found.values()))) for name, found in both.items()}
        for half, both in tables.items()
    }
    print(
        json.dumps(
            {
                "benchmark": "planner_fit",
                "constants": asdict(fitted),
                "mean of medians": mean,
                "tables": tables,
            }
        )
    )


if __name__ == "__main__":
    main()
