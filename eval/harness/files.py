"""lm-evaluation-harness's task files as they lie: YAML with includes, and the names that groups and tags stand for."""

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from ...core.errors import MissingExtra, WrongUse

CALL = "!function "  # begins a value that names a Python function: "!function PLACE/FILE.NAME"
Fields = dict[str, Any]


@cache
def _loader(folder: Path) -> Any:
    """A loader of YAML for files of this folder. A function stays a name, with its place."""
    import yaml

    loader: Any = type("Loader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), {})
    loader.add_constructor("!function", lambda made, node: f"{CALL}{folder}/{made.construct_scalar(node)}")
    return loader


def read_fields(path: Path, seen: tuple[Path, ...] = ()) -> Fields:
    """The fields of a file over those of the files that it includes. Raises WrongUse naming the file."""
    import yaml

    path = path.resolve()
    if path in seen:
        raise WrongUse("a task file includes itself", where=path, fix="take one of the includes out")
    try:
        with path.open("rb") as file:
            fields = yaml.load(file, Loader=_loader(path.parent))  # noqa: S506 (a safe loader's class)
    except OSError as error:
        raise WrongUse(
            "cannot read the task file", where=path, why=str(error), fix="check the path"
        ) from error
    except yaml.YAMLError as error:
        why = " ".join(str(error).split())
        raise WrongUse("the task file is no YAML", where=path, why=why, fix="mend the file") from error
    if not isinstance(fields, dict):
        raise WrongUse("the task file has no fields", where=path, fix="give a task or group of the harness")
    included = fields.pop("include", None) or []
    merged: Fields = {}
    for name in [included] if isinstance(included, str) else included:
        merged |= read_fields(path.parent / name, (*seen, path))
    return merged | fields


def members(path: Path) -> Iterator[tuple[Path, Fields]]:
    """The tasks that a group file names, nested groups and tags among them: (file, fields). Raises WrongUse for a name
    that no file below its folder has.
    """
    fields = read_fields(path)
    if "group" not in fields:
        yield path, fields
        return
    known = files_by_name(path.parent.resolve())
    for name in [fields["task"]] if isinstance(fields["task"], str) else fields["task"]:
        own = {} if isinstance(name, str) else {key: value for key, value in name.items() if key != "task"}
        title = name if isinstance(name, str) else str(name.get("task", name.get("group")))
        if title not in known:
            why = f"no file in {path.parent} is called so, as a task, a group or a tag"
            raise WrongUse(
                f"the group names {title!r}, which is not there", where=path, why=why, fix="read its files"
            )
        for file in known[title]:
            for place, found in members(file):
                yield place, found | own


@cache
def files_by_name(folder: Path) -> dict[str, list[Path]]:
    """Every name of a task, a group or a tag below a folder -> its files, in order."""
    found: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*.yaml")):
        fields = read_fields(file)
        tags = fields.get("tag") or []
        own = fields.get("group") or fields.get("task")
        for name in [own, *([tags] if isinstance(tags, str) else tags)]:
            if isinstance(name, str):
                found.setdefault(name, []).append(file)
    return found


@cache
def function(marked: str) -> Callable[..., Any]:
    """The Python function that a value names. Raises WrongUse when its file lacks it, MissingExtra for a library."""
    place, _, name = marked.removeprefix(CALL).rpartition(".")
    folder, _, module = place.rpartition("/")
    file = Path(folder) / (module.replace(".", "/") + ".py")
    spec = importlib.util.spec_from_file_location("harness" + re.sub(r"\W", "_", str(file)), file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise WrongUse(
            "the task's Python file is not there", where=file, fix="give the whole folder of the task"
        )
    made = importlib.util.module_from_spec(spec)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # what its functions load lies here, or is refused
    try:
        spec.loader.exec_module(made)
    except ImportError as error:
        raise MissingExtra(str(error.name), f"the task's {file.name}", "throughline[eval]") from error
    if not hasattr(made, name):
        raise WrongUse(
            f"the task's Python file has no {name!r}", where=file, fix="give the files of one release"
        )
    return getattr(made, name)
