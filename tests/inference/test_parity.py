"""The report itself: what it sees, what it costs, what it says."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from throughline.core.backend import divergence
from throughline.inference.graphs.parity import (
    BOUNDS,
    Tally,
    compare_scores,
    summarise,
    sweep,
)

MEMORY = """
import sys
from pathlib import Path
from throughline.core.artifact import Input
from throughline.inference.runtimes.backends import run_graph
from throughline.inference.runtimes.source import Loaded
from throughline.inference.exports.export import write_graph
from throughline.inference.graphs.parity import compare
from throughline.inference.graphs.parity import reference_of
from throughline.models.config import GPTConfig
from throughline.models.init import build

source, path = Input("test", "foreign", "0"), Path(sys.argv[1]) / "model.onnx"
config = GPTConfig(vocab_size=128_256, sequence_length=8_192, layers=1, width=32, heads=1)
model = build(config).eval()
write_graph(model, path, {})
report = compare(reference_of(model, None, source), Loaded(config, None, source, run_graph(path, config)))
cases = [row["case"] for row in report["cases"] if row["output"] == "logits in pieces"]
assert report["passed"] and "1 x 8192" in cases, report["outputs"]
peak = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(int(peak[0].split()[1]) // 1024)
"""


@pytest.mark.slow
def test_logits_of_a_llama_3_vocabulary_are_compared_within_2_gb(tmp_path: Path) -> None:
    """4.2 GB of logits on each side, in pieces of 65 tokens; torch and ONNX Runtime alone take 0.5 GB."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, tmp_path], capture_output=True, text=True, timeout=570, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 2000, f"{done.stdout} MiB"


def test_pieces_add_up_to_the_whole() -> None:
    rng = np.random.default_rng(0)
    ours = rng.normal(size=(40, 11)).astype(np.float32)
    theirs = ours + rng.normal(size=ours.shape).astype(np.float32) * 1e-5
    whole, parts = Tally(True), Tally(True)
    whole.add(ours, theirs)
    for start in range(0, 40, 7):
        parts.add(ours[start : start + 7], theirs[start : start + 7])
    one, two = (tally.row("case", "logits", BOUNDS["fp32"]) for tally in (whole, parts))
    assert one["passed"] and one.keys() == two.keys()
    assert [one[key] for key in ("max_abs", "scale", "top1_agreement")] == [
        two[key] for key in ("max_abs", "scale", "top1_agreement")
    ]
    assert one["kl"] == pytest.approx(two["kl"]) and one["mean_abs"] == pytest.approx(two["mean_abs"])


@pytest.mark.parametrize("rows", range(1, 60))
def test_one_near_tie_of_a_short_case_is_allowed_and_two_are_not(rows: int) -> None:
    """Counted in whole numbers: 6/7 is less than 1 - 1/7 in floating point."""
    ours = np.zeros((rows, 5), np.float32)
    ours[:, 0] = 1e-6
    for flipped in (1, 2):
        theirs = ours.copy()
        theirs[:flipped, 1] = 2e-6
        tally = Tally(True)
        tally.add(ours[:rows], theirs[:rows])
        assert tally.row("case", "logits", BOUNDS["fp32"])["passed"] == (min(flipped, rows) == 1)


def test_an_output_s_line_is_its_worst() -> None:
    """Of two cases, one of which fails; of NaN it is NaN."""
    good, bad = (
        {"passed": p, "top1_agreement": t, "max_abs": m}
        for p, t, m in ((True, 1.0, 0.1), (False, 0.5, np.nan))
    )
    for rows in ([good, bad], [bad, good]):
        told = summarise(rows)
        assert (told["passed"], told["top1_agreement"]) == (False, 0.5) and np.isnan(told["max_abs"])


def test_divergence_is_torchs() -> None:
    one, two = torch.randn(9, 50, generator=torch.Generator().manual_seed(0)).split(25, dim=1)
    logs = [x.log_softmax(-1) for x in (one, two)]
    expected = torch.nn.functional.kl_div(logs[1], logs[0], log_target=True, reduction="none").sum(-1)
    np.testing.assert_allclose(divergence(one.numpy(), two.numpy()), expected.numpy(), rtol=1e-4)


def test_the_sweep_has_the_shapes_that_break_exports() -> None:
    cases = sweep(100, 160)
    shapes = {case.ids_BS.shape for case in cases}
    assert {(1, 1), (1, 7), (3, 33), (1, 160)} <= shapes
    assert any(len(set(case.lengths_B.tolist())) > 1 for case in cases)  # ragged
    assert max(case.ids_BS.shape[1] for case in sweep(100, 5)) == 5  # nothing beyond the context


def test_scores_may_rise_and_may_not_fall() -> None:
    values = iter([{"a": 0.5}, {"a": 0.6}, {"a": 0.5}, {"a": 0.48}])
    risen, fallen = (compare_scores(None, None, lambda _: next(values), BOUNDS["int8"]) for _ in range(2))
    assert risen["passed"] and not fallen["passed"]
    assert json.loads(json.dumps(fallen))["difference"]["a"] == pytest.approx(-0.02)
