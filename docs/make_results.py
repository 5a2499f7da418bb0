"""Write the measured table of README.md from benchmarks/results/*.json: python docs/make_results.py [--check]."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results: made by `make reference` -->", "<!-- end of results -->"


def rows() -> list[str]:
    """One line a claim, in the order of file and benchmark."""
    lines = [
        "| claim | ours | peer | ratio (range) | goal | met | machine, date |",
        "|---|---|---|---|---|---|---|",
    ]
    for file in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        for name, line in json.loads(file.read_text()).items():
            machine = line["machine"]
            place = f"{(machine['gpus'] or [machine['cpu']])[0]}, {machine['cores']} cores, {line['date']}"
            for claim in line["claims"]:
                goal = "-" if claim["goal"] is None else f"{claim['goal']:g}"
                met = {True: "yes", False: "**no**", None: "-"}[claim["met"]]
                low, high = claim["spread"]
                lines.append(
                    f"| {claim['name']} (`benchmarks/{name}.py`) | {claim['ours']:.4g} {claim['unit']} | {claim['theirs']:.4g}: "
                    f"{claim['peer']} | {claim['ratio']:.2f} ({low:.2f}-{high:.2f}) | {goal} | {met} | {place} |"
                )
    return lines


def main() -> int:
    readme = ROOT / "README.md"
    text = readme.read_text()
    made = re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: "\n".join([BEGIN, *rows(), END]), text, flags=re.S
    )
    if "--check" in sys.argv:
        return 0 if made == text else 1
    readme.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
