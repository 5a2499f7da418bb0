"""The planning page shows what its commands print today."""

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_output_on_the_page_is_that_of_its_command() -> None:
    tools = runpy.run_path(str(ROOT / "docs" / "make_planning.py"))
    text = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")
    assert text.count("```console\n$ throughline plan") == 15
    assert tools["refreshed"](text) == text
