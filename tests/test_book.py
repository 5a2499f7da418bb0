"""The book's pages work: each page's commands run in order in a directory of their own, with few training steps."""

import html
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from common import settings
from search import UNTRAINED, bm25, recall
from throughline.core.recipe import load_recipe
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.rules import RULES
from walk import SHORT, file_of, script, walk

ROOT = Path(__file__).resolve().parents[1]

# a quarter of an hour together: `make walk` alone walks them
LONG = {"options", "layouts", "faults", "evaluation"}
PAGES = re.search(r"^WALKED := (.*)$", (ROOT / "Makefile").read_text(), re.M)[1].split()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all pages are walked: what the README's road has made serves those that go on from it."""
    return tmp_path_factory.mktemp("walk")


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in LONG])
def test_the_commands_of_a_page_run(page: str, place: Path) -> None:
    """From nothing but the repository's samples; `make walk` gives them their own numbers of steps."""
    walk(page, place, quick=True)


@pytest.mark.parametrize("page", PAGES)
def test_every_long_training_is_shortened(page: str) -> None:
    """In the slow test a page's trainings have few steps, whether the page names their number or not."""
    text = script(file_of(page), quick=True)
    for line in text.replace("\\\n", "").splitlines():
        if re.match(r"throughline (?:launch .* )?(?:train|finetune) ", line):
            assert re.search(SHORT, line) or "train.epochs=1 " in line, line


def test_a_failing_command_ends_the_walk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of three commands fails: the third does not run, and the page is named."""
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "bad.md").write_text("```sh\ntouch one\nfalse\ntouch three\n```\n")
    monkeypatch.setattr("walk.ROOT", tmp_path)
    (tmp_path / "place").mkdir()
    with pytest.raises(SystemExit, match=r"bad\.md"):
        walk("bad", tmp_path / "place", quick=False)
    assert (tmp_path / "place" / "one").exists() and not (tmp_path / "place" / "three").exists()


def test_a_server_ends_with_its_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a page leaves in the background is a child of the shell's function: it ends too."""
    (tmp_path / "docs").mkdir()
    lines = ["python -c 'import os, time; print(os.getpid(), flush=True); time.sleep(60)' > pid &"]
    lines.append("until [ -s pid ]; do sleep 0.05; done")
    (tmp_path / "docs" / "page.md").write_text("```sh\n" + "\n".join(lines) + "\n```\n")
    monkeypatch.setattr("walk.ROOT", tmp_path)
    (tmp_path / "place").mkdir()
    walk("page", tmp_path / "place", quick=False)
    server = int((tmp_path / "place" / "pid").read_text())
    for _ in range(100):
        if not psutil.pid_exists(server) or psutil.Process(server).status() == psutil.STATUS_ZOMBIE:
            return
        time.sleep(0.05)
    pytest.fail(f"process {server} is still there")


def test_the_untrained_model_of_the_search_table_is_a_legal_run() -> None:
    """One step of the page's recipe, which itself warms up for longer."""
    changes = settings({"data.train": "tokens"} | UNTRAINED)[1::2]
    assert load_recipe("bert-novels-phase1", Recipe, changes, RULES).train.steps == 1


def test_recall_counts_ties_for_the_others_and_bm25_prefers_the_rarer_word() -> None:
    """Eight passages that score alike: none is found among five. "moor" stands in one of three passages."""
    assert recall(np.ones((2, 8)), np.array([0, 7])) == 0.0
    assert recall(np.eye(8), np.arange(8)) == 1.0
    scores = bm25(["the moor"], ["the house and the garden", "the moor at night", "the town"])
    assert scores[0].argmax() == 1


def test_every_page_is_in_the_book_and_in_the_readme() -> None:
    """None has a name that the generator gives a page of its own, which would be written over it."""
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"index"}
    assert not pages & {"search", "genindex", "modindex", "py-modindex"}
    assert pages == set(re.findall(r"^([\w-]+)$", (ROOT / "docs" / "index.md").read_text(), re.M))
    assert pages <= set(re.findall(r"\(docs/([\w-]+)\.md", (ROOT / "README.md").read_text()))


@pytest.mark.slow
def test_every_page_has_its_own_heading_in_its_html(tmp_path: Path) -> None:
    """As `make docs` builds it: a page that another one was written over has another heading."""
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-b",
        "html",
        ROOT / "docs",
        tmp_path,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in (ROOT / "docs").glob("*.md"):
        heading = re.search(r"^# (.*)$", page.read_text(), re.M)[1]
        titles = re.findall(r"<h1>(.*?)<a class", (tmp_path / f"{page.stem}.html").read_text(), re.S)
        shown = [re.sub(r"<[^>]*>", "", html.unescape(title)) for title in titles]
        letters = [re.findall(r"\w+", title) for title in (*shown, heading)]
        assert len(shown) == 1 and letters[0] == letters[1], page.name
