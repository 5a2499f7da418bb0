"""Evaluations survive crashes and any number of processes without a trace in the scores; reports and comparisons tell the truth."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from throughline.core.artifact import verify_artifact
from throughline.core.errors import Failed, Refused, WrongUse
from throughline.data.readers import ReadOptions
from throughline.data.tokenize import tokenize
from throughline.eval.causal import CausalScorer
from throughline.eval.compare import compare_scores, mcnemar, paired_test
from throughline.eval.contamination import shared_runs
from throughline.eval.metrics import aggregate
from throughline.eval.report import curves
from throughline.eval.runner import Ranks, Settings, evaluate, group_means, present
from throughline.eval.session import Request, evaluate_checkpoints, evaluate_one
from throughline.eval.task import find_tasks

TASKS = ["lambada_openai", "blimp_wh_island", "blimp_transitive"]
LIMIT = 12


@pytest.fixture(scope="module")
def scorer(small_gpt, gpt2_tokenizer) -> CausalScorer:
    return CausalScorer(small_gpt, gpt2_tokenizer, identity="weights", batch_questions=4)


@pytest.fixture(scope="module")
def wanted(scorer) -> list:
    return evaluate(scorer, find_tasks(TASKS), Settings(limit=LIMIT))


def test_a_killed_evaluation_goes_on_where_it_was(scorer, wanted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after any number of batches, the last line cut: the same scores, and no question is asked twice."""
    real, asked = scorer.score, []

    def killed_after(batches: int):
        def score(questions):
            for number, batch in enumerate(real(questions)):
                asked.extend(index for index, _ in batch)
                yield batch
                if number + 1 == batches:
                    raise KeyboardInterrupt

        return score

    for stop in (1, 2, 1):
        monkeypatch.setattr(scorer, "score", killed_after(stop))
        with pytest.raises(KeyboardInterrupt):
            evaluate(scorer, find_tasks(TASKS), Settings(limit=LIMIT), tmp_path)
        file = tmp_path / "answers-0.jsonl"
        file.write_bytes(file.read_bytes() + b'{"key": "cut in the mi')
    monkeypatch.setattr(scorer, "score", killed_after(10_000))
    assert evaluate(scorer, find_tasks(TASKS), Settings(limit=LIMIT), tmp_path) == wanted
    assert len(asked) == LIMIT * len(TASKS)
    monkeypatch.setattr(scorer, "score", lambda questions: pytest.fail("a finished evaluation asks nothing"))
    assert evaluate(scorer, find_tasks(TASKS), Settings(limit=LIMIT), tmp_path) == wanted


@pytest.mark.parametrize(("world", "batch"), [(1, 1), (1, 7), (1, 64), (2, 64), (3, 1)])
def test_any_number_of_ranks_and_any_batch_give_the_same_scores(
    small_gpt, gpt2_tokenizer, wanted, tmp_path: Path, world: int, batch: int
) -> None:
    """Ranks in turn, the first one last; of three one dies without having answered anything. Equal to the last bit."""
    scorer = CausalScorer(small_gpt, gpt2_tokenizer, identity="weights", batch_questions=batch)
    for rank in reversed(range(world)):
        if rank == world - 1 and world == 3:
            continue
        found = evaluate(scorer, find_tasks(TASKS), Settings(limit=LIMIT), tmp_path, Ranks(rank, world))
        assert found == (wanted if rank == 0 else [])
    assert len(list(tmp_path.glob("answers-*.jsonl"))) >= min(world, 2)


def test_other_weights_share_no_answers(scorer, small_gpt, gpt2_tokenizer, tmp_path: Path) -> None:
    evaluate(scorer, find_tasks(TASKS[:1]), Settings(limit=2), tmp_path)
    other = CausalScorer(small_gpt, gpt2_tokenizer, identity="others")
    asked = []
    real = other.score
    other.score = lambda questions: (asked.extend(questions), real(questions))[1]  # type: ignore[method-assign]
    evaluate(other, find_tasks(TASKS[:1]), Settings(limit=2), tmp_path)
    assert len(asked) == 2


