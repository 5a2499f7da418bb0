"""Scores equal lm-evaluation-harness's on the same model and records, its own task files driving it,
everything offline.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import hub
import pytest
from small import small_model
from throughline.core.errors import WrongUse
from throughline.data.records import Record
from throughline.eval.asked import Settings
from throughline.eval.opening import open_scorer
from throughline.eval.runner import evaluate
from throughline.eval.task import BoundTask, find_tasks

pytest.importorskip("lm_eval", reason="needs the extra `eval` (lm_eval)")
RECORDS = int(os.environ.get("THROUGHLINE_PARITY_RECORDS", "200"))


class Held(BoundTask):
    """A task over records at hand instead of a file."""

    rows: dict[str, list[dict[str, Any]]] = {}

    def records(self, data_dir: Any, limit: int | None, *, fewshot: bool = False) -> list[Record]:
        return [
            Record(f"{self.name}:{number}", row) for number, row in enumerate(self.rows[self.name][:limit], 1)
        ]


def compare(
    model: Path, rows: dict[str, list[dict[str, Any]]], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracies equal; log-likelihoods within 1e-3 nats (a document's within 1e-6 of its size: the harness
    adds in float32).
    """
    monkeypatch.setattr(Held, "rows", rows)
    tasks = [Held(task.name, task.group, task.task, task.source) for task in find_tasks(list(rows))]
    theirs = harness.scores(folder, rows, model)
    for scores in evaluate(open_scorer(model).scorer, tasks, Settings()):
        name = scores.summary["task"]
        rolling = scores.summary["kind"] == "rolling"
        answers = theirs[name]["answers"]
        assert len(answers) == len(scores.samples) == len(rows[name])
        for sample, wanted in zip(scores.samples, answers, strict=True):
            if rolling:
                total = sum(packed[0] for answer in sample["answers"] for packed in answer)
                assert total == pytest.approx(wanted[0][0], abs=1e-3, rel=1e-6)
                continue
            for packed, (logprob, greedy) in zip(
                sample["answers"][0], [one[0] for one in wanted], strict=True
            ):
                assert packed[0] == pytest.approx(logprob, abs=1e-3)
                assert (packed[1] == packed[2]) == greedy  # right ones of all
        for metric, found in scores.summary["metrics"].items():
            if metric in theirs[name]["metrics"]:
                exact = metric.startswith("acc")
                wanted = theirs[name]["metrics"][metric]
                assert found["value"] == (wanted if exact else pytest.approx(wanted, rel=1e-4)), (
                    name,
                    metric,
                )
                if exact and (error := theirs[name]["metrics"].get(f"{metric}_stderr")) not in (None, "N/A"):
                    assert found["stderr"] == pytest.approx(error, rel=1e-6)


def test_a_handful_of_records_equals_the_harness(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shipped records: LAMBADA and a BLiMP paradigm, and a document longer than the window."""
    text = (samples / "tinyshakespeare" / "input.txt").read_text()
    lambada = [
        json.loads(line) for line in (samples / "lambada" / "lambada_test.jsonl").read_text().splitlines()[:6]
    ]
    pairs = [("Who sleeps here?", "Who sleep here?"), ("A b.", "A b c.")]
    blimp = [{"sentence_good": good, "sentence_bad": bad} for good, bad in pairs]
    rows = {
        "lambada_openai": lambada,
        "blimp_wh_island": blimp,
        "wikitext_2": [{"page": text[:3000]}, {"page": "Short . "}],
    }
    compare(small_model(tmp_path / "model", text[:200_000], steps=0), rows, tmp_path / "harness", monkeypatch)


def test_a_tokenizer_that_puts_bos_equals_the_harness(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Llama's file says: before contexts, not before an answer without one, and before documents, where it
    is predicted too.
    """
    text = (samples / "tinyshakespeare" / "input.txt").read_text()
    model = small_model(tmp_path / "model", text[:100_000], steps=0)
    made = json.loads((model / "tokenizer.json").read_text())
    name = "<|endoftext|>"
    made["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {name: {"id": name, "ids": [0], "tokens": [name]}},
    }
    (model / "tokenizer.json").write_text(json.dumps(made))
    lambada = [
        json.loads(line) for line in (samples / "lambada" / "lambada_test.jsonl").read_text().splitlines()[:4]
    ]
    blimp = [{"sentence_good": "Who sleeps here?", "sentence_bad": "Who sleep here?"}]
    rows = {
        "lambada_openai": lambada,
        "blimp_wh_island": blimp,
        "wikitext_2": [{"page": text[:3000]}, {"page": "Short . "}],
    }
    assert open_scorer(model).scorer.recipe["bos"]
    compare(model, rows, tmp_path / "harness", monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [0, 120], ids=["random", "trained"])
def test_all_tasks_equal_the_harness(
    shared: Path, samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The first records of every task whose data are at hand (16 paradigms of BLiMP); WikiText by its first
    ten articles.
    """
    rows = hub.records(shared, RECORDS)
    rows["wikitext_2"] = rows["wikitext_2"][:10]
    text = (samples / "tinyshakespeare" / "input.txt").read_text()
    compare(small_model(tmp_path / "model", text, steps=steps), rows, tmp_path / "harness", monkeypatch)


def test_the_adapter_gives_the_harness_our_scores(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness driving our scorer reports what it reports of the same weights through transformers."""
    from lm_eval.api.instance import Instance
    from throughline.eval.adapter import ThroughlineLM

    text = (samples / "tinyshakespeare" / "input.txt").read_text()[:100_000]
    model = ThroughlineLM(str(small_model(tmp_path / "model", text, steps=0)))
    made = [("The king", " is dead"), ("The king", " lives on"), ("", "Alone")]
    asked = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(made)]
    found = model.loglikelihood(asked)
    for pair, (logprob, greedy) in zip(made, found, strict=True):
        question = model.scorer.encode([[pair]])
        (score,) = next(iter(model.scorer.score(question)))[0][1]
        assert (logprob, greedy) == (pytest.approx(score.logprob, abs=1e-4), score.greedy)
    grouped, encode = [], model.scorer.encode
    monkeypatch.setattr(
        model.scorer, "encode", lambda groups: (grouped.extend(map(len, groups)), encode(groups))[1]
    )
    records = [("blimp", record, 1) for record in (0, 0, 1, 1, 2, 2)]
    model.loglikelihood(
        [Instance("loglikelihood", {}, ("", f"Word {i}"), i % 2, record) for i, record in enumerate(records)]
    )
    assert grouped == [2, 2, 2], "records without a context are no single question"
    (document,) = model.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, ("The king is dead. " * 80,), 0)]
    )
    assert document < -1000
    written = model.generate_until(
        [Instance("generate_until", {}, ("The king", {"until": ["\n"], "max_gen_toks": 4}), 0)]
    )
    assert len(written) == 1 and "\n" not in written[0]
    for how in ({"do_sample": True, "temperature": 0.7}, {"num_beams": 4}):
        with pytest.raises(WrongUse, match="greedy"):
            model.generate_until([Instance("generate_until", {}, ("The king", how), 0, ("t", 0, 1))])
    greedy = {"do_sample": False, "num_beams": 1, "until": ["\n"], "max_gen_toks": 4}
    asked = Instance("generate_until", {}, ("The king", greedy), 0, ("t", 0, 1))
    assert model.generate_until([asked]) == written, "one beam without sampling is greedy"


