"""The command: reports, the gate of a second form, checkpoints of a run, comparisons; killed or shared, the
same report.
"""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from throughline.core.artifact import create_artifact, verify_artifact
from throughline.core.errors import Refused, WrongUse
from throughline.data.ingest.readers import ReadOptions
from throughline.data.ingest.tokenize import tokenize
from throughline.eval.compare import compare_scores
from throughline.eval.opening import own_gpu
from throughline.eval.runner import join_ranks
from throughline.eval.session import Request, evaluate_checkpoints, evaluate_one


def test_scores_artifact_reports_and_comparison(gpt_directory: Path, tmp_path: Path) -> None:
    """One path from a model directory to a verified artifact; comparing it with itself finds nothing."""
    request = Request(gpt_directory, "lambada_openai,blimp_wh_island", limit=8, out=tmp_path / "one")
    payload, lines = evaluate_one(request)
    assert any("lambada_openai" in line for line in lines)
    verify_artifact(tmp_path / "one" / "scores")
    page = (tmp_path / "one" / "scores" / "report.html").read_text()
    assert "lambada_openai" in page and "http" not in page.replace("http://www.w3.org", "")
    assert (tmp_path / "one" / "scores" / "report.md").read_text().count("| lambada_openai |") == 2
    samples = [
        json.loads(line) for line in (tmp_path / "one" / "scores" / "samples.jsonl").read_text().splitlines()
    ]
    assert [sample["record"] for sample in samples] == [*range(8), *range(8)]
    same = compare_scores(tmp_path / "one" / "scores", tmp_path / "one" / "scores")[0]
    rows = same["rows"]
    assert same["questions"] == []
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
    """The same directory passes with a difference of zero; a copy with one changed weight is refused, naming
    a record.
    """
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
    """Answers of the first command have no log-probabilities of tokens: they are asked again, and both forms
    are in the reports.
    """
    asked = {"path": small_directory, "tasks": "blimp_wh_island", "limit": 4, "out": tmp_path / "out"}
    alone, _ = evaluate_one(Request(**asked))
    payload, lines = evaluate_one(Request(**asked, against=str(small_directory)))
    assert payload["against"]["largest_difference"] == {"blimp_wh_island": 0.0}
    assert payload["tasks"] == alone["tasks"] == payload["against"]["scores"]
    title = f"Against {small_directory}: no token's log-probability is more than 0.001 nats apart"
    assert title in lines and all(
        title in (tmp_path / "out" / "scores" / f"report.{kind}").read_text() for kind in ("md",)
    )
    assert "more than 0.001 nats apart" in (tmp_path / "out" / "scores" / "report.html").read_text()


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"tasks": ""}, "nothing to compare"),
        ({"tasks": "triviaqa"}, "nothing to compare"),
        ({"against": "other"}, "cannot be compared"),
    ],
)
def test_a_gate_that_would_compare_nothing_is_refused(
    small_directory: Path, tmp_path: Path, changed: dict, complaint: str
) -> None:
    """Without answers that have probabilities, or of a model with other tokens: said before anything is
    scored or made.
    """
    import shutil

    from throughline.data.new_tokenizer import train_tokenizer

    shutil.copytree(small_directory, tmp_path / "other")
    made = train_tokenizer(["a few words to make a small tokenizer of"] * 4, "bpe", 270)
    (tmp_path / "other" / "tokenizer.json").write_text(made.to_json())
    asked = {"tasks": "blimp_wh_island", "against": str(small_directory), "out": tmp_path / "out"} | changed
    if asked["against"] == "other":
        asked["against"] = str(tmp_path / "other")
    with pytest.raises(WrongUse, match=complaint):
        evaluate_one(Request(small_directory, **asked))
    assert not (tmp_path / "out").exists()


