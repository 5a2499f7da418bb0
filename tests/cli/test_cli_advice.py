"""Every command and option that the program prints as advice exists, and a whole command parses as printed."""

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from click.testing import CliRunner, Result
from throughline.cli.main import VERBS, main
from throughline.core.recipe import describe, shipped_recipes
from throughline.models.config import BERTConfig, GPTConfig
from throughline.train.finetune.recipe import FinetuneRecipe
from throughline.train.recipes.recipe import Recipe

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("core", "models", "data", "planner", "train", "prove", "inference", "eval", "cli")
# a command ends where the sentence around it goes on
ENDS = re.compile(
    r"[\n;)(`#]|\.\.\.|…|, | and | or |: |'$| \|\| | names | is | has | reads | makes | wrote | writes "
)
# words of other programs
FOREIGN = re.compile(
    r"--format|torchrun|--rdzv|--map-root-user|^--(net|pid|fork|kill-child)$|pip install|hf download|--query-gpu"
)
KEYS = {key for model in (Recipe, FinetuneRecipe) for key, *_ in describe(model)}
SHAPE = {field.name for config in (GPTConfig, BERTConfig) for field in fields(config)}


class Advice(NamedTuple):
    where: str
    text: str


def strings(path: Path) -> Iterator[Advice]:
    """The texts that a file may print: no docstring, and a word for each value that is put in."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    passive = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}  # docstrings, also of fields
    passive |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passive:
            text = node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "1" for part in node.values]
            text = "".join(map(str, parts))
        else:
            continue
        if "--" in text or "throughline " in text:
            yield Advice(f"{path.relative_to(ROOT)}:{node.lineno}", text)


@cache
def advice() -> list[Advice]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [found for path in sorted(files) for found in strings(path) if not FOREIGN.search(found.text)]


def commands() -> list[Advice]:
    """`throughline …` in the texts, to the end of each command."""
    found = []
    for where, text in advice():
        for match in re.finditer(r"(?<![\w/.\[])throughline ", text):
            command = ENDS.split(text[match.end() :])[0].strip().rstrip(".,:")
            command = re.sub(r"\bN\b", "1", command + "'" * (command.count("'") % 2))
            if command and command.split()[0] in VERBS:
                found.append(Advice(where, command))
    return found


def resolve(words: list[str]) -> tuple[click.Command, click.Context, list[str]]:
    """The command that these words name, its context and what is left of them."""
    command: click.Command = main
    context = click.Context(main, info_name="throughline")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        name, inner, rest = command.resolve_command(context, list(words))
        assert inner is not None, words
        command, context, words = inner, click.Context(inner, info_name=name, parent=context), rest
    return command, context, words


def every_option() -> set[str]:
    def of(command: click.Command) -> set[str]:
        names = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
        if isinstance(command, click.Group):
            context = click.Context(command)
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                names |= of(inner)
        return names

    return of(main) | {"--help"}


@pytest.mark.parametrize(("where", "command"), commands(), ids=lambda value: str(value)[:60])
def test_a_printed_command_parses(where: str, command: str) -> None:
    """A command without arguments is a name; with some it is one to type, and all that it needs is there."""
    inner, context, rest = resolve(shlex.split(command))
    if rest:
        try:
            inner.make_context(context.info_name, rest, parent=context.parent)
        except click.exceptions.Exit:
            pass
        except click.ClickException as error:
            if "does not exist" not in error.format_message():  # a file that stands for the user's own
                pytest.fail(f"{where}: throughline {command}: {error.format_message()}")


def test_printed_options_exist() -> None:
    known = every_option()
    unknown = [
        f"{where}: {option}"
        for where, text in advice()
        for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+\b", text)
        if option not in known
    ]
    assert not unknown, "\n".join(unknown)


def test_printed_settings_exist() -> None:
    """`--set section.key=…` names a field of a recipe, and `train NAME` a shipped one."""
    shipped = shipped_recipes()
    unknown = [
        f"{where}: {key}"
        for where, text in advice()
        for key in re.findall(r"--set '?([\w.]+)=", text)
        if key not in KEYS and key.removeprefix("model.overrides.") not in SHAPE and "1" not in key
    ]
    for where, command in commands():
        names = re.findall(r"^(?:train|finetune) ((?:gpt|bert|finetune)-\S+)", command)
        unknown += [f"{where}: {name}" for name in names if name not in shipped]
    assert not unknown, "\n".join(unknown)


def type_fix(done: Result) -> list[str]:
    """Type each command of an error's fix; one that would train for long or start processes is only checked."""
    assert done.exit_code == 2, done.output
    lines = done.stderr.partition("fix:")[2].splitlines()
    typed = [match[1].strip() for line in lines if (match := re.search(r"throughline (.*)", line))]
    for command in typed:
        words = shlex.split(command)
        words += ["--dry-run"] if words[0] == "train" else []
        words[1:1] = ["--emit", "torchrun"] if words[0] == "launch" else []
        again = CliRunner().invoke(main, words)
        assert again.exit_code == 0, f"throughline {command}: {again.output}"
    return typed


@pytest.mark.parametrize(
    ("words", "count"),
    [
        (["train", "my text.txt", "--set", "model.preset=gpt-toy"], 4),
        (["train", "my text.txt", "--set", "model.preset=bert-toy"], 4),
        (["launch", "--nproc", "2", "--", "train", "my text.txt"], 4),
        (
            [
                "recipe",
                "new",
                "--model",
                "gpt-toy",
                "--machine",
                "cpu",
                "--out",
                "r.toml",
                "--data",
                "my text.txt",
            ],
            2,
        ),
        (
            [
                "launch",
                "--nproc",
                "2",
                "--",
                "data",
                "tokenize",
                "my text.txt",
                "--tokenizer",
                "tok",
                "--out",
                "s",
            ],
            1,
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_fix_of_several_commands_runs_when_it_is_typed(
    words: list[str], count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an empty directory with a text, one after the other, as a reader would."""
    monkeypatch.chdir(tmp_path)
    text = "".join(f"He said that {n} is a number of things. It is not so.\n\n" for n in range(600))
    Path("my text.txt").write_text(text)
    if "tokenize" in words:
        made = CliRunner().invoke(
            main, ["data", "tokenizer", "my text.txt", "--vocab-size", "300", "--out", "tok"]
        )
        assert made.exit_code == 0, made.output
    assert len(type_fix(CliRunner().invoke(main, words))) == count
