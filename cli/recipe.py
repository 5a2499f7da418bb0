"""`throughline recipe list|show|check`."""

import click

from ..core import console
from ..core.recipe import describe, dump_toml, find_recipe, load_recipe, shipped_recipes
from .common import recipe_options, throughline_command


@click.group()
def command() -> None:
    """List, show and check recipes."""


@command.command("list")
@throughline_command
def list_recipes() -> None:
    """List the shipped recipes with the first line of their comment.

    \b
    Example:  throughline recipe list
    """
    rows = [
        (name, path.read_text(encoding="utf-8").splitlines()[0].lstrip("# "))
        for name, path in shipped_recipes().items()
    ]
    console.result({"recipes": dict(rows)}, [f"{name:<28}{note}" for name, note in rows])


@command.command()
@click.argument("name", required=False)
@throughline_command
def show(name: str | None) -> None:
    """Print a shipped recipe, or without a name every field with its type, default and meaning.

    \b
    Example:  throughline recipe show gpt-shakespeare
    """
    if name:
        text = find_recipe(name).read_text(encoding="utf-8")
        console.result({"recipe": name, "text": text}, text.splitlines())
        return
    from ..train.recipe import Recipe

    rows = describe(Recipe)
    lines = [
        line
        for key, kind, default, note in rows
        for line in (f"{key}  ({kind}, default {default})", f"    {note}")
    ]
    console.result({"fields": [dict(zip(("key", "type", "default", "help"), row)) for row in rows]}, lines)


@command.command()
@recipe_options
@throughline_command
def check(recipe: str, overrides: tuple[str, ...]) -> None:
    """Check a recipe and print it resolved; exit 2 with every problem at once.

    \b
    Example:  throughline recipe check gpt-shakespeare --set train.steps=100
    """
    from ..train.recipe import RULES, Recipe

    resolved = load_recipe(recipe, Recipe, overrides, RULES)
    text = dump_toml(resolved)
    console.result({"recipe": resolved.model_dump(mode="json")}, text.splitlines())
