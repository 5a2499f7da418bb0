"""The table of reported results: every claim parses, its commands exist, every figure of ours was read from the
output of a command, and no row says *measured* without one.
"""

import json
import re
import shlex
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from bert_two_phases import reference_target
from layer_eighth import made_input, shard_block
from long_attention import BEYOND, extrapolated
from reproduce import parts, with_earlier
from reproductions import (
    MINUTES,
    RESULTS,
    Claim,
    Run,
    answer,
    choice,
    execute,
    job,
    pick,
    read_claim,
    read_claims,
)
from throughline.cli.main import main
from throughline.models.config import preset
from throughline.models.init import STD

ROOT = Path(__file__).resolve().parents[1]

CLAIMS = read_claims()
by_name = pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)


def parses(line: str) -> None:
    """Asserts that a command names a script, or a verb with options that it takes."""
    words = shlex.split(line)
    if words[0] == "python":
        assert (ROOT / words[1]).exists(), words[1]
        return
    assert words[0] == "throughline"
    command, words = main.get_command(click.Context(main), words[1]), words[2:]
    while isinstance(command, click.Group) and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    assert isinstance(command, click.Command), line
    command.make_context("throughline", list(words), resilient_parsing=True)


def test_eleven_claims_in_order() -> None:
    assert [claim.number for claim in CLAIMS] == list(range(1, 12))


@by_name
def test_every_command_of_a_claim_exists(claim: Claim) -> None:
    """Those that are run here, and those for the machine that the claim needs."""
    for line in (*(run.command for run in claim.runs.values()), *claim.there):
        parses(line)
    assert claim.source and claim.machine


def test_all_claims_fit_into_their_minutes() -> None:
    """Each command once, however many claims share it; what needs a GPU or is kept by `make bench` is left out."""
    every = [run for claim in CLAIMS for run in claim.runs.values()]
    runs = {run.command: run.minutes for run in every if not run.needs and not run.bench}
    assert sum(runs.values()) <= MINUTES, runs


def test_the_list_has_every_command_once_and_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """With nothing kept by `make bench`, and without a GPU; what is kept takes no minutes."""
    every = {run.command: run for claim in CLAIMS for run in claim.runs.values() if run.needs != "gpu"}
    for kept in (False, True):
        monkeypatch.setattr("reproduce.benched", lambda name, kept=kept: {"seconds": 0.0} if kept else None)
        *rows, last = parts(CLAIMS, gpu=False)[2:]
        assert all(sum(row.endswith(f"  {command}") for row in rows) == 1 for command in every)
        assert len(rows) == len(every)
        counted = [run.minutes for run in every.values() if not (kept and run.bench)]
        assert float(last.split()[0]) == pytest.approx(sum(counted), abs=0.05)


@by_name
def test_every_figure_was_read_from_an_output(claim: Claim) -> None:
    """A committed row holds the object that its figure was read from: ours is what stands there, times the unit's
    factor; it is no field of the published tables, and the row's text is that of the claim's file.
    """
    found = json.loads((RESULTS / f"{claim.name}.json").read_text())
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"]) and found["measured_on"]
    assert re.fullmatch(r"[0-9a-f]{64}", found["artifact"])
    rows = {row["name"]: row for row in found["rows"]}
    for row in claim.rows:
        if claim.runs[row.run].needs or row.what in found["open"]:
            continue
        last = row.value.rpartition(".")[2]
        assert not any(word in last for word in ("reported", "published", "measured_seconds")), row.value
        held = rows[row.name]
        assert held["ours"] == pytest.approx(pick(held["read_from"], last) * row.scale, rel=1e-12), row.name
        assert (held["evidence"], held["reported"]) == (row.evidence, row.reported)
        assert row.evidence == "predicted" or "plan" not in claim.runs[row.run].command.split()


def test_a_committed_row_stays_where_its_command_left_no_output() -> None:
    """Of two rows one was measured again; the other keeps its figure, unless it now reads another place."""
    claim = next(claim for claim in CLAIMS if claim.name == "mlperf-bert")
    eighth = {"errors": {"output": 0.5, "gradient": 0.25}, "seconds": 2.0, "parameters": 7}
    twin = {"samples_mean": 900.0, "logs_accepted_as_open": 3}
    outputs = {"eighth": {"details": eighth, "seconds": 1.0}, "twin": {"details": twin, "seconds": 4.0}}
    earlier = answer(claim, outputs, "here", "2026-01-01")
    again = answer(
        claim, {"eighth": {"details": eighth | {"seconds": 3.0}, "seconds": 1.5}}, "here", "2026-01-02"
    )
    assert len(again["open"]) == 3
    found = with_earlier(claim, again, earlier)
    rows = {row["name"]: (row["ours"], row["date"]) for row in found["rows"]}
    assert rows["eighth"] == (3.0, "2026-01-02") and rows["samples"] == (900.0, "2026-01-01")
    assert found["open"] == ["seconds a step of 4,096 rows"]
    assert found["seconds"] == {"eighth": 1.5, "twin": 4.0}
    moved = [replace(row, value="details.other") if row.name == "samples" else row for row in claim.rows]
    found = with_earlier(replace(claim, rows=tuple(moved)), again, earlier)
    assert "samples" not in {row["name"] for row in found["rows"]} and len(found["open"]) == 2


