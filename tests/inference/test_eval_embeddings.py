"""Scores of embeddings: correlation and classification against libraries, and both by the command line."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from throughline.cli.main import main
from throughline.eval.search import classified, regression, spearman
from throughline.inference.serving.offline import embed_texts

DRAW = np.random.default_rng(0)


def test_the_correlation_of_ranks_is_scipy_s() -> None:
    """Also where values are equal."""
    for most in (3, 10, 1000):
        one, other = DRAW.integers(0, most, 50), DRAW.random(50).round(1)
        assert spearman(one, other) == pytest.approx(spearmanr(one, other).statistic, abs=1e-12)


@pytest.mark.parametrize("labels", [2, 5])
def test_the_regression_is_scikit_learn_s(labels: int) -> None:
    """Two labels have one column of weights there, more have one each; the mean is over MTEB's ten draws."""
    middle = DRAW.normal(size=(labels, 12))
    right = DRAW.integers(0, labels, 300)
    rows = middle[right] + DRAW.normal(size=(300, 12))
    rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    theirs = LogisticRegression(max_iter=1000, tol=1e-10).fit(rows[:100], right[:100])
    assert (regression(rows[:100], right[:100], rows[100:]) == theirs.predict(rows[100:])).all()

    order, generator, scores = np.arange(100), np.random.RandomState(42), []
    for _ in range(10):
        generator.shuffle(order)
        drawn = [place for label in range(labels) for place in [i for i in order if right[i] == label][:8]]
        fitted = LogisticRegression(max_iter=1000, tol=1e-10).fit(rows[drawn], right[drawn])
        scores.append(fitted.score(rows[100:], right[100:]))
    assert classified(rows, right, 100) == pytest.approx(np.mean(scores))


def test_a_folder_is_scored_by_its_form(bert_dir: Path, tmp_path: Path) -> None:
    def score(name: str, **files: list[dict]) -> dict:
        folder = tmp_path / name
        folder.mkdir()
        for split, rows in files.items():
            (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
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
    assert "no folder in MTEB's form" in score("neither", test=labelled)["error"]
