"""`report.html` of a run: curves, memory, environment and recipe in one file that needs no network."""

from pathlib import Path
from typing import Any

from ..core.console import amount, duration
from ..core.errors import WrongUse
from ..core.files import write_atomic
from ..core.page import Chart, Part, page
from ..core.workspace import read_records
from .metrics import FILE, read_metrics

TASKS_IN_A_CHART = 8  # as many as there are colours


def write_report(run: Path | str) -> Path:
    """Write `report.html` of a run from its records, and return its path. Raises WrongUse when there are
    none.
    """
    run = Path(run)
    if not (run / FILE).is_file():
        raise WrongUse(
            "no run to report on",
            where=run,
            why=f"it has no {FILE}",
            fix="give a directory that `throughline train` wrote",
        )
    records, events = read_metrics(run), list(read_records(run / "events.jsonl"))
    # moved since, it makes the same page again
    places = [event["run"] for event in events if event["event"] == "finished"]
    recipe = run / "recipe.toml"
    parts = [
        Part(rows=summary_rows(records, events)),
        Part("Curves", charts=curves(records)),
        Part("Environment", rows=environment_rows(events)),
        Part(
            "Events",
            rows=[
                _event_row(event)
                for event in events
                if event["event"] not in ("checkpoint", "finished", "running", "evaluation")
            ],
        ),
        Part("Recipe", text=recipe.read_text(encoding="utf-8") if recipe.is_file() else ""),
    ]
    write_atomic(run / "report.html", page(Path(places[-1]).name if places else run.resolve().name, parts))
    return run / "report.html"


def _event_row(event: dict[str, Any]) -> tuple[str, str]:
    by = f" by {event['signal']}" if event.get("signal") else ""
    return f"step {event['step']:,}", event["event"] + by


def summary_rows(records: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The figures at the top: how far, how good, how fast."""
    steps = [record for record in records if "loss" in record]
    rows = [("step", f"{steps[-1]['step']:,}")] if steps else []
    if steps and steps[-1]["loss"] is not None:
        rows.append(("training loss", f"{steps[-1]['loss']:.4f}"))
    validation: dict[str, Any] = next(
        (record["validation"] for record in reversed(records) if record.get("validation")), {}
    )
    rows += [(figure_name(name).replace("_", " "), figure_text(value)) for name, value in validation.items()]
    rates = sorted(record["tokens_per_s"] for record in steps)
    if rates:
        rows.append(("tokens/s without padding, median step", f"{rates[len(rates) // 2]:,.0f}"))
    pairs = sorted(record["sequences_per_s"] for record in steps if record.get("sequences_per_s"))
    if pairs:
        rows.append(("sequences/s, median step", f"{pairs[len(pairs) // 2]:,.1f}"))
    used = sorted(record["mfu"] for record in steps if record.get("mfu") is not None)
    if used:
        rows.append(("MFU, median step", f"{100 * used[len(used) // 2]:.1f} %"))
    skipped = sum(bool(record.get("skipped")) for record in steps)
    if skipped:
        rows.append(("steps skipped (not finite)", f"{skipped:,}"))
    finished = [event for event in events if event["event"] == "finished"]
    if finished and finished[-1].get("target"):
        aim = finished[-1]["target"]
        near = aim["mlperf_reference"]
        rows.append(
            (
                f"target {figure_name(aim['figure']).replace('_', ' ')} {aim['value']:g}",
                f"{'reached' if aim['reached'] else 'not reached'} after {aim['samples']:,} rows; MLPerf's reference "
                f"takes {near['samples']:,} to {near['mlm_accuracy']} at a batch of {near['batch']:,}",
            )
        )
    if finished:
        memory = finished[-1]["memory_bytes"]
        rows.append(("time of the last stretch", duration(finished[-1]["seconds"])))
        rows.append(
            (
                "memory",
                f"{amount(memory['measured'], 'B')} measured, {amount(memory['predicted'], 'B')} predicted",
            )
        )
        times = finished[-1].get("step_seconds")
        if times and times["measured"]:
            rows.append(
                (
                    "a step",
                    f"{duration(times['measured'])} measured, {duration(times['predicted'])} predicted",
                )
            )
    return rows


def figure_name(name: str) -> str:
    """What a figure of an evaluation is called: a task's score has a name of its own (`task/metric`)."""
    return name if "/" in name else f"validation {name}"


def figure_text(value: float | None) -> str:
    """A figure for people."""
    return "not finite" if value is None else f"{value:,.4f}" if isinstance(value, float) else f"{value:,}"


def environment_rows(events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Where the run last started: versions, hardware, predicted memory."""
    started = [event for event in events if event["event"] in ("started", "resumed")]
    if not started:
        return []
    facts = started[-1]
    rows = [
        (name, str(facts[name])) for name in ("throughline", "torch", "python", "device", "cpu", "threads")
    ]
    rows += [("gpus", ", ".join(facts["gpus"]) or "none"), ("parameters", f"{facts['parameters']:,}")]
    if facts.get("peak_flops"):
        rows.append(("peak for MFU", f"{facts['peak_flops'] / 1e12:.3g} TFLOP/s ({facts['peak_source']})"))
    predicted = facts.get("predicted_memory", {})
    rows.append(
        (
            "predicted memory",
            f"{amount(sum(predicted.values()), 'B')}: "
            + ", ".join(f"{name} {amount(size, 'B')}" for name, size in predicted.items()),
        )
    )
    return rows


def curves(records: list[dict[str, Any]]) -> list[Chart]:
    """Every chart of the page."""

    def column(name: str) -> list[tuple[float, float]]:
        return [(record["step"], record[name]) for record in records if record.get(name) is not None]

    def validation(name: str) -> list[tuple[float, float]]:
        points = [
            (record["step"], record["validation"].get(name)) for record in records if record.get("validation")
        ]
        return [point for point in points if point[1] is not None]

    def memory(place: str, phase: str) -> list[tuple[float, float]]:
        points = [(r["step"], r["memory"].get(place, {}).get(phase)) for r in records if r.get("memory")]
        return [(step, size / 2**30) for step, size in points if size is not None]

    phases = ("forward", "backward", "optimizer")
    return [
        Chart("loss", [("training", column("loss")), ("validation", validation("loss"))]),
        Chart(
            "BERT losses",
            [
                ("masked tokens", column("mlm")),
                ("pairs", column("nsp")),
                ("masked, validation", validation("mlm_loss")),
            ],
        ),
        Chart(
            "accuracy", [("masked tokens", validation("mlm_accuracy")), ("pairs", validation("nsp_accuracy"))]
        ),
        *(
            Chart(f"tasks: {metric}", [(name.rpartition("/")[0], validation(name)) for name in names])
            for metric, names in _tasks(records)
        ),
        Chart("gradient norm", [("before clipping", column("grad_norm"))]),
        Chart("learning rate", [("", column("lr"))]),
        Chart("tokens per second", [("", column("tokens_per_s"))]),
        Chart("host memory after each phase, GiB", [(phase, memory("host", phase)) for phase in phases]),
        Chart("GPU memory, peak of each phase, GiB", [(phase, memory("gpu", phase)) for phase in phases]),
    ]


def _tasks(records: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Scores of tasks by metric, as many in a chart as there are colours."""
    by_metric: dict[str, dict[str, None]] = {}
    for name in (name for record in records for name in record.get("validation") or {} if "/" in name):
        by_metric.setdefault(name.rpartition("/")[2], {})[name] = None
    size = TASKS_IN_A_CHART
    return [
        (metric, list(names)[first : first + size])
        for metric, names in by_metric.items()
        for first in range(0, len(names), size)
    ]
