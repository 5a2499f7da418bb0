"""The house stands: nothing imports upward, packages are complete, start-up is light, light modules stay
light.
"""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

FLOORS = {
    "core": 0,
    "models": 1,
    "data": 1,
    "planner": 2,
    "train": 3,
    "prove": 4,
    "inference": 4,
    "eval": 5,
    "cli": 6,
}
ROOT = Path(__file__).resolve().parents[1]


def sources() -> list[Path]:
    return sorted(path for floor in FLOORS for path in (ROOT / floor).rglob("*.py"))


def reached(path: Path) -> set[str]:
    """The floors that a module imports, by its relative imports; an absolute self-import is reported as
    'throughline'.
    """
    found = set()
    parts = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = parts[: len(parts) - (node.level - 1)] if node.level > 1 else parts
            full = [*base, *((node.module or "").split(".") if node.module else [])]
            found.update([full[0]] if full else [alias.name for alias in node.names])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "throughline":
            found.add("throughline")
        elif isinstance(node, ast.Import):
            found.update("throughline" for alias in node.names if alias.name.split(".")[0] == "throughline")
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_imports_upward(path: Path) -> None:
    floor = path.relative_to(ROOT).parts[0]
    for other in reached(path):
        assert other != "throughline", f"{path}: absolute self-import"
        if other in FLOORS and other != floor:
            assert FLOORS[other] < FLOORS[floor], f"{path}: {floor} imports {other}, which is not below it"


def edges() -> dict[Path, set[Path]]:
    """Which files each file of the package imports by relative imports, inside functions and for types too."""
    found = {}
    for path in sources():
        targets = found.setdefault(path, set())
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                base = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                near = [base.with_suffix(".py"), *(base / f"{alias.name}.py" for alias in node.names)]
                targets.update(file for file in near if file.is_file() and file != path)
    return found


def circles(graph: dict[Path, set[Path]]) -> list[Path]:
    """The files in a circle: what is left when files that import nothing left, and files that nothing left
    imports, are taken away again and again.
    """
    left = {path: targets & graph.keys() for path, targets in graph.items()}
    while done := [
        path
        for path, targets in left.items()
        if not targets & left.keys() or not any(path in others for others in left.values())
    ]:
        for path in done:
            del left[path]
    return sorted(left)


def test_no_files_import_each_other_in_a_circle() -> None:
    assert [str(path.relative_to(ROOT)) for path in circles(edges())] == []


def test_a_circle_would_be_found() -> None:
    one, two, three, four = map(Path, ("1", "2", "3", "4"))
    assert circles({one: {two}, two: {one, three}, three: set(), four: {one}}) == [one, two]


def test_the_parts_of_a_layout_import_nothing_of_training() -> None:
    """Inside train: mesh, collectives, tensor, pipeline and sharding below; the engines above them, the loop on
    top.
    """
    for path in sorted((ROOT / "train" / "parallel").glob("*.py")):
        imported = [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
        ]
        above = [node.module for node in imported if node.level == 2]
        assert above == [], path
    for path in sorted((ROOT / "train").glob("*.py")):
        if path.stem in ("engine", "parallelize", "stage", "loss", "shards", "step"):
            modules = {
                node.module
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.ImportFrom)
            }
            assert not modules & {"loop", "build", "checkpoint", "snapshot", "evaluate", "recipe"}, path


def test_the_rooms_of_inference_stand_on_each_other() -> None:
    """Runtimes below graphs (which they are compared by) and serving, which do not know each other; exports on top of
    graphs.
    """
    allowed = {"runtimes": set(), "graphs": {"runtimes"}, "serving": {"runtimes"}}
    allowed["exports"] = {"runtimes", "graphs"}
    rooms = {path.name for path in (ROOT / "inference").iterdir() if (path / "__init__.py").is_file()}
    assert rooms == allowed.keys()
    for path, targets in edges().items():
        if path.is_relative_to(ROOT / "inference") and (room := path.parent.name) in rooms:
            others = {target.parent.name for target in targets if target.is_relative_to(ROOT / "inference")}
            assert others - {room, "inference"} <= allowed[room], path


