"""A plan and a layout in words and numbers: the ranked table, the reasons, the two breakdowns that sum exactly; who
holds what of a layout and what is sent in a step, as `train --show-layout` prints it.
"""

import csv
import dataclasses
import io
import itertools
from typing import Any

from ..core.console import amount, table
from ..models.config import GPTConfig, ModelConfig, family_of
from . import tables
from .hardware import Cluster
from .layout import Layout
from .memory import MOMENTS, host_terms, stage_memory, state_terms
from .run import Run, goodput, node_failures, nodes_of, run_facts, run_lines, saves_of
from .schedule import pipeline_actions
from .search import Candidate, Found, Search, band, flops_facts, neighbours, why_not
from .traffic import StepShape, held, traffic
from .work import RECOMPUTES, Layouts, Work

KEY = (
    "T tensor, P pipeline, C context, D data, E expert: processes on each axis. micro: rows of a micro-batch. turns: "
    "stages of each process. zero1, zero2, full: what data processes share of optimizer, gradients and weights. "
    "recompute: what a backward computes again. offload: the optimizer on the host. MFU counts model FLOPs, HFU those "
    "that are computed again too, both of the chip's peak in the precision of the products."
)


def candidate_facts(search: Search, candidate: Candidate, run: Run) -> dict[str, Any]:
    """Everything about one layout, for JSON, CSV and the page."""
    cluster, work = search.cluster, search.work
    whole = run_facts(search, candidate, run)
    days, hourly = whole.get("days"), cluster.price_per_chip_hour * candidate.layouts.world
    return {
        "layout": candidate.describe(),
        "parallel": candidate.layout().facts(),
        "micro_batch_rows": candidate.layouts.micro_rows,
        "recompute": RECOMPUTES[candidate.layouts.recompute],
        "expert": candidate.layouts.expert,
        "offload": bool(candidate.layouts.offload),
        "step_seconds": candidate.seconds,
        "tokens_per_second": work.tokens / candidate.seconds,
        **flops_facts(search, candidate),
        "needed_gib": candidate.needed_bytes / 2**30,
        "host_gib": candidate.host_bytes / 2**30,
        "days": days,
        "cost": hourly * 24 * days if days and hourly else None,
        "band": band(search),
        "run": whole,
        "parts": candidate.parts,
    }


def asked(search: Search) -> str:
    """What a plan is for, in a line."""
    work = search.work
    text = f"{search.world:,} chips of {search.cluster.name}; {work.rows:,} rows of {work.length:,} tokens a step"
    whole, active = work.config.parameter_count(), active_parameters(work.config)
    told = f"; {active / 1e9:.3g} of {whole / 1e9:.4g} billion parameters active"
    return text + told * (active != whole)


def active_parameters(config: ModelConfig) -> int:
    """Those that a token goes through."""
    return config.active_parameter_count() if isinstance(config, GPTConfig) else config.parameter_count()


Told = tuple[dict[str, Any], list[str]]  # facts for a script, lines for a person


def ranked(found: Found, run: Run) -> Told:
    """The table of the best layouts and one line for each neighbour of the first, as facts and as lines."""
    search, best = found.search, found.best
    rows = [candidate_facts(search, candidate, run) for candidate in best]
    others = neighbours(search, best[0])
    reasons = [(name, why_not(best[0], other, found.capacity)) for name, other in others]
    told = [{"step": name, "reason": reason} for name, reason in reasons]
    facts = {
        "chips": search.world,
        "cluster": search.cluster.key,
        "chip": search.cluster.chip.key,
        "software": search.software.name,
        "rows": search.work.rows,
        "length": search.work.length,
        "parameters": search.work.config.parameter_count(),
        "active_parameters": active_parameters(search.work.config),
        "legal": len(found.seconds),
        "fit": int(found.fits.sum()),
        "capacity_gib": found.capacity / 2**30,
        "layouts": rows,
        "neighbours": told,
    }
    legal = f"{facts['legal']:,} legal layouts, {facts['fit']:,} fit in {amount(found.capacity, 'B')}"
    lines = [f"{asked(search)}; {legal}", "", *table(*ranked_cells(rows, search.cluster.currency))]
    if reasons:
        lines += ["", f"beside {best[0].describe()}:", *(f"  {name:<26}{reason}" for name, reason in reasons)]
    whole = run_lines(rows[0]["run"])
    lines += ["", *whole] if whole else []
    if price := price_told(search.cluster):
        lines += ["", f"price: {price}"]
    return facts, lines


def price_told(cluster: Cluster) -> str:
    """What a chip costs, and where that stands; "" where it is not known."""
    price = cluster.price_per_chip_hour
    return f"{price:g} {cluster.currency} a chip and hour, {cluster.priced}" if price else ""


