"""Answer reported results on this machine: python benchmarks/reproduce.py [NAME ...] [--list] [--job] [--kept].

Runs the commands of each claim in recipes/reproductions/, writes an artifact of kind `bench` for each under
runs/reproductions/ with the job for the machine that the claim needs, and its figures to
benchmarks/results/reproductions/. A command that several claims share runs once. docs/make_reproductions.py makes
the page of them.
"""

import argparse
import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common import machine_facts
from reproductions import (
    MINUTES,
    RESULTS,
    ROOT,
    Claim,
    Run,
    answer,
    benched,
    choice,
    execute,
    job,
    read_claims,
)
from throughline.core.artifact import create_artifact, read_manifest
from throughline.core.console import table
from throughline.core.hardware import Machine, machine

PLACE = ROOT / "runs" / "reproductions"


def output_of(run: Run, kept: bool) -> dict[str, Any]:
    """The output of a command, which is kept beside the artifacts; with `kept` that of an earlier time, and nothing is
    run. Raises RuntimeError where there is none.
    """
    file = PLACE / "outputs" / (re.sub(r"[^a-z0-9]+", "-", run.command.lower()).strip("-") + ".json")
    if not kept:
        output = execute(run)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(output))
    elif not file.exists():
        raise RuntimeError(f"{run.command}: no output is kept")
    return json.loads(file.read_text())


def outputs_of(
    claim: Claim, gpu: bool, kept: bool, done: dict[str, dict[str, Any] | None]
) -> dict[str, dict[str, Any]]:
    """The outputs of a claim's commands. `done` has those that ran before, None for one that failed."""
    for run in claim.runs.values():
        if run.command in done or (run.needs == "gpu" and not gpu):
            continue
        try:
            done[run.command] = benched(run.bench) if run.bench else None
            done[run.command] = done[run.command] or output_of(run, kept)
        except (RuntimeError, ValueError) as error:
            print(f"  failed: {error}", file=sys.stderr, flush=True)
            done[run.command] = None
    found = {name: done.get(run.command) for name, run in claim.runs.items()}
    return {name: output for name, output in found.items() if output is not None}


def with_earlier(claim: Claim, found: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """The answer, with the committed rows of an earlier one where its commands gave no output this time. A row is
    taken as it is now written, if it still reads its figure at the same place of the same command.
    """
    rows = {row["name"]: row for row in found["rows"]}
    for row in claim.rows:
        held = next((old for old in earlier["rows"] if old["name"] == row.name), None)
        where = (claim.runs[row.run].command, row.value, row.scale, row.reported, row.bound)
        if row.name in rows or held is None:
            continue
        if where == tuple(held[key] for key in ("command", "value", "scale", "reported", "bound")):
            rows[row.name] = held | asdict(row)
    kept = [rows[row.name] for row in claim.rows if row.name in rows]
    left = [row.what for row in claim.rows if row.what in found["open"] and row.name not in rows]
    return found | {"rows": kept, "open": left, "seconds": earlier["seconds"] | found["seconds"]}


def reproduce(
    claim: Claim, here: Machine, outputs: dict[str, dict[str, Any]], place: Path, kept: bool = False
) -> bool:
    """One claim: its artifact and committed figures. Whether every row that this machine can answer is answered."""
    name = here.gpus[0].name if here.gpus else f"{here.cpu.name}, {here.cpu.cores} cores"
    found, file = answer(claim, outputs, name, time.strftime("%Y-%m-%d")), RESULTS / f"{claim.name}.json"
    if kept and file.exists():
        found = with_earlier(claim, found, json.loads(file.read_text()))
    for row in found["rows"]:
        ratio = "" if row["ratio"] is None else f" (x {row['ratio']:.3g})"
        print(
            f"  {row['what']}: reported {row['reported']}, {row['evidence']} {row['ours']:.5g} {row['unit']}{ratio}"
        )
    with create_artifact(place, "bench", overwrite=True) as draft:
        (draft.path / "outputs.json").write_text(json.dumps(outputs, indent=1))
        (draft.path / "rows.json").write_text(json.dumps(found, indent=1))
        job(claim, draft.path)
        draft.facts.update({"claim": claim.title, "rows": len(found["rows"]), "machine": machine_facts()})
    found["artifact"] = read_manifest(place).hash
    RESULTS.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"  in {place.relative_to(ROOT)}; on {claim.machine}: sh {place.relative_to(ROOT)}/job.sh", flush=True
    )
    return not found["open"]


def parts(claims: Sequence[Claim], gpu: bool) -> list[str]:
    """Every command once, with its minutes on 2 cores, what it took when its committed rows were made, and their sum;
    what `make bench` has kept on this machine takes none.
    """
    rows, total, seen = [], 0.0, set()
    for claim in claims:
        file = RESULTS / f"{claim.name}.json"
        took = json.loads(file.read_text())["seconds"] if file.exists() else {}
        for run in claim.runs.values():
            if run.command in seen or (run.needs == "gpu" and not gpu):
                continue
            seen.add(run.command)
            held = bool(run.bench) and benched(run.bench) is not None
            minutes, seconds = 0.0 if held else run.minutes, took.get(run.name)
            total += minutes
            spent = "kept" if held else "" if seconds is None else f"{seconds / 60:.1f}"
            rows.append((minutes, spent, run.command))
    rows.sort(key=lambda row: -row[0])
    return table(("minutes", "took", "command"), [*rows, (round(total, 1), "", f"all (at most {MINUTES})")])


def write_job(claim: Claim) -> None:
    """The job for the claim's machine, beside its artifact."""
    folder = PLACE / f"{claim.name}-job"
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{claim.name}, for {claim.machine}: {job(claim, folder).relative_to(ROOT)}", flush=True)


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("names", nargs="*", help="claims to answer (default: all)")
    options.add_argument(
        "--list", action="store_true", help="print the claims and what their commands take, and end"
    )
    options.add_argument(
        "--job", action="store_true", help="write the jobs for the claims' machines, run nothing"
    )
    options.add_argument(
        "--kept",
        action="store_true",
        help="answer from the outputs that earlier runs have kept, the committed rows where there is none",
    )
    chosen = options.parse_args()
    claims = read_claims()
    unknown = set(chosen.names) - {claim.name for claim in claims}
    if unknown:
        options.error(f"no claim {', '.join(sorted(unknown))}; --list names them")
    if chosen.list:
        for claim in claims:
            print(f"{claim.name:20} {claim.title}")
        print("\n".join(parts(claims, bool(machine().gpus))))
        return 0
    here, begun = machine(), time.monotonic()
    gpus, failed = [gpu.name for gpu in here.gpus], []
    done: dict[str, dict[str, Any] | None] = {}
    for claim in claims:
        if chosen.names and claim.name not in chosen.names:
            continue
        try:
            if chosen.job:
                write_job(claim)
                continue
            print(f"{claim.name}: {claim.title}", flush=True)
            print(f"  chose {choice(claim, gpus, shutil.which('sbatch') is not None)}", flush=True)
            outputs = outputs_of(claim, bool(gpus), chosen.kept, done)
            if not reproduce(claim, here, outputs, PLACE / claim.name, chosen.kept):
                failed.append(claim.name)
        except (RuntimeError, ValueError, KeyError) as error:
            print(f"  failed: {error}", file=sys.stderr, flush=True)
            failed.append(claim.name)
    print(
        f"{(time.monotonic() - begun) / 60:.1f} minutes"
        + (f"; not whole: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