def test_arguments_of_the_adapter_are_options_of_eval(samples: Path, tmp_path: Path) -> None:
    """They reach the scorer; a misspelt one is refused, not ignored."""
    from throughline.eval.adapter import ThroughlineLM

    text = (samples / "tinyshakespeare" / "input.txt").read_text()[:20_000]
    model = small_model(tmp_path / "model", text, steps=0)
    # what the harness gives to every model
    extra = {"batch_size": "auto", "max_batch_size": 64, "device": "cpu"}
    made = ThroughlineLM.create_from_arg_string(f"path={model},window=64,bos=true", extra)
    assert (made.scorer.window, made.scorer.recipe["bos"]) == (64, True)
    for arguments, complaint in (
        (f"path={model},windw=64", "windw"),
        ("window=64", "no model"),
        (f"path={model},pll=x", "'x'"),
    ):
        with pytest.raises(WrongUse, match=complaint):
            ThroughlineLM.create_from_arg_string(arguments, extra)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize(
    ("missing", "complaint"), [(True, "pip install throughline[eval]"), (False, "no such model")]
)
def test_the_adapter_s_command_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: bool, complaint: str
) -> None:
    """One error and exit code 2, as of every command of ours: without the harness, and without the model."""
    import runpy

    # it is known already
    monkeypatch.setattr("lm_eval.api.registry.register_model", lambda name: lambda model: model)
    monkeypatch.setattr("lm_eval.__main__.cli_evaluate", lambda: open_scorer("nowhere"))
    if missing:
        monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("throughline.eval.adapter", run_name="__main__")
    assert caught.value.code == 2 and complaint in capsys.readouterr().err


@pytest.mark.slow
def test_the_harness_command_knows_our_models(
    samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own command line with our model class gives the score of `throughline eval`."""
    text = (samples / "tinyshakespeare" / "input.txt").read_text()[:100_000]
    model = small_model(tmp_path / "model", text, steps=0)
    verbs = ("loves", "hates", "sees", "is")
    rows = [
        {"sentence_good": f"The king {verb} me.", "sentence_bad": f"The kings {verb} me."} for verb in verbs
    ]
    harness.load(tmp_path / "tasks", {"blimp_wh_island": rows})
    command = [
        sys.executable,
        "-m",
        "throughline.eval.adapter",
        "run",
        "--model",
        "throughline",
        "--model_args",
        f"path={model}",
    ]
    command += ["--tasks", "local_blimp_wh_island", "--include_path", str(tmp_path / "tasks")]
    command += ["--output_path", str(tmp_path / "out")]
    subprocess.run(
        command,
        check=True,
        env=os.environ | {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
    )
    (file,) = (tmp_path / "out").rglob("results_*.json")
    theirs = json.loads(file.read_text())["results"]["local_blimp_wh_island"]["acc,none"]
    (task,) = find_tasks(["blimp_wh_island"])
    monkeypatch.setattr(Held, "rows", {"blimp_wh_island": rows})
    (ours,) = evaluate(
        open_scorer(model).scorer, [Held(task.name, task.group, task.task, task.source)], Settings()
    )
    assert ours.summary["metrics"]["acc"]["value"] == theirs
