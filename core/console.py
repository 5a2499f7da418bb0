"""Everything a person or a script reads goes through here: notes and progress to stderr, the result to stdout.

On a terminal progress is a live bar; elsewhere a plain line every `PLAIN_EVERY_S` seconds with rate and time left. With
`--json` stdout carries exactly one JSON object.
"""

import contextlib
import functools
import json
import os
import sys
import threading
from collections.abc import Iterable, Sequence
from typing import Any

PLAIN_EVERY_S = 10.0
_settings = {"json": False, "quiet": False}


def configure(*, json_output: bool = False, quiet: bool = False) -> None:
    """Set by the command line before a command runs."""
    _settings.update(json=json_output, quiet=quiet)


def say(text: str) -> None:
    """A line for the person who watches."""
    if not _settings["quiet"]:
        write_line(text)


def warn(text: str) -> None:
    """A line that must be seen."""
    write_line(f"warning: {text}")


warn_once = functools.cache(warn)  # the same text once a process


def write_line(text: str) -> None:
    """A line on stderr. A reader or a terminal that has gone is no reason to stop serving or training."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def result(payload: dict[str, Any], lines: Iterable[str] = ()) -> None:
    """The result of a command: `payload` as one JSON object with --json, otherwise the lines."""
    if _settings["json"]:
        print(json.dumps(payload, default=str), flush=True)
    else:
        for line in lines:
            print(line, flush=True)


def stream(text: str) -> None:
    """A piece of a result that grows while it is made (generated text); nothing with --json."""
    if not _settings["json"]:
        print(text, end="", flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """Aligned lines of a table; numbers to the right."""
    columns = list(zip(*rows)) or [("",)] * len(header)
    right = [all(value is None or isinstance(value, int | float) for value in each) for each in columns]
    lines = [[str(name) for name in header], *([cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    return [
        "  ".join(text.rjust(w) if r else text.ljust(w) for text, w, r in zip(line, widths, right)).rstrip()
        for line in lines
    ]


def cell(value: Any) -> str:
    """A value as the tables show it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def duration(seconds: float) -> str:
    """Seconds as a person says them: 0.52 s, 41 s, 3 min 20 s, 2 h 05 min."""
    if seconds < 10:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    seconds = round(seconds)  # here, so that no 59.7 becomes 60 beside its minutes
    if seconds < 120:
        return f"{seconds} s"
    if seconds < 7200:
        return f"{seconds // 60} min {seconds % 60:02} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02} min"


def amount(value: float, unit: str) -> str:
    """A quantity with its unit: bytes as KiB…TiB, others with k, M, G, T."""
    base, names = (1024, ("", "Ki", "Mi", "Gi", "Ti")) if unit == "B" else (1000, ("", "k", "M", "G", "T"))
    step = 0
    while abs(value) >= base and step < len(names) - 1:
        value, step = value / base, step + 1
    digits = 0 if step == 0 and float(value).is_integer() else (2 if abs(value) < 10 else 1)
    return f"{value:.{digits}f} {names[step]}{unit}"


def progress(label: str, total: float | None = None, unit: str = "") -> Any:
    """Progress of a long piece of work, as a context manager: done, rate, time left. `total` in `unit`, or unknown."""
    from tqdm import tqdm

    live = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
    live = live and os.get_terminal_size(sys.stderr.fileno()).lines > 0  # of some consoles it is not known

    class Bar(tqdm):
        monitor_interval = 0  # no thread of its own: processes are forked beside it

        def start_at(self, done: float) -> None:
            """Work that an earlier run did: it counts as done and not in the rate."""
            self.initial = self.n = self.last_print_n = done

        def advance(self, done: float, note: str = "") -> None:
            """Add work done; shown at most ten times a second on a terminal, every 10 s elsewhere."""
            if note:
                self.set_postfix_str(note, refresh=False)
            self.update(done)

        @staticmethod
        def status_printer(file: Any) -> Any:
            return tqdm.status_printer(file) if live else lambda line: write_line(line) if line else None

        def close(self) -> None:
            self.sp = getattr(self, "sp", None) if live else None  # nothing is wiped off plain lines
            super().close()

    Bar.set_lock(threading.RLock())
    every_s = 0.1 if live else PLAIN_EVERY_S
    how: dict[str, Any] = {"unit": unit, "unit_divisor": 1024} if unit == "B" else {"unit": f" {unit}"}
    how |= {"dynamic_ncols": True} if live else {"ncols": 0}
    how |= {"mininterval": every_s, "delay": every_s, "miniters": 0, "smoothing": 0, "leave": False}
    return Bar(desc=label, total=total, unit_scale=True, disable=_settings["quiet"], file=sys.stderr, **how)
