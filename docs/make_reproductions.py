"""Write docs/reproductions.md with its plots, the table of claims in README.md and that of docs/own-search.md, from
benchmarks/results/: python docs/make_reproductions.py [--check].
"""

import html
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = ROOT / "benchmarks" / "results" / "reproductions"
PLOTS = HERE / "plots"
BEGIN, END = "<!-- claims: made by `make reproduce` -->", "<!-- end of claims -->"
HEAD = """# Reported results beside ours

Made by `make reproduce` from the artifacts of its runs. *measured*: the figure was measured on the machine that is
named, under the conditions of its row. *predicted*: the planner computed it for the machine that the claim needs.
*proved small*: the property is shown on a small twin. A ratio stands only where both figures are of the same thing.
The planner's few constants were fitted to published measurements, some of these rows among them; `throughline plan
validate` prints every row, and its errors on tables that were left out of the fit.

`make reproduce-NAME` answers one claim; with `python benchmarks/reproduce.py NAME --job` its job for the machine that it
needs is written to `runs/reproductions/NAME-job`: the recipe that the planner chose there, and what `throughline
launch --emit` prints. On a machine with GPUs the same target says what it chose and adds what it can measure there.
"""
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 300, 70, 46, 22, 20
REPORTED, OURS = "#f58518", "#4c78a8"  # as in the planner's drawings
Row = dict[str, Any]


def figure(value: Any) -> str:
    """A number in at most four digits, exact where it is whole and long."""
    if value is None:
        return "-"
    if isinstance(value, int) and abs(value) >= 1e6:
        return f"{value:,}"
    return f"{value:,.4g}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.3g}"


def with_unit(value: Any, unit: str) -> str:
    return "-" if value is None else f"{figure(value)} {unit}".strip()


def claims() -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    return sorted(found, key=lambda claim: claim["number"])


def plot(claim: dict[str, Any]) -> str:
    """Reported dots over the line of ours, both axes logarithmic, as SVG; empty with fewer than three points."""
    points = sorted((row["point"], row["reported"], row["ours"]) for row in claim["rows"] if row.get("point"))
    if len(points) < 3:
        return ""
    units = {row["unit"] for row in claim["rows"] if row.get("point")}
    assert len(units) == 1, f"{claim['name']}: points in {units}"
    values = [value for _, *pair in points for value in pair if value is not None]
    low, high = math.log(min(values)) - 0.2, math.log(max(values)) + 0.2
    first, last = math.log(points[0][0]), math.log(points[-1][0])

    def x(point: float) -> float:
        return LEFT + (math.log(point) - first) / (last - first) * (WIDTH - LEFT - RIGHT - 20) + 10

    def y(value: float) -> float:
        return TOP + (high - math.log(value)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    line = " ".join(f"{x(point):.1f},{y(ours):.1f}" for point, _, ours in points)
    out = [f'<polyline points="{line}" fill="none" stroke="{OURS}" stroke-width="2"/>']
    for point, reported, ours in points:
        out.append(f'<circle cx="{x(point):.1f}" cy="{y(ours):.1f}" r="2.5" fill="{OURS}"/>')
        if reported is not None:
            out.append(f'<circle cx="{x(point):.1f}" cy="{y(reported):.1f}" r="5" fill="{REPORTED}"/>')
        out.append(f'<text x="{x(point):.1f}" y="{HEIGHT - 26}" text-anchor="middle">{point:,g}</text>')
    for tick in ticks(math.exp(low), math.exp(high)):
        out.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:,g}</text>')
        out.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#bbb" stroke-width=".5"/>')
    names = f'<tspan fill="{REPORTED}">reported</tspan> <tspan fill="{OURS}">ours</tspan>'
    out.append(f'<text x="{LEFT}" y="14">{html.escape(units.pop())}: {names}</text>')
    out.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{html.escape(claim["axis"])}</text>'
    )
    style = "text{font:12px sans-serif;fill:#333}@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}"'
    title = f"<title>{html.escape(claim['title'])}</title>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">{title}<style>{style}</style>{"".join(out)}</svg>\n'


def ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten between two values."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in (1, 2, 5) if low <= step * 10.0**power <= high]


def section(claim: dict[str, Any]) -> list[str]:
    """One claim: where it comes from, its plot, and a row for each figure."""
    lines = [
        f"## {claim['title']}",
        "",
        f"Source: {claim['source']}. Machine of the claim: {claim['machine']}.",
    ]
    lines += ["There:", "", "```text", *claim["there"], "```", ""]
    dates = " and ".join(sorted({row["date"] for row in claim["rows"]}))
    lines += [f"Ours on {claim['measured_on']}, {dates}; `make reproduce-{claim['name']}`.", ""]
    if claim["note"]:
        lines += [claim["note"], ""]
    if plot(claim):
        lines += [f"![{claim['title']}](plots/{claim['name']}.svg)", ""]
    lines += table(
        ("what", "reported", "ours", "ratio", "evidence", "conditions", "command"),
        [cells(row) for row in claim["rows"]],
    )
    if claim["open"]:
        lines += ["", f"Not answered yet: {'; '.join(claim['open'])}."]
    return [*lines, ""]


def cells(row: Row) -> list[str]:
    return [
        row["what"],
        with_unit(row["reported"], row["unit"]),
        with_unit(row["ours"], row["unit"]),
        figure(row["ratio"]),
        f"*{row['evidence']}*" + ("" if row["met"] is not False else ", outside its bound"),
        row["conditions"],
        f"`{row['command']}`",
    ]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]


def readme_rows(found: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each claim: its headline's figure, reported and ours."""
    rows = []
    for claim in found:
        row = next((row for row in claim["rows"] if row["name"] == claim["headline"]), None)
        if row is None:
            continue
        reported, ours = (with_unit(row[key], row["unit"]) for key in ("reported", "ours"))
        rows.append([f"{claim['title']}: {row['what']}", reported, ours, row["evidence"]])
    return rows


def made() -> dict[Path, str]:
    """Every generated file and its text."""
    found = claims()
    files = {
        HERE / "reproductions.md": "\n".join([HEAD, *(line for claim in found for line in section(claim))])
    }
    files |= {PLOTS / f"{claim['name']}.svg": plot(claim) for claim in found if plot(claim)}
    readme = ROOT / "README.md"
    block = [BEGIN, *table(("claim", "reported", "ours", "evidence"), readme_rows(found)), END]
    text = re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: "\n".join(block), readme.read_text(), flags=re.S
    )
    files[readme] = text
    search = HERE / "own-search.md"
    files[search] = re.sub(
        r"(<!-- search: made by [^\n]*-->\n).*?(<!-- end of search -->)",
        lambda found: found[1] + "".join(f"{line}\n" for line in search_rows()) + found[2],
        search.read_text(),
        flags=re.S,
    )
    return files


def search_rows() -> list[str]:
    """The table of docs/own-search.md, from the newest result of benchmarks/search.py; empty before it has run."""
    lines = [json.loads(path.read_text()).get("search") for path in RESULTS.parent.glob("*.json")]
    for line in sorted(filter(None, lines), key=lambda line: line["date"], reverse=True)[:1]:
        found, machine = line["details"], line["machine"]
        about = f"{found['questions']} questions over {found['paragraphs']} paragraphs, {machine['cpu']}, {line['date']}"
        rows = [(name, f"{100 * value:.1f} %") for name, value in found["recall"].items()]
        return [*table(("search by", "right paragraph among the first five"), rows), "", f"{about}."]
    return []


def main() -> int:
    stale = [path for path, text in made().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv:
        if stale:
            names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
            sys.stderr.write(f"stale: {names}; run: make reference\n")
        return 1 if stale else 0
    PLOTS.mkdir(exist_ok=True)
    for path in stale:
        path.write_text(made()[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
