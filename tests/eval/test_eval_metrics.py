"""Metrics against their definitions: what decides a choice, F1 as scikit-learn has it, standard errors."""

import math

import numpy as np
import pytest
from throughline.core.scorer import Score
from throughline.eval import metrics as metrics_module
from throughline.eval.items import Item
from throughline.eval.kinds.kind import Kind
from throughline.eval.metrics import (
    METRICS,
    aggregate,
    random_baseline,
    resampled,
)
from throughline.eval.task import find_tasks


def kind(name: str) -> Kind:
    """That of a shipped task."""
    return find_tasks([name])[0].kind


def test_choices_are_compared_by_sums_characters_and_bytes() -> None:
    """Three choices, each of which wins by one measure: of few tokens, of many letters, of many bytes."""
    item = Item(
        "x", (("Q", " ab"), ("Q", " abcdefghij"), ("Q", " " + "ü" * 8)), ("ab", "abcdefghij", "ü" * 8), gold=0
    )
    scores = [Score(value, 0, 1) for value in (-4.0, -5.0, -6.0)]
    wins = {"acc": 0, "acc_norm": 1, "acc_bytes": 2}
    for gold in range(3):
        found = kind("piqa").of_scores(Item(item.where, item.pairs, item.choices, gold), scores)
        assert {name: found[name] for name in wins} == {
            name: [float(gold == winner)] for name, winner in wins.items()
        }
    assert kind("piqa").of_scores(item, [Score(-1.0, 0, 1)] * 3)["acc"] == [1.0], "of equal choices the first"
    assert random_baseline("acc", [item, Item("y", (), ("a", "b"))]) == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert random_baseline("acc", [item]) == pytest.approx(1 / 3)
    assert random_baseline("f1", [item]) is None and random_baseline("acc", []) is None


def test_f1_is_told_the_gold_and_the_predicted_label() -> None:
    """The pick is neither the first choice nor the gold one."""
    item = Item("x", (("Q", " a"), ("Q", " b"), ("Q", " c")), ("a", "b", "c"), gold=2)
    found = kind("piqa").of_scores(item, [Score(value, 0, 1) for value in (-4.0, -1.0, -6.0)])
    assert (found["f1"], found["f1_macro"]) == ([2.0, 1.0], [2.0, 1.0, 3.0])


def test_outcomes_of_answers_and_of_log_likelihoods() -> None:
    """Greedy only when every token is the arg-max; case, punctuation and outer blanks of an answer do not count."""
    written = kind("triviaqa")
    assert kind("lambada_openai").of_scores(Item("x"), [Score(-2.5, 3, 3)]) == {
        "acc": [1.0],
        "perplexity": [-2.5],
    }
    assert kind("lambada_openai").of_scores(Item("x"), [Score(-2.5, 2, 3)])["acc"] == [0.0]
    right = written.outcome(Item("x", answers=("Paris", "City of Light")), [" city of light. "])
    assert right["exact_match"] == right["f1_words"] == right["contains"] == [1.0]
    near = written.outcome(Item("x", answers=("Paris",)), ["Paris, France"])
    assert (near["exact_match"], near["f1_words"], near["contains"]) == ([0.0], [2 / 3], [1.0])


def test_aggregates_are_their_definitions() -> None:
    """Two records of -2 and -4 nats, of 3 and 5 units; a perplexity too large for JSON is capped."""
    rows = [[-2.0, 3.0], [-4.0, 5.0]]
    assert aggregate("perplexity", rows)[0] == pytest.approx(math.exp(3.0))
    for name in (
        "word_perplexity",
        "byte_perplexity",
        "token_perplexity",
        "adjusted_perplexity",
        "mlm_perplexity",
    ):
        assert aggregate(name, rows)[0] == pytest.approx(math.exp(6.0 / 8.0)), name
        assert not METRICS[name].higher
    assert aggregate("bits_per_byte", rows)[0] == pytest.approx(6.0 / 8.0 / math.log(2))
    assert aggregate("mlm_accuracy", [[1.0, 4.0], [3.0, 4.0]])[0] == 0.5
    assert aggregate("word_perplexity", [[-5000.0, 1.0]])[0] == pytest.approx(math.exp(300.0))


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
    assert resampled(METRICS["acc"].aggregate, rows).std(ddof=1) == pytest.approx(error, rel=0.12)
    assert aggregate("acc", [[1.0]]) == (1.0, None)
    assert aggregate("acc", [[1], [0]])[1] == pytest.approx(0.5), "of two records the error is known"


def test_a_bootstrap_is_the_same_each_time_however_much_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a ratio of sums, whose error has no closed form; the draws have one order, in pieces too."""
    rows = np.random.default_rng(2).uniform(1, 2, (40, 2)) * [-1, 1]
    value, error = aggregate("bits_per_byte", rows.tolist())
    assert (
        error
        == aggregate("bits_per_byte", rows.tolist())[1]
        != resampled(METRICS["acc"].aggregate, rows).std(ddof=1)
    )
    monkeypatch.setattr(metrics_module, "_RESAMPLE_CELLS", 81)
    assert aggregate("bits_per_byte", rows.tolist()) == (value, pytest.approx(error, rel=1e-12))
    jackknife = [METRICS["bits_per_byte"].aggregate(np.delete(rows, k, 0)) for k in range(40)]
    assert error == pytest.approx(np.std(jackknife) * math.sqrt(39), rel=0.15), (
        "1,000 resamples of 40 records"
    )
