"""Every layout trains the same model: the table of tests/layouts.toml against the single process (`make
prove-layouts`).

Ten steps of GPT and BERT from one set of weights, with unequal target counts for every process and
micro-batch. Prints a row for each layout with its largest differences, and ends with one JSON line.
"""

import sys
import time
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from throughline.benchmarks.common import Claim, claim, finish, parser
from throughline.planner.layout import Layout, layout_problems
from throughline.prove.forked import warm

if TYPE_CHECKING:
    from throughline.prove.proof import Case

TABLE = Path(__file__).parents[1] / "tests" / "layouts.toml"


def read_table(path: Path = TABLE) -> "list[Case]":
    """The rows of a layout table, every one of them a legal layout; `also` names more precisions of a row."""
    from throughline.prove.proof import LENGTH, ROWS, Case  # after `warm`

    cases = []
    for row in tomllib.loads(path.read_text())["layout"]:
        more = row.pop("also", [])
        fields = {name: row.pop(name) for name in Layout.__dataclass_fields__ if name in row}
        if "layers_per_stage" in fields:
            fields["layers_per_stage"] = tuple(fields["layers_per_stage"])
        case = Case(layout=Layout(**fields), **row)
        problems = layout_problems(case.layout, case.config, LENGTH, ROWS, case.micro_rows)
        assert not problems, f"{path.name}, {case.name}: {problems[0]}"
        cases += [case]
        cases += [replace(case, name=f"{kind}-{case.name}", precision=kind) for kind in more]
    return cases


def main() -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--only", default="", help="rows whose name contains this")
    given = options.parse_args()
    warm()
    from throughline.prove.proof import BOUNDS, Prover

    cases = [case for case in read_table() if given.only in case.name]
    if not cases:
        options.error(f"no row of {TABLE.name} has {given.only!r} in its name: nothing would be proven")
    if given.quick:
        large = [case for case in cases[1:] if case.layout.world == 32]
        cases = cases[::24] + large[:1]
    prover, rows, start = Prover(), [], time.monotonic()
    print(
        f"{'layout':<50}{'processes':>9}{'loss':>9}{'norm':>9}{'gradient':>9}{'weights':>9}{'MiB':>7}{'s':>6}"
    )
    for case in cases:
        begun = time.monotonic()
        try:
            errors = prover.prove(case)
        except RuntimeError as failure:
            print(f"{case.name:<50}{case.layout.world:>9}  {failure}", flush=True)
            rows.append(
                {
                    "name": case.name,
                    "processes": case.layout.world,
                    "equal": False,
                    "error": str(failure).splitlines()[-1],
                }
            )
            continue
        broken, seconds = errors.beyond(case.bounds), time.monotonic() - begun
        figures = "".join(
            f"{value:>9.1e}" for value in (errors.loss, errors.norm, errors.gradient, errors.parameter)
        )
        note = f"  beyond the bound: {', '.join(broken)} ({errors.worst})" if broken else ""
        print(
            f"{case.name:<50}{case.layout.world:>9}{figures}{errors.pss_mib:>7.0f}{seconds:>6.1f}{note}",
            flush=True,
        )
        row = {
            "name": case.name,
            "layout": case.layout.describe(),
            "family": case.family,
            "precision": case.precision,
        }
        rows.append(
            row
            | {"processes": case.layout.world, "equal": not broken, "seconds": round(seconds, 1)}
            | asdict(errors)
        )
    equal, seconds = sum(row["equal"] for row in rows), time.monotonic() - start
    print(f"{equal} of {len(rows)} layouts equal the single process, in {seconds / 60:.1f} minutes\n")
    finish("prove_layouts", claims_of(rows, seconds), kind="proof", bounds=BOUNDS, rows=rows)
    return int(equal < len(rows))


def claims_of(rows: list[dict[str, Any]], seconds: float) -> list[Claim]:
    """What the table shows, and what it costs."""
    equal = sum(row["equal"] for row in rows)
    made = [
        claim(
            "layouts_equal",
            [equal],
            [len(rows)],
            peer="the single process",
            unit="layouts",
            better="higher",
            goal=1.0,
        ),
        claim("layouts_minutes", [seconds / 60], [20.0], peer="limit", unit="min", better="lower", goal=1.0),
    ]
    large = [row for row in rows if row["processes"] == 32 and row["equal"]]
    for name, field, limit, unit in (
        ("seconds", "seconds", 120.0, "s"),
        ("memory", "pss_mib", 3072.0, "MiB"),
    ):
        if large:
            worst = max(row[field] for row in large)
            made.append(
                claim(
                    f"processes_32_{name}",
                    [worst],
                    [limit],
                    peer="limit",
                    unit=unit,
                    better="lower",
                    goal=1.0,
                )
            )
    return made


if __name__ == "__main__":
    sys.exit(main())
