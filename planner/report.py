"""A plan in words and numbers: the ranked table, the reasons, and the two breakdowns that sum exactly."""

import csv
import dataclasses
import io
from typing import Any

from ..core.console import amount, table
from ..models.config import GPTConfig, ModelConfig
from .hardware import Cluster
from .memory import MOMENTS, stage_memory
from .run import Run, goodput, node_failures, nodes_of, run_facts, run_lines, saves_of
from .search import Candidate, Found, Search, band, flops_facts, neighbours, why_not
from .work import RECOMPUTES

KEY = (
    "T tensor, P pipeline, C context, D data, E expert: processes on each axis. micro: rows of a micro-batch. turns: "
    "stages of each process. zero1, zero2, full: what data processes share of optimizer, gradients and weights. "
    "recompute: what a backward computes again. offload: the optimizer on the host. MFU counts model FLOPs, HFU those "
    "that are computed again too."
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
        **flops_facts(work, candidate, cluster, search.software),
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


def ranked(found: Found, run: Run) -> tuple[dict[str, Any], list[str]]:
    """The table of the best layouts and one line for each neighbour of the first, as facts and as lines."""
    search, best = found.search, found.best
    rows = [candidate_facts(search, candidate, run) for candidate in best]
    others = neighbours(search, best[0])
    reasons = [(name, why_not(best[0], other, found.capacity)) for name, other in others]
    told = [{"step": name, "reason": reason} for name, reason in reasons]
    facts = {**search_facts(found), "layouts": rows, "neighbours": told}
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
    header = [
        "layout",
        "s/step",
        f"+-{rows[0]['band']:.0%}",
        "TFLOP/s",
        "MFU",
        "HFU",
        "GiB",
        "days",
        currency,
    ]
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


def search_facts(found: Found) -> dict[str, Any]:
    """What was asked and how much was looked at."""
    search = found.search
    return {
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
    }


def explain(search: Search, candidate: Candidate, run: Run) -> tuple[dict[str, Any], list[str]]:
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


def checkpoint_facts(
    search: Search, candidate: Candidate, run: Run, told_tokens: bool
) -> tuple[dict[str, Any], list[str]]:
    """How often to save, with the share of time that trains at published rates of failure, and the spare nodes."""
    facts = {"layout": candidate.describe(), "chips": search.world} | run_facts(search, candidate, run)
    nodes, saves = nodes_of(search), saves_of(search, candidate, run)
    rows, facts["rates"] = [], []
    named = {"--failures": run.failures} if run.failures else node_failures()
    for name, rate in sorted(named.items(), key=lambda item: item[1]):
        found = goodput(nodes, rate, *saves)
        facts["rates"].append({"name": name, "failures_of_a_node_a_day": rate} | dataclasses.asdict(found))
        between, every = found.between_failures_s / 3600, found.save_every_s / 60
        rows.append(
            (name, f"{rate:.2g}", f"{between:,.3g}", f"{every:,.3g}", f"{found.share:.1%}", found.spare_nodes)
        )
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
