"""Metrics against their definitions: what decides a choice, F1 as scikit-learn has it, standard errors."""

import numpy as np
import pytest
from throughline.core.scorer import Score
from throughline.eval.items import Item
from throughline.eval.metrics import METRICS, aggregate, bootstrap_error, choice_outcome, random_baseline


def test_choices_are_compared_by_sums_characters_and_bytes() -> None:
    """Three choices, each of which wins by one measure: of few tokens, of many letters, of many bytes."""
    item = Item(
        "x", (("Q", " ab"), ("Q", " abcdefghij"), ("Q", " " + "ü" * 8)), ("ab", "abcdefghij", "ü" * 8), gold=0
    )
    scores = [Score(value, 0, 1) for value in (-4.0, -5.0, -6.0)]
    wins = {"acc": 0, "acc_norm": 1, "acc_bytes": 2}
    for gold in range(3):
        found = choice_outcome(Item(item.where, item.pairs, item.choices, gold), scores)
        assert {name: found[name] for name in wins} == {
            name: [float(gold == winner)] for name, winner in wins.items()
        }
    assert choice_outcome(item, [Score(-1.0, 0, 1)] * 3)["acc"] == [1.0], "of equal choices the first"
    assert random_baseline("acc", [item, Item("y", (), ("a", "b"))]) == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert random_baseline("f1", [item]) is None


def test_f1_is_that_of_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="comes with lm_eval")
    generator = np.random.default_rng(0)
    for labels in (2, 3):
        gold, predicted = generator.integers(0, labels, (2, 40))
        rows = np.stack([gold, predicted], axis=1).tolist()
        if labels == 2:
            assert aggregate("f1", rows)[0] == pytest.approx(metrics.f1_score(gold, predicted))
        each = [
            metrics.f1_score(gold == label, predicted == label, zero_division=0) for label in range(labels)
        ]
        assert aggregate("f1_macro", [[*row, labels] for row in rows])[0] == pytest.approx(np.mean(each))


def test_standard_errors() -> None:
    """The closed form of a mean; the bootstrap of the same mean comes near it (1,000 resamples err by 3 %)."""
    rows = np.random.default_rng(1).integers(0, 2, (300, 1)).astype(float)
    value, error = aggregate("acc", rows.tolist())
    assert value == rows.mean() and error == pytest.approx(rows.std(ddof=1) / np.sqrt(300))
    assert bootstrap_error(METRICS["acc"].aggregate, rows) == pytest.approx(error, rel=0.12)
    assert aggregate("acc", [[1.0]]) == (1.0, None)
