"""What is made of the records of a run: `report.html`, one file that needs no network, and how two runs differ."""

import math
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.console import amount, duration
from ...core.errors import Refused, WrongUse
from ...core.files import write_atomic
from ...core.page import Chart, Part, page
from ...core.workspace import read_records
from .metrics import FILE, flat, read_metrics

TASKS_IN_A_CHART = 8  # as many as there are colours
UNSHOWN = ("started", "checkpoint", "finished", "running", "evaluation")  # events
ERROR = "_stderr"  # ends the name of a task's standard error
SOURCES = "sources/"  # begins the name of a figure of one store of a mixture
SAMPLES = "samples.jsonl"  # of text, as an evaluator wrote them
MOST_SAMPLES = 6
COMPARED = ("loss", "grad_norm")  # of two runs
FOLDERS = re.compile(r'"/(?:[^"/\n]*/)+(?=[^"\n])')  # of an absolute path: a page is shown to others
MEDIANS: dict[str, tuple[str, Callable[[float], str]]] = {  # of the steps, by figure
    "tokens_per_s": ("tokens/s without padding, median step", "{:,.0f}".format),
    "sequences_per_s": ("sequences/s, median step", "{:,.1f}".format),
    "mfu": ("MFU, median step", lambda value: f"{100 * value:.1f} %"),
}
# charts by title: lines by name, and where `flat` has their figures
LEARNT = {
    "loss": {"training": "loss", "validation": "validation/loss"},
    "z-loss": {"": "z_loss"},
    "further tokens, weighed loss": {"": "ahead"},
    "BERT losses": {"masked tokens": "mlm", "pairs": "nsp", "masked, validation": "validation/mlm_loss"},
    "accuracy": {"masked tokens": "validation/mlm_accuracy", "pairs": "validation/nsp_accuracy"},
}
PHASES = ("forward", "backward", "optimizer")
SPENT = {
    "gradient norm": {"before clipping": "grad_norm"},
    "learning rate": {"": "lr"},
    "tokens per second": {"": "tokens_per_s"},
    "host memory after each phase, GiB": {phase: f"memory/host/{phase}" for phase in PHASES},
    "GPU memory, peak of each phase, GiB": {phase: f"memory/gpu/{phase}" for phase in PHASES},
}


