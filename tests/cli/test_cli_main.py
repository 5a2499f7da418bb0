"""The command line: help for every verb with a runnable example, near-misses named, errors without
tracebacks, --json clean.
"""

import json
import os
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from throughline.cli.common import throughline_command
from throughline.cli.demo import check_text, road
from throughline.cli.main import ELSEWHERE, VERBS, main
from throughline.cli.training import figure_lines
from throughline.core import console, hardware
from throughline.core.artifact import create_artifact, input_record
from throughline.core.errors import WrongUse


def all_commands() -> list[list[str]]:
    found = []
    context = click.Context(main)
    for verb in VERBS:
        command = main.get_command(context, verb)
        if isinstance(command, click.Group):
            found += [[verb, name] for name in command.commands]
        else:
            found.append([verb])
    return found


@pytest.mark.parametrize("words", all_commands(), ids=" ".join)
def test_every_command_has_help_with_an_example(words: list[str]) -> None:
    done = CliRunner().invoke(main, [*words, "--help"])
    assert done.exit_code == 0, done.output
    assert f"throughline {words[0]}" in done.output.replace("Usage: main", ""), "help has no runnable example"
    assert "--json" in done.output


def test_unknown_verb_names_the_nearest() -> None:
    done = CliRunner().invoke(main, ["trian"])
    assert done.exit_code == 2 and "did you mean train?" in done.output


def test_every_stage_of_the_demo_is_a_command(tmp_path: Path) -> None:
    """Parsed, not run: what `make demo` types exists, with these options."""
    for _, words in road(tmp_path / "out", tmp_path / "text.txt"):
        command: click.Command = main
        context = click.Context(main)
        while isinstance(command, click.Group):
            found = command.get_command(context, words[0])
            assert found is not None, words
            command, words = found, words[1:]
        command.make_context("throughline", words)


def test_a_demo_keeps_nothing_of_another_text(tmp_path: Path) -> None:
    text, folder, out = tmp_path / "a.txt", tmp_path / "texts", tmp_path / "out"
    text.write_text("one")
    check_text(out, text)
    with create_artifact(out / "gpt-tokenizer", "tokenizer", inputs=[input_record(text)]) as draft:
        (draft.path / "x").write_text("x")
    check_text(out, text)
    folder.mkdir()
    (folder / "moved.txt").write_text("one")
    check_text(out, folder)
    text.write_text("two")
    with pytest.raises(WrongUse, match="of another text"):
        check_text(out, text)