def test_the_twins_target_is_the_reference_runs_at_three_quarters() -> None:
    """Of eight evaluations the sixth, whatever came before it or after; never the first one."""
    reference = [(25 * place, value) for place, value in enumerate((9, 2, 3, 4, 5, 6, 7, 8), 1)]
    assert reference_target(reference) == 6


def test_the_input_of_the_481_billion_shard_is_none_of_its_weights() -> None:
    """Queries of independent numbers have a variance of width x STD^2; input from the weights' own stream gave five
    times that. 5 %: 512 x 256 of them, of which those of one token share its length.
    """
    part = replace(preset("google-481b"), width=1024, mlp_width=1024, heads=16)
    block = shard_block(part)
    x, upstream = made_input(part.width)
    queries = block.attention.q(x).float()
    assert float(queries.detach().std()) == pytest.approx(STD * 1024**0.5, rel=0.05)
    assert abs(float((x.float() * upstream.float()).mean())) < 0.01  # 5 / sqrt(512 x 1024) is 0.007


def test_the_extrapolated_speeds_follow_from_the_measured_ones() -> None:
    """What stands in the committed result is what the script says of its measurements."""
    for path in sorted(RESULTS.parent.glob("*.json")):
        if (held := json.loads(path.read_text()).get("long_attention")) is None:
            continue
        measured = [SimpleNamespace(**claim) for claim in held["claims"]]
        said = {str(length): extrapolated(measured, length) for length in BEYOND}
        assert held["facts"]["extrapolated"] == said, path.name


def test_nothing_that_is_ours_stands_in_the_claims() -> None:
    """The files of the claims have reported figures and paths, and none of our figures."""
    for path in sorted((ROOT / "recipes" / "reproductions").glob("*.toml")):
        assert not re.search(r"^(ours|measured|predicted)\s*=", path.read_text(), re.M), path.name


def test_pages_and_plots_are_current() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_reproductions.py", "--check"], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    for path in (ROOT / "docs" / "plots").glob("*.svg"):
        assert ET.fromstring(path.read_text()).tag.endswith("svg")


def test_values_are_picked_by_key_index_and_name() -> None:
    tree = {"claims": [{"name": "a-4.1-x", "ours": 1.5}], "layouts": [{"days": 2}]}
    assert pick(tree, "claims[name=a-4.1-x].ours") == 1.5
    assert pick(tree, "layouts.0.days") == 2
    with pytest.raises(KeyError, match=r"nights of layouts\.0\.nights"):
        pick(tree, "layouts.0.nights")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('run = "layouts"', 'run = "x"', "names the run 'x'"),
        ('headline = "1t-step"', 'headline = "y"', "the row 'y'"),
    ],
)
def test_a_claim_that_names_what_it_lacks_is_refused(old: str, new: str, said: str, tmp_path: Path) -> None:
    text = (ROOT / "recipes" / "reproductions" / "deepspeed-3d.toml").read_text()
    bad = tmp_path / "bad.toml"
    bad.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=said):
        read_claim(bad)


def test_a_run_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the process that it has started: neither is there afterwards."""
    monkeypatch.setattr("reproductions.SLACK", 0)
    monkeypatch.setattr("reproductions.REST_SECONDS", 1)
    monkeypatch.setattr("reproductions.INTERPRETERS", {"sh": ["sh"]})
    with pytest.raises(RuntimeError, match="not done after"):
        execute(Run("slow", "sh -c 'sleep 77.5 & wait'", 1.0))
    assert "sleep 77.5" not in subprocess.run(
        ["ps", "ax", "-o", "args"], capture_output=True, text=True
    ).stdout.split("\n")


@by_name
def test_the_job_for_the_claims_machine(claim: Claim, tmp_path: Path) -> None:
    """Every claim's job is written; a Slurm job asks for as many GPUs as the claim has."""
    text = job(claim, tmp_path).read_text()
    assert subprocess.run(["sh", "-n", tmp_path / "job.sh"]).returncode == 0
    for name in re.findall(r"sbatch .*?(\S+\.sbatch)", text):
        sizes = {
            key: int(re.search(rf"--{key}=(\d+)", (tmp_path / name).read_text())[1])
            for key in ("nodes", "gpus-per-node")
        }
        assert sizes["nodes"] * sizes["gpus-per-node"] <= claim.gpus
    if claim.name == "bert-53-minutes":
        assert "--dependency=afterok:$job job-2.sbatch" in text
        assert sizes == {"nodes": 92, "gpus-per-node": 16}


def test_what_was_chosen_is_said() -> None:
    claim = next(claim for claim in CLAIMS if claim.name == "single-node-bert")
    assert "no GPU" in choice(claim, [], False) and claim.machine in choice(claim, [], False)
    assert "gpu_scale.py" in choice(claim, ["NVIDIA H100"], False)
    assert "enough for" in choice(claim, ["NVIDIA A100"] * 8, False)
