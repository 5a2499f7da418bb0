"""Everything a person or a script reads goes through here: notes and progress to stderr, the result to stdout.

On a terminal progress is a live bar; elsewhere a plain line every `PLAIN_EVERY_S` seconds with rate and time left. With
`--json` stdout carries exactly one JSON object.
"""

import contextlib
import functools
import io
import json
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

PLAIN_EVERY_S = 10.0
LEVELS = ("info", "warning", "error")
WAITING_LINES = 10_000  # of stderr, some 3 MB, while a background thread writes the ones before them
LAST_LINES_S = 1.0  # that the end of a command waits for lines that are not written yet
_settings: dict[str, Any] = {"json": False, "quiet": False, "log_format": "text", "log_level": "info"}


def configure(*, json_output: bool = False, quiet: bool = False) -> None:
    """Set by the command line before a command runs; the log is text of all levels until `configure_log`."""
    _settings.update(json=json_output, quiet=quiet, log_format="text", log_level="info")


def configure_log(log_format: str, log_level: str) -> None:
    """Write stderr as "json" lines or as "text", from this level of LEVELS on."""
    _settings.update(log_format=log_format, log_level=log_level)


def log_settings() -> tuple[str, str]:
    """Format and level of the log, for a process that is to write as this one does."""
    return _settings["log_format"], _settings["log_level"]


def say(text: str) -> None:
    """A line for the person who watches."""
    if not _settings["quiet"]:
        log("info", text)


def warn(text: str) -> None:
    """A line that must be seen."""
    log("warning", text)


warn_once = functools.cache(warn)  # the same text once a process


def log(level: str, message: str = "", **fields: Any) -> None:
    """Write one line of this level to stderr: a JSON object with `time` and `level`, or text. Never raises."""
    if LEVELS.index(level) < LEVELS.index(_settings["log_level"]):
        return
    if _settings["log_format"] == "json":
        write_line(_json_line(level, message, fields))
        return
    values = [f"{name}={_text_value(value)}" for name, value in fields.items()]
    prefix = "" if level == "info" else f"{level}: "
    write_line(prefix + " ".join([message, *values] if message else values))


def _text_value(value: Any) -> str:
    """A value of a field, in quotes when it has blanks or quotes itself, or what would steer a terminal."""
    text = str(value)
    if not text.isprintable():
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False) if re.search(r"[\s\"=]", text) else text


def _json_line(level: str, message: str, fields: dict[str, Any]) -> str:
    line: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "level": level}
    if message:
        line["message"] = message
    return json.dumps(line | fields, ensure_ascii=False, default=str)


def write_line(line: str) -> None:
    """Print a line. Stderr that cannot be written is no reason to stop serving or training, nor not to stop."""
    if sys.stderr is None:  # closed when the process began
        return
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


class LossyStderr(io.RawIOBase):
    """Standard error whose writes never raise: what the system refuses (a full disk, a limit on the size of files, a
    terminal that has gone) is dropped and counted in `dropped`. Between `start` and `stop` a thread writes, so that a
    pipe that nobody reads holds nobody up; lines beyond WAITING_LINES are dropped.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: queue.Queue[bytes | None] | None = None
        self._thread: threading.Thread | None = None
        self.dropped = 0

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, data: Any) -> int:
        written = bytes(data)
        lines = self._as_json(written) if _settings["log_format"] == "json" else written
        if self._waiting is None:
            self._write(lines)
        else:
            try:
                self._waiting.put_nowait(lines)
            except queue.Full:
                self.dropped += 1
        return len(written)

    def start(self) -> None:
        """Let a thread write from now on."""
        self._waiting = queue.Queue(WAITING_LINES)
        self._thread = threading.Thread(target=self._drain, args=(self._waiting,), daemon=True, name="stderr")
        self._thread.start()

    def stop(self) -> None:
        """Write directly again, after the lines that are waiting, if those can be written soon."""
        assert self._waiting is not None and self._thread is not None
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(LAST_LINES_S)
        if not self._thread.is_alive():  # else nobody reads, and a direct write would wait for ever
            self._waiting = None

    def _drain(self, waiting: "queue.Queue[bytes | None]") -> None:
        while (lines := waiting.get()) is not None:
            self._write(lines)

    def _write(self, data: bytes) -> None:
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            self.dropped += 1

    def _as_json(self, data: bytes) -> bytes:
        """Put what libraries print into JSON lines like our own."""
        lines = []
        for line in data.decode("utf-8", "replace").splitlines():
            if line.startswith("{"):
                lines.append(line)
            elif line.strip():
                lines.append(_json_line("info", line, {}))
        return "".join(f"{line}\n" for line in lines).encode()


@contextlib.contextmanager
def guarded_stderr() -> Iterator[None]:
    """Let no print to stderr raise, whoever prints, while the block runs."""
    before = sys.stderr
    try:
        descriptor = before.fileno()
        before.flush()
    except (AttributeError, OSError, ValueError):  # closed, or no file: that of a test
        yield
        return
    raw: Any = LossyStderr(descriptor)
    sys.stderr = io.TextIOWrapper(raw, before.encoding, "backslashreplace", line_buffering=True)
    try:
        yield
    finally:
        sys.stderr = before


def lossy_stderr() -> LossyStderr | None:
    """The stream that `guarded_stderr` has put in the place of stderr, if it has."""
    found = getattr(sys.stderr, "buffer", None)
    return found if isinstance(found, LossyStderr) else None


@contextlib.contextmanager
def background_stderr() -> Iterator[None]:
    """Let a thread write stderr while the block runs: a server must not wait for whoever reads its log."""
    stream = lossy_stderr()
    if stream is None:
        yield
        return
    stream.start()
    try:
        yield
    finally:
        stream.stop()


def dropped_lines() -> int:
    """Return the number of stderr lines dropped so far."""
    stream = lossy_stderr()
    return 0 if stream is None else stream.dropped


def fail(error: BaseException) -> None:
    """The error that ends a command."""
    log("error", f"error: {error}" if _settings["log_format"] == "json" else str(error))


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