def test_a_path_of_any_form_has_scores_beside_it(
    small_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory one stands in, one with blanks and no ASCII, a link; and a wrong path leaves nothing
    behind.
    """
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


def test_scores_of_a_checkpoint_lie_beside_its_run(
    small_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that still goes on hashes, when it ends, all that lies in its directory: later scores would
    damage it.
    """
    import shutil

    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copytree(small_directory, checkpoints / "step-00000010")
    monkeypatch.chdir(checkpoints)
    for path in (Path("step-00000010"), checkpoints / "step-00000010"):
        _, lines = evaluate_one(Request(path, "blimp_wh_island", limit=2))
        verify_artifact(tmp_path / "run.scores" / "step-00000010")
        assert [path.name for path in checkpoints.iterdir()] == ["step-00000010"]
        assert (
            Path(lines[-1].removeprefix("scores in ")).resolve() == tmp_path / "run.scores" / "step-00000010"
        )


def test_scores_take_no_other_artifact_s_place(
    small_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--out RUN/checkpoints would put a report in the place of every checkpoint, --out runs one of a run that
    is called scores.
    """
    import shutil

    with create_artifact(tmp_path / "runs" / "scores", "checkpoint") as draft:
        shutil.copytree(small_directory, draft.path, dirs_exist_ok=True)
    run = tmp_path / "runs" / "scores"
    steps = [tmp_path / name / "checkpoints" / "step-00000010" for name in ("one", "two")]
    for step in steps:
        shutil.copytree(run, step)
    asked = {"tasks": "blimp_wh_island", "limit": 2}
    for found, request, complaint in (
        (evaluate_one, Request(run, **asked, out=run.parent), "place of the scores is taken"),
        (
            evaluate_checkpoints,
            Request(tmp_path / "one", **asked, out=steps[1].parent),
            "place of the scores is taken",
        ),
        (evaluate_checkpoints, Request(tmp_path / "one", **asked, out=steps[0].parent), "cannot lie inside"),
        (evaluate_one, Request(steps[0], **asked, out=tmp_path / "one" / "eval"), "cannot lie inside"),
        (evaluate_one, Request(small_directory, **asked, out=small_directory / "eval"), "cannot lie inside"),
    ):
        with pytest.raises(WrongUse, match=complaint):
            found(request)
        assert not (request.home / "answers").exists()
    for path in (run, *steps):
        verify_artifact(path)
    (tmp_path / "mine" / "scores").mkdir(parents=True)
    (tmp_path / "mine" / "scores" / "notes").write_text("")
    monkeypatch.setattr(
        "throughline.eval.session.evaluate", lambda *_: pytest.fail("scored before the refusal")
    )
    with pytest.raises(WrongUse, match="no artifact"):
        evaluate_one(Request(small_directory, **asked, out=tmp_path / "mine"))


def test_scores_of_other_records_are_not_compared(small_directory: Path, tmp_path: Path) -> None:
    """As many records by the same prompt, but one of them another."""
    for name, goal in (("one", "Warm up"), ("two", "Cool down")):
        file = tmp_path / name / "piqa" / "piqa.jsonl"
        file.parent.mkdir(parents=True)
        rows = [{"goal": text, "sol1": "Run.", "sol2": "Sit.", "label": 0} for text in (goal, "Rest")]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        evaluate_one(
            Request(small_directory, "piqa", data_dir=tmp_path / name, out=tmp_path / f"{name}.scores")
        )
    with pytest.raises(WrongUse, match="not asked in the same way"):
        compare_scores(tmp_path / "one.scores" / "scores", tmp_path / "two.scores" / "scores")


def test_every_checkpoint_of_a_run_makes_a_curve(
    gpt_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two checkpoints (of one model here): a scores artifact each, the last page with the curve over both."""
    import shutil

    checkpoints = [tmp_path / "run" / "checkpoints" / f"step-{step:08d}" for step in (10, 20)]
    for checkpoint in checkpoints:
        shutil.copytree(gpt_directory, checkpoint)
    monkeypatch.setattr("throughline.eval.session.checkpoints_of", lambda run: checkpoints)
    payload, lines = evaluate_checkpoints(Request(tmp_path / "run", "blimp_wh_island", limit=6))
    assert [results["step"] for results in payload["checkpoints"]] == [10, 20]
    assert 'class="plot"' in (tmp_path / "run.scores" / "step-00000020" / "report.html").read_text()
    assert 'class="plot"' not in (tmp_path / "run.scores" / "step-00000010" / "report.html").read_text()
    assert len([line for line in lines if "blimp_wh_island" in line]) == 2


def test_the_command_lists_tasks_and_refuses_clearly(gpt_directory: Path, tmp_path: Path) -> None:
    from click.testing import CliRunner
    from throughline.cli.main import main

    listed = json.loads(CliRunner().invoke(main, ["eval", "--list", "--json"]).stdout)["tasks"]
    assert {"hellaswag", "race", "anli", "triviaqa", "wikitext_megatron", "lambada_megatron_strict"} <= set(
        listed
    )
    assert len(listed["blimp"]["files"]) == 67
    shown = CliRunner().invoke(main, ["eval", "--list"]).stdout.splitlines()
    assert max(map(len, shown)) <= 100 and "  metrics: acc, acc_norm" in shown
    for arguments, complaint in (
        ([str(gpt_directory)], "nothing to evaluate"),
        ([str(tmp_path / "none"), "--tasks", "blimp"], "no such model"),
        ([str(gpt_directory), "--tasks", "piqa", "--data-dir", str(tmp_path / "none")], "no such directory"),
        ([str(gpt_directory), "--tasks", "piqa", "--all-checkpoints"], "no checkpoints"),
        ([str(gpt_directory), "--tasks", "blimp", "--device", "gpu"], "no device is called 'gpu'"),
        ([str(gpt_directory), "--tasks", "PIQA"], "did you mean piqa?"),
        (
            [str(gpt_directory), "--tasks", "blimp", "--against", str(gpt_directory), "--bound", "-1"],
            "--bound",
        ),
        ([str(gpt_directory), "--tasks", "blimp", "--bound", "1e-3"], "--bound belongs to --against"),
        ([str(gpt_directory), "--tasks", "blimp", "--clients", "8"], "--clients belongs to --url"),
        (["--url", "http://x", "--tasks", "blimp", "--pll", "original"], "--pll is for a BERT"),
        (["--url", "http://x", "--tasks", "blimp", "--device", "cpu"], "the server decides --device"),
    ):
        done = CliRunner().invoke(main, ["eval", *arguments, "--out", str(tmp_path / "out")])
        assert done.exit_code == 2 and complaint in done.stderr
    (tmp_path / "data" / "piqa").mkdir(parents=True)
    (tmp_path / "data" / "piqa" / "piqa.jsonl").write_text(
        '{"query": "Q", "choices": ["a", "b"], "gold": 2}\n'
    )
    twice = ["--tasks", "PIQA", "--tasks", "piqa"]
    done = CliRunner().invoke(main, ["eval", str(gpt_directory), *twice, "--out", str(tmp_path / "out")])
    assert done.exit_code == 2 and "'PIQA'" in done.stderr, "no mention of --tasks takes the place of another"
    done = CliRunner().invoke(
        main, ["eval", str(gpt_directory), "--tasks", "piqa", "--data-dir", str(tmp_path / "data"), "--json"]
    )
    assert done.exit_code == 1 and "piqa.jsonl:1" in json.loads(done.stdout)["where"]


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert [own_gpu(name) for name in ("cpu", "cuda", "cuda:1")] == ["cpu", "cuda", "cuda:1"]
    with pytest.raises(WrongUse, match="no cuda:2 here"):
        own_gpu("cuda:2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert own_gpu("auto") == "cpu"
    with pytest.raises(WrongUse, match="no CUDA device here"):
        own_gpu("cuda")


@pytest.mark.parametrize("world", ["2", "two"])
def test_one_process_that_is_told_of_others_is_named(monkeypatch: pytest.MonkeyPatch, world: str) -> None:
    """WORLD_SIZE left over in the environment, without what else a launcher sets."""
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(WrongUse, match="cannot find each other"):
        join_ranks()


def test_scores_without_the_records_found_in_training_data(
    gpt_directory: Path, gpt2_tokenizer, samples: Path, tmp_path: Path
) -> None:
    """Three of eight records stand inside longer texts of the store: found, and the clean scores are the
    other five's.
    """
    lines = (samples / "lambada" / "lambada_test.jsonl").read_text().splitlines()[:8]
    records = [json.loads(line)["text"].replace("\n", " ") for line in lines]
    (tmp_path / "text.txt").write_text(
        "".join(f"It was said: {records[place]} So it goes.\n" for place in (0, 3, 6))
    )
    gpt2_tokenizer.save(tmp_path / "tokenizer")
    tokenize(
        [str(tmp_path / "text.txt")],
        tmp_path / "tokenizer",
        tmp_path / "tokens",
        options=ReadOptions(documents="line"),
    )
    request = Request(
        gpt_directory, "lambada_openai", limit=8, contamination=str(tmp_path / "tokens"), out=tmp_path / "out"
    )
    payload, lines = evaluate_one(request)
    found = payload["contamination"]["lambada_openai"]
    assert (found["checked"], found["hits"], found["too_short"]) == (8, 3, 0)
    samples_ = [
        json.loads(line) for line in (tmp_path / "out" / "scores" / "samples.jsonl").read_text().splitlines()
    ]
    others = [
        sample["metrics"]["perplexity"] for place, sample in enumerate(samples_) if place not in (0, 3, 6)
    ]
    assert found["clean"]["perplexity"] == pytest.approx(math.exp(-sum(value for (value,) in others) / 5))
    assert found["all"]["perplexity"] != found["clean"]["perplexity"]
    assert any(line.split()[-3:] == ["3", "8", "0"] for line in lines)
    assert all(
        "without hits" in (tmp_path / "out" / "scores" / f"report.{kind}").read_text()
        for kind in ("md", "html")
    )
    with pytest.raises(WrongUse, match="no token store"):  # before anything is scored
        evaluate_one(
            Request(gpt_directory, "lambada_openai", contamination=str(tmp_path), out=tmp_path / "no")
        )
    assert not (tmp_path / "no" / "answers").exists()


@pytest.mark.slow
def test_killed_at_any_point_the_command_goes_on_to_the_same_report(
    gpt_directory: Path, tmp_path: Path
) -> None:
    """SIGKILL once so and so many answers are on disk, several times over; then the results of an undisturbed
    run.
    """
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
        assert (tmp_path / "killed" / "scores" / name).read_text() == (
            tmp_path / "whole" / "scores" / name
        ).read_text()


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
        assert (tmp_path / "one" / "scores" / name).read_text() == (
            tmp_path / "three" / "scores" / name
        ).read_text()
    wrong = [*program, "launch", "--nproc", "2", "--", "eval", str(tmp_path / "nothere"), *tasks]
    done = subprocess.run(wrong, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.count("no such model") == 1, (
        "what all processes meet is said once"
    )