def ranked_cells(rows: list[dict[str, Any]], currency: str) -> tuple[list[str], list[tuple[str, ...]]]:
    """Header and cells of the ranked table, for the terminal and for the page."""
    wide = f"+-{rows[0]['band']:.0%}"
    header = ["layout", "s/step", wide, "TFLOP/s", "MFU", "HFU", "GiB", "days", currency]
    return header, [
        (
            row["layout"],
            _short(row["step_seconds"]),
            _short(row["step_seconds"] * row["band"]),
            f"{row['model_tflops']:,.1f}",
            f"{row['mfu']:.1%}",
            f"{row['hfu']:.1%}",
            f"{row['needed_gib']:,.1f}",
            _short(row["days"]),
            "-" if row["cost"] is None else f"{row['cost']:,.0f}",
        )
        for row in rows
    ]


def explain(search: Search, candidate: Candidate, run: Run) -> Told:
    """Where the time and the memory of one layout go. Both lists sum to what the table says."""
    facts = candidate_facts(search, candidate, run)
    facts["memory"] = stage_memory(search.work, candidate.layouts, search.software)
    title = f"{candidate.describe()} on {search.world:,} chips of {search.cluster.name}, +-{band(search):.0%}"
    rows = [
        (name, f"{value:,.4f}", f"{value / candidate.seconds:.1%}")
        for name, value in [*candidate.parts.items(), ("step", candidate.seconds)]
        if value
    ]
    lines = [title, "", "seconds of a step", *table(("part", "s", "share"), rows)]
    for stage in facts["memory"]:
        lines += ["", f"memory of the {stage['stage']} process, at its worst moment: {stage['peak']}"]
        names = MOMENTS[stage["peak"]]
        held = [(name, f"{stage['terms'][name] / 2**30:,.3f}") for name in names if stage["terms"][name]]
        lines += table(("term", "GiB"), [*held, ("sum", f"{stage['moments'][stage['peak']] / 2**30:,.3f}")])
    if candidate.host_bytes:
        lines += ["", f"host memory for each process: {amount(candidate.host_bytes, 'B')}"]
    whole = run_lines(facts["run"])
    return facts, lines + (["", *whole] if whole else [])


def as_csv(rows: list[dict[str, Any]]) -> str:
    """The table of layouts for a spreadsheet: one column a part."""
    flat = [
        {name: value for name, value in row.items() if name not in ("parts", "parallel", "memory", "run")}
        | {f"seconds {name}": value for name, value in row["parts"].items()}
        for row in rows
    ]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(flat[0]))
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def pareto_lines(points: list[tuple[int, float]], width: int = 60) -> list[str]:
    """Days against chips as bars in a terminal: one line for each number of chips that fits."""
    longest = max((days for _, days in points), default=1.0)
    bars = [(chips, days, "#" * max(1, round(width * days / longest))) for chips, days in points]
    return [f"{chips:>8,} chips {bar} {_short(days)} days" for chips, days, bar in bars]


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def checkpoint_facts(search: Search, candidate: Candidate, run: Run, told_tokens: bool) -> Told:
    """How often to save, with the share of time that trains at published rates of failure, and the spare nodes."""
    facts = run_facts(search, candidate, run) | {"layout": candidate.describe(), "chips": search.world}
    nodes, saves = nodes_of(search), saves_of(search, candidate, run)
    rows, facts["rates"] = [], []
    named = {"--failures": run.failures} if run.failures else node_failures()
    for name, rate in sorted(named.items(), key=lambda item: item[1]):
        found = goodput(nodes, rate, *saves)
        facts["rates"].append({"name": name, "failures_of_a_node_a_day": rate} | dataclasses.asdict(found))
        times = f"{found.between_failures_s / 3600:,.3g}", f"{found.save_every_s / 60:,.3g}"
        rows.append((name, f"{rate:.2g}", *times, f"{found.share:.1%}", found.spare_nodes))
    steps = max(1, round(facts["save_every_minutes"] * 60 / candidate.seconds))
    header = ("as in", "failures of a node a day", "hours between", "minutes to save", "training", "spares")
    lines = [
        f"{asked(search)}; {candidate.describe()}, {candidate.seconds:.3g} s a step",
        "",
        *table(header, rows),
        "",
        f"save every {facts['save_every_minutes']:,.3g} minutes: checkpoint.save_every_steps = {steps}",
        f"a save stops training for {saves[0]:.3g} s, a failure for {run.restart_s:,.0f} s, a node for "
        f"{run.repair_days:g} days; {facts['spare_nodes']} spare nodes are too few in one case of 100",
    ]
    facts["save_every_steps"] = steps
    if not told_tokens:  # the days would be of tokens that nobody named
        for name in ("days", "expected_days", "days_low", "days_high", "cost", "kwh", "co2_kg"):
            facts.pop(name)
    return facts, lines + (["", *run_lines(facts)] if told_tokens else [])


