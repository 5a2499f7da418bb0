"""The command line: help for every verb with a runnable example, near-misses named, errors without tracebacks, --json clean."""

import json
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from throughline.cli.main import VERBS, main
from throughline.core.artifact import create_artifact


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
    assert done.exit_code == 2 and "'train'" in done.output


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


def test_doctor_runs() -> None:
    done = CliRunner().invoke(main, ["doctor", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["machine"]["cpu"]["cores"] >= 1


def test_a_reader_that_goes_away_is_no_fault() -> None:
    """`throughline … | head`: the end of the pipe is closed before a word is written."""
    command = [sys.executable, "-m", "throughline.cli.main", "recipe", "list"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
