"""What people and scripts read: one JSON object or lines, progress as a live line on a terminal and as plain
lines elsewhere.
"""

import io
import json
import os
import re
import subprocess
import sys
import termios
import traceback
from pathlib import Path

import pytest
from throughline.core import console
from throughline.core.errors import WrongUse


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.5249, "0.52 s"),
        (9.94, "9.9 s"),
        (59.7, "60 s"),
        (119.4, "119 s"),
        (119.7, "2 min 00 s"),
        (179.7, "3 min 00 s"),
        (200, "3 min 20 s"),
        (7199.7, "2 h 00 min"),
        (7500, "2 h 05 min"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """Rounded once: no minute has 60 seconds."""
    assert console.duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "B", "0 B"),
        (1536, "B", "1.50 KiB"),
        (5 * 2**30, "B", "5.00 GiB"),
        (12_345, "tokens", "12.3 ktokens"),
        (3, "", "3 "),
    ],
)
def test_amounts(value: float, unit: str, text: str) -> None:
    assert console.amount(value, unit) == text


def test_a_table_is_aligned_with_numbers_to_the_right() -> None:
    lines = console.table(("name", "n"), [("a", 1), ("long", 2000), ("none", None)])
    assert lines == ["name      n", "----  -----", "a         1", "long  2,000", "none      -"]
    assert console.table(("name",), []) == ["name", "----"]


def test_with_json_standard_output_is_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    console.configure(json_output=True)
    try:
        console.say("for the person")
        console.stream("a piece")
        console.result({"a": 1}, ["not shown"])
    finally:
        console.configure()
    out, err = capsys.readouterr()
    assert json.loads(out) == {"a": 1} and err == "for the person\n"
    console.result({"a": 1}, ["one", "two"])
    assert capsys.readouterr().out == "one\ntwo\n"


def test_progress_elsewhere_is_plain_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work of an earlier run counts as done and not in the rate; a note stays until there is another."""
    now = [100.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    with console.progress("read", 2048, "B") as bar:
        bar.start_at(1024)
        for note in ("loss 4", "loss 3", "", ""):
            now[0] += 5
            bar.advance(128, note)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "read:  62% 1.25k/2.00k [00:10<00:30, 25.6B/s, loss 3]",
        "read:  75% 1.50k/2.00k [00:20<00:20, 25.6B/s, loss 3]",
    ]


def test_progress_on_a_terminal_is_one_line_that_goes() -> None:
    code = (
        "from throughline.core.console import progress\n"
        "with progress('read', 3) as bar:\n"
        "    bar.mininterval = bar.delay = 0\n"
        "    for _ in range(3):\n"
        "        bar.advance(1, 'loss')\n"
    )
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    environment = os.environ | {"TERM": "xterm"}
    subprocess.run([sys.executable, "-c", code], stderr=theirs, check=True, env=environment)
    os.close(theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(ours)
    assert (
        "100%" in shown and "\n" not in shown and shown.endswith("\r") and not shown.split("\r")[-2].strip()
    )


def test_nobody_is_told_when_all_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    console.configure(quiet=True)
    try:
        with console.progress("read") as bar:
            bar.start_at(1)
            bar.advance(1, "loss 3")
    finally:
        console.configure()
    assert capsys.readouterr() == ("", "")


# --- stderr that cannot be written ---


def test_stderr_that_refuses_every_write_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full fails as a full disk does: our lines, progress, tracebacks and warnings raise nothing and are counted.
    What went wrong leaves nothing behind that the interpreter's last flush would stumble over.
    """
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        with console.guarded_stderr():
            console.say("a line")
            print("of a library", file=sys.stderr, flush=True)
            traceback.print_exception(ValueError("x"))
            with console.progress("read", 3) as bar:
                bar.advance(3)
            assert console.dropped_lines() >= 3
        assert sys.stderr is full
        full.flush()


def test_without_the_guard_our_own_lines_raise_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    for stderr in (Refusing(), None):
        monkeypatch.setattr(sys, "stderr", stderr)
        console.warn("a line")


def test_a_pipe_that_nobody_reads_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many times what the pipe and the queue hold is logged at once; the rest is dropped and counted."""
    monkeypatch.setattr(console, "WAITING_LINES", 10)
    monkeypatch.setattr(console, "LAST_LINES_S", 0.01)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        with console.guarded_stderr(), console.background_stderr():
            for _ in range(300):
                console.say("x" * 1000)  # a pipe holds 64 KiB
            assert 300 - 10 - 66 <= console.dropped_lines() < 300
        os.close(reading)  # ends the thread


def test_lines_that_wait_are_written_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stderr", pipe)
        with console.guarded_stderr(), console.background_stderr():
            for number in range(50):
                console.say(f"line {number}")
    with os.fdopen(reading) as pipe:
        assert pipe.read().splitlines() == [f"line {number}" for number in range(50)]


def test_stderr_is_json_lines_throughout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Our notes, the fields of a request, what libraries print and an error of four lines: each line is an object."""
    with open(tmp_path / "log", "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        with console.guarded_stderr():
            console.configure_log("json", "info")
            try:
                console.say('a "note" of café')
                console.log("warning", status=500, path="/ready")
                print("two lines\nof a library", file=sys.stderr)
                console.fail(WrongUse("wrong", where="here", fix="mend it"))
                console.configure_log("json", "error")
                console.warn("below the level")
            finally:
                console.configure()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", line.pop("time")) for line in lines)
    assert lines == [
        {"level": "info", "message": 'a "note" of café'},
        {"level": "warning", "status": 500, "path": "/ready"},
        {"level": "info", "message": "two lines"},
        {"level": "info", "message": "of a library"},
        {"level": "error", "message": "error: wrong\n  where: here\n  fix:   mend it"},
    ]


def test_the_fields_of_a_line_of_text_can_be_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    console.log("warning", status=500, path="/ready", error='no "model" here')
    assert capsys.readouterr().err == 'warning: status=500 path=/ready error="no \\"model\\" here"\n'


def test_no_field_of_a_line_of_text_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Paths come from clients: ESC and its one-byte form are written as characters."""
    console.log("info", path="/\x1b[2Jcaf\xe9\x9b1m", name="caf\xe9")
    assert capsys.readouterr().err == 'path="/\\u001b[2Jcaf\\u00e9\\u009b1m" name=caf\xe9\n'
