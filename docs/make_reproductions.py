"""Write docs/reproductions.md from benchmarks/results/reproductions/*.json: python docs/make_reproductions.py [--check]."""

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = ROOT / "benchmarks" / "results" / "reproductions"


def figure(value: Any) -> str:
    """A number in at most four digits, anything else as text."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    return f"{value:,.4g}" if abs(value) < 1e5 else f"{value:.3g}"


def page() -> str:
    """One section a claim; each row has the reported figure, ours, the kind of evidence and the command."""
    lines = [
        "# Reported results beside ours",
        "",
        "Made by `make reproduce` from the artifacts of its runs. *measured*: the figure was measured on the machine that is",
        "named, under the conditions of its row. *predicted*: the planner computed it for the machine that the claim needs.",
        "*proved small*: the property is shown on a small twin. A ratio stands only where both figures are of the same thing.",
        "The planner's few constants were fitted to published measurements, some of these rows among them; `throughline plan",
        "validate` prints every row, and its errors on tables that were left out of the fit.",
        "",
    ]
    for path in sorted(RESULTS.glob("*.json")):
        claim = json.loads(path.read_text())
        lines += [
            f"## {claim['title']}",
            "",
            f"Source: {claim['source']}. Machine of the claim: {claim['machine']}.",
        ]
        lines += [f"There: `{claim['there']}`. Ours on {claim['measured_on']}, {claim['date']}.", ""]
        if claim["note"]:
            lines += [claim["note"], ""]
        lines += [
            "| what | reported | ours | ratio | evidence | conditions | command |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in claim["rows"]:
            cells = (
                row["what"],
                figure(row["reported"]) + (f" {row['unit']}" if row["reported"] is not None else ""),
                f"{figure(row['ours'])} {row['unit']}",
                figure(row["ratio"]),
                f"*{row['evidence']}*" + ("" if row["met"] is not False else ", outside its bound"),
                row["conditions"],
                f"`{row['command']}`",
            )
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    target, text = HERE / "reproductions.md", page()
    if "--check" in sys.argv:
        if not target.exists() or target.read_text() != text:
            sys.stderr.write("stale: reproductions.md; run: make reference\n")
            return 1
        return 0
    target.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
