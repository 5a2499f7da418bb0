"""Two models compared record by record: the tests, their intervals, and the records in which the two differ."""

import math
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from throughline.core.errors import WrongUse
from throughline.core.workspace import read_records
from throughline.eval.compare import compare_scores, mcnemar, paired_test
from throughline.eval.kinds.choices import MultipleChoice
from throughline.eval.session import Request, evaluate_one


def test_paired_tests() -> None:
    """McNemar against sums written out by hand; a z test on a difference that is there and on one that is
    not.
    """
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 0) == pytest.approx(2 / 2**5)
    assert mcnemar(7, 2) == pytest.approx(2 * (1 + 9 + 36) / 2**9)
    generator = np.random.default_rng(0)
    base = generator.normal(-3, 1, (200, 1))
    assert (
        paired_test("perplexity", base, base + 0.3 + generator.normal(0, 0.5, base.shape))["better"]
        == "second"
    )
    assert paired_test("perplexity", base, base + generator.normal(0, 0.5, base.shape))["better"] == "-"
    found = paired_test("acc", np.zeros((100, 1)), (np.arange(100) < 20).astype(float)[:, None])
    spread = 1.96 * (0.2 * 0.8 / 100) ** 0.5  # of the mean of 100 draws of 0 and 1, a fifth of them 1
    assert (found["low"], found["high"]) == pytest.approx((0.2 - spread, 0.2 + spread), abs=0.02)
    tenths = np.arange(50)[:, None] / 500
    assert paired_test("brier_score", tenths, tenths + 0.3 + tenths / 9)["better"] == "first", "the lower one"
    for metric in ("f1", "f1_words"):  # of a task's own function, and of words: one number of each record
        found = paired_test(metric, [[1.0], [0.5], [0.0]], [[1.0], [1.0], [0.0]])
        assert found["second"] == pytest.approx(2 / 3) and found["difference"] == pytest.approx(1 / 6)
    followed = paired_test("inst_level_strict_acc", [[1.0, 2.0], [0.0, 2.0]], [[2.0, 2.0], [0.0, 2.0]])
    assert followed["difference"] == followed["second"] - followed["first"] == 0.25, "of an instruction"
    for metric, one, other in (
        ("adjusted_perplexity", [[-900.0, 100.0]], [[-400.0, 100.0]]),
        ("acc", [[0.0]], [[1.0]]),
    ):
        alone = paired_test(metric, one, other)
        assert (alone["p"], alone["better"]) == (None, "-"), "one record is no sign of equality"
        assert paired_test(metric, one, one)["p"] == 1.0


def test_the_records_in_which_two_models_differ_are_listed(
    gpt_directory: Path, small_directory: Path, tmp_path: Path
) -> None:
    """Those of which one model alone is right, by file and line; in the table ten of a task."""
    for path, name in ((gpt_directory, "one"), (small_directory, "two")):
        evaluate_one(Request(path, "blimp_wh_island", limit=60, out=tmp_path / name))
    payload, lines = compare_scores(tmp_path / "one" / "scores", tmp_path / "two" / "scores")
    one, two = (list(read_records(tmp_path / name / "scores" / "samples.jsonl")) for name in ("one", "two"))
    wanted = [
        (a["where"], *a["metrics"]["acc"], *b["metrics"]["acc"])
        for a, b in zip(one, two, strict=True)
        if a["metrics"] != b["metrics"]
    ]
    assert [(q["where"], q["first"], q["second"]) for q in payload["questions"]] == wanted
    assert len(wanted) > 10 and sum("wh_island.jsonl.gz:" in line for line in lines) == 10
    assert f"differ in {len(wanted)} records" in "\n".join(lines)
    page = (tmp_path / "two" / "differences.html").read_text()
    assert page.count("<tr>") == 1 + 3 * len(wanted), (
        "a header, and of each question its record and two sentences"
    )
    assert all(q["where"] in page for q in payload["questions"]) and str(one[0]["choices"][0]) != ""
    (row,) = payload["rows"]
    assert row["low"] <= row["difference"] <= row["high"]


def test_lists_that_a_task_sums_up_itself_are_no_pairs(
    gpt_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have no number of a record to compare; their end is no part of the samples, which are JSON."""
    lists = cycle(([1.0, math.nan], [1.0, 2.0, math.nan]))
    monkeypatch.setattr(MultipleChoice, "of_scores", lambda *_: {"acc": [1.0], "own": next(lists)})
    monkeypatch.setattr(MultipleChoice, "reported", ("own", "acc"))
    for name in ("one", "two"):
        evaluate_one(Request(gpt_directory, "blimp_wh_island", limit=20, out=tmp_path / name))
    text = (tmp_path / "one" / "scores" / "samples.jsonl").read_text()
    assert "NaN" not in text and '"own": [1.0]' in text and '"own": [1.0, 2.0]' in text
    payload, _ = compare_scores(tmp_path / "one" / "scores", tmp_path / "two" / "scores")
    assert [row["metric"] for row in payload["rows"]] == ["acc"]
    monkeypatch.setattr(MultipleChoice, "reported", ("own",))
    for name in ("three", "four"):
        evaluate_one(Request(gpt_directory, "blimp_wh_island", limit=20, out=tmp_path / name))
    with pytest.raises(WrongUse, match="no score is one of single records"):
        compare_scores(tmp_path / "three" / "scores", tmp_path / "four" / "scores")
