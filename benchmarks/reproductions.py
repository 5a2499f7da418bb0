"""The table of reported results: one TOML file a claim in recipes/reproductions/, and what a run of one gives.

A claim has its source, the rows it reported, the commands that are run here and the command for the machine that
the claim needs. Each row names the kind of evidence that this machine can give:

| evidence     | meaning                                                                             |
|--------------|-------------------------------------------------------------------------------------|
| measured     | the figure was measured here, under the row's own conditions                        |
| predicted    | the planner computes the figure for the machine that the claim needs                |
| proved small | the property is shown on a small twin; the figure of the large machine is not ours   |
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from common import machine_facts

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = ROOT / "recipes" / "reproductions"
RESULTS = ROOT / "benchmarks" / "results" / "reproductions"
EVIDENCE = ("measured", "predicted", "proved small")
MINUTES = 40  # that all of them may take on 2 cores
SLACK = 3  # a run is ended after so many times its minutes: machines differ, and a job that hangs must end
REST_SECONDS = 60  # beside that, for what takes no time
STARTED_BY = {
    "slurm": ("sbatch", "sbatch --parsable"),
    "kubernetes": ("yaml", "kubectl apply -f"),
    "torchrun": ("sh", "sh"),
}
INTERPRETERS = {"throughline": [sys.executable, "-m", "throughline.cli.main"], "python": [sys.executable]}


@dataclass(frozen=True)
class Run:
    """A command that is run here; it ends its output with one JSON object.

    With `bench` the result that `make bench` has kept of that benchmark on this machine stands for it, when there.
    `minutes` it takes on 2 cores, about; it is ended after SLACK times as long. `needs = "gpu"`: left out where
    there is none.
    """

    name: str
    command: str
    minutes: float
    needs: str = ""
    bench: str = ""

    def words(self) -> list[str]:
        """The command as an argument list: `throughline` and `python` are those of this interpreter."""
        first, *rest = shlex.split(self.command)
        return [*INTERPRETERS[first], *rest]


@dataclass(frozen=True)
class Row:
    """One reported figure: its value in `unit` under `conditions`, and where ours stands in the JSON of `run`.

    `value` is a path into that object: keys and list indices joined by dots, `[name=x]` picks the element of a list
    whose `name` is x. `scale` turns ours into `unit`. `reported` is None where the claim states no number. `point`
    places the row on the claim's plot, at that number of GPUs or tokens.
    """

    name: str
    what: str
    unit: str
    conditions: str
    evidence: str
    run: str
    value: str
    reported: float | None = None
    scale: float = 1.0
    bound: float | None = None  # ours / reported is at most this far from 1, as a factor
    comparable: bool = True  # whether ours and the reported figure are of the same machine and size
    point: float | None = None


@dataclass(frozen=True)
class Claim:
    """One headline: what was reported, by whom, and how it is answered here and on the machine that it needs."""

    name: str
    number: int  # its place in the table of claims
    title: str
    source: str
    machine: str  # that the claim needs
    gpus: int  # of that machine
    there: tuple[str, ...]  # the commands for that machine, in order
    headline: str  # the row that stands for the claim where there is room for one
    rows: tuple[Row, ...]
    runs: dict[str, Run] = field(default_factory=dict)
    note: str = ""
    axis: str = ""  # of the plot, what `point` counts


def read_claim(path: Path) -> Claim:
    """One file of the table. Raises ValueError naming the file and what is wrong."""
    try:
        tree = tomllib.loads(path.read_text())
        runs = {name: Run(name, **given) for name, given in tree.pop("run").items()}
        rows = tuple(Row(**row) for row in tree.pop("row"))
        tree["there"] = tuple(tree["there"])
        claim = Claim(name=path.stem, rows=rows, runs=runs, **tree)
    except (KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    for row in rows:
        if row.evidence not in EVIDENCE:
            raise ValueError(f"{path}: evidence of {row.name} is {row.evidence!r}, not one of {EVIDENCE}")
        if row.run not in runs:
            raise ValueError(f"{path}: {row.name} names the run {row.run!r}, which the file does not have")
    if claim.headline not in {row.name for row in rows}:
        raise ValueError(f"{path}: headline names the row {claim.headline!r}, which the file does not have")
    return claim


def read_claims(folder: Path = CLAIMS) -> list[Claim]:
    """Every claim, in the order of their numbers."""
    return sorted((read_claim(path) for path in folder.glob("*.toml")), key=lambda claim: claim.number)


def pick(tree: Any, path: str) -> Any:
    """The value at a path such as `claims[name=ddp2].ours` or `layouts.0.days`. Raises KeyError naming the part."""
    for part in re.findall(r"\[[^\]]+\]|[^.\[\]]+", path):
        try:
            if part.startswith("["):
                key, _, wanted = part[1:-1].partition("=")
                tree = next(item for item in tree if str(item[key]) == wanted)
            else:
                tree = tree[int(part)] if isinstance(tree, list) else tree[part]
        except (KeyError, IndexError, ValueError, StopIteration, TypeError):
            raise KeyError(f"{part} of {path}") from None
    return tree


def last_object(text: str) -> dict[str, Any]:
    """The JSON object that an output is, or that its last line is. Raises ValueError where there is none."""
    try:
        return json.loads(text)
    except ValueError:
        pass
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            return json.loads(line)
    raise ValueError("the output has no JSON object")


def execute(run: Run) -> dict[str, Any]:
    """Run one command; its JSON object. Raises RuntimeError with the end of what it printed when it fails."""
    begun, limit = time.monotonic(), 60 * SLACK * run.minutes + REST_SECONDS
    process = subprocess.Popen(
        run.words(), stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGTERM)  # with the processes that it has started
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise RuntimeError(f"{run.command}: not done after {limit / 60:.1f} minutes") from error
        raise
    if process.returncode not in (
        0,
        1,
    ):  # 1: a benchmark or a plan that misses its goal still has its figures
        raise RuntimeError(f"{run.command}: exit code {process.returncode}\n{output[-2000:]}")
    return last_object(output) | {"seconds": round(time.monotonic() - begun, 1)}


def benched(name: str) -> dict[str, Any] | None:
    """The kept result of a benchmark on this machine."""
    here = machine_facts()
    for path in sorted(RESULTS.parent.glob("*.json")):
        line = json.loads(path.read_text()).get(name)
        if line and all(line["machine"][key] == here[key] for key in ("cpu", "cores", "gpus")):
            return line | {"seconds": 0.0}
    return None


def around(tree: Any, path: str) -> Any:
    """The object that the value at `path` stands in: what is kept beside a figure."""
    whole, _, last = path.rpartition(".")
    return pick(tree, whole) if whole else {last: pick(tree, path)}


def answer(claim: Claim, outputs: dict[str, dict[str, Any]], machine: str, date: str) -> dict[str, Any]:
    """The rows of a claim with our figures beside the reported ones, and the object that each was read from. Rows
    whose command gave no such figure are named under `open`, unless they need what this machine lacks.
    """
    rows, left = [], []
    for row in claim.rows:
        try:
            ours = pick(outputs[row.run], row.value) * row.scale
        except KeyError:
            left += [] if claim.runs[row.run].needs else [row.what]
            continue
        ratio = ours / row.reported if row.reported and row.comparable else None
        far = (
            None
            if ratio is None or row.bound is None
            else max(ratio, 1 / ratio)
            if ratio > 0
            else float("inf")
        )
        made = {
            "ours": ours,
            "ratio": ratio,
            "met": None if far is None or row.bound is None else far <= row.bound,
            "command": claim.runs[row.run].command,
            "read_from": around(outputs[row.run], row.value),
            "date": outputs[row.run].get("date", date),
        }
        rows.append(asdict(row) | made)
    keys = ("name", "number", "title", "source", "machine", "gpus", "there", "headline", "note", "axis")
    head = {key: getattr(claim, key) for key in keys}
    seconds = {name: output["seconds"] for name, output in outputs.items()}
    return head | {"rows": rows, "open": left, "seconds": seconds, "measured_on": machine, "date": date}


def job(claim: Claim, folder: Path) -> Path:
    """Write the job for the machine that the claim needs into `folder`: the recipe that the planner chose, the file
    that `launch --emit` prints, and the shell script that starts it, which is returned.
    """
    script = folder / "job.sh"
    lines = [
        "#!/bin/sh",
        f"# {claim.title}",
        f"# for {claim.machine}; made by: make reproduce-{claim.name}",
        "set -e",
    ]
    for number, command in enumerate(claim.there, 1):
        words = shlex.split(command)
        emitted = words[words.index("--emit") + 1] if "--emit" in words else ""
        if not emitted and words[1] not in ("plan", "recipe"):
            lines.append(command)
            continue
        done = subprocess.run(
            [*INTERPRETERS[words[0]], *words[1:]], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            raise RuntimeError(f"{command}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        if emitted:
            suffix, start = STARTED_BY[emitted]
            (folder / f"job-{number}.{suffix}").write_text(done.stdout)
            after = "--dependency=afterok:$job " if emitted == "slurm" and "--init-from" in words else ""
            begun = f"{start} {after}job-{number}.{suffix}"
            lines.append(f"job=$({begun}) && echo $job" if emitted == "slurm" else begun)
    script.write_text("\n".join(lines) + "\n")
    return script


def choice(claim: Claim, gpus: Sequence[str], scheduler: bool) -> str:
    """What is run for a claim on a machine with these GPUs, in words."""
    extra = [run.command for run in claim.runs.values() if run.needs == "gpu"]
    if gpus and len(gpus) >= claim.gpus:
        return f"{len(gpus)} x {gpus[0]}: enough for {claim.machine}; the job is in job.sh, its measurements run now"
    if gpus and extra:
        return f"{len(gpus)} x {gpus[0]}: fewer than {claim.machine}; measured here: {', '.join(extra)}"
    reach = ", which this machine's scheduler takes" if scheduler else ""
    return f"no GPU that the claim could use: twins and predictions here, the job for {claim.machine} in job.sh{reach}"
