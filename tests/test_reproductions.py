"""The table of reported results: claims parse, their commands exist, no row says *measured* without an artifact."""

import json
import re
import shlex
import sys
from pathlib import Path

import click
import pytest
from throughline.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from reproductions import RESULTS, pick, read_claim, read_claims  # noqa: E402


@pytest.mark.parametrize("claim", read_claims(), ids=lambda claim: claim.name)
def test_every_command_of_a_claim_exists(claim) -> None:
    """Commands run here name a script or a verb of the command line; the one for the claim's machine too."""
    for words in (
        shlex.split(line) for run in claim.runs.values() for line in (run.command, run.gpu or run.command)
    ):
        if words[0] == "python":
            assert (ROOT / words[1]).exists(), words[1]
        else:
            assert words[0] == "throughline"
            assert isinstance(main.get_command(click.Context(main), words[1]), click.Command), words[1]
    assert claim.source and claim.there and claim.machine


def test_a_measured_row_has_an_artifact() -> None:
    """Each row of docs/reproductions.md is backed by a committed result whose figure is a number."""
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]) and found["measured_on"]
        for row in found["rows"]:
            assert isinstance(row["ours"], (int, float)), f"{path.name}: {row['name']}"


def test_values_are_picked_by_key_index_and_name() -> None:
    tree = {"claims": [{"name": "a-4.1-x", "ours": 1.5}], "layouts": [{"days": 2}]}
    assert pick(tree, "claims[name=a-4.1-x].ours") == 1.5
    assert pick(tree, "layouts.0.days") == 2
    with pytest.raises(KeyError, match=r"nights of layouts\.0\.nights"):
        pick(tree, "layouts.0.nights")


def test_a_claim_that_names_a_run_it_lacks_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text(
        (ROOT / "recipes" / "reproductions" / "deepspeed-3d.toml")
        .read_text()
        .replace('run = "layouts"', 'run = "x"')
    )
    with pytest.raises(ValueError, match="names the run 'x'"):
        read_claim(bad)
