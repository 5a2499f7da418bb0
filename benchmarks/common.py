"""What every benchmark shares: paired A B A B measurement, claims, machine facts, the table and the final
JSON line.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from throughline.core import hardware
from throughline.core.console import table
from throughline.data.shard import write_index

LEFT_OUT = "left out: "  # so begins what `details` says of a claim whose peer is not here


@dataclass
class Claim:
    """One measured comparison; `ratio` is oriented so that larger is better for us. `ours`, `theirs` are
    medians in `unit`.
    """

    name: str
    ours: float
    peer: str
    theirs: float
    unit: str
    better: str
    ratio: float
    spread: tuple[float, float]
    goal: float | None
    met: bool | None


def paired(
    ours: Callable[[], float], theirs: Callable[[], float], pairs: int = 5
) -> tuple[list[float], list[float]]:
    """Run both in turn, A B A B; each call returns one measurement."""
    first, second = [], []
    for _ in range(pairs):
        first.append(ours())
        second.append(theirs())
    return first, second


def claim(
    name: str,
    ours: Sequence[float],
    theirs: Sequence[float],
    *,
    peer: str,
    unit: str,
    better: str,
    goal: float | None,
) -> Claim:
    """A claim from paired measurements: the median of the paired ratios with their range. `better` is "lower"
    or "higher".
    """
    assert better in ("lower", "higher"), better
    ratios = [b / a if better == "lower" else a / b for a, b in zip(ours, theirs, strict=True)]
    ratio = statistics.median(ratios)
    return Claim(
        name,
        round(statistics.median(ours), 6),
        peer,
        round(statistics.median(theirs), 6),
        unit,
        better,
        round(ratio, 3),
        (round(min(ratios), 3), round(max(ratios), 3)),
        goal,
        None if goal is None else ratio >= goal,
    )


def finish(
    name: str, claims: Sequence[Claim], *, packages: Sequence[str] = (), kind: str = "benchmark", **extra: Any
) -> None:
    """Print the table and the one JSON line that ends every benchmark and proof."""
    header = ("claim", "ours", "theirs", "unit", "ratio", "spread", "goal", "met", "peer")
    rows = [
        (c.name, c.ours, c.theirs, c.unit, c.ratio, f"{c.spread[0]}-{c.spread[1]}", c.goal, c.met, c.peer)
        for c in claims
    ]
    print("\n".join(table(header, rows)))
    line = {
        kind: name,
        "claims": [asdict(c) for c in claims],
        **extra,
        "machine": machine_facts(),
        "versions": versions(packages),
    }
    print(json.dumps(line | {"date": time.strftime("%Y-%m-%d")}), flush=True)


def machine_facts() -> dict[str, Any]:
    """CPU, memory and GPUs of this machine."""
    here = hardware.machine()
    return {
        "cpu": here.cpu.name,
        "cores": here.cpu.cores,
        "memory_gib": round(here.cpu.memory_bytes / 2**30, 1),
        "gpus": [gpu.name for gpu in here.gpus],
        "system": platform.platform(),
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of Python and of the packages that took part."""
    found = {"python": platform.python_version()}
    for package in ("throughline", "torch", "numpy", *packages):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def parser(description: str) -> argparse.ArgumentParser:
    """The argument parser every benchmark starts from: --quick."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    made.add_argument(
        "--quick", action="store_true", help="fewer pairs and shorter runs, the same comparison"
    )
    return made


def existing(path: str) -> Path:
    """argparse type: a path that exists."""
    found = Path(path)
    if not found.exists():
        raise argparse.ArgumentTypeError(f"{path} does not exist")
    return found


def run(command: Sequence[object], cwd: Path | None = None, **environment: str) -> str:
    """Run a command to its end; its standard output. Ends the benchmark when it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        printed = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{printed}")
    return done.stdout


def throughline(*words: object, cwd: Path | None = None, **environment: str) -> str:
    """As `run`, of the command line of this checkout."""
    return run([sys.executable, "-m", "throughline.cli.main", *words], cwd, **environment)


def settings(changes: dict[str, Any]) -> list[str]:
    """`--set` options of a command that takes a recipe; values as JSON, which TOML reads the same way."""
    return [word for key, value in changes.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def peak_memory() -> int:
    """Most bytes that this process has held, from its own table: getrusage's figure begins with what the process
    that started it had.
    """
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def index_file(path: Path, lengths: np.ndarray, bounds: np.ndarray, dtype: Any) -> None:
    """The `.idx` of a store made by hand: sequences of `lengths` tokens, documents that end at `bounds` of them."""
    counts = len(lengths), len(bounds) - 1
    write_index(path, counts, lambda: [lengths], lambda: [np.diff(bounds)], dtype)
