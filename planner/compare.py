"""Choices of chips side by side, for a person who decides: time, money, energy, memory, and why the others lost."""

import json
from pathlib import Path
from typing import Any

from ..core.artifact import create_artifact
from ..core.console import cell, table
from ..core.errors import WrongUse
from ..core.page import Bar, Part, made_here, page
from .report import KEY, candidate_facts, price_told
from .run import Run
from .search import Candidate, Search

DECIDES = {"cost": "cost", "days": "expected_days", "energy": "kwh"}
ROWS = "layout|s/step|band|MFU|GiB of a chip|days alone|days expected|from|to|training|spare nodes|cost|MWh|t CO2"


def compared(choices: list[tuple[str, Search, Candidate, Run]], by: str) -> tuple[dict[str, Any], list[str]]:
    """Facts and lines of the comparison, best choice first. Raises WrongUse where the best cannot be told."""
    found = []
    for name, search, best, run in choices:
        facts = candidate_facts(search, best, run)
        cluster = search.cluster
        facts |= {"name": name, "cluster": cluster.name, "capacity_gib": cluster.chip.memory_gib}
        facts["priced"] = price_told(cluster)
        found.append(facts)
    key = DECIDES[by]
    if unknown := [facts["name"] for facts in found if facts["run"][key] is None]:
        what = "price" if by == "cost" else "power"
        fix = "CHIPS:CLUSTER:PRICE, or --by days" if by == "cost" else "--by days or cost"
        raise WrongUse(f"no {what} is known of {', '.join(unknown)}", where=f"--by {by}", fix=fix)
    found.sort(key=lambda facts: facts["run"][key])
    reasons = [{"name": facts["name"], "reason": why_lost(found[0], facts, by)} for facts in found[1:]]
    whole = {"by": by, "choices": found, "reasons": reasons}
    header = ("", *(facts["name"] for facts in found))
    lines = [
        f"best by {by}: {found[0]['name']} ({found[0]['cluster']})",
        "",
        *table(header, comparison_cells(found)),
    ]
    lines += ["", *(f"{row['name']}: {row['reason']}" for row in reasons)]
    lines += ["", *(f"{facts['name']}: {facts['priced']}" for facts in found if facts["priced"])]
    return whole, lines


def comparison_cells(found: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row for each figure, one column for each choice."""
    columns = []
    for facts in found:
        run = facts["run"]
        cells = [
            facts["layout"],
            f"{facts['step_seconds']:.3g}",
            f"+-{facts['band']:.0%}",
            f"{facts['mfu']:.1%}",
        ]
        cells += [f"{facts['needed_gib']:.1f} of {facts['capacity_gib']:g}"]
        cells += [f"{run[name]:.3g}" for name in ("days", "expected_days", "days_low", "days_high")]
        cells += [
            f"{run['goodput']:.1%}",
            str(run["spare_nodes"]),
            known(run["cost"], 1, run["currency"]),
        ]
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
    parts = [
        Part(
            f"By {facts['by']}: {found[0]['name']} is best", KEY, header=header, rows=comparison_cells(found)
        ),
        Part(
            "Why the others lost",
            header=("choice", "reason"),
            rows=[tuple(row.values()) for row in facts["reasons"]],
        ),
    ]
    priced = [(choice["name"], choice["priced"]) for choice in found if choice["priced"]]
    parts += [Part("Prices", header=("choice", "list"), rows=priced)] if priced else []
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