def test_examples_depend_on_the_record_alone(scorer) -> None:
    few = Settings(limit=3, shots=2, seed=1)
    more = Settings(limit=6, shots=2, seed=1)
    first = evaluate(scorer, find_tasks(["blimp_wh_island"]), few)[0].samples
    assert evaluate(scorer, find_tasks(["blimp_wh_island"]), more)[0].samples[:3] == first
    assert evaluate(scorer, find_tasks(["blimp_wh_island"]), Settings(limit=3, shots=2, seed=2))[0].samples != first


def test_a_group_is_the_mean_of_its_members(wanted) -> None:
    (group,) = group_means(wanted, {"blimp": True})
    values = [score.summary["metrics"]["acc"]["value"] for score in wanted[1:]]
    errors = [score.summary["metrics"]["acc"]["stderr"] for score in wanted[1:]]
    assert group["metrics"]["acc"]["value"] == pytest.approx(np.mean(values)) and group["n"] == 2 * LIMIT
    assert group["metrics"]["acc"]["stderr"] == pytest.approx(np.hypot(*errors) / 2)


def test_truncation_is_counted(small_gpt, gpt2_tokenizer) -> None:
    narrow = CausalScorer(small_gpt, gpt2_tokenizer, window=32)
    summary = evaluate(narrow, find_tasks(TASKS[:1]), Settings(limit=LIMIT))[0].summary
    assert summary["truncated_records"] > 0 and summary["truncated_tokens"] > summary["truncated_records"]
    assert summary["scorer"]["window"] == 32


def test_records_that_are_too_long_are_cut_refused_or_left_out(small_gpt, gpt2_tokenizer, wanted) -> None:
    """Left out: the others keep their number and their answer; refused: by name of file and line."""
    tasks = find_tasks(TASKS[:1])
    narrow = CausalScorer(small_gpt, gpt2_tokenizer, window=80)
    cut = evaluate(narrow, tasks, Settings(limit=LIMIT))[0]
    left = evaluate(narrow, tasks, Settings(limit=LIMIT, overlong="skip"))[0]
    long = {place for place, sample in enumerate(cut.samples) if sample["answers"][0][0][3]}
    assert 0 < len(long) == cut.summary["truncated_records"] == left.summary["skipped_records"] < LIMIT
    assert left.samples == [sample for sample in cut.samples if sample["record"] not in long]
    assert (left.summary["truncated_records"], left.summary["n"]) == (0, LIMIT - len(long))
    with pytest.raises(Failed, match="too long for the model") as caught:
        evaluate(narrow, tasks, Settings(limit=LIMIT, overlong="error"))
    assert caught.value.where.startswith(cut.samples[min(long)]["where"])
    with pytest.raises(Failed, match="no record of task"):
        evaluate(CausalScorer(small_gpt, gpt2_tokenizer, window=4), tasks, Settings(limit=LIMIT, overlong="skip"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"query": "Q", "choices": ["a", "b"], "gold": 2}', "gold"),
        ('{"query": "Q", "choices": ["a", "b"], "gold": -1}', "gold"),
        ('{"query": "Q", "choices": ["a", " "], "gold": 0}', r"choices\[1\]"),
        ('{"query": "Q", "choices": [], "gold": 0}', "choices"),
        ('{"query": "Q", "gold": 0}', "lacks the field"),
        ('{"query": "Q", "choices": ["a", "' + "word " * 300 + '"], "gold": 0}', r"choices\[1\] is longer than the model's window"),
        ("{broken", "not a JSON record"),
    ],
)
def test_a_bad_record_is_named(scorer, tmp_path: Path, line: str, complaint: str) -> None:
    file = tmp_path / "piqa" / "piqa.jsonl"
    file.parent.mkdir()
    file.write_text('{"query": "Q", "choices": ["a", "b"], "gold": 0}\n' + line + "\n")
    with pytest.raises(Failed, match=complaint) as caught:
        evaluate(scorer, find_tasks(["piqa"]), Settings(tmp_path))
    assert f"{file}:2" in caught.value.where


