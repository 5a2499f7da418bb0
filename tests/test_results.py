"""Committed results parse, say when, where and with what they were measured, and README.md shows exactly them."""

import json
import subprocess
import sys
from pathlib import Path


def test_results_are_whole(root: Path) -> None:
    for file in sorted((root / "benchmarks" / "results").glob("*.json")):
        for name, line in json.loads(file.read_text()).items():
            assert (root / "benchmarks" / f"{name}.py").exists(), f"{file.name}: no benchmark {name}"
            assert {"claims", "machine", "versions", "date"} <= set(line), f"{file.name}: {name}"
            for claim in line["claims"]:
                assert claim["met"] == (None if claim["goal"] is None else claim["ratio"] >= claim["goal"]), claim["name"]
                assert claim["spread"][0] <= claim["ratio"] <= claim["spread"][1], claim["name"]


def test_readme_table_is_made_from_them(root: Path) -> None:
    assert subprocess.run([sys.executable, root / "docs" / "make_results.py", "--check"]).returncode == 0, "run: make reference"
