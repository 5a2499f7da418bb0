"""Scores of embeddings: MTEB's draws, both forms of a folder by the command line, and the package mteb itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from sklearn.linear_model import LogisticRegression
from throughline.cli.main import main
from throughline.core.backend import BackendOptions
from throughline.eval.search import classified, of_embeddings
from throughline.inference.serving.offline import embed_texts

DRAW = np.random.default_rng(0)


@pytest.mark.parametrize("labels", [2, 5])
def test_classification_is_the_mean_over_ten_draws(labels: int) -> None:
    """Eight rows a label of one permutation that is shuffled again and again, as MTEB draws."""
    middle = DRAW.normal(size=(labels, 12))
    right = DRAW.integers(0, labels, 300)
    rows = middle[right] + DRAW.normal(size=(300, 12))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    order, scores = np.arange(100), []
    for _ in range(10):
        np.random.RandomState(42).shuffle(order)
        drawn = [place for label in range(labels) for place in [i for i in order if right[i] == label][:8]]
        fitted = LogisticRegression(max_iter=100).fit(rows[drawn], right[drawn])
        scores.append(fitted.score(rows[100:], right[100:]))
    assert classified(rows, right, 100) == pytest.approx(np.mean(scores))


def test_a_folder_is_scored_by_its_form(bert_dir: Path, tmp_path: Path) -> None:
    def score(name: str, **files: list[dict[str, Any]]) -> dict[str, Any]:
        folder = write(tmp_path / name, **files)
        done = CliRunner().invoke(main, ["eval", str(bert_dir), "--embeddings", str(folder), "--json"])
        return json.loads(done.stdout) if not done.exit_code else {"error": done.output}

    texts = ["the cat", "a dog and a moon", "the moon sees", "a cat and a dog", "the dog", "a moon"]
    vectors = embed_texts(bert_dir, texts)
    cosines = (vectors[:3] * vectors[3:]).sum(axis=1)
    rows = [
        {"sentence1": one, "sentence2": other, "score": float(10 * cosine)}
        for one, other, cosine in zip(texts, texts[3:], cosines)
    ]
    assert score("pairs", test=rows)["spearman"] == pytest.approx(1)
    labelled = [{"text": text, "label": text.split()[-1]} for text in texts]
    assert score("labels", train=labelled, test=labelled)["accuracy"] > 0.5
    numbers = {"cat": (1, "1.0"), "moon": (2.0, "2"), "sees": (3, 3.0), "dog": ("4", 4)}  # one class each
    known, asked = ([row | {"label": numbers[row["label"]][side]} for row in labelled] for side in (0, 1))
    assert score("numbers", train=known, test=asked) == score("again", train=labelled, test=labelled)
    assert "no folder in MTEB's form" in score("neither", test=labelled)["error"]
    for number, wrong in enumerate(({"score": "high"}, {"score": None}, {"sentence1": 5})):
        told = score(f"wrong{number}", test=[rows[0], rows[1] | wrong, rows[2]])["error"]
        assert "no folder in MTEB's form" in told and "scores that differ" in told
    assert "scores that differ" in score("equal", test=[row | {"score": 1.0} for row in rows])["error"]
    one = labelled[:1] * 2
    for name, known, asked in (("text", labelled, [{"text": 5, "label": "cat"}]), ("one", one, one)):
        assert "text, labels" in score(name, train=known, test=asked)["error"]
    words = ["eval", str(bert_dir), "--embeddings", str(tmp_path / "pairs")]
    for more in (["--limit", "1"], ["--tasks", "piqa"], ["--all-checkpoints"], ["--window", "8"]):
        refused = CliRunner().invoke(main, [*words, *more])
        assert refused.exit_code == 2 and "--device and --dtype alone" in refused.output


def write(folder: Path, **splits: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    for split, rows in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_both_scores_are_those_of_the_package_mteb(bert_dir: Path, tmp_path: Path) -> None:
    """Its own tasks' classes over the same records and vectors: correlation, and accuracy over its ten draws."""
    pytest.importorskip("mteb", reason="needs the package mteb")
    import datasets
    from mteb.abstasks import AbsTaskClassification, AbsTaskSTS
    from mteb.abstasks.task_metadata import TaskMetadata

    class Encoder:
        """What mteb asks of a model."""

        mteb_model_meta = None

        def encode(self, inputs: Any, **_: Any) -> np.ndarray:
            return embed_texts(bert_dir, [text for batch in inputs for text in batch["text"]], truncate=True)

        def similarity(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
            return one @ other.T

        def similarity_pairwise(self, one: np.ndarray, other: np.ndarray) -> np.ndarray:
            return (one * other).sum(axis=1)

    def scored(kind: Any, of: str, main: str, **splits: list[dict[str, Any]]) -> dict[str, float]:
        about = {
            "name": "Local",
            "description": "Local records",
            "dataset": {"path": "local", "revision": "0"},
        }
        about |= {"type": of, "eval_langs": ["eng-Latn"], "main_score": main}
        task = type("Local", (kind,), {"metadata": TaskMetadata(**about)})()
        made = {split: datasets.Dataset.from_list(rows) for split, rows in splits.items()}
        task.dataset, task.data_loaded = {"default": datasets.DatasetDict(made)}, True
        return task.evaluate(Encoder(), "test", encode_kwargs={"batch_size": 8})["default"]

    words = ["the", "cat", "a", "dog", "and", "moon", "sees"]
    texts = [" ".join(DRAW.choice(words, DRAW.integers(2, 9))) for _ in range(160)]
    pairs = [
        {"sentence1": one, "sentence2": other, "score": float(DRAW.integers(0, 6))}
        for one, other in zip(texts[:60], texts[60:])
    ]
    ours = of_embeddings(bert_dir, write(tmp_path / "pairs", test=pairs), BackendOptions())
    theirs = scored(AbsTaskSTS, "STS", "cosine_spearman", test=pairs)
    assert ours["spearman"] == pytest.approx(theirs["cosine_spearman"], abs=1e-3)

    rows = [{"text": text, "label": text.count("cat") % 3} for text in texts]
    train, test = rows[:100], rows[100:]
    ours = of_embeddings(bert_dir, write(tmp_path / "labels", train=train, test=test), BackendOptions())
    theirs = scored(AbsTaskClassification, "Classification", "accuracy", train=train, test=test)
    assert ours["accuracy"] == pytest.approx(theirs["accuracy"])
