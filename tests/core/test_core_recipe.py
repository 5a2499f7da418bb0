"""Recipes: every problem at once, with line and nearest key; overrides; a resolved recipe is valid input
again.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import pytest
from throughline.core.errors import WrongUse
from throughline.core.recipe import Problem, Section, dump_toml, line_of, load_recipe, read_toml, recipe_hash


class Inner(Section):
    steps: int = 10
    """Optimizer steps."""
    rate: float = 0.5
    kind: Literal["a", "b"] = "a"


class Tree(Section):
    version: int = 1
    inner: Inner = Inner()
    names: list[str] = []
    parts: str | list[str | Inner] = []


def even(recipe: Tree) -> Iterable[Problem]:
    if recipe.inner.steps % 2:
        yield Problem("inner.steps", f"{recipe.inner.steps} is odd", "use an even number")


def write(tmp_path: Path, text: str) -> Path:
    (tmp_path / "r.toml").write_text(text)
    return tmp_path / "r.toml"


def test_all_problems_at_once_with_lines_and_suggestions(tmp_path: Path) -> None:
    path = write(tmp_path, '[inner]\nstep = 5\nrate = "fast"\nkind = "c"\n')
    with pytest.raises(WrongUse) as caught:
        load_recipe(path, Tree)
    text = str(caught.value)
    assert "3 problems" in text
    assert f"{path}:2: [inner.step] unknown key; did you mean steps?" in text and "step = 5" in text
    assert f"{path}:3: [inner.rate]" in text and f"{path}:4: [inner.kind]" in text


def test_a_value_of_several_kinds_has_one_problem_and_its_own_key(tmp_path: Path) -> None:
    """pydantic tells every kind that it is not, under keys that name the kinds."""
    with pytest.raises(WrongUse, match=r"1 problem\b") as caught:
        load_recipe(write(tmp_path, 'names = []\nparts = ["x", { step = 5 }]\n'), Tree)
    assert "r.toml:2: [parts.1.step] unknown key; did you mean steps?" in caught.value.why
    with pytest.raises(WrongUse, match=r"1 problem\b") as caught:
        load_recipe(tmp_path / "r.toml", Tree, ["parts=3"])
    assert (
        caught.value.why
        == "--set: [parts] input should be a valid string or input should be a valid list, not 3"
    )
    with pytest.raises(WrongUse) as caught:
        load_recipe(tmp_path / "r.toml", Tree, ["parts=[{stepz=1}]"])
    assert caught.value.why.startswith("--set: [parts.0.stepz] unknown key")


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_numbers_are_finite(tmp_path: Path, value: str) -> None:
    """What a resolved recipe could not say again (JSON's Infinity is no TOML)."""
    with pytest.raises(WrongUse, match="finite number"):
        load_recipe(write(tmp_path, f"[inner]\nrate = {value}\n"), Tree)


def test_rules_and_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, "[inner]\nsteps = 4\n")
    recipe = load_recipe(path, Tree, ["inner.steps=6", "inner.kind=b", 'names=["x"]'], [even])
    assert (recipe.inner.steps, recipe.inner.kind, recipe.names) == (6, "b", ["x"])
    with pytest.raises(WrongUse, match=r"--set: \[inner.steps\] 7 is odd; use an even number"):
        load_recipe(path, Tree, ["inner.steps=7"], [even])
    with pytest.raises(WrongUse, match="not of the form"):
        load_recipe(path, Tree, ["inner.steps"])


def test_dump_is_valid_input_with_the_same_hash(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, 'names = ["a\\"b", "é"]\n[inner]\nrate = 1e-4\n'), Tree)
    again = load_recipe(write(tmp_path, dump_toml(recipe)), Tree)
    assert again == recipe and recipe_hash(again) == recipe_hash(recipe)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="not valid TOML"):
        load_recipe(write(tmp_path, "a = = 1"), Tree)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WrongUse, match="not a text file"):
        load_recipe(tmp_path / "b.toml", Tree)
    with pytest.raises(WrongUse, match="no such recipe"):
        load_recipe(tmp_path / "nowhere.toml", Tree)


def test_line_of_finds_dotted_and_nested_keys() -> None:
    text = "version = 1\n[a]\nx = 1\n[a.b]\ny = 2\nc.d = 3\n"
    assert [line_of(text, key) for key in ("version", "a.x", "a.b.y", "a.b.c.d", "a.z", "q")] == [
        1,
        3,
        5,
        6,
        2,
        None,
    ]


def test_a_recipe_saved_by_a_windows_editor_is_read(tmp_path: Path) -> None:
    """Notepad writes a byte order mark and \\r\\n; tomllib takes the second alone."""
    file = tmp_path / "recipe.toml"
    file.write_bytes(b"\xef\xbb\xbf# mine\r\n[train]\r\nsteps = 7\r\n")
    assert read_toml(file)[1] == {"train": {"steps": 7}}
