"""Committed results parse, say when, where and with what they were measured, and docs/results.md and
the figures in README.md show exactly them.
"""

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
                assert claim["met"] == (None if claim["goal"] is None else claim["ratio"] >= claim["goal"]), (
                    claim["name"]
                )
                assert claim["spread"][0] <= claim["ratio"] <= claim["spread"][1], claim["name"]


def test_pages_are_made_from_them(root: Path) -> None:
    assert subprocess.run([sys.executable, root / "docs" / "make_results.py", "--check"]).returncode == 0, (
        "run: make reference"
    )


def test_every_claim_is_on_the_page_and_the_readme_fits_one(root: Path) -> None:
    page = (root / "docs" / "results.md").read_text()
    for file in sorted((root / "benchmarks" / "results").glob("*.json")):
        for line in json.loads(file.read_text()).values():
            assert all(f"| {claim['name']} |" in page for claim in line["claims"])
    assert len((root / "README.md").read_text().splitlines()) <= 120


TASKS = {
    "lambada_openai",
    "hellaswag",
    "piqa",
    "winogrande",
    "arc_easy",
    "arc_challenge",
    "boolq",
    "copa",
    "openbookqa",
    "sst2",
    "wikitext_2",
}


def test_parity_covers_the_tasks_and_holds(root: Path) -> None:
    """All records of each task by both: accuracies equal, log-likelihoods within 1e-3 nats (a document's
    within 1e-6 of itself).
    """
    line = json.loads((root / "benchmarks" / "results" / "eval-parity.json").read_text())["eval_parity"]
    assert set(line["models"]["random"]) >= TASKS and set(line["models"]) == {"random", "trained"}
    assert sum(name.startswith("blimp_") for name in line["models"]["random"]) == 16
    assert set(line["models"]["trained"]) == set(line["models"]["random"])
    for tasks in line["models"].values():
        for name, found in tasks.items():
            assert found["equal"] and found["accuracies_equal"] and found["records"] > 0, name
            bound = 1e-6 * found["largest_loglikelihood_nats"] if name == "wikitext_2" else 1e-3
            assert found["largest_difference_nats"] <= bound, name
