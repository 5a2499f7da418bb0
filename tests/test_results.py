"""Results: the committed ones parse, the pages show exactly them, and what makes claims, pages and verdicts is
right on small planted input.
"""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from common import claim

ROOT = Path(__file__).resolve().parents[1]


def script(place: str) -> Any:
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(Path(place).stem, ROOT / place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def results() -> Any:
    return script("docs/make_results.py")


@pytest.mark.parametrize(
    "file", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.name
)
def test_committed_results_parse(file: Path) -> None:
    for name, line in json.loads(file.read_text()).items():
        assert (ROOT / "benchmarks" / f"{name}.py").exists(), f"{file.name}: no benchmark {name}"
        assert {"claims", "machine", "versions", "date"} <= set(line), f"{file.name}: {name}"


def test_pages_are_made_from_them() -> None:
    """Also: the page names every claim, since it is made from all of them."""
    made = subprocess.run([sys.executable, ROOT / "docs" / "make_results.py", "--check"])
    assert made.returncode == 0, "run: make reference"
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize(
    ("better", "ours", "theirs"),
    [("lower", [2.0, 1.0, 4.0], [4.0, 4.0, 4.0]), ("higher", [4.0, 4.0, 4.0], [2.0, 1.0, 4.0])],
)
def test_a_ratio_is_the_median_of_pairs_and_larger_is_better_for_us(
    better: str, ours: list[float], theirs: list[float]
) -> None:
    """The pairs are 2, 4 and 1 times better."""
    found = claim("c", ours, theirs, peer="p", unit="s", better=better, goal=2.0)
    assert (found.ratio, found.spread, found.met) == (2.0, (1.0, 4.0), True)
    assert claim("c", ours, theirs, peer="p", unit="s", better=better, goal=2.001).met is False
    assert claim("c", ours, theirs, peer="p", unit="s", better=better, goal=None).met is None


def planted(results: Any, monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Any]:
    """The rows of two machines' results: a race that missed its goal, a proof, and a bound."""
    monkeypatch.setattr(results, "ROOT", folder)
    (folder / "benchmarks" / "results").mkdir(parents=True)
    made = {
        "name": "fast",
        "ours": 1.0,
        "peer": "them, tuned",
        "theirs": 2.0,
        "unit": "s",
        "spread": [1.0, 3.0],
    }
    missed = made | {"ratio": 2.0, "goal": 4.0, "met": False}
    for number, (gpus, claims) in enumerate(
        [([], [missed]), (["H100"], [missed | {"ours": 0.5, "met": True}])]
    ):
        line = {"claims": claims, "machine": {"cpu": "EPYC", "cores": 2, "gpus": gpus}, "date": "2026-01-01"}
        proof = line | {"claims": [made | {"name": "equal", "ratio": 2.0, "goal": None, "met": None}]}
        lines = {"race": line} | ({} if gpus else {"prove_it": proof, "faults": proof})
        (folder / "benchmarks" / "results" / f"{number}.json").write_text(json.dumps(lines))
    return results.rows()


def test_the_page_keeps_a_missed_goal_and_names_each_machine(
    results: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = planted(results, monkeypatch, tmp_path)
    assert {row.benchmark: row.section for row in found} == {
        "race": "Races",
        "prove_it": "Proofs",
        "faults": "Bounds",
    }
    page = results.results_page(found)
    shown, _, folded = page.partition("<details>")  # one row a claim, the others folded
    newer, older = "| 2.00 (1.00-3.00) | 4 | yes | 0.5 s |", "| 2.00 (1.00-3.00) | 4 | **no** | 1 s |"
    assert "H100, 2 cores, 2026-01-01:" in shown and newer in shown and older not in shown
    assert f"| fast {older} 2 (them) | EPYC, 2 cores, 2026-01-01 |" in folded
    assert "- fast: them, tuned" in folded and "| equal | 2.00 (1.00-3.00) | - | - |" in page


def test_the_readme_shows_the_machine_that_measured_last(
    results: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = planted(results, monkeypatch, tmp_path)
    monkeypatch.setattr(results, "HEADLINES", {"fast": "What was done"})
    shown = ["What was done", "0.5 s", "2 s (them)", "2.0", "H100, 2 cores"]  # of one day the last file's
    assert list(results.headline_rows(found)) == [shown]
    later = [replace(row, date="2026-01-02") if row.machine.startswith("EPYC") else row for row in found]
    shown[1], shown[4] = "1 s", "EPYC, 2 cores"
    assert list(results.headline_rows(later)) == [shown]


def test_parity_is_refused_where_it_does_not_hold() -> None:
    """The verdict of benchmarks/eval_parity.py: 1e-3 nats a log-likelihood, 1e-6 of itself a document's, accuracies the
    same; a task that was not scored is open.
    """
    parity = script("benchmarks/eval_parity.py")
    same = {"acc": [0.5, 0.5], "perplexity": [10.0, 10.0005]}
    assert parity.judged("piqa", [(-5.0, -5.0009), (-7.0, -7.0)], same)["equal"]
    assert not parity.judged("piqa", [(-5.0, -5.0011), (-7.0, -7.0)], same)["equal"]
    assert not parity.judged("piqa", [(-5.0, -5.0)], same | {"acc_norm": [0.5, 0.51]})["equal"]
    assert not parity.judged("piqa", [(-5.0, -5.0)], same | {"perplexity": [10.0, 10.01]})["equal"]
    assert parity.judged("gsm8k", [("so 4", "so 4")], {"exact_match": [1.0, 1.0]})["equal"]
    assert not parity.judged("gsm8k", [("so 4", "so 5")], {"exact_match": [0.0, 0.0]})["equal"]
    assert parity.judged("wikitext_2", [(-9000.0, -9000.008)], same)["equal"]
    assert not parity.judged("wikitext_2", [(-9000.0, -9000.01)], same)["equal"]
    line = {
        "models": {
            "random": {"piqa": {"equal": True}, "copa": {"equal": False}},
            "trained": {"piqa": {"equal": True}},
        }
    }
    tasks = {weights: ["piqa", "copa"] for weights in ("random", "trained")}
    assert parity.open_points(line, tasks) == (["trained copa"], ["random copa"])


def test_a_run_that_leaves_out_a_claim_says_so() -> None:
    """What `make bench-quick` checks against the committed results of every machine."""
    unnamed = script("benchmarks/run_all.py").unnamed
    committed = [
        {"race": {"claims": [{"name": "a"}, {"name": "b"}]}},
        {"race": {"claims": [{"name": "c"}]}},
        {},
    ]
    assert unnamed("race", {"claims": [{"name": "b"}, {"name": "new"}]}, committed) == ["a", "c"]
    assert unnamed("other", {"claims": []}, committed) == []
    told = {"c": "left out: no such peer is installed here", "d": "left out: no such peer is installed here"}
    assert unnamed("race", {"claims": [{"name": "b"}], "details": told}, committed) == ["a"]