def write_report(run: Path | str) -> Path:
    """Write `report.html` of a run from its records, and return its path. Raises WrongUse when there are none."""
    run = Path(run)
    if not (run / FILE).is_file():
        fix = "give a directory that `throughline train` wrote"
        raise WrongUse("no run to report on", where=run, why=f"it has no {FILE}", fix=fix)
    records, events = read_metrics(run), list(read_records(run / "events.jsonl"))
    # moved since, it makes the same page again
    places = [event["run"] for event in events if event["event"] == "finished"]
    facts = next((event for event in events[::-1] if event["event"] in ("started", "resumed")), None)
    recipe, samples = run / "recipe.toml", run / SAMPLES
    said = {each["step"]: each for each in (read_records(samples) if samples.is_file() else ())}
    chosen = list(said.values())[:: -(-len(said) // MOST_SAMPLES) or 1]
    parts = [
        Part(rows=summary_rows(records, events)),
        Part(
            "Samples",
            rows=[(f"step {each['step']:,}", each["prompt"] + " | " + each["text"]) for each in chosen],
            note="The beginning of the held-out text, and after the bar what the model makes of it.",
        ),
        Part("Curves", charts=curves(records)),
        Part("Environment", rows=environment_rows(facts) if facts else []),
        Part("Events", rows=[_event_row(event) for event in events if event["event"] not in UNSHOWN]),
        Part("Recipe", text=FOLDERS.sub('"', recipe.read_text(encoding="utf-8")) if recipe.is_file() else ""),
    ]
    title = Path(places[-1]).name if places else run.resolve().name
    write_atomic(run / "report.html", page(title, parts, _where_and_when(facts) if facts else ""))
    return run / "report.html"


def _where_and_when(facts: dict[str, Any]) -> str:
    words = [time.strftime("%Y-%m-%d", time.gmtime(facts["time"])), ", ".join(facts["gpus"]) or facts["cpu"]]
    if facts.get("data"):
        words.append(f"trained on {', '.join(facts['data'])} ({facts['training_tokens']:,} tokens)")
    return ", ".join(words)


def _event_row(event: dict[str, Any]) -> tuple[str, str]:
    by = f" by {event['signal']}" if event.get("signal") else ""
    return f"step {event['step']:,}", event["event"] + by


def summary_rows(records: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The figures at the top: how far, how good, how fast."""
    steps = [record for record in records if "loss" in record]
    rows = [("step", f"{steps[-1]['step']:,}")] if steps else []
    if steps and steps[-1]["loss"] is not None:
        rows.append(("training loss", f"{steps[-1]['loss']:.4f}"))
    measured: list[dict[str, Any]] = [{}, *(x["validation"] for x in records if x.get("validation"))]
    for name, value in measured[-1].items():
        if not name.endswith(ERROR):
            error = measured[-1].get(name + ERROR)
            figure = figure_text(value) + (f" \N{PLUS-MINUS SIGN} {figure_text(error)}" if error else "")
            rows.append((figure_name(name).replace("_", " "), figure))
    for name, (title, text) in MEDIANS.items():
        # none is above all: MFU of a step that was faster than the peak, which was measured on a busy machine
        values = sorted(math.inf if step[name] is None else step[name] for step in steps if name in step)
        if values and math.isfinite(middle := values[len(values) // 2]):
            rows.append((title, text(middle)))
    if skipped := sum(bool(record.get("skipped")) for record in steps):
        rows.append(("steps skipped (not finite)", f"{skipped:,}"))
    finished = [event for event in events if event["event"] == "finished"]
    return rows + (_finished_rows(finished[-1]) if finished else [])


def _finished_rows(event: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if aim := event.get("target"):
        near, reached = aim["mlperf_reference"], "reached" if aim["reached"] else "not reached"
        text = (
            f"{reached} after {aim['samples']:,} rows; MLPerf's reference takes {near['samples']:,} to "
            f"{near['mlm_accuracy']} at a batch of {near['batch']:,}"
        )
        rows.append((f"target {figure_name(aim['figure']).replace('_', ' ')} {aim['value']:g}", text))
    rows.append(("time since the last start", duration(event["seconds"])))
    for title, pair, told in (
        ("memory", event["memory_bytes"], lambda size: amount(size, "B")),
        ("a step", event.get("step_seconds"), duration),
    ):
        if pair and pair["measured"]:
            rows.append((title, f"{told(pair['measured'])} measured, {told(pair['predicted'])} predicted"))
    return rows


def figure_name(name: str) -> str:
    """What a figure of an evaluation is called: a task's score has a name of its own (`task/metric`)."""
    return name if "/" in name else f"validation {name}"


def figure_text(value: float | None) -> str:
    """A figure for people."""
    if isinstance(value, float) and abs(value) < 1000:
        return f"{value:,.4f}"
    return "not finite" if value is None else f"{value:,.6g}" if isinstance(value, float) else f"{value:,}"


def environment_rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """Where the run last started: versions, hardware, predicted memory."""
    names = ("throughline", "torch", "python", "device", "cpu", "threads")
    rows = [(name, str(facts[name])) for name in names]
    rows += [("gpus", ", ".join(facts["gpus"]) or "none"), ("parameters", f"{facts['parameters']:,}")]
    if facts.get("peak_flops"):
        rows.append(("peak for MFU", f"{facts['peak_flops'] / 1e12:.3g} TFLOP/s ({facts['peak_source']})"))
    predicted = facts.get("predicted_memory", {})
    terms = ", ".join(f"{name} {amount(size, 'B')}" for name, size in predicted.items())
    return [*rows, ("predicted memory", f"{amount(sum(predicted.values()), 'B')}: {terms}")]


def curves(records: list[dict[str, Any]]) -> list[Chart]:
    """Every chart of the page."""
    numbers = [(record["step"], flat(record)) for record in records]

    def points(name: str) -> list[tuple[float, float]]:
        unit = 2**30 if name.startswith("memory/") else 1
        return [(step, found[name] / unit) for step, found in numbers if name in found]

    names = [name for _, found in numbers for name in found]
    charts = [*LEARNT.items(), *_sources(names), *_tasks(numbers), *SPENT.items()]
    return [
        Chart(
            title,
            [(line, points(name)) for line, name in lines.items()],
            errors={line: [(x, 1.96 * y) for x, y in points(name + ERROR)] for line, name in lines.items()},
        )
        for title, lines in charts
    ]


def _sources(names: Iterable[str]) -> list[tuple[str, dict[str, str]]]:
    """The validation figure that is trained on, of each store of a mixture, as many in a chart as there are colours."""
    lines = {}
    for name in dict.fromkeys(names):
        source, _, figure = name.removeprefix("validation/").rpartition("/")
        if source.startswith(SOURCES) and figure in ("loss", "mlm_loss"):
            lines[source.removeprefix(SOURCES)] = name
    parts = [
        list(lines.items())[first : first + TASKS_IN_A_CHART]
        for first in range(0, len(lines), TASKS_IN_A_CHART)
    ]
    return [("validation loss by source", dict(part)) for part in parts]


def _tasks(numbers: list[tuple[int, dict[str, float]]]) -> list[tuple[str, dict[str, str]]]:
    """Scores of tasks by metric, as many in a chart as there are colours."""
    by_metric: dict[str, dict[str, str]] = {}
    for name in (name for _, found in numbers for name in found if name.startswith("validation/")):
        task, _, metric = name.removeprefix("validation/").rpartition("/")
        if task.startswith(SOURCES):
            continue
        if task and not metric.endswith(ERROR):
            by_metric.setdefault(metric, {})[task] = name
    return [
        (f"tasks: {metric}", dict(list(tasks.items())[first : first + TASKS_IN_A_CHART]))
        for metric, tasks in by_metric.items()
        for first in range(0, len(tasks), TASKS_IN_A_CHART)
    ]


@dataclass(frozen=True)
class Difference:
    """The step at which one figure of two runs differs most, relative to the larger; inf where one is not finite."""

    name: str
    steps: int
    alone: int  # steps that one run alone logged, and that nothing is compared with
    difference: float
    step: int
    first: float | None
    second: float | None


def compare_runs(first: Path | str, second: Path | str) -> list[Difference]:
    """The largest relative difference of each figure over the steps of both. Raises WrongUse where there are none."""
    tables = []
    for run in (first, second):
        if not (Path(run) / FILE).is_file():
            fix = f"give the directory of a run, which has a {FILE}, or of scores, which `throughline eval` names"
            raise WrongUse("no metrics to compare", where=run, fix=fix)
        tables.append({record["step"]: record for record in read_metrics(run) if "loss" in record})
    steps = sorted(set(tables[0]) & set(tables[1]))
    if not steps:
        raise WrongUse("the runs logged no step in common", where=f"{first}, {second}")
    return [_largest(name, steps, *tables) for name in COMPARED]


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
    text = "{0.name} by {0.difference:.3g} at step {0.step:,}: {0.first}, {0.second}"
    if lines := [text.format(row) for row in comparison if not row.difference <= bound]:
        what = f"the runs differ by more than the relative bound {bound:g}"
        raise Refused(what, where=f"{first}, {second}", why="\n".join(lines))
