"""Answers that are asked again, and a task from the page on task files alone."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from throughline.eval.asked import Answers
from throughline.eval.session import Request, evaluate_one


def test_fresh_asks_again(
    gpt_directory: Path,
    small_directory: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This model's answers to these questions; those of another model in the same place stay. One that is stopped
    leaves the old answers where they were.
    """
    asked = Request(gpt_directory, "lambada_openai", limit=3, out=tmp_path / "scores")
    other = replace(asked, path=small_directory)
    first, second = evaluate_one(asked), evaluate_one(other)
    assert evaluate_one(asked) == first and "3 of 3 answers are kept" in capsys.readouterr().err
    stored = next((tmp_path / "scores" / "answers").iterdir())
    stored.write_text(stored.read_text().replace('"answer": [[-', '"answer": [[9'))  # of a faulty program
    assert evaluate_one(asked) != first
    with monkeypatch.context() as patch:
        patch.setattr(Answers, "add", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            evaluate_one(replace(asked, fresh=True))
    assert evaluate_one(asked) != first
    capsys.readouterr()
    assert evaluate_one(replace(asked, fresh=True)) == first and "kept" not in capsys.readouterr().err
    assert evaluate_one(other) != second and "3 of 3 answers are kept" in capsys.readouterr().err


def test_the_example_of_the_page_on_task_files_runs(
    small_directory: Path, root: Path, tmp_path: Path
) -> None:
    """From the page alone: its records, its file; two questions of three choices, scored by both metrics."""
    page = (root / "docs" / "task-file.md").read_text()
    records, task = (re.search(f"```{form}\n(.*?)```", page, re.S)[1] for form in ("json", "toml"))
    (tmp_path / "data" / "rivers").mkdir(parents=True)
    (tmp_path / "data" / "rivers" / "test.jsonl").write_text(records)
    (tmp_path / "rivers.toml").write_text(task)
    asked = {"data_dir": tmp_path / "data", "out": tmp_path / "scores"}
    for shots in (0, 1):
        found, _ = evaluate_one(Request(small_directory, str(tmp_path / "rivers.toml"), shots=shots, **asked))
        (summary,) = found["tasks"]
        assert (summary["n"], list(summary["metrics"])) == (2, ["acc", "acc_norm"])
        assert summary["metrics"]["acc"]["random"] == pytest.approx(1 / 3)
