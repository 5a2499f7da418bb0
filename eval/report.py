"""Scores as files: JSON for machines, Markdown and an HTML page for people, every record's answer beside them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..core.artifact import Input, check_free, create_artifact, is_artifact, read_manifest
from ..core.console import cell, table
from ..core.errors import WrongUse
from ..core.page import Bar, Chart, Part, page
from .asked import TaskScores

HEADER = ("task", "metric", "per", "value", "stderr", "random", "n", "shots", "cut", "skipped", "prompt")
FILE = "results.json"
WIDE = 1.96  # standard errors on each side: a 95 % interval
NOTES = (
    "stderr: closed form for means, bootstrap over records otherwise.",
    "cut: records whose context lost tokens to the window; skipped: those left out for it.",
)


def summaries(results: dict[str, Any]) -> list[dict[str, Any]]:
    """Of every task, and behind them of every group."""
    return [*results["tasks"], *results["groups"]]


def rows_of(results: dict[str, Any]) -> list[tuple[Any, ...]]:
    """One line per metric of every task and group, in HEADER's columns; a group says its number of tasks."""
    rows = []
    for one in summaries(results):
        task = one["task"] + (f" ({one['members']} tasks)" if "members" in one else "")
        stride = f", stride {one['stride']}" if one["stride"] else ""
        counts = "n", "shots", "truncated_records", "skipped_records", "prompt_hash"
        for name, metric in one["metrics"].items():
            values = metric["value"], metric["stderr"], metric["random"]
            rows.append((task, name, metric["per"] + stride, *values, *(one[key] for key in counts)))
    return rows


def lines_of(results: dict[str, Any], table: Callable[..., list[str]] = table, title: str = "") -> list[str]:
    """The results for a terminal, or with another form of `table` and of titles."""
    lines = [f"{title}{results['model']}  {protocol(results)}"]
    if results["validation"]:
        lines += ["", *table(("validation", "value"), [*results["validation"].items()])]
    if rows := rows_of(results):
        lines += ["", *table(HEADER, rows)]
    cut = sum(task["truncated_tokens"] for task in results["tasks"])
    if cut:
        records = sum(task["truncated_records"] for task in results["tasks"])
        of = f"{cut:,} context tokens of {records:,} record{'s' * (records != 1)}"
        lines += ["", f"{of} were cut on the left to fit the window"]
    for name, header, more in further_tables(results):
        lines += ["", title + name, "", *table(header, more)]
    return lines


def further_tables(results: dict[str, Any]) -> list[tuple[str, tuple[str, ...], list[tuple[Any, ...]]]]:
    """What was asked for besides: scores of the second form, and scores without the records found in a store."""
    tables: list[tuple[str, tuple[str, ...], list[tuple[Any, ...]]]] = []
    if against := results.get("against"):
        title = f"Against {against['path']}: no token's log-probability is more than {against['bound']:g} nats apart"
        rows: list[tuple[Any, ...]] = []
        for one, other in zip(results["tasks"], against["scores"], strict=True):
            apart = against["largest_difference"].get(one["task"])
            for name, metric in one["metrics"].items():
                rows.append((one["task"], name, metric["value"], other["metrics"][name]["value"], apart))
        tables.append((title, ("task", "metric", "value", "theirs", "largest difference"), rows))
    if checked := results.get("contamination"):
        length = next(iter(checked.values()))["n"]
        clean = [
            (task, name, value, found["clean"].get(name), found["hits"], found["checked"], found["too_short"])
            for task, found in checked.items()
            for name, value in found["all"].items()
        ]
        header = ("task", "metric", "value", "without hits", "hits", "records", "too short")
        tables.append((f"Records that share {length} tokens in a row with the store (hits)", header, clean))
    return tables


def protocol(results: dict[str, Any]) -> str:
    """What every number of a report depends on besides the task: scorer, window, BOS, dtype."""
    return ", ".join(f"{name} {value}" for name, value in results["scorer"].items())


def markdown(results: dict[str, Any]) -> str:
    """The results as a Markdown page."""
    about = [f"- **{task['task']}**: {task['about']}" for task in results["tasks"]]
    return "\n".join([*lines_of(results, _lines, "## "), "", *NOTES, "", *about]) + "\n"


