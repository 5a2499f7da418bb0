"""Recipes: TOML files read into one tree of frozen pydantic models, any field set anew by `--set a.b=c`.

Unknown keys are refused with the nearest known one, all problems are shown at once with file, line and the offending
line. Rules that span fields are small functions that return problems.
"""

import json
import re
import shlex
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import WrongUse, did_you_mean, nearest
from .files import sha256_json
from .recipe_names import familiar


class Section(BaseModel):
    """A part of a recipe: frozen, strict (no "3" for 3, no inf), unknown keys refused, field docstrings are help."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


@dataclass(frozen=True)
class Problem:
    """What is wrong in a recipe at a dotted key ("train.steps"), with the fix if known."""

    key: str
    text: str
    fix: str = ""


Recipe = TypeVar("Recipe", bound=Section)
Rule = Callable[[Any], Iterable[Problem]]


def load_recipe(
    source: Path | str, model: type[Recipe], overrides: Sequence[str] = (), rules: Sequence[Rule] = ()
) -> Recipe:
    """A recipe from a path, or a shipped one by name, with its overrides. Raises WrongUse with all problems at once."""
    path = find_recipe(source)
    text, tree = read_toml(path)
    return build_recipe(tree, model, rules, where=path, text=text, overridden=set_overrides(tree, overrides))


def build_recipe(
    tree: dict[str, Any],
    model: type[Recipe],
    rules: Sequence[Rule] = (),
    *,
    where: object = "recipe",
    text: str = "",
    overridden: frozenset[str] = frozenset(),
    what: str = "the recipe",
    fix: str = "every field: throughline recipe show; a check of a recipe: throughline recipe check RECIPE",
) -> Recipe:
    """Validate a tree of values into `model` by the rules too. Raises WrongUse with every problem."""
    recipe = None
    try:
        recipe = model.model_validate(tree)
        problems = [problem for rule in rules for problem in rule(recipe)]
    except ValidationError as error:
        problems = list(_from_pydantic(error.errors(), model))
    if problems or recipe is None:
        counted = f"{what} has {len(problems)} problem{'s' * (len(problems) != 1)}"
        why = "\n".join(_lines(problems, where, text, overridden))
        raise WrongUse(counted, where=where, why=why, fix=fix)
    return recipe


def find_recipe(source: Path | str) -> Path:
    """The path of a recipe, or of a shipped one given by name. Raises WrongUse naming the nearest one."""
    path = Path(source)
    if path.is_file():
        return path
    names = shipped_recipes()
    if path.suffix != ".toml" and str(source) in names:
        return names[str(source)]
    # with a suffix it is the name of a text's or a recipe's file
    beside = {file.name: file for file in path.parent.glob("*")} if path.suffix else {}
    found = nearest(path.name if beside else path.stem, [*names, *beside])
    near = f"did you mean {beside.get(found[0], found[0])}?" if found else ""
    fix = f"{near} list them with: throughline recipe list".strip()
    raise WrongUse("no such recipe", where=source, why="neither a file nor a shipped recipe", fix=fix)


def shipped_recipes() -> dict[str, Path]:
    """Name -> path of the recipes in the package."""
    folder = Path(str(resources.files(__package__.rsplit(".", 1)[0]).joinpath("recipes")))
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}


def recipe_hash(recipe: Section) -> str:
    """sha256 of the resolved recipe."""
    return sha256_json(recipe.model_dump(mode="json"))


def dump_toml(recipe: Section, given: bool = False) -> str:
    """The recipe as TOML, every field written out, or those that were given; valid input again (None is left out)."""
    return tomli_w.dumps(recipe.model_dump(mode="json", exclude_none=True, exclude_unset=given))


def describe(model: type[Section], prefix: str = "") -> list[tuple[str, str, str, str]]:
    """(key, type, default, help) of every field, depth first: the reference that `recipe show` prints."""
    rows = []
    for name, info in model.model_fields.items():
        inner = _section_of(info.annotation)
        if inner is not None:
            rows += describe(inner, f"{prefix}{name}.")
            continue
        kind = re.sub(r"typing\.|<class '|'>|\bthroughline[\w.]*\.", "", str(info.annotation))
        default = "required"
        if not info.is_required():
            default = json.dumps(info.get_default(call_default_factory=True), default=str)
        note = " ".join((info.description or "").split())
        rows.append((prefix + name, kind.replace("NoneType", "None"), default, note))
    return rows


def read_toml(path: Path, what: str = "the recipe") -> tuple[str, dict[str, Any]]:
    """The text of a TOML file and its tree. Raises WrongUse when it is none."""
    text = read_text(path, what)
    try:
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        why, fix = str(error), "mend that line"
        raise WrongUse(f"{what} is not valid TOML", where=path, why=why, fix=fix) from None


def read_text(path: Path, what: str = "the recipe") -> str:
    """The text of a TOML file, without the byte order mark of Windows editors. Raises WrongUse when it is no text."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        why, fix = str(error), "it must be TOML in UTF-8"
        raise WrongUse(f"cannot read {what}: not a text file", where=path, why=why, fix=fix) from None