def test_few_tables_are_kept_from_the_formatter() -> None:
    """At most 10 in the whole repository, tables of data."""
    mark = "# fmt: " + "skip"
    files = subprocess.run(
        ["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split()
    if not files:
        pytest.skip("not a checkout of git")
    assert sum((ROOT / file).read_text().count(mark) for file in files) <= 10


def test_files_and_functions_are_short() -> None:
    """A file answers one question in at most 400 lines, a function has at most 100."""
    long_files = {
        str(path.relative_to(ROOT)) for path in sources() if len(path.read_text().splitlines()) > 400
    }
    assert long_files == set()
    long_functions = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or node.lineno) - node.lineno >= 100
    ]
    assert long_functions == []


def test_packages_listed_and_inits_empty() -> None:
    """pyproject lists every package, so that a wheel holds them all; every __init__.py is empty."""
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = {"throughline"}
    for top in (*FLOORS, "recipes"):
        for init in (ROOT / top).rglob("__init__.py"):
            found.add("throughline." + ".".join(init.parent.relative_to(ROOT).parts))
            assert init.read_text().strip() == "", f"{init} is not empty"
        for module in (ROOT / top).rglob("*.py"):
            assert (module.parent / "__init__.py").exists(), f"{module.parent} has no __init__.py"
    assert listed == found


def test_every_data_file_is_in_the_wheel() -> None:
    """Recipes, samples, presets, tasks, chips and pages are package data, each matched by a pattern of its
    package.
    """
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    listed = {ROOT.joinpath(*package.split(".")[1:]): patterns for package, patterns in data.items()}
    files = [path for top in (*FLOORS, "recipes") for path in (ROOT / top).rglob("*") if path.is_file()]
    missing = [
        str(path.relative_to(ROOT))
        for path in files
        if path.suffix not in (".py", ".pyc")
        and not any(
            path in folder.glob(pattern) for folder, patterns in listed.items() for pattern in patterns
        )
    ]
    assert len(files) > 100 and missing == []


def imported_after(code: str) -> set[str]:
    """Top-level modules present after running `code` in a fresh interpreter."""
    out = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{code}\nimport sys\nprint(*sorted({{n.split('.')[0] for n in sys.modules}}))",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(out.stdout.split("\n")[-2].split())


def test_help_imports_neither_torch_nor_datasets() -> None:
    code = "import sys\nfrom throughline.cli.main import main\ntry:\n    main(['--help'])\nexcept SystemExit:\n    pass"
    heavy = {
        "torch",
        "datasets",
        "transformers",
        "numpy",
        "pydantic",
        "onnx",
        "starlette",
        "rich",
        "tokenizers",
    }
    assert not imported_after(code) & heavy


def test_light_modules_import_no_torch() -> None:
    """core, planner, model configs, recipes and the replays of published runs work where torch is blocked."""
    names = [
        "throughline." + ".".join(p.relative_to(ROOT).with_suffix("").parts)
        for folder in ("core", "planner")
        for p in (ROOT / folder).rglob("*.py")
        if p.stem != "__init__"
    ]
    names += [
        "throughline.models.config",
        "throughline.train.recipes.new_recipe",
        "throughline.train.recipes.own_text",
        "throughline.train.recipes.rules",
        "throughline.prove.validate",
    ]
    code = (
        "import sys\nsys.modules['torch'] = None\n"
        + "\n".join(f"import {name}" for name in names)
        + "\ndel sys.modules['torch']"
    )
    assert "torch" not in imported_after(code)


def test_command_modules_import_no_heavy_library() -> None:
    """Every verb's module loads without torch: help and errors of the command line are quick."""
    from throughline.cli.main import VERBS

    files = sorted({file for file, _ in VERBS.values()})
    code = "import sys\n" + "\n".join(f"import throughline.cli.{name}" for name in files)
    assert not imported_after(code) & {"torch", "datasets", "transformers", "starlette", "onnx"}
