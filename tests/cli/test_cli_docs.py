"""Documents tell the truth: the references are current, every path the README names exists, every command in
it parses.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from throughline.cli.main import main
from throughline.core.recipe import load_recipe
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import is_text
from throughline.train.recipes.rules import RULES


def test_references_are_current(root: Path) -> None:
    """In a process of its own: click keeps on a command how it was first called, and other tests call some
    without their parent.
    """
    made = subprocess.run(
        [sys.executable, root / "docs" / "make_reference.py", "--check"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr


def documents(root: Path) -> list[Path]:
    return [
        root / "README.md",
        *sorted(path for path in (root / "docs").glob("*.md") if path.name not in ("cli.md", "recipe.md")),
    ]


def test_paths_named_in_the_documents_exist(root: Path) -> None:
    """Paths in backticks that start with a folder of the repository."""
    tops = {path.name for path in root.iterdir() if path.is_dir()}
    for document in documents(root):
        for name in re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", document.read_text()):
            if name.split("/")[0] in tops - {"runs", "build"}:
                assert (root / name).exists(), f"{document.name} names {name}, which does not exist"
    for name in re.findall(r"\]\(([^)#:]+)\)", (root / "README.md").read_text()):
        assert (root / name).exists(), f"README.md links {name}, which does not exist"


def commands(root: Path) -> list[str]:
    found = []
    for document in documents(root):
        for block in re.findall(r"```(?:sh|bash)(?: there)?\n(.*?)```", document.read_text(), re.S):
            lines = (line.strip() for line in block.replace("\\\n", " ").splitlines())
            found += [line.split("  #")[0] for line in lines if line.startswith("throughline ")]
    return found


def test_every_command_in_the_documents_parses(root: Path) -> None:
    """Each `throughline …` line names a real command with real options (parsed, not run)."""
    found = commands(root)
    assert found, "no commands in the documents"
    for line in found:
        words = shlex.split(line.split(" | ")[0].split(" > ")[0].rstrip("&").strip())[1:]
        command: click.Command = main
        context = click.Context(main, info_name="throughline")
        while isinstance(command, click.Group) and words and not words[0].startswith("-"):
            try:
                _, inner, rest = command.resolve_command(context, list(words))
            except click.UsageError:
                inner, rest = None, []
            assert inner is not None, f"{line}: no command {words[0]}"
            command, words = inner, rest
        try:
            command.make_context("throughline", list(words), resilient_parsing=False)
        except click.exceptions.Exit:
            pass
        except click.ClickException as error:
            pytest.fail(f"{line}: {error.format_message()}")


def test_every_run_in_the_documents_is_a_legal_one(root: Path) -> None:
    """Each `train RECIPE --set …` line, launched or not, passes the rules and names data that a command of a
    document makes.
    """
    made = set(re.findall(r"--out (\S+)", "\n".join(commands(root))))
    runs = [line.partition("train ")[2] for line in commands(root) if " train " in line]
    assert len(runs) >= 5
    for line in runs:
        words = shlex.split(line)
        if is_text(words[0]):  # a recipe is picked
            continue
        changes = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
        recipe = load_recipe(words[0], Recipe, changes, RULES)
        assert recipe.data.train in {*made, "$TEXT"}, f"no command before makes what is trained on: {line}"


def test_make_targets_named_in_the_readme_exist(root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
    for name in re.findall(r"\bmake ([a-z][a-z-]+)", (root / "README.md").read_text()):
        assert name in targets, f"README.md names make {name}"
