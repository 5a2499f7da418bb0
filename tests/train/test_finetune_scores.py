"""Scores of fine-tuned heads are those of scikit-learn, seqeval and SQuAD's official script."""

from pathlib import Path

import numpy as np
import pytest
from throughline.train.finetune import records as scores
from throughline.train.finetune.records import read_records
from throughline.train.finetune.tasks import best_span

DRAW = np.random.default_rng(3)


def test_classification_scores_are_scikit_learns() -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    for labels, average in ((2, "binary"), (5, "macro")):
        right, said = (DRAW.integers(0, labels, 200).tolist() for _ in range(2))
        ours = scores.classification(said, right, labels)
        assert ours["accuracy"] == pytest.approx(sklearn.accuracy_score(right, said))
        assert ours["f1"] == pytest.approx(sklearn.f1_score(right, said, average=average))
        assert ours["matthews"] == pytest.approx(sklearn.matthews_corrcoef(right, said))


def test_entity_scores_are_seqevals() -> None:
    seqeval = pytest.importorskip("seqeval.metrics")
    tags = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
    right, said = ([DRAW.choice(tags, size).tolist() for size in range(1, 60)] for _ in range(2))
    ours = scores.tagging(said, right)
    for name, function in (("precision", "precision_score"), ("recall", "recall_score"), ("f1", "f1_score")):
        assert ours[name] == pytest.approx(getattr(seqeval, function)(right, said)), name
    assert ours["accuracy"] == pytest.approx(seqeval.accuracy_score(right, said))


def test_answers_are_scored_as_the_official_script_does() -> None:
    """Cases worked by hand from its rules: case, punctuation, articles and spaces do not count; F1 is of words
    with their counts; the best answer counts.
    """
    assert scores.squad(["The  Panthers!"], [["panthers"]]) == {"exact_match": 100.0, "f1": 100.0}
    found = scores.squad(["in New York City", ""], [["New York", "York"], ["Rome"]])
    assert found["exact_match"] == 0.0
    assert found["f1"] == pytest.approx(100 * (2 * 2 / (4 + 2)) / 2)


def test_answers_are_scored_as_the_harness_scores_them(shared: Path) -> None:
    """XQuAD's answers against predictions that are right, cut short, too long, of another case, or wrong: the
    official script's rules as T5's authors wrote them, which lm_eval ships.
    """
    theirs = pytest.importorskip("lm_eval.tasks.super_glue.record.t5_utils", reason="needs lm_eval")
    records = read_records(str(shared / "data" / "squad" / "xquad.en.json"), squad=True)
    draw, predicted = np.random.default_rng(0), []
    for record in records:
        start, text = record["answers"][0]
        before, after = draw.integers(0, 25, 2)
        wrong = str(draw.choice(record["context"].split()))
        cut = record["context"][max(start - before, 0) : start + after]
        predicted.append(str(draw.choice([text, f"The {text.upper()}!", cut, wrong])))
    answers = [[text for _, text in record["answers"]] for record in records]
    second = [predicted[place - 1] if place % 3 else given[0] for place, given in enumerate(answers)]
    answers = [[given[0], other] for given, other in zip(answers, second)]  # there each answer is a record
    items = [
        (text, f"{number}_{answer.replace('_', ' ')}")
        for number, (text, given) in enumerate(zip(predicted, answers))
        for answer in given
    ]
    ours = scores.squad(predicted, answers)
    assert ours["exact_match"] == pytest.approx(100 * theirs.squad_em_agg(items))
    assert ours["f1"] == pytest.approx(100 * theirs.squad_f1_agg(items))
    assert 20 < ours["exact_match"] < ours["f1"] < 90, "predictions of every kind"


def test_the_best_span_ends_after_it_starts_and_is_not_too_long() -> None:
    start, end = DRAW.normal(size=12), DRAW.normal(size=12)
    every = [(start[a] + end[b], a, b) for a in range(12) for b in range(a, min(a + 4, 12))]
    assert best_span(start, end, 4) == pytest.approx(max(every))
