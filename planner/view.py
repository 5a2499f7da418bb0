"""Pages of a plan and of a comparison of plans, each one file without a network, with what was read off them as JSON.

A plan's has the table, breakdowns, memory, days against chips with the band, and the pipeline's timeline: from the same
simulation whose trace a browser's tracing view opens next to a measured one. A comparison is for a person who decides:
time, money, energy and memory of choices of chips side by side, and why the others lost.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.artifact import create_artifact
from ..core.console import cell, table
from ..core.errors import WrongUse
from ..core.page import Bar, Chart, Part, made_here, page
from .cost import Step
from .memory import MOMENTS, stage_memory
from .report import KEY, as_csv, asked, candidate_facts, price_told, ranked_cells
from .run import SECONDS_PER_DAY, Run, run_lines, run_seconds
from .schedule import Event, simulate
from .search import Candidate, Found, Search, band, find_layouts

MOST_EVENTS = 4000  # drawn; a page with more is slow to open
WIDTH = 900
KINDS = {"F": "forward", "B": "backward", "I": "backward of inputs", "W": "backward of weights"}


def write_plan(path: Path, found: Found, facts: dict[str, Any], run: Run) -> None:
    """The plan as an artifact of kind `plan`: plan.html, plan.json, layouts.csv, and trace.json with a pipeline."""
    best = found.best[0]
    memory = stage_memory(found.search.work, best.layouts, found.search.software)
    points = days_by_chips(found, run) if run.tokens else []
    events = timeline(found, best)
    facts = facts | {"memory": memory, "days_by_chips": points}
    with create_artifact(path, "plan") as draft:
        files = {
            "plan.json": json.dumps(facts, indent=1) + "\n",
            "layouts.csv": as_csv(facts["layouts"]),
            "plan.html": plan_page(found, facts, memory, points, events),
        }
        files |= {"trace.json": json.dumps(chrome_trace(events))} if events else {}
        for name, text in files.items():
            (draft.path / name).write_text(text, encoding="utf-8")
        plain = {key: value for key, value in facts.items() if isinstance(value, str | int | float)}
        draft.facts |= plain | {"best": best.describe(), "step_seconds": best.seconds}


def days_by_chips(found: Found, run: Run) -> list[tuple[int, float]]:
    """Days of the run on other numbers of chips that it fits on: halves down to one, doubles up to eight times."""
    points, cluster, world = [], found.search.cluster, found.search.world
    smaller = [world >> times for times in range(10, 0, -1) if world % (1 << times) == 0]
    for world in (*smaller, *(world * factor for factor in (1, 2, 4, 8))):
        if world > cluster.chips_per_node and not cluster.node_network_gb_s:
            break
        other = find_layouts(dataclasses.replace(found.search, world=world), 1)
        if other.best:
            points.append((world, run_seconds(other.search, other.best[0], run) / SECONDS_PER_DAY))
    return points


def timeline(found: Found, candidate: Candidate) -> list[Event]:
    """The simulated pipeline of one step, at most four rounds of micro-batches; empty without a pipeline."""
    here, search = candidate.layouts, found.search
    if here.pipeline == 1:
        return []
    layout, layers = candidate.layout(), search.work.config.layers
    rounds = max(1, min(4, MOST_EVENTS // (2 * layout.stages * here.pipeline)))
    micro_batches = min(search.work.rows // (here.data * here.micro_rows), rounds * here.pipeline)
    layer, _, head = Step(search.work, here, search.cluster, search.software).times()

    def seconds(times: dict, phase: str) -> float:
        return float(sum(value for (when, kind), value in times.items() if when == phase and kind != "core"))

    again = seconds(layer, "forward") * (here.recompute == 2)
    phases: dict[str, list[float]] = {}
    for phase, once in (("forward", 0.0), ("backward", again)):
        stages = (len(layout.layers_of(stage, layers)) for stage in range(layout.stages))
        phases[phase] = [count * (seconds(layer, phase) + once) for count in stages]
        ahead = search.work.config.blocks_ahead * (seconds(layer, phase) + once)
        phases[phase][-1] += seconds(head, phase) + ahead
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
        f"{asked(search)}; {facts['legal']:,} legal layouts, {facts['fit']:,} fit. "
        f"Band: {band(search):.0%} either way, four predictions in five. {made_here()}"
    )
    whole, price = run_lines(facts["layouts"][0]["run"]), price_told(search.cluster)
    whole += [f"price: {price}"] if whole and price else []
    step = f"Step of {best.describe()}: {best.seconds:,.4g} s"
    fewest = f"Fewest chips that fit: {points[0][0]:,}." if points else ""
    header, cells = ranked_cells(facts["layouts"], search.cluster.currency)
    reasons = [(row["step"], row["reason"]) for row in facts["neighbours"]]
    return page(
        f"Plan of {facts['model']}" if "model" in facts else "Plan",
        [
            Part("Layouts", note=KEY, header=header, rows=cells),
            Part("The whole run", items=[(line.split(": ")[0], line.split(": ", 1)[1]) for line in whole]),
            Part(step, bars=shares(parts, best.seconds, 1, "s")),
            *memory_parts(memory, found.capacity),
            Part("Days against chips", charts=[days_chart(points, band(search))], note=fewest),
            Part("Pipeline, first micro-batches", svg=pipeline_drawing(events) if events else ""),
            Part("Why its neighbours lost", header=("step", "reason"), rows=reasons),
        ],
        note,
    )


def memory_parts(memory: list[dict[str, Any]], capacity: float) -> list[Part]:
    """For each process that is listed its terms at its worst moment, as shares of the chip's memory (bytes)."""
    found = []
    for stage in memory:
        terms = {name: stage["terms"][name] for name in MOMENTS[stage["peak"]] if stage["terms"][name]}
        title = f"Memory of the {stage['stage']} process at its worst moment ({stage['peak']})"
        used = f"{sum(terms.values()) / 2**30:,.4g} of a capacity of {capacity / 2**30:,.1f} GiB"
        found.append(Part(f"{title}: {used}", bars=shares(terms, capacity, 2**30, "GiB")))
    return found