def test_missing_data_and_wrong_names_are_named(scorer, tmp_path: Path) -> None:
    with pytest.raises(WrongUse, match="no data for task piqa") as caught:
        evaluate(scorer, find_tasks(["piqa"]), Settings(tmp_path))
    assert "piqa/piqa.jsonl" in caught.value.why
    with pytest.raises(WrongUse, match="unknown task") as unknown:
        find_tasks(["helaswag"])
    assert "hellaswag" in unknown.value.fix


def test_nothing_is_fetched_for_a_group_that_is_partly_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped paradigms of BLiMP are scored without a network; the other members are left out, not waited for."""
    monkeypatch.setattr("throughline.eval.task.hub_records", lambda *_: pytest.fail("asked the network"))
    found = present(find_tasks(["blimp"]), Settings(limit=1))
    assert len(found) == 16
    monkeypatch.setattr("throughline.eval.task.hub_records", lambda *_: _no_network())
    for names in (["anli"], ["blimp", "blimp_wh_vs_that_no_gap"], ["blimp_wh_island", "blimp_wh_vs_that_no_gap"]):
        with pytest.raises(WrongUse, match="no network"):  # the last one is not shipped and was asked for by its name
            present(find_tasks(names), Settings(limit=1))


def _no_network() -> None:
    raise WrongUse("no network")


def test_scores_artifact_reports_and_comparison(gpt_directory: Path, tmp_path: Path) -> None:
    """One path from a model directory to a verified artifact; comparing it with itself finds nothing."""
    request = Request(gpt_directory, "lambada_openai,blimp_wh_island", limit=8, out=tmp_path / "one")
    payload, lines = evaluate_one(request)
    assert any("lambada_openai" in line for line in lines)
    verify_artifact(tmp_path / "one" / "scores")
    page = (tmp_path / "one" / "scores" / "report.html").read_text()
    assert "lambada_openai" in page and "http" not in page.replace("http://www.w3.org", "")
    assert (tmp_path / "one" / "scores" / "report.md").read_text().count("| lambada_openai |") == 2
    samples = [json.loads(line) for line in (tmp_path / "one" / "scores" / "samples.jsonl").read_text().splitlines()]
    assert [sample["record"] for sample in samples] == [*range(8), *range(8)]
    rows = compare_scores(tmp_path / "one" / "scores", tmp_path / "one" / "scores")[0]["rows"]
    assert {row["p"] for row in rows} == {1.0} and {row["better"] for row in rows} == {"-"}
    again, _ = evaluate_one(request)
    assert again == payload
    other = Request(gpt_directory, "lambada_openai", limit=4, out=tmp_path / "two")
    evaluate_one(other)
    with pytest.raises(WrongUse, match="not asked in the same way"):
        compare_scores(tmp_path / "one" / "scores", tmp_path / "two" / "scores")
    (tmp_path / "two" / "scores" / "samples.jsonl").unlink()
    with pytest.raises(Refused):
        compare_scores(tmp_path / "two" / "scores", tmp_path / "two" / "scores")


def test_the_gate_refuses_another_model(gpt_directory: Path, tmp_path: Path) -> None:
    """The same directory passes with a difference of zero; a copy with one changed weight is refused, naming a record."""
    import shutil

    from safetensors.torch import load_file, save_file

    asked = {"path": gpt_directory, "tasks": "blimp_wh_island", "limit": 4}
    payload, _ = evaluate_one(Request(**asked, against=str(gpt_directory), out=tmp_path / "same"))
    assert payload["against"]["largest_difference"] == {"blimp_wh_island": 0.0}
    other = tmp_path / "other"
    shutil.copytree(gpt_directory, other)
    weights = load_file(other / "model.safetensors")
    name = next(key for key in weights if key.endswith("wte.weight"))
    weights[name] = weights[name] * 1.01
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(Refused, match="do not predict the same") as caught:
        evaluate_one(Request(**asked, against=str(other), out=tmp_path / "refused"))
    assert "wh_island.jsonl.gz:" in caught.value.where


def test_the_gate_opens_after_an_evaluation_without_it(small_directory: Path, tmp_path: Path) -> None:
    """Answers of the first command have no log-probabilities of tokens: they are asked again, and both forms are in the reports."""
    asked = {"path": small_directory, "tasks": "blimp_wh_island", "limit": 4, "out": tmp_path / "out"}
    alone, _ = evaluate_one(Request(**asked))
    payload, lines = evaluate_one(Request(**asked, against=str(small_directory)))
    assert payload["against"]["largest_difference"] == {"blimp_wh_island": 0.0}
    assert payload["tasks"] == alone["tasks"] == payload["against"]["scores"]
    title = f"Against {small_directory}: no token's log-probability is more than 0.001 nats apart"
    assert title in lines and all(title in (tmp_path / "out" / "scores" / f"report.{kind}").read_text() for kind in ("md",))
    assert "more than 0.001 nats apart" in (tmp_path / "out" / "scores" / "report.html").read_text()


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"tasks": ""}, "nothing to compare"),
        ({"tasks": "triviaqa"}, "nothing to compare"),
        ({"against": "other"}, "cannot be compared"),
    ],
)
def test_a_gate_that_would_compare_nothing_is_refused(small_directory: Path, tmp_path: Path, changed: dict, complaint: str) -> None:
    """Without answers that have probabilities, or of a model with other tokens: said before anything is scored or made."""
    import shutil

    from throughline.data.train_tokenizer import train_tokenizer

    shutil.copytree(small_directory, tmp_path / "other")
    made = train_tokenizer(["a few words to make a small tokenizer of"] * 4, "bpe", 270)
    (tmp_path / "other" / "tokenizer.json").write_text(made.to_json())
    asked = {"tasks": "blimp_wh_island", "against": str(small_directory), "out": tmp_path / "out"} | changed
    if asked["against"] == "other":
        asked["against"] = str(tmp_path / "other")
    with pytest.raises(WrongUse, match=complaint):
        evaluate_one(Request(small_directory, **asked))
    assert not (tmp_path / "out").exists()


def test_a_model_of_nans_has_no_score(gpt_directory: Path, gpt2_tokenizer) -> None:
    """Every comparison with a NaN is false, so the first choice would win, which in BLiMP is the right one: 100 percent."""
    from throughline.inference.source import open_model

    model = open_model(gpt_directory).model
    with torch.no_grad():
        model.output_weight().fill_(math.nan)
    with pytest.raises(Failed, match="the model predicts nothing") as caught:
        evaluate(CausalScorer(model, gpt2_tokenizer), find_tasks(["blimp_wh_island"]), Settings(limit=2))
    assert "wh_island" in caught.value.where


def test_a_path_of_any_form_has_scores_beside_it(small_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory one stands in, one with blanks and no ASCII, a link; and a wrong path leaves nothing behind."""
    import shutil

    inside = tmp_path / "mein Modell é"
    shutil.copytree(small_directory, inside)
    (tmp_path / "link").symlink_to(inside)
    monkeypatch.chdir(inside)
    for path in (".", inside, "../link", tmp_path / "link"):
        evaluate_one(Request(Path(path), "blimp_wh_island", limit=2))
        verify_artifact(tmp_path / "mein Modell é.scores" / "scores")
        shutil.rmtree(tmp_path / "mein Modell é.scores")
    with pytest.raises(WrongUse, match="no such model"):
        evaluate_one(Request(tmp_path / "nowhere" / "gpt", "blimp_wh_island"))
    (tmp_path / "file").write_text("")
    with pytest.raises(WrongUse, match="something else has that name"):
        evaluate_one(Request(inside, "blimp_wh_island", out=tmp_path / "file"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link", "mein Modell é"]


def test_scores_of_a_checkpoint_lie_beside_its_run(small_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that still goes on hashes, when it ends, all that lies in its directory: later scores would damage it."""
    import shutil

    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copytree(small_directory, checkpoints / "step-00000010")
    monkeypatch.chdir(checkpoints)
    for path in (Path("step-00000010"), checkpoints / "step-00000010"):
        _, lines = evaluate_one(Request(path, "blimp_wh_island", limit=2))
        verify_artifact(tmp_path / "run.scores" / "step-00000010")
        assert [path.name for path in checkpoints.iterdir()] == ["step-00000010"]
        assert Path(lines[-1].removeprefix("scores in ")).resolve() == tmp_path / "run.scores" / "step-00000010"


def test_scores_of_other_records_are_not_compared(small_directory: Path, tmp_path: Path) -> None:
    """As many records by the same prompt, but one of them another."""
    for name, goal in (("one", "Warm up"), ("two", "Cool down")):
        file = tmp_path / name / "piqa" / "piqa.jsonl"
        file.parent.mkdir(parents=True)
        rows = [{"goal": text, "sol1": "Run.", "sol2": "Sit.", "label": 0} for text in (goal, "Rest")]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        evaluate_one(Request(small_directory, "piqa", data_dir=tmp_path / name, out=tmp_path / f"{name}.scores"))
    with pytest.raises(WrongUse, match="not asked in the same way"):
        compare_scores(tmp_path / "one.scores" / "scores", tmp_path / "two.scores" / "scores")


def test_every_checkpoint_of_a_run_makes_a_curve(gpt_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two checkpoints (of one model here): a scores artifact each, the last page with the curve over both."""
    import shutil

    checkpoints = [tmp_path / "run" / "checkpoints" / f"step-{step:08d}" for step in (10, 20)]
    for checkpoint in checkpoints:
        shutil.copytree(gpt_directory, checkpoint)
    monkeypatch.setattr("throughline.eval.session.checkpoints_of", lambda run: checkpoints)
    payload, lines = evaluate_checkpoints(Request(tmp_path / "run", "blimp_wh_island", limit=6))
    assert [results["step"] for results in payload["checkpoints"]] == [10, 20]
    assert "<polyline" in (tmp_path / "run.scores" / "step-00000020" / "report.html").read_text()
    assert "<polyline" not in (tmp_path / "run.scores" / "step-00000010" / "report.html").read_text()
    assert len([line for line in lines if "blimp_wh_island" in line]) == 2


def test_the_command_lists_tasks_and_refuses_clearly(gpt_directory: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner
    from throughline.cli.main import main

    listed = json.loads(CliRunner().invoke(main, ["eval", "--list", "--json"]).stdout)["tasks"]
    assert {"hellaswag", "race", "anli", "triviaqa", "wikitext_megatron", "lambada_megatron_strict"} <= set(listed)
    assert len(listed["blimp"]["files"]) == 67
    for arguments, complaint in (
        ([str(gpt_directory)], "nothing to evaluate"),
        ([str(tmp_path / "none"), "--tasks", "blimp"], "no such model"),
        ([str(gpt_directory), "--tasks", "piqa", "--data-dir", str(tmp_path / "none")], "no such directory"),
        ([str(gpt_directory), "--tasks", "piqa", "--all-checkpoints"], "no checkpoints"),
        ([str(gpt_directory), "--tasks", "blimp", "--device", "gpu"], "no device is called 'gpu'"),
        ([str(gpt_directory), "--tasks", "PIQA"], "did you mean piqa?"),
        ([str(gpt_directory), "--tasks", "blimp", "--against", str(gpt_directory), "--bound", "-1"], "--bound"),
    ):
        done = CliRunner().invoke(main, ["eval", *arguments, "--out", str(tmp_path / "out")])
        assert done.exit_code == 2 and complaint in done.stderr
    (tmp_path / "data" / "piqa").mkdir(parents=True)
    (tmp_path / "data" / "piqa" / "piqa.jsonl").write_text('{"query": "Q", "choices": ["a", "b"], "gold": 2}\n')
    done = CliRunner().invoke(main, ["eval", str(gpt_directory), "--tasks", "piqa", "--data-dir", str(tmp_path / "data"), "--json"])
    assert done.exit_code == 1 and "piqa.jsonl:1" in json.loads(done.stdout)["where"]


def test_paired_tests() -> None:
    """McNemar against sums written out by hand; a z test on a difference that is there and on one that is not."""
    assert mcnemar(0, 0) == 1.0
    assert mcnemar(5, 0) == pytest.approx(2 / 2**5)
    assert mcnemar(7, 2) == pytest.approx(2 * (1 + 9 + 36) / 2**9)
    generator = np.random.default_rng(0)
    base = generator.normal(-3, 1, (200, 1))
    assert paired_test("perplexity", base, base + 0.3 + generator.normal(0, 0.5, base.shape))["better"] == "second"
    assert paired_test("perplexity", base, base + generator.normal(0, 0.5, base.shape))["better"] == "-"


def test_a_page_of_one_word_has_a_perplexity_that_json_can_hold() -> None:
    """Chinese has no blanks: thousands of nats a word. Value and standard error stay finite numbers."""
    for number in aggregate("word_perplexity", [[-9000.0, 1.0], [-8000.0, 1.0], [-3.0, 1.0]]):
        json.dumps(number, allow_nan=False)


class _Store:
    def __init__(self, ids: np.ndarray) -> None:
        self.ids, self.tokens = ids, len(ids)

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop]


def test_contamination_finds_runs_of_thirteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of 13 are found wherever the pieces are cut, runs of 12 never, and equal hashes alone are no hit."""
    monkeypatch.setattr("throughline.eval.contamination.PIECE", 50)
    generator = np.random.default_rng(1)
    store = _Store(generator.integers(0, 1000, 333).astype(np.uint16))
    fresh = generator.integers(1000, 2000, 40)
    for start in range(0, 320, 7):
        found, nearly = fresh.copy(), fresh.copy()
        found[5:18] = store.ids[start : start + 13]
        nearly[5:17] = store.ids[start : start + 12]
        assert shared_runs([found, nearly, fresh[:5]], store) == [True, False, False]
    alike = lambda ids, length: np.zeros(max(0, len(ids) - length + 1), np.uint64)  # noqa: E731
    monkeypatch.setattr("throughline.eval.contamination.window_hashes", alike)
    assert shared_runs([fresh[:20]], _Store(store.ids[:60])) == [False]


def test_contamination_of_repeated_tokens_ends() -> None:
    """Rows of dashes in store and records alike: compared pair by pair they would be 10^11 comparisons."""
    dashes = np.full(1000, 7)
    store = _Store(np.concatenate([np.full(100_000, 7), np.arange(100)]).astype(np.uint16))
    assert shared_runs([dashes] * 1000 + [np.arange(200, 230)], store) == [True] * 1000 + [False]


def test_scores_without_the_records_found_in_training_data(
    gpt_directory: Path, gpt2_tokenizer, samples: Path, tmp_path: Path
) -> None:
    """Three of eight records stand inside longer texts of the store: found, and the clean scores are the other five's."""
    lines = (samples / "lambada" / "lambada_test.jsonl").read_text().splitlines()[:8]
    records = [json.loads(line)["text"].replace("\n", " ") for line in lines]
    (tmp_path / "text.txt").write_text("".join(f"It was said: {records[place]} So it goes.\n" for place in (0, 3, 6)))
    gpt2_tokenizer.save(tmp_path / "tokenizer")
    tokenize([str(tmp_path / "text.txt")], tmp_path / "tokenizer", tmp_path / "tokens", options=ReadOptions(documents="line"))
    request = Request(gpt_directory, "lambada_openai", limit=8, contamination=str(tmp_path / "tokens"), out=tmp_path / "out")
    payload, lines = evaluate_one(request)
    found = payload["contamination"]["lambada_openai"]
    assert (found["checked"], found["hits"], found["too_short"]) == (8, 3, 0)
    samples_ = [json.loads(line) for line in (tmp_path / "out" / "scores" / "samples.jsonl").read_text().splitlines()]
    others = [sample["metrics"]["perplexity"] for place, sample in enumerate(samples_) if place not in (0, 3, 6)]
    assert found["clean"]["perplexity"] == pytest.approx(math.exp(-sum(value for (value,) in others) / 5))
    assert found["all"]["perplexity"] != found["clean"]["perplexity"]
    assert any(line.split()[-3:] == ["3", "8", "0"] for line in lines)
    assert all("without hits" in (tmp_path / "out" / "scores" / f"report.{kind}").read_text() for kind in ("md", "html"))
    with pytest.raises(WrongUse, match="no token store"):  # before anything is scored
        evaluate_one(Request(gpt_directory, "lambada_openai", contamination=str(tmp_path), out=tmp_path / "no"))
    assert not (tmp_path / "no" / "answers").exists()


def test_curves_follow_the_steps() -> None:
    history = [
        {"step": step, "groups": [], "validation": {"loss": 5.0 - step / 100},
         "tasks": [{"task": "t", "metrics": {"acc": {"value": step / 200}}}]}
        for step in (100, 0, 50)
    ]  # fmt: skip
    plots = {plot["name"]: plot["points"] for plot in curves(history)}
    assert plots["t acc"] == [(0.0, 160.0), (210.0, 80.0), (420.0, 0.0)]
    assert plots["validation loss"] == [(0.0, 0.0), (210.0, 80.0), (420.0, 160.0)]


@pytest.mark.slow
def test_killed_at_any_point_the_command_goes_on_to_the_same_report(gpt_directory: Path, tmp_path: Path) -> None:
    """SIGKILL once so and so many answers are on disk, several times over; then the results of an undisturbed run."""
    tasks = ["--tasks", "lambada_openai,blimp_wh_island", "--limit", "60", "--batch-tokens", "1"]
    command = [sys.executable, "-m", "throughline.cli.main", "eval", str(gpt_directory), *tasks]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, "--out", str(tmp_path / "whole")], check=True, env=environment)
    file = tmp_path / "killed" / "answers" / "answers-0.jsonl"
    killed = 0
    for answers in (1, 17, 64, 101):
        process = subprocess.Popen([*command, "--out", str(tmp_path / "killed")], env=environment)
        while process.poll() is None and (not file.exists() or file.read_bytes().count(b"\n") < answers):
            time.sleep(0.002)
        process.kill()
        killed += process.wait() != 0
    assert killed
    subprocess.run([*command, "--out", str(tmp_path / "killed")], check=True, env=environment)
    for name in ("results.json", "samples.jsonl", "report.md", "report.html"):
        assert (tmp_path / "killed" / "scores" / name).read_text() == (tmp_path / "whole" / "scores" / name).read_text()


@pytest.mark.slow
def test_three_processes_write_the_report_of_one(gpt_directory: Path, tmp_path: Path) -> None:
    """`throughline launch -- eval` on three processes and the command alone give equal results."""
    tasks = ["--tasks", "lambada_openai,blimp_wh_island", "--limit", "40"]
    program, command = [sys.executable, "-m", "throughline.cli.main"], ["eval", str(gpt_directory), *tasks]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*program, *command, "--out", str(tmp_path / "one")], check=True, env=environment)
    launched = [*program, "launch", "--nproc", "3", "--", *command, "--out", str(tmp_path / "three")]
    subprocess.run(launched, check=True, env=environment, timeout=300)
    for name in ("results.json", "samples.jsonl"):
        assert (tmp_path / "one" / "scores" / name).read_text() == (tmp_path / "three" / "scores" / name).read_text()
    wrong = [*program, "launch", "--nproc", "2", "--", "eval", str(tmp_path / "nothere"), *tasks]
    done = subprocess.run(wrong, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.count("no such model") == 1, "what all processes meet is said once"
