"""`throughline study RECIPE`: measure this machine, so that plans for it rest on measurements."""

import json
from pathlib import Path

import click

from ..core import console
from .common import PATH, option, pretraining_recipe, recipe_options, throughline_command


@click.command()
@recipe_options
@option("--out", PATH, "Directory to write.", "calibration")
@option("--steps", click.IntRange(4), "Number of timed steps in each short run.", 20)
@throughline_command
def command(recipe: str, overrides: tuple[str, ...], out: Path, steps: int) -> None:
    """Probe this machine, run RECIPE for a few steps at two sizes, and write what was learned as a calibration.

    \b
    Example:  throughline study gpt-shakespeare --set data.train=tokens/shakespeare --out calibration
    Then THROUGHLINE_CALIBRATION=calibration makes `plan --on here` and every run's prediction use it.
    """
    from ..core.artifact import check_free, create_artifact
    from ..core.recipe import recipe_hash

    resolved = pretraining_recipe(recipe, overrides)
    check_free(out)
    from ..train.parallel.mesh import running_processes
    from ..train.study import study

    facts = study(resolved, steps)
    if running_processes()[0] > 0:
        return
    with create_artifact(out, "calibration", recipe_hash=recipe_hash(resolved)) as draft:
        (draft.path / "calibration.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
        told = ("machine", "device", "torch", "threads", "precision", "probes", "runs")
        draft.facts |= {key: facts[key] for key in told}
    names = ("datasheet_seconds", "probes_seconds", "refit_seconds")
    rows = []
    for row in facts["runs"]:
        errors = [f"{row[name] / row['measured_seconds'] - 1:+.0%}" for name in names]
        name = row["run"] + (" (left out)" if row["left_out"] else "")
        measured = f"{row['measured_seconds']:.4g}", f"{row['spread_seconds']:.2g}"
        peak = console.amount(row["measured_bytes"], "B")
        peak_error = f"{row['refit_bytes'] / row['measured_bytes'] - 1:+.0%}"
        rows.append((name, *measured, *errors, peak, peak_error))
    probes = facts["probes"]
    lines = [
        f"products {probes['tflops'] * 1e3:,.0f} GFLOP/s in {facts['precision']}, "
        f"copies {probes['bandwidth_gb_s']:.1f} GB/s, "
        f"smallest kernel {probes['launch_s'] * 1e6:.1f} us",
        "",
        *console.table(("run", "s/step", "spread", "datasheet", "probes", "refit", "peak", "refit"), rows),
        "",
        f"calibration in {out}; use it with THROUGHLINE_CALIBRATION={out}",
    ]
    console.result(facts, lines)