def set_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> frozenset[str]:
    """Put the overrides into a tree of values; their keys. Raises WrongUse for one of another form."""
    keys = []
    for item in overrides:
        key, value = parse_override(item)
        keys.append(key)
        node = tree
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                fix = "see: throughline recipe show NAME"
                raise WrongUse(f"--set {key}: {parent} is a value, not a section", fix=fix)
        node[last] = value
    return frozenset(keys)


def parse_override(item: str) -> tuple[str, Any]:
    """Key and value of `--set a.b=c`. Raises WrongUse on another form."""
    key, equals, value = item.partition("=")
    if not equals or not key.strip():
        fix = "for example: --set train.steps=100"
        raise WrongUse(f"--set {item!r} is not of the form section.key=value", fix=fix)
    try:
        return key.strip(), tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        return key.strip(), value  # the text itself, so that paths and names need no quotes


def text_override(key: str, text: str) -> str:
    """The override that sets `key` to this text: in quotes where it would be read as another value (`2024`, `true`)."""
    plain = f"{key}={text}"
    return plain if parse_override(plain)[1] == text else f"{key}={json.dumps(text, ensure_ascii=False)}"


def _section_of(annotation: Any) -> type[Section] | None:
    """The section that a field is, or may be beside other kinds."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = typing.get_args(annotation) if union else [annotation]
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)


def _from_pydantic(items: Iterable[Any], model: type[Section]) -> Iterable[Problem]:
    """One problem a key; where a value may be of several kinds, of the kind that came furthest."""
    found: dict[str, tuple[type[Section] | None, list[Any]]] = {}
    for item in items:
        path, section = _place(item["loc"], model)
        found.setdefault(".".join(path), (section, []))[1].append(item)
    for key, (section, wrong) in found.items():
        if any(other.startswith(f"{key}.") for other in found):
            continue
        if wrong[0]["type"] == "extra_forbidden":
            known = list(section.model_fields) if section else []
            place, _, name = key.rpartition(".")
            given = wrong[0]["input"]
            names = {name, *given} if isinstance(given, dict) else {name}
            fields = [path for path, *_ in describe(model)]
            others = [path for path in fields if path.rpartition(".")[2] in names]
            others = others or [setting for each in sorted(names) if (setting := familiar(each, fields))]
            fix = did_you_mean(name, known, "known here: " + ", ".join(known))
            if others:
                fix = f"it is {' or '.join(others)} here"
            elif "overrides" in known:
                fix += f"; a field of the shape is {place}.overrides.{name}"
            yield Problem(key, "unknown key", fix)
        elif wrong[0]["type"] == "missing":
            yield Problem(key, "missing")
        elif wrong[0]["type"] == "model_type" and section:
            its_fields = ", ".join(f"{key}.{name}" for name in section.model_fields)
            yield Problem(key, f"a section, not {wrong[0]['input']!r}", f"it has {its_fields}")
        else:
            texts = dict.fromkeys(f"{item['msg'][0].lower()}{item['msg'][1:]}" for item in wrong)
            fix = ""
            if wrong[0]["type"] == "list_type":
                as_list = f"{key}={json.dumps([wrong[0]['input']], default=str)}"
                fix = f"as a list: --set {shlex.quote(as_list)}"
            yield Problem(key, f"{' or '.join(texts)}, not {wrong[0]['input']!r}", fix)


def _place(loc: Sequence[str | int], model: type[Section]) -> tuple[list[str], type[Section] | None]:
    """The key at a pydantic location, without the names of a union's kinds, and the section that holds it."""
    path: list[str] = []
    section: type[Section] | None = model
    kinds: Any = model
    for part in loc:
        field = section.model_fields.get(str(part)) if section else None
        if field is not None:
            kinds, section = field.annotation, _section_of(field.annotation)
        elif section is None and isinstance(part, str) and typing.get_origin(kinds) is not dict:
            section = next((kind for kind in _sections_in(kinds) if kind.__name__ == part), None)
            continue
        path.append(str(part))
    return path, section


def _sections_in(annotation: Any) -> list[type[Section]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [section for part in typing.get_args(annotation) for section in _sections_in(part)]


def _lines(problems: Sequence[Problem], where: object, text: str, overridden: frozenset[str]) -> list[str]:
    lines = []
    source = text.splitlines()
    for problem in problems:
        given = any(f"{problem.key}.".startswith(f"{key}.") for key in overridden)
        number = None if given else line_of(text, problem.key)
        place = "--set" if given else f"{where}:{number}" if number else f"{where}"
        lines.append(f"{place}: [{problem.key}] {problem.text}" + (f"; {problem.fix}" if problem.fix else ""))
        if number:
            lines.append(f"    {source[number - 1].strip()}")
    return lines


def line_of(text: str, key: str) -> int | None:
    """The 1-based line of a TOML text that gives dotted `key`, or that of its nearest section, or None."""
    wanted = key.split(".")
    section: list[str] = []
    best = None
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[\[?\s*([^\]]+?)\s*\]\]?", line):
            section = [part.strip().strip("\"'") for part in header[1].split(".")]
            if wanted[: len(section)] == section:
                best = number
        elif pair := re.match(r"\s*([\w.\-\"']+)\s*=", line):
            name = section + [part.strip("\"'") for part in pair[1].split(".")]
            if name == wanted:
                return number
            if wanted[: len(name)] == name:
                best = number
    return best
