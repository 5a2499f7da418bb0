"""Show that new tests fail at an older commit: python tests/regressions.py BASE [--jobs N] [--only WORDS].

The test functions that this checkout has and BASE has not are run in a worktree of BASE, to which this checkout's tests
are copied: the tests are new, the package is old. A function that passes there in all its cases proves nothing new; it
is listed, and the exit status is 1. A function that moved to another file of its folder is not new, and new cases of an
old function are not looked for. This file is also the plugin that ends a test which waits for ever.
"""

import argparse
import ast
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEST_SECONDS = 180  # after which a test has failed: at an older commit what it waits for may never come
UNUSABLE = "pytest cannot import the file"
CHOSEN = "THROUGHLINE_NEW_TESTS"  # the variable that has their names


@contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """A worktree of a commit, gone afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "throughline"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(place), commit], check=True)
        try:
            yield place
        finally:
            subprocess.run([*git, "remove", "--force", str(place)], check=True)


def environment(checkout: Path) -> dict[str, str]:
    """Variables under which `throughline` is this checkout."""
    link = checkout / "build" / "path" / "throughline"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(checkout)
    shared = os.environ.get("THROUGHLINE_SHARED", str(ROOT.parent / "shared"))
    path = f"{link.parent}:{checkout / 'tests'}"
    return os.environ | {"PYTHONPATH": path, "THROUGHLINE_SHARED": shared}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """pytest's hook: leave out what is not new."""
    chosen = set(os.environ[CHOSEN].splitlines())
    items[:] = [item for item in items if item.nodeid.partition("[")[0] in chosen]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    """pytest's hook around each test: raise TimeoutError in it after `TEST_SECONDS`."""

    def end(number: int, frame: object) -> None:
        raise TimeoutError(f"no end after {TEST_SECONDS} s")

    signal.signal(signal.SIGALRM, end)
    signal.alarm(TEST_SECONDS)
    result = yield
    signal.alarm(0)
    return result  # type: ignore[return-value]


def tests_of(checkout: Path) -> set[str]:
    """The test functions of a checkout as `path::name` or `path::Class::name`, read without importing anything."""
    found = set()
    for file in sorted((checkout / "tests").rglob("test_*.py")):
        place = file.relative_to(checkout).as_posix()
        if place.startswith("tests/rehearsal/"):
            continue
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef):
                found |= {f"{place}::{node.name}::{name}" for name in test_names(node.body)}
        found |= {f"{place}::{name}" for name in test_names(ast.parse(file.read_text()).body)}
    return found


def test_names(body: Sequence[ast.stmt]) -> list[str]:
    functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [node.name for node in functions if node.name.startswith("test_")]


def new_tests(checkout: Path, base: Path) -> list[str]:
    """The test functions of `checkout` that `base` has neither there nor, under the same name, in a file of the folder
    that has lost it since.
    """
    names, base_names = tests_of(checkout), tests_of(base)
    moved = {folder_and_function(name) for name in base_names - names}
    return sorted(name for name in names - base_names if folder_and_function(name) not in moved)


def folder_and_function(name: str) -> tuple[str, str]:
    """The folder and the function, with its class, of `path::name`."""
    path, _, function = name.partition("::")
    return path.rpartition("/")[0], function


def run_folder(checkout: Path, folder: str, names: Sequence[str]) -> dict[str, list[str]]:
    """The outcomes of the cases of these test functions, in one process. Files are named, not functions: pytest runs
    nothing at all where a function that is asked for stands in a file that cannot be imported.
    """
    report = checkout / f"report-{folder.replace('/', '-')}.xml"
    words = ["-q", "-p", "no:cacheprovider", "-p", "regressions", "--continue-on-collection-errors"]
    files = sorted({name.partition("::")[0] for name in names})
    command = [sys.executable, "-m", "pytest", *words, f"--junitxml={report}", *files]
    chosen = {CHOSEN: "\n".join(names)}
    subprocess.run(command, cwd=checkout, env=environment(checkout) | chosen, capture_output=True)
    outcomes: dict[str, list[str]] = {name: [] for name in names}
    unusable: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase") if report.is_file() else ():
        name = function_of(case, names)
        if name:
            outcomes[name].append(outcome_of(case))
        elif (error := case.find("error")) is not None:  # of a file, whose path is written with dots
            lines = [line for line in (error.text or "").splitlines() if line.startswith("E ")]
            unusable[case.get("name", "")] = f"{UNUSABLE}: {lines[-1][1:].strip()[:100] if lines else ''}"
    for name in names:
        module = name.partition(".py::")[0].replace("/", ".")
        outcomes[name] = outcomes[name] or [unusable.get(module, "it did not run")]
    return outcomes


def function_of(case: ElementTree.Element, names: Sequence[str]) -> str:
    """The test function of a case in pytest's report, where a path is written with dots."""
    dotted = f"{case.get('classname', '')}.{case.get('name', '').partition('[')[0]}"
    for name in names:
        if name.replace(".py::", ".").replace("::", ".").replace("/", ".") == dotted:
            return name
    return ""


def outcome_of(case: ElementTree.Element) -> str:
    for kind in ("failure", "error", "skipped"):
        found = case.find(kind)
        if found is not None:
            said = (found.get("message") or "").strip().splitlines()
            return "skipped" if kind == "skipped" else f"{kind}: {said[0][:100] if said else ''}"
    return "passed"


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("base", help="the older commit")
    options.add_argument("--jobs", type=int, default=1, help="folders of tests run at once (default: 1)")
    options.add_argument("--only", default="", help="only tests whose ids contain this")
    chosen = options.parse_args()
    with worktree(chosen.base) as old:
        names = new_tests(ROOT, old)
        shutil.rmtree(old / "tests")
        shutil.copytree(ROOT / "tests", old / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        by_folder: dict[str, list[str]] = {}
        for name in names:
            if chosen.only in name:
                by_folder.setdefault(folder_and_function(name)[0], []).append(name)
        functions: dict[str, list[str]] = {}
        with ThreadPoolExecutor(chosen.jobs) as pool:
            for found in pool.map(lambda item: run_folder(old, *item), by_folder.items()):
                tell(found)
                functions |= found
    return summarise(functions, chosen.base)


def kind_of(outcomes: Sequence[str]) -> str:
    """`fails`, `PASSES` or `skipped`: a function of which one case fails shows what is new."""
    if any(outcome not in ("passed", "skipped") for outcome in outcomes):
        return "fails"
    return "PASSES" if "passed" in outcomes else "skipped"


def tell(functions: dict[str, list[str]]) -> None:
    """Print a line for each test function, with the first failure and how many of its cases fail."""
    for name, outcomes in functions.items():
        failures = [outcome for outcome in outcomes if outcome not in ("passed", "skipped")]
        why = f"{len(failures)} of {len(outcomes)}: {failures[0]}" if failures else ""
        print(f"{kind_of(outcomes):8} {name}  {why}".rstrip(), flush=True)


def summarise(functions: dict[str, list[str]], base: str) -> int:
    """Print the counts and the functions that pass; the exit status."""
    kinds = Counter(kind_of(outcomes) for outcomes in functions.values())
    fails, passes, skipped = kinds["fails"], kinds["PASSES"], kinds["skipped"]
    print(f"{fails} new test functions fail at {base}, {passes} pass there, {skipped} are skipped")
    for name, outcomes in functions.items():
        if kind_of(outcomes) == "PASSES":
            print(f"proves nothing new: {name}")
    return 1 if passes else 0


if __name__ == "__main__":
    sys.exit(main())
