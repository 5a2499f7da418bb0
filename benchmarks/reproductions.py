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
import re
import shlex
import subprocess
import sys
import time
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLAIMS = ROOT / "recipes" / "reproductions"
RESULTS = ROOT / "benchmarks" / "results" / "reproductions"
EVIDENCE = ("measured", "predicted", "proved small")


@dataclass(frozen=True)
class Run:
    """A command that is run here; it ends its output with one JSON object. `minutes` on 2 cores, about."""

    name: str
    command: str
    minutes: float = 1.0
    gpu: str = ""  # the command that takes its place where a CUDA device is present

    def words(self, gpu: bool) -> list[str]:
        """The command as an argument list: `throughline` and `python` are those of this interpreter."""
        first, *rest = shlex.split(self.gpu if gpu and self.gpu else self.command)
        known = {"throughline": [sys.executable, "-m", "throughline.cli.main"], "python": [sys.executable]}
        return [*known.get(first, [first]), *rest]


@dataclass(frozen=True)
class Row:
    """One reported figure: its value in `unit` under `conditions`, and where ours stands in the JSON of `run`.

    `value` is a path into that object: keys and list indices joined by dots, `[name=x]` picks the element of a list
    whose `name` is x. `scale` turns ours into `unit`. `reported` is None where the claim states no number.
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


@dataclass(frozen=True)
class Claim:
    """One headline: what was reported, by whom, and how it is answered here and on the machine that it needs."""

    name: str
    title: str
    source: str
    machine: str  # that the claim needs
    there: str  # the command for that machine
    rows: tuple[Row, ...]
    runs: dict[str, Run] = field(default_factory=dict)
    note: str = ""


def read_claim(path: Path) -> Claim:
    """One file of the table. Raises ValueError naming the file and what is wrong."""
    try:
        tree = tomllib.loads(path.read_text())
        runs = {name: Run(name, **given) for name, given in tree.pop("run").items()}
        rows = tuple(Row(**row) for row in tree.pop("row"))
        claim = Claim(name=path.stem, rows=rows, runs=runs, **tree)
    except (KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    for row in rows:
        if row.evidence not in EVIDENCE:
            raise ValueError(f"{path}: evidence of {row.name} is {row.evidence!r}, not one of {EVIDENCE}")
        if row.run not in runs:
            raise ValueError(f"{path}: {row.name} names the run {row.run!r}, which the file does not have")
    return claim


def read_claims(folder: Path = CLAIMS) -> list[Claim]:
    """Every claim, in the order of the files' names."""
    return [read_claim(path) for path in sorted(folder.glob("*.toml"))]


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


def execute(run: Run, gpu: bool) -> dict[str, Any]:
    """Run one command; its JSON object. Raises RuntimeError with the end of what it printed when it fails."""
    begun = time.monotonic()
    done = subprocess.run(run.words(gpu), stdout=subprocess.PIPE, text=True, cwd=ROOT)
    if done.returncode not in (0, 1):  # 1: a benchmark or a plan that misses its goal still has its figures
        raise RuntimeError(f"{run.command}: exit code {done.returncode}\n{done.stdout[-2000:]}")
    return last_object(done.stdout) | {"seconds": round(time.monotonic() - begun, 1)}


def answer(claim: Claim, outputs: dict[str, dict[str, Any]], machine: str, date: str) -> dict[str, Any]:
    """The rows of a claim with our figures beside the reported ones."""
    rows = []
    for row in claim.rows:
        found = pick(outputs[row.run], row.value)
        ours = found * row.scale if isinstance(found, (int, float)) and not isinstance(found, bool) else found
        ratio = ours / row.reported if row.reported and row.comparable and not isinstance(ours, str) else None
        far = (
            None
            if ratio is None or row.bound is None
            else max(ratio, 1 / ratio)
            if ratio > 0
            else float("inf")
        )
        rows.append(
            asdict(row)
            | {
                "ours": ours,
                "ratio": ratio,
                "met": None if far is None or row.bound is None else far <= row.bound,
                "command": claim.runs[row.run].command,
            }
        )
    head = {key: getattr(claim, key) for key in ("name", "title", "source", "machine", "there", "note")}
    return head | {"rows": rows, "measured_on": machine, "date": date}
