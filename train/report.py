"""`report.html` of a run: curves, memory, environment and recipe in one file that needs no network and no script."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..core.console import amount, duration
from ..core.errors import WrongUse
from ..core.files import write_atomic
from ..core.workspace import read_records
from .metrics import FILE, read_metrics

POINTS = 400  # of a curve: more are averaged, a screen has no more columns
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 220, 62, 26, 10
COLOURS = ("#1f5fa8", "#c2571a", "#3d8b40", "#8c4a9e")

Series = tuple[str, list[tuple[float, float]]]


def write_report(run: Path | str) -> Path:
    """Write `report.html` of a run from its records, and return its path. Raises WrongUse when there are none."""
    import jinja2
    from markupsafe import Markup

    run = Path(run)
    if not (run / FILE).is_file():
        raise WrongUse(
            "no run to report on", where=run, why=f"it has no {FILE}", fix="give a directory that train wrote"
        )
    records, events = read_metrics(run), list(read_records(run / "events.jsonl"))
    template = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(template)
    places = [
        event["run"] for event in events if event["event"] == "finished"
    ]  # moved since, it makes the same page again
    html = page.render(
        name=Path(places[-1]).name if places else run.resolve().name,
        summary=summary_rows(records, events),
        charts=[
            (title, Markup(chart(series))) for title, series in curves(records) if any(p for _, p in series)
        ],
        environment=environment_rows(events),
        events=[event for event in events if event["event"] not in ("checkpoint", "finished")],
        recipe=(run / "recipe.toml").read_text(encoding="utf-8") if (run / "recipe.toml").is_file() else "",
    )
    write_atomic(run / "report.html", html)
    return run / "report.html"


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
        rows.append(("tokens/s, median step", f"{rates[len(rates) // 2]:,.0f}"))
    used = sorted(record["mfu"] for record in steps if record.get("mfu") is not None)
    if used:
        rows.append(("MFU, median step", f"{100 * used[len(used) // 2]:.1f} %"))
    skipped = sum(bool(record.get("skipped")) for record in steps)
    if skipped:
        rows.append(("steps skipped (not finite)", f"{skipped:,}"))
    finished = [event for event in events if event["event"] == "finished"]
    if finished:
        memory = finished[-1]["memory_bytes"]
        rows.append(("time of the last stretch", duration(finished[-1]["seconds"])))
        rows.append(
            (
                "memory",
                f"{amount(memory['measured'], 'B')} measured, {amount(memory['predicted'], 'B')} predicted",
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
    rows.append(("predicted memory", f"{amount(sum(predicted.values()), 'B')}: "
                 + ", ".join(f"{name} {amount(size, 'B')}" for name, size in predicted.items())))  # fmt: skip
    return rows


def curves(records: list[dict[str, Any]]) -> list[tuple[str, list[Series]]]:
    """Title and series of every chart."""

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
        ("loss", [("training", column("loss")), ("validation", validation("loss"))]),
        (
            "BERT losses",
            [
                ("masked tokens", column("mlm")),
                ("pairs", column("nsp")),
                ("masked, validation", validation("mlm_loss")),
            ],
        ),
        ("accuracy", [("masked tokens", validation("mlm_accuracy")), ("pairs", validation("nsp_accuracy"))]),
        *(
            (f"tasks: {metric}", [(name.rpartition("/")[0], validation(name)) for name in names])
            for metric, names in _tasks(records)
        ),
        ("gradient norm", [("before clipping", column("grad_norm"))]),
        ("learning rate", [("", column("lr"))]),
        ("tokens per second", [("", column("tokens_per_s"))]),
        ("host memory after each phase, GiB", [(phase, memory("host", phase)) for phase in phases]),
        ("GPU memory, peak of each phase, GiB", [(phase, memory("gpu", phase)) for phase in phases]),
    ]


def _tasks(records: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    """Scores of tasks by metric, as many in a chart as there are colours."""
    by_metric: dict[str, dict[str, None]] = {}
    for name in (name for record in records for name in record.get("validation") or {} if "/" in name):
        by_metric.setdefault(name.rpartition("/")[2], {})[name] = None
    size = len(COLOURS)
    return [
        (metric, list(names)[first : first + size])
        for metric, names in by_metric.items()
        for first in range(0, len(names), size)
    ]


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most POINTS points: means of equal stretches."""
    if len(points) <= POINTS:
        return list(points)
    size = len(points) / POINTS
    parts = [points[int(i * size) : int((i + 1) * size)] for i in range(POINTS)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def chart(series: Sequence[Series]) -> str:
    """An inline SVG line chart with axes, three gridlines and a legend."""
    named = [(name, thin(points)) for name, points in series if points]
    every = [point for _, points in named for point in points]
    x_low, x_high = min(x for x, _ in every), max(x for x, _ in every)
    y_low, y_high = min(y for _, y in every), max(y for _, y in every)
    if y_high - y_low < 1e-12 * max(abs(y_high), 1e-300):
        y_low, y_high = y_low - max(abs(y_low), 1e-9) / 2, y_high + max(abs(y_high), 1e-9) / 2

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low) if x_high > x_low else 0.5
        return LEFT + across * (WIDTH - LEFT - 8), HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (
            HEIGHT - BOTTOM - TOP
        )

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for share in (0, 0.5, 1):
        value = y_low + share * (y_high - y_low)
        _, y = place(x_low, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 8}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    for value, anchor in ((x_low, "start"), (x_high, "end")):
        parts.append(
            f'<text x="{place(value, y_low)[0]:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{value:,.0f}</text>'
        )
    parts.append(f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">step</text>')
    legend = WIDTH - 12.0
    for (name, points), colour in zip(named, COLOURS):
        places = [place(x, y) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>')
        if len(places) < 30:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
        if name:
            parts.append(
                f'<text x="{legend:.0f}" y="{TOP + 12}" text-anchor="end" fill="{colour}">{name}</text>'
            )
            legend -= 12 + 6.5 * len(name)
    return "".join([*parts, "</svg>"])