def _lines(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """A Markdown table."""
    return ["| " + " | ".join(map(cell, row)) + " |" for row in (header, ["---"] * len(header), *rows)]


def html_page(results: dict[str, Any], history: Sequence[dict[str, Any]] = ()) -> str:
    """The results as one HTML file without outside references; `history`: results of earlier steps."""
    about = [
        (task["task"], task["about"] + (" (prompt-checked)" if task["checked"] == "prompts" else ""))
        for task in results["tasks"]
    ]
    parts = [
        Part("Validation", rows=[*results["validation"].items()]),
        Part("Accuracies, percent", bars=bars(results), note="Line: 95 % interval. Dashes: random choice."),
        Part("Score against step", charts=curves([*history, results]), note="Band: 95 % interval."),
        Part("All scores", header=HEADER, rows=rows_of(results), note=" ".join(NOTES)),
        *(Part(title, header=header, rows=rows) for title, header, rows in further_tables(results)),
        Part("What the tasks are", items=about),
    ]
    return page(f"Scores of {results['model']}", parts, protocol(results))


def bars(results: dict[str, Any]) -> list[Bar]:
    """First metric of every task whose value lies in [0, 1], with its error and the random baseline."""
    found = []
    for summary in summaries(results):
        metric = next(iter(summary["metrics"].values()))
        value, error = metric["value"], WIDE * (metric["stderr"] or 0.0)
        if 0 <= value <= 1 and metric["higher_is_better"]:
            low, high = max(0.0, value - error), min(1.0, value + error)
            found.append(Bar(summary["task"], value, low, high, metric["random"]))
    return found


def curves(history: Sequence[dict[str, Any]]) -> list[Chart]:
    """Score against step, one chart per task and first metric with at least two steps."""
    series: dict[str, dict[int, float]] = {}
    errors: dict[str, dict[int, float]] = {}
    for results in history:
        if (step := results["step"]) is None:
            continue
        for summary in summaries(results):
            name, metric = next(iter(summary["metrics"].items()))
            title = f"{summary['task']} {name}"
            series.setdefault(title, {})[step] = metric["value"]
            if metric["stderr"] is not None:
                errors.setdefault(title, {})[step] = WIDE * metric["stderr"]
        for name, value in results["validation"].items():
            series.setdefault(f"validation {name}", {})[step] = value
    return [
        Chart(name, [("", sorted(found.items()))], errors={"": sorted(errors.get(name, {}).items())})
        for name, found in series.items()
        if len(found) > 1
    ]


def check_place(path: Path) -> None:
    """Raises WrongUse when something else than earlier scores stands at `path`."""
    why = ""
    if is_artifact(path):
        kind = read_manifest(path).kind
        why = "" if kind == "scores" else f"an artifact of kind {kind} is there, which they would replace"
    elif path.is_file() or (path.is_dir() and any(path.iterdir())):
        why = "what is there is no artifact"
    if why:
        raise WrongUse("the place of the scores is taken", where=path, why=why, fix="choose another --out")
    check_free(path, overwrite=True)


def write_scores(
    path: Path,
    results: dict[str, Any],
    scores: Sequence[TaskScores],
    inputs: Sequence[Input],
    history: Sequence[dict[str, Any]] = (),
) -> None:
    """Write a scores artifact, in place of an earlier one of the same path."""
    with create_artifact(path, "scores", inputs=inputs, overwrite=True) as draft:
        (draft.path / FILE).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        (draft.path / "report.md").write_text(markdown(results), encoding="utf-8")
        (draft.path / "report.html").write_text(html_page(results, history), encoding="utf-8")
        with (draft.path / "samples.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(sample) + "\n" for score in scores for sample in score.samples)
        draft.facts |= {key: results[key] for key in ("model", "step", "scorer", "validation")}
        draft.facts["scores"] = {
            summary["task"]: {name: metric["value"] for name, metric in summary["metrics"].items()}
            for summary in summaries(results)
        }


def read_scores(path: Path | str) -> dict[str, Any]:
    """The results of a scores artifact. Raises WrongUse when `path` is none."""
    read_manifest(path, "scores")
    return json.loads((Path(path) / FILE).read_text())