def layout_report(config: ModelConfig, layout: Layout, batch: StepShape, optimizer: str) -> Told:
    """A layout for a script and for a person: what each process holds and sends in a step."""
    degrees = range(layout.pipeline), range(layout.tensor), range(1), range(layout.shards)
    places = [
        tables.Coordinates(*ranks) for ranks in itertools.product(*degrees)
    ]  # those that hold different parts
    processes = [vars(place) | held_bytes(config, layout, batch, optimizer, place) for place in places]
    sent = {rank: traffic(config, layout, batch, rank) for rank in range(layout.pipeline)}
    facts: dict[str, Any] = {
        "layout": layout.facts(),
        "family": family_of(config),
        "parameters": config.parameter_count(),
        "processes": processes,
        "placements": {name: _over_tensor(name, config, layout) for name in tables.parameter_shapes(config)},
        "traffic": [{"pipeline": rank} | vars(entry) for rank, entries in sent.items() for entry in entries],
    }
    if layout.pipeline > 1:
        order = pipeline_actions(layout, batch.micro_batches)
        facts["actions"] = [[str(action) for action in rank] for rank in order]
    lines = [f"{layout.product()}: {layout.describe()}", f"{config.parameter_count():,} parameters", ""]
    lines += table(("parameter", "shape", "over tensor", "stage"), _placement_rows(config, layout))
    lines += ["", "held in a step by one process of each place; its copies hold as much"]
    counted, sized = ("pipeline", "tensor", "shard", "parameters"), list(processes[0])[-3:]
    bytes_of = [[amount(row[name], "B") for name in sized] for row in processes]
    cells = [[row[name] for name in counted] + held for row, held in zip(processes, bytes_of, strict=True)]
    lines += table((*counted, *sized), cells)
    warm = "" if batch.scheme == "none" else ", after the warm-up of compression"
    lines += ["", f"sent by one process in a step{warm}"]
    rows = [
        (rank, entry.axis, entry.kind, entry.what, entry.calls, amount(entry.bytes, "B"))
        for rank, entries in sent.items()
        for entry in entries
    ]
    lines += table(("pipeline", "axis", "collective", "of", "calls", "bytes"), rows) if rows else ["nothing"]
    if layout.pipeline > 1:
        lines += ["", "order of work: stage, forward or backward (I of inputs, W of weights), micro-batch"]
        lines += [f"{rank}: {shortened(actions)}" for rank, actions in enumerate(facts["actions"])]
    return facts, lines


def held_bytes(
    config: ModelConfig, layout: Layout, batch: StepShape, optimizer: str, place: tables.Coordinates
) -> dict[str, int]:
    """Parameters of a process, counted, and the bytes that the planner's memory has for so many."""
    owned = [(spec.name, spec.box.size, spec.box.numel) for spec in tables.shard_specs(config, layout, place)]
    count, number = sum(numel for *_, numel in owned), batch.numbers.gradient
    slots = sum(tables.optimizer_numbers(optimizer, name, size) for name, size, _ in owned)
    slots += batch.averages * count
    numbers = dataclasses.replace(batch.numbers, moments=number * slots / max(count, 1))
    software = dataclasses.replace(batch.software, precision=numbers)
    whole = held(config, dataclasses.replace(layout, sharding="replicated"), place)
    layouts = Layouts.of(layout, batch.rows, batch.recompute, batch.halves)
    work = Work(config, batch.micro_batches * batch.rows * layout.data, batch.length)
    terms = state_terms(config, layouts, numbers, whole, count)
    terms["host"] = sum(host_terms(work, layouts, software, count).values())
    names = ("weights", "gradients", "host" if batch.halves else "optimizer")
    return {"parameters": count} | {name: round(float(terms[name])) for name in names}


def shortened(words: list[str], most: int = 24) -> str:
    """The first and last of a long list."""
    return " ".join(words if len(words) <= most else [*words[: most // 2], "...", *words[-most // 2 :]])


def _over_tensor(name: str, config: ModelConfig, layout: Layout) -> str:
    if layout.tensor == 1:
        return "whole"
    placement = tables.tensor_placement(name, config)
    return f"cut on dim {placement}" if isinstance(placement, int) else f"whole, gradient {placement}"


def _placement_rows(config: ModelConfig, layout: Layout) -> list[tuple[str, str, str, str]]:
    """One row for each parameter, those of the blocks once for all layers."""
    rows = []
    for name, shape in tables.parameter_shapes(config).items():
        if name.startswith("blocks.") and not name.startswith("blocks.0."):
            continue
        shown, where = name.replace("blocks.0.", "blocks.*."), "its layer's"
        if shown == name:
            stages = [
                stage for stage in range(layout.stages) if tables.stage_holds(name, stage, config, layout)
            ]
            where = ", ".join(map(str, stages))
        rows.append((shown, " x ".join(map(str, shape)), _over_tensor(name, config, layout), where))
    return rows