def test_show_and_verify(tmp_path: Path) -> None:
    with create_artifact(tmp_path / "a", "tokens") as draft:
        (draft.path / "x").write_text("x")
        draft.facts["tokens"] = 7
    done = CliRunner().invoke(main, ["show", str(tmp_path / "a"), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["facts"] == {"tokens": 7}
    assert CliRunner().invoke(main, ["verify", str(tmp_path / "a")]).exit_code == 0
    (tmp_path / "a" / "x").write_text("y")
    done = CliRunner().invoke(main, ["verify", str(tmp_path / "a"), "--json"])
    assert done.exit_code == 3 and "damaged" in done.stderr and "Traceback" not in done.output
    assert json.loads(done.stdout)["exit_code"] == 3


def test_missing_path_is_wrong_use(tmp_path: Path) -> None:
    done = CliRunner().invoke(main, ["show", str(tmp_path / "nowhere")])
    assert done.exit_code == 2 and "no such path" in done.stderr and "fix:" in done.stderr
    (tmp_path / "tokens").mkdir()
    for words in (["show"], ["data", "inspect"], ["generate", "--prompt", "x"]):
        done = CliRunner().invoke(main, [*words, str(tmp_path / "tokns")])
        assert done.exit_code == 2 and f"did you mean {tmp_path / 'tokens'}?" in done.stderr, words


def test_what_nobody_foresaw_is_one_error_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path that the system refuses is no fault of ours; both are one JSON object with --json, and no
    traceback.
    """
    done = CliRunner().invoke(main, ["show", "x" * 300, "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == found["exit_code"] == 1
    assert (found["error"], found["where"]) == (
        "file name too long",
        "x" * 300,
    ) and "Traceback" not in done.stderr

    def broken(*_: object) -> None:
        raise KeyError("gone")

    monkeypatch.setattr("throughline.core.recipe.shipped_recipes", broken)
    done = CliRunner().invoke(main, ["recipe", "show", "x", "--json"])
    assert done.exit_code == 1 and json.loads(done.stdout)["fix"].startswith("a fault in throughline")
    assert "Traceback" in CliRunner().invoke(main, ["recipe", "show", "x", "--debug"]).stderr


def test_doctor_says_what_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores that this process may use, and the versions that would be imported."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 4, 5}, raising=False)
    monkeypatch.setattr(hardware, "machine", hardware.machine.__wrapped__)  # not what another test has read
    done = CliRunner().invoke(main, ["doctor", "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0 and found["machine"]["cpu"]["cores"] == 3
    assert found["packages"]["numpy"] == metadata.version("numpy")


def test_a_reader_that_goes_away_is_no_fault() -> None:
    """`throughline … | head`: the end of the pipe is closed before a word is written."""
    command = [sys.executable, "-m", "throughline.cli.main", "recipe", "list"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)]
)
def test_a_signal_before_the_work_has_begun_ends_with_its_code(number: signal.Signals, code: int) -> None:
    """A scheduler that stops a job while it loads is told what it is told later: the same command continues."""

    @click.command()
    @throughline_command
    def loads() -> None:
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    done = CliRunner().invoke(loads)
    assert done.exit_code == code and "Traceback" not in done.output
    assert ("interrupted" if code == 130 else f"stopped by {number.name}") in done.stderr
    assert signal.getsignal(number) is before


def test_a_command_under_nohup_outlives_its_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGHUP that the parent ignores stays ignored; SIGTERM still ends the command."""

    @click.command()
    @throughline_command
    def works() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        console.result({"done": True}, ["done"])

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = CliRunner().invoke(works)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (done.exit_code, done.stdout) == (0, "done\n")


def test_a_lost_terminal_is_reported_twice_and_stops_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel and the shell both send SIGHUP, and what is written to the terminal fails from then on."""
    terminal, ours = os.openpty()
    os.close(terminal)
    cleaned = []

    @click.command()
    @throughline_command
    def works() -> None:
        try:
            os.kill(os.getpid(), signal.SIGHUP)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            with os.fdopen(ours, "w", buffering=1) as lost, monkeypatch.context() as patch:
                patch.setattr(sys, "stderr", lost)
                console.say("removing what is half-written")
                console.warn("and saving")
                cleaned.append(True)
                patch.undo()
                os.dup2(os.open(os.devnull, os.O_WRONLY), ours)

    assert CliRunner().invoke(works).exit_code == 75
    assert cleaned


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("trian", "did you mean train?"),
        ("chat", "throughline serve RUN"),
        ("convert", "throughline export RUN"),
        ("resume", "the same `throughline train` command continues"),
        ("tokenize", "throughline data tokenize"),
        ("layouts", "throughline plan layouts"),
        ("qqq", "there are data, plan"),
    ],
)
def test_an_unknown_command_is_answered_with_what_there_is(name: str, said: str) -> None:
    done = CliRunner().invoke(main, [name])
    assert done.exit_code == 2 and said in done.stderr


def test_no_command_hides_behind_a_hint() -> None:
    """A name that is a command now is no hint any more, and each name has one."""
    names = " ".join(ELSEWHERE.values()).split()
    assert not set(names) & set(VERBS) and len(names) == len(set(names))


def test_show_counts_many_input_files(tmp_path: Path) -> None:
    """One line for a folder of files and one for each that has changed since; --inputs and --json have them all."""
    (tmp_path / "notes").mkdir()
    for number in range(60):
        (tmp_path / "notes" / f"note {number}.md").write_text(f"note {number}")
    records = [input_record(file) for file in sorted((tmp_path / "notes").iterdir())]
    with create_artifact(tmp_path / "made", "tokens", inputs=records):
        pass
    (tmp_path / "notes" / "note 7.md").write_text("another")
    out = CliRunner().invoke(main, ["show", str(tmp_path / "made")]).stdout
    assert f"60 files in {tmp_path / 'notes'}" in out and out.count(".md") == 1 and "note 7.md" in out
    assert CliRunner().invoke(main, ["show", str(tmp_path / "made"), "--inputs"]).stdout.count(".md") == 60
    found = json.loads(CliRunner().invoke(main, ["show", str(tmp_path / "made"), "--json"]).stdout)
    assert len(found["chain"]) == 60


def test_the_figures_of_a_run_stand_in_two_columns() -> None:
    """The names of tasks' scores are longer than those of losses."""
    names = {"loss": "2.1", "validation perplexity": "8.2", "lambada_openai/perplexity_stderr": "2.80483e+11"}
    lines = figure_lines(names)
    assert [line.split() for line in lines] == [[*name.split(), value] for name, value in names.items()]
    assert len({line.rindex(" ") for line in lines}) == 1
