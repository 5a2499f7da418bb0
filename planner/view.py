"""A plan to look at: one self-contained HTML page with drawings, and beside it JSON, CSV and a Chrome trace.

Drawn here as SVG: stacked memory with the capacity line, the parts of a step, days against chips on logarithmic
scales with the band, and the pipeline's timeline from the same simulation whose
trace a browser's tracing view opens next to a measured one.
"""

import dataclasses
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.artifact import create_artifact
from ..core.page import Part, page
from .actions import Action
from .cost import kernel_times, targets
from .kernels import Share, head_kernels, layer_kernels
from .layout import Layout
from .memory import MOMENTS, stage_memory
from .report import as_csv, halvings, ranked_cells
from .schedule import Event, simulate
from .search import Candidate, Found, band, find_layouts, run_days

COLOURS = (
    "#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2",
    "#eeca3b", "#9d755d", "#ff9da6", "#bab0ac", "#6b6ecf", "#8ca252",
)  # fmt: skip
MOST_EVENTS = 4000  # drawn; a page with more is slow to open
WIDTH = 900


def write_plan(path: Path, found: Found, facts: dict[str, Any], tokens: float) -> None:
    """The plan as an artifact of kind `plan`: plan.html, plan.json, layouts.csv, and trace.json with a pipeline."""
    best = found.best[0]
    memory = stage_memory(found.search.work, best.layouts, found.search.software)
    points = days_by_chips(found, tokens) if tokens else []
    events = timeline(found, best)
    facts = facts | {"memory": memory, "days_by_chips": points}
    with create_artifact(path, "plan") as draft:
        (draft.path / "plan.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        (draft.path / "layouts.csv").write_text(as_csv(facts["layouts"]), encoding="utf-8")
        (draft.path / "plan.html").write_text(
            plan_page(found, facts, memory, points, events), encoding="utf-8"
        )
        if events:
            (draft.path / "trace.json").write_text(json.dumps(chrome_trace(events)), encoding="utf-8")
        draft.facts |= {key: value for key, value in facts.items() if isinstance(value, str | int | float)}
        draft.facts["best"] = best.describe()
        draft.facts["step_seconds"] = best.seconds


def days_by_chips(found: Found, tokens: float) -> list[tuple[int, float]]:
    """Days of the run on other numbers of chips, those on which it fits."""
    points = []
    for world in halvings(found):
        other = find_layouts(dataclasses.replace(found.search, world=world), 1)
        if other.best:
            points.append((world, run_days(found.search.work, other.best[0].seconds, tokens)))
    return points


def timeline(found: Found, candidate: Candidate) -> list[Event]:
    """The simulated pipeline of one step, at most four rounds of micro-batches; empty without a pipeline."""
    here, search = candidate.layouts, found.search
    if here.pipeline == 1:
        return []
    layout: Layout = candidate.layout()
    rounds = max(1, min(4, MOST_EVENTS // (2 * layout.stages * int(here.pipeline))))
    micro_batches = min(search.work.rows // int(here.data * here.micro_rows), rounds * int(here.pipeline))
    share = Share(here.micro_rows, search.work.length * search.work.fill, here.tensor, here.context)
    rest = (search.cluster, search.software, search.constants)
    layer = kernel_times(layer_kernels(search.work.config, share, search.software), *rest)
    logits = head_kernels(
        search.work.config, share, search.software, share.tokens * targets(search.work, search.software)
    )
    head = kernel_times(logits, *rest)

    def seconds(times: dict, phase: str) -> float:
        return float(sum(value for (when, kind), value in times.items() if when == phase and kind != "core"))

    phases: dict[str, list[float]] = {"forward": [], "backward": []}
    for stage in range(layout.stages):
        layers, last = len(layout.layers_of(stage, search.work.config.layers)), stage == layout.stages - 1
        again = seconds(layer, "forward") * (here.recompute == 2)
        for phase, times in phases.items():
            once = seconds(layer, phase) + (again if phase == "backward" else 0.0)
            times.append(layers * once + (seconds(head, phase) if last else 0.0))
    return simulate(layout, micro_batches, phases["forward"], phases["backward"])


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """The events as chrome://tracing and Perfetto read them: microseconds, one thread a pipeline rank."""
    return {
        "displayTimeUnit": "ms",
        "traceEvents": [
            {"name": str(event.action), "cat": event.action.kind, "ph": "X", "ts": event.start * 1e6,
             "dur": (event.end - event.start) * 1e6, "pid": 0, "tid": event.rank}
            for event in events
        ],
    }  # fmt: skip


def plan_page(
    found: Found,
    facts: dict[str, Any],
    memory: list[dict[str, Any]],
    points: list[tuple[int, float]],
    events: list[Event],
) -> str:
    """The whole page."""
    best, search = found.best[0], found.search
    parts = {name: value for name, value in best.parts.items() if value}
    note = (
        f"{search.world:,} x {search.cluster.name}, {search.work.rows:,} rows of {search.work.length:,} tokens a step; "
        f"{facts['legal']:,} legal layouts, {facts['fit']:,} fit. "
        f"Band: {band(search):.0%} either way, four predictions in five."
    )
    fewest = f"Fewest chips that fit: {points[0][0]:,}." if points else ""
    header, cells = ranked_cells(facts["layouts"], search.cluster.currency)
    return page(
        "Plan",
        [
            Part("Layouts", header=header, rows=cells),
            Part(
                f"Step of {best.describe()}: {best.seconds:,.4g} s",
                svg=stacked([("step", parts)], "s", best.seconds, None),
            ),
            Part("Memory at the worst moment", svg=_memory(memory, found.capacity)),
            Part("Days against chips", svg=days_drawing(points, band(search)) if points else "", note=fewest),
            Part("Pipeline, first micro-batches", svg=pipeline_drawing(events) if events else ""),
            Part(
                "Why its neighbours lost",
                header=("step", "reason"),
                rows=[(row["step"], row["reason"]) for row in facts["neighbours"]],
            ),
        ],
        note,
    )


def _memory(memory: list[dict[str, Any]], capacity: float) -> str:
    bars = []
    for stage in memory:
        names = MOMENTS[stage["peak"]]
        terms = {name: stage["terms"][name] / 2**30 for name in names if stage["terms"][name]}
        bars.append((f"{stage['stage']}: {stage['peak']}", terms))
    most = max(capacity / 2**30, *(sum(terms.values()) for _, terms in bars))
    return stacked(bars, "GiB", most, capacity / 2**30)


def stacked(bars: Sequence[tuple[str, dict[str, float]]], unit: str, most: float, line: float | None) -> str:
    """Horizontal stacked bars on one scale, with a legend of every part's value and an optional capacity line."""
    out, y, scale = [], 10, (WIDTH - 20) / (most * 1.02)
    names = list(dict.fromkeys(name for _, parts in bars for name in parts))
    for title, parts in bars:
        x = 10.0
        out.append(
            f'<text x="10" y="{y + 10}">{html.escape(title)}, {sum(parts.values()):,.4g} {unit}</text>'
        )
        for name, value in parts.items():
            colour = COLOURS[names.index(name) % len(COLOURS)]
            label = f"<title>{html.escape(name)}: {value:,.4g} {unit}</title>"
            out.append(
                f'<rect x="{x:.2f}" y="{y + 15}" width="{value * scale:.2f}" height="24" fill="{colour}">{label}</rect>'
            )
            x += value * scale
        y += 50
    if line is not None:
        at = 10 + line * scale
        out.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="5" y2="{y - 5}" stroke="#d00" stroke-width="2"/>')
        out.append(
            f'<text x="{at - 4:.1f}" y="{y + 6}" text-anchor="end" fill="#d00">capacity {line:,.1f} {unit}</text>'
        )
        y += 16
    for index, name in enumerate(names):
        x, row = 10 + index % 3 * 300, y + 14 + index // 3 * 18
        values = ", ".join(f"{parts[name]:,.3g}" for _, parts in bars if name in parts)
        out.append(
            f'<rect x="{x}" y="{row - 9}" width="10" height="10" fill="{COLOURS[index % len(COLOURS)]}"/>'
        )
        out.append(f'<text x="{x + 15}" y="{row}">{html.escape(name)} {values} {unit}</text>')
    height = y + 24 + -(-len(names) // 3) * 18
    return f'<svg viewBox="0 0 {WIDTH} {height}">{"".join(out)}</svg>'


def days_drawing(points: Sequence[tuple[int, float]], wide: float) -> str:
    """Days against chips, both logarithmic, with the prediction's band; the leftmost point is the fewest that fit."""
    from math import log

    chips, days = [log(world) for world, _ in points], [log(value) for _, value in points]
    low, high = min(days) - wide - 0.1, max(days) + wide + 0.1
    span = (max(chips) - min(chips)) or 1.0

    def at(chip: float, day: float) -> str:
        return f"{70 + (chip - min(chips)) / span * (WIDTH - 130):.1f},{20 + (high - day) / (high - low) * 240:.1f}"

    upper = [at(chip, day + log(1 + wide)) for chip, day in zip(chips, days, strict=True)]
    lower = [at(chip, day + log(1 - wide)) for chip, day in zip(chips, days, strict=True)]
    out = [f'<polygon points="{" ".join([*upper, *reversed(lower)])}" fill="#4c78a8" opacity="0.2"/>']
    out.append(
        f'<polyline points="{" ".join(map(at, chips, days))}" fill="none" stroke="#4c78a8" stroke-width="2"/>'
    )
    for (world, value), chip, day in zip(points, chips, days, strict=True):
        x, y = at(chip, day).split(",")
        out.append(
            f'<circle cx="{x}" cy="{y}" r="4" fill="#4c78a8"/>'
            f'<text x="{x}" y="{float(y) - 9:.1f}">{value:,.3g} d</text>'
        )
        out.append(f'<text x="{x}" y="285" text-anchor="middle">{world:,}</text>')
    return f'<svg viewBox="0 0 {WIDTH} 300">{"".join(out)}</svg>'


def pipeline_drawing(events: Sequence[Event]) -> str:
    """Who works when, up to MOST_EVENTS: one line a pipeline rank, forwards blue, backwards orange, weights'
    half green, gaps white.
    """
    events = sorted(events, key=lambda event: event.start)[:MOST_EVENTS]
    end, ranks = max(event.end for event in events), 1 + max(event.rank for event in events)
    height = max(4, min(24, 600 // ranks))
    colours = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b"}

    def box(event: Event) -> str:
        x, wide = event.start / end * WIDTH, (event.end - event.start) / end * WIDTH
        title = _title(event.action)
        return (
            f'<rect x="{x:.2f}" y="{event.rank * height}" width="{max(wide - 0.3, 0.2):.2f}" height="{height - 1}" '
            f'fill="{colours[event.action.kind]}"><title>{title}</title></rect>'
        )

    body = "".join(map(box, events))
    return f'<svg viewBox="0 0 {WIDTH} {ranks * height}">{body}</svg>'


def _title(action: Action) -> str:
    kinds = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}
    return f"stage {action.stage}, {kinds[action.kind]} of micro-batch {action.micro_batch}"
