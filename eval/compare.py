"""Two scores compared record by record: is one model better, or could the difference be chance?

The test is paired: McNemar's exact one for 0/1 metrics on the records that only one model got right, else a two-sided z
test on the differences, with a bootstrap's interval. A page shows the questions in which the two differ.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..core.artifact import verify_artifact
from ..core.console import table, warn
from ..core.errors import WrongUse
from ..core.files import write_atomic
from ..core.page import Part, page
from ..core.workspace import read_records
from .metrics import metric_of, per_unit, resampled
from .report import read_scores

DETECTABLE = 1.960 + 0.842  # standard errors: the normal's 97.5 % point, and its 80 % point as power
SHOWN = 10  # records of a task that are printed; all are in the JSON
COLUMNS = ("record", "question and answers", "first", "second")
NOTES = (
    "low, high: 95 % interval of the difference, by 1,000 resamples of the records",
    "p: chance of a difference at least this large if the two were equal (paired; McNemar exact for 0/1 metrics)",
    "detectable: the smallest true difference that so many records show four times in five (p < 0.05)",
)


def compare_scores(first: Path | str, second: Path | str) -> tuple[dict[str, Any], list[str]]:
    """(JSON, lines) of two scores artifacts on their common tasks. Raises WrongUse for none or one asked otherwise."""
    tasks, others = ({one["task"]: one for one in read_scores(path)["tasks"]} for path in (first, second))
    for path in (first, second):
        verify_artifact(path)
    common = [name for name in tasks if name in others]
    where = f"{first} and {second}"
    if not common:
        raise WrongUse("no task in common", where=where, fix="evaluate both on the same tasks")
    samples = [_by_task(Path(path)) for path in (first, second)]
    rows: list[dict[str, Any]] = []
    questions: list[dict[str, Any]] = []
    parts: list[Part] = []
    for name in common:
        one, two = tasks[name], others[name]
        keys = ("prompt_hash", "shots", "seed", "n")
        why = next((f"{key} is {one[key]} and {two[key]}" for key in keys if one[key] != two[key]), "")
        fix = "evaluate both alike"
        if not why and len({tuple(sample["record"] for sample in part[name]) for part in samples}) > 1:
            why = "each left out other records that were too long"
            fix = "evaluate both with the same --window or --limit"
        if not why and one.get("data_hash") != two.get("data_hash"):
            why = "the texts of its records or examples are not the same"
            fix = "evaluate both on the same files"
        if why:
            raise WrongUse(f"task {name} was not asked in the same way", where=second, why=why, fix=fix)
        paired = []
        for metric, found in one["metrics"].items():
            pairs = [[sample["metrics"][metric] for sample in part[name]] for part in samples]
            if len({len(line) for part in pairs for line in part}) > 1:
                continue  # lists that a function of the task sums up: no number of a record
            values = {"first": found["value"], "second": two["metrics"][metric]["value"]}
            paired.append({"task": name, "metric": metric, **paired_test(metric, *pairs), **values})
        rows += paired
        score, shown = next((row["metric"] for row in paired), ""), list[tuple[Any, ...]]()
        for a, b in zip(*(part[name] for part in samples), strict=True) if score else ():
            values = {"first": a["metrics"][score][0], "second": b["metrics"][score][0]}
            if values["first"] != values["second"] and metric_of(score).mean:
                about = {key: a[key] for key in ("task", "record", "where")}
                questions.append(about | {"metric": score} | values)
                shown += _rows(a, b, *values.values())
        parts.append(Part(name, f"right: {score}; below it every answer's log-probability", COLUMNS, shown))
    if not rows:
        raise WrongUse("no score is one of single records", where=where, why=", ".join(common))
    lines = [*table(tuple(rows[0]), [list(row.values()) for row in rows]), *NOTES]
    for name in dict.fromkeys(one["task"] for one in questions):
        mine = [one for one in questions if one["task"] == name]
        more = ", the first:" if len(mine) > SHOWN else ""
        lines += ["", f"{name}: the two differ in {len(mine):,} records{more}"]
        columns = ("where", "metric", "first", "second")
        lines += table(columns, [[one[key] for key in columns] for one in mine[:SHOWN]])
    if questions:
        place = Path(second).resolve().with_name("differences.html")
        html = page("Questions in which two models differ", parts, f"first: {first}, second: {second}")
        try:
            write_atomic(place, html)
            lines += ["", f"the questions themselves are in {place}"]
        except OSError as error:
            warn(f"no page of the questions: {error}")
    return {"first": str(first), "second": str(second), "rows": rows, "questions": questions}, lines


def _rows(one: dict[str, Any], other: dict[str, Any], *values: float) -> list[tuple[Any, ...]]:
    """A question as lines of a table: its record and text with both scores, then its answers."""
    lines: list[tuple[Any, ...]] = [(one["where"], one.get("question"), *values)]
    answers = one["answers"][0], other["answers"][0]
    choices = one.get("choices", [])
    known = not isinstance(answers[0], str) and len(answers[0]) == len(choices)
    for place, choice in enumerate(choices):
        marked = ("right: " if place in one["right"] else "") + choice
        lines.append(("", marked, *(answer[place][0] if known else "" for answer in answers)))
    return [*lines, ("", "written", *answers)] if isinstance(answers[0], str) else lines


def _by_task(path: Path) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for sample in read_records(path / "samples.jsonl"):
        found.setdefault(sample["task"], []).append(sample)
    return found


def paired_test(
    metric: str, first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """Values of both, second - first (of a perplexity that of log-probabilities per record, in nats), its error, p."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    how = metric_of("" if metric == "f1" and a.shape[1] == 1 else metric)  # one of each record: a mean
    values = [float(how.aggregate(rows)) for rows in (a, b)]
    if metric.startswith("f1") and a.shape[1] > 1:  # lines are (gold, predicted): compare right answers
        a, b = ((rows[:, :1] == rows[:, 1:2]).astype(np.float64) for rows in (a, b))
    differences = b[:, 0] - a[:, 0]
    if how.aggregate is per_unit:
        differences /= a[:, 1].mean()
    count = len(differences)
    error = float(differences.std(ddof=1) / math.sqrt(count)) if count > 1 else None
    means = resampled(lambda rows: rows[..., 0].mean(axis=-1), differences[:, None])
    low, high = np.percentile(means, (2.5, 97.5)).tolist() if count > 1 else (None, None)
    p: float | None
    if not differences.any():
        p = 1.0
    elif count < 2:  # a stream is one record, of which nothing can be said
        p = None
    elif set(np.unique(differences)) <= {-1.0, 0.0, 1.0} and how.mean:
        p = mcnemar(int((differences > 0).sum()), int((differences < 0).sum()))
    else:
        p = math.erfc(abs(differences.mean()) / error / math.sqrt(2)) if error else 0.0
    rises = (differences.mean() > 0) == (how.higher or not how.mean)  # a perplexity's are log-probabilities
    better = "-" if p is None or p >= 0.05 else ("second" if rises else "first")
    return {
        "first": values[0],
        "second": values[1],
        "difference": float(differences.mean()),
        "low": low,
        "high": high,
        "stderr": error,
        "detectable": None if error is None else DETECTABLE * error,
        "p": p,
        "better": better,
    }


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact probability under fair coins that the discordant records split at least so unevenly."""
    total = gained + lost
    if not total:
        return 1.0
    whole = math.lgamma(total + 1) - total * math.log(2)
    splits = range(min(gained, lost) + 1)
    tail = (math.exp(whole - math.lgamma(k + 1) - math.lgamma(total - k + 1)) for k in splits)
    return min(1.0, 2 * math.fsum(tail))