def shares(parts: dict[str, float], whole: float, unit: float, name: str) -> list[Bar]:
    """A bar for each part, as long as its share; beside it its size in the unit."""
    return [Bar(part, value / whole, text=f"{value / unit:,.3g} {name}") for part, value in parts.items()]


def days_chart(points: Sequence[tuple[int, float]], wide: float) -> Chart:
    """Days against chips, both logarithmic, with the prediction's band; the leftmost point is the fewest that fit."""
    series = [
        (name, [(float(world), days * factor) for world, days in points])
        for name, factor in (("days", 1.0), ("at least", 1 - wide), ("at most", 1 + wide))
    ]
    return Chart("days of the run", series, "chips", logarithmic=True)


def pipeline_drawing(events: Sequence[Event]) -> str:
    """Who works when, up to MOST_EVENTS, a line a rank: forwards blue, backwards orange, weights' half green."""
    events = sorted(events, key=lambda event: event.start)[:MOST_EVENTS]
    end, ranks = max(event.end for event in events), 1 + max(event.rank for event in events)
    height = max(4, min(24, 600 // ranks))
    colours = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b"}

    def box(event: Event) -> str:
        x, wide = event.start / end * WIDTH, (event.end - event.start) / end * WIDTH
        title = f"stage {event.action.stage}, {KINDS[event.action.kind]} of micro-batch {event.action.micro_batch}"
        return (
            f'<rect x="{x:.2f}" y="{event.rank * height}" width="{max(wide - 0.3, 0.2):.2f}" height="{height - 1}" '
            f'fill="{colours[event.action.kind]}"><title>{title}</title></rect>'
        )

    body = "".join(map(box, events))
    return f'<svg viewBox="0 0 {WIDTH} {ranks * height}">{body}</svg>'


DECIDES = {"cost": "cost", "days": "expected_days", "energy": "kwh"}
ROWS = "layout|s/step|band|MFU|GiB of a chip|days alone|days expected|from|to|training|spare nodes|cost|MWh|t CO2"


def compared(choices: list[tuple[str, Search, Candidate, Run]], by: str) -> tuple[dict[str, Any], list[str]]:
    """Facts and lines of the comparison, best choice first. Raises WrongUse where the best cannot be told."""
    found = []
    for name, search, best, run in choices:
        cluster, facts = search.cluster, candidate_facts(search, best, run)
        facts |= {"name": name, "cluster": cluster.name, "capacity_gib": cluster.chip.memory_gib}
        found.append(facts | {"priced": price_told(cluster)})
    key = DECIDES[by]
    if unknown := [facts["name"] for facts in found if facts["run"][key] is None]:
        what, fix = (
            ("price", "CHIPS:CLUSTER:PRICE, or --by days") if by == "cost" else ("power", "--by days or cost")
        )
        raise WrongUse(f"no {what} is known of {', '.join(unknown)}", where=f"--by {by}", fix=fix)
    found.sort(key=lambda facts: facts["run"][key])
    reasons = [{"name": facts["name"], "reason": why_lost(found[0], facts, by)} for facts in found[1:]]
    whole = {"by": by, "choices": found, "reasons": reasons}
    header = ("", *(facts["name"] for facts in found))
    first = f"best by {by}: {found[0]['name']} ({found[0]['cluster']})"
    lines = [first, "", *table(header, comparison_cells(found))]
    lines += ["", *(f"{row['name']}: {row['reason']}" for row in reasons)]
    lines += ["", *(f"{facts['name']}: {facts['priced']}" for facts in found if facts["priced"])]
    return whole, lines


def comparison_cells(found: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row for each figure, one column for each choice."""
    columns = []
    for facts in found:
        run = facts["run"]
        cells = [facts["layout"], f"{facts['step_seconds']:.3g}", f"+-{facts['band']:.0%}"]
        cells += [f"{facts['mfu']:.1%}", f"{facts['needed_gib']:.1f} of {facts['capacity_gib']:g}"]
        cells += [f"{run[name]:.3g}" for name in ("days", "expected_days", "days_low", "days_high")]
        cells += [f"{run['goodput']:.1%}", str(run["spare_nodes"]), known(run["cost"], 1, run["currency"])]
        columns.append([*cells, known(run["kwh"], 1e3), known(run["co2_kg"], 1e3)])
    return [(name, *cells) for name, *cells in zip(ROWS.split("|"), *columns, strict=True)]


def known(value: float | None, per: float, unit: str = "") -> str:
    """A figure in a unit, "-" where it is not known."""
    return "-" if value is None else f"{cell(value / per)} {unit}".rstrip()


def why_lost(best: dict[str, Any], other: dict[str, Any], by: str) -> str:
    """By how much, of which factors that comes, whether the prediction can tell, and which part of a step grew most."""
    key = DECIDES[by]
    more, days = (other["run"][name] / max(best["run"][name], 1e-12) for name in (key, "expected_days"))
    words = f"{more - 1:.0%} more {by}"
    if by != "days":
        words += f": {days:.2g} times the days, {more / days:.2g} times the {by} of a day"
    if more - 1 < best["band"] + other["band"]:
        words += f"; within the bands of {best['band']:.0%} and {other['band']:.0%}, so not certain"
    shares = {
        name: other["parts"][name] / other["step_seconds"] - best["parts"][name] / best["step_seconds"]
        for name in best["parts"]
    }
    grown = max(shares, key=shares.__getitem__)
    return words + (f"; {shares[grown]:.0%} more of its step is {grown}" if shares[grown] > 0.005 else "")


def write_comparison(path: Path, facts: dict[str, Any]) -> None:
    """The comparison as an artifact of kind `plan`: compare.html, one page without a network, and compare.json."""
    found = facts["choices"]
    header = ("", *(choice["name"] for choice in found))
    best = f"By {facts['by']}: {found[0]['name']} is best"
    lost = [tuple(row.values()) for row in facts["reasons"]]
    priced = [(choice["name"], choice["priced"]) for choice in found if choice["priced"]]
    parts = [
        Part(best, KEY, header=header, rows=comparison_cells(found)),
        Part("Why the others lost", header=("choice", "reason"), rows=lost),
        Part("Prices", header=("choice", "list"), rows=priced),
    ]
    for title, name, per, unit in (
        ("Days expected", "expected_days", 1.0, "days"),
        ("Cost, spare nodes included", "cost", 1.0, found[0]["run"]["currency"]),
        ("Energy of the machines", "kwh", 1e3, "MWh"),
    ):
        values = {choice["name"]: choice["run"][name] for choice in found}
        if None not in values.values():
            most = max(values.values()) or 1.0
            bars = [Bar(key, value / most, text=known(value, per, unit)) for key, value in values.items()]
            parts.append(Part(title, bars=bars))
    with create_artifact(path, "plan") as draft:
        (draft.path / "compare.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        note = f"Days expected count failures; from and to take the bands and the rates of failures. {made_here()}"
        (draft.path / "compare.html").write_text(page("Choices", parts, note), encoding="utf-8")
        draft.facts |= {"best": found[0]["name"], "by": facts["by"]}
