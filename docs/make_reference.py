"""Write docs/cli.md, docs/recipe.md, docs/models.md and docs/task-file.md from the program itself: python docs/make_reference.py [--check]."""

import dataclasses
import sys
from collections.abc import Iterable
from pathlib import Path

import click
from make_models import models_page
from make_tasks import tasks_page
from throughline.cli.main import VERBS, main
from throughline.core.recipe import describe
from throughline.models.config import BERTConfig, GPTConfig
from throughline.train.finetune.recipe import FinetuneRecipe
from throughline.train.recipes.recipe import Recipe

HERE = Path(__file__).parent
COLUMNS = 90  # of a code block on a page of the book


def cli_page() -> str:
    """Help of every command, as it prints in as many columns as the book's pages have."""
    parts = [
        "# Command line",
        "",
        "Made by `make reference` from the program; a test checks that it is current.",
        "",
        "The result goes to stdout, everything else to stderr. For completion of commands and options, put one of these lines",
        "into the start-up file of your shell:",
        "",
        "```text",
        'eval "$(_THROUGHLINE_COMPLETE=bash_source throughline)"   # ~/.bashrc',
        'eval "$(_THROUGHLINE_COMPLETE=zsh_source throughline)"    # ~/.zshrc',
        "_THROUGHLINE_COMPLETE=fish_source throughline | source    # ~/.config/fish/config.fish",
        "```",
        "",
    ]
    # the names of the help option among them, which a command keeps from its first context
    settings = main.context_settings
    wide = {"terminal_width": COLUMNS, "max_content_width": COLUMNS}
    top = click.Context(main, info_name="throughline", **settings | wide)
    parts += ["```text", _help(main, top), "```", ""]
    for verb in VERBS:
        command = main.get_command(top, verb)
        assert command is not None
        context = click.Context(command, info_name=verb, parent=top, **wide)
        parts += [f"## throughline {verb}", "", "```text", _help(command, context), "```", ""]
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                deeper = click.Context(inner, info_name=name, parent=context, **wide)
                parts += [f"### throughline {verb} {name}", "", "```text", _help(inner, deeper), "```", ""]
    return "\n".join(parts)


def _help(command: click.Command, context: click.Context) -> str:
    return "\n".join(line.rstrip() for line in command.get_help(context).splitlines())


def recipe_page() -> str:
    """Every field of a recipe with type, default and meaning."""
    lines = [
        "# Recipe reference",
        "",
        "Made by `make reference` from the program; a test checks that it is current.",
        "",
    ]
    lines += rows(describe(Recipe))
    lines += [
        "",
        "## Fine-tuning",
        "",
        "Of `throughline finetune`. Fields of `[parallel]` are those above.",
        "",
    ]
    lines += rows(each for each in describe(FinetuneRecipe) if not each[0].startswith("parallel."))
    lines += ["", "## Shapes", ""]
    lines += [
        "`model.preset` names a row of `models/presets.toml`; `model.overrides` sets these fields of it, and",
        "",
    ]
    lines[-2] += (
        " `model.init_from` takes them from the weights. 0 is the usual size: 4 x width, one key head per head, width / heads."
    )
    for kind in (GPTConfig, BERTConfig):
        given = ", ".join(f"`{field.name}` {field.default!r}" for field in dataclasses.fields(kind))
        lines += [f"{kind.__name__.removesuffix('Config')}: {given}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def rows(fields: Iterable[tuple[str, str, str, str]]) -> list[str]:
    """A table of fields."""
    lines = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for key, kind, default, note in fields:
        cells = [text.replace("|", "\\|").replace("\n", " ") for text in (kind, default, note)]
        lines.append(f"| `{key}` | {cells[0]} | {cells[1]} | {cells[2]} |")
    return lines


def main_() -> int:
    stale = []
    pages = {"cli": cli_page(), "recipe": recipe_page(), "models": models_page(), "task-file": tasks_page()}
    for name, text in ((f"{page}.md", text) for page, text in pages.items()):
        if "--check" not in sys.argv:
            (HERE / name).write_text(text)
        elif not (HERE / name).exists() or (HERE / name).read_text() != text:
            stale.append(name)
    if stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run: make reference\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main_())
