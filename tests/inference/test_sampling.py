"""Samplers: the filters are those of transformers, draws follow the distribution, and a row depends on no neighbour."""

import numpy as np
import pytest
from throughline.core.errors import WrongUse
from throughline.inference.sampling import GREEDY, Sampling, choose, filtered, log_softmax, penalised


@pytest.fixture
def logits_BV() -> np.ndarray:
    return (np.random.default_rng(0).normal(size=(6, 500)) * 3).astype(np.float32)


@pytest.mark.parametrize(
    "setting",
    [
        Sampling(),
        Sampling(temperature=0.3),
        Sampling(top_k=1),
        Sampling(top_k=40),
        Sampling(top_k=10_000),
        Sampling(top_p=0.05),
        Sampling(top_p=0.9),
        Sampling(min_p=0.1),
        Sampling(temperature=1.7, top_k=50, top_p=0.8, min_p=0.02),
    ],
)
def test_filters_are_those_of_transformers(logits_BV: np.ndarray, setting: Sampling) -> None:
    import torch
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    theirs = TemperatureLogitsWarper(setting.temperature)(None, torch.tensor(logits_BV))
    if setting.top_k:
        theirs = TopKLogitsWarper(setting.top_k)(None, theirs)
    if setting.top_p < 1:
        theirs = TopPLogitsWarper(setting.top_p)(None, theirs)
    if setting.min_p:
        theirs = MinPLogitsWarper(setting.min_p)(None, theirs)
    weights = filtered(logits_BV, [setting] * len(logits_BV))
    ours = weights / weights.sum(axis=1, keepdims=True)
    # 1e-5: probabilities of fp32 logits; a token too many or too few would show as its whole probability
    np.testing.assert_allclose(ours, theirs.softmax(-1).numpy(), atol=1e-5)
    assert ((ours > 0) == (theirs.softmax(-1).numpy() > 0)).all()


def test_repetition_penalty_is_that_of_transformers(logits_BV: np.ndarray) -> None:
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    seen_ids = np.random.default_rng(1).integers(0, 500, (6, 30))
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor(seen_ids), torch.tensor(logits_BV)).numpy()
    seen = np.zeros((6, 500), bool)
    np.put_along_axis(seen, seen_ids, True, axis=1)
    before = logits_BV.copy()
    np.testing.assert_allclose(
        penalised(logits_BV, [Sampling(repetition_penalty=1.3)] * 6, list(seen)), theirs, rtol=1e-6
    )
    np.testing.assert_array_equal(
        logits_BV, before
    )  # the caller's logits stay as they are: logprobs are read from them


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125, 1e-30]], np.float32))
    draws, generator = 40_000, Sampling(seed=5).generator()
    rows = np.repeat(logits, draws, axis=0)
    ids = choose(rows, [Sampling()] * draws, [None] * draws, [generator] * draws)
    shares = np.bincount(ids, minlength=5) / draws
    # five standard deviations of a share of one half among 40,000: 0.0125
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.125, 0.125, 0], atol=0.0125)


def test_greedy_and_extreme_settings_take_the_most_probable(logits_BV: np.ndarray) -> None:
    settings = [
        GREEDY,
        Sampling(top_k=1),
        Sampling(temperature=1e-9),
        Sampling(top_p=1e-6),
        Sampling(min_p=1.0),
        GREEDY,
    ]
    ids = choose(logits_BV, settings, [None] * 6, [setting.generator() for setting in settings])
    np.testing.assert_array_equal(ids, logits_BV.argmax(axis=1))


def test_a_row_does_not_depend_on_its_neighbours(logits_BV: np.ndarray) -> None:
    settings = [Sampling(seed=i, top_p=0.9, temperature=0.5 + i) for i in range(5)] + [GREEDY]
    together = choose(logits_BV, settings, [None] * 6, [setting.generator() for setting in settings])
    alone = [
        int(choose(logits_BV[i : i + 1], [s], [None], [s.generator()])[0]) for i, s in enumerate(settings)
    ]
    assert together.tolist() == alone


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_settings_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(WrongUse, match=field):
        Sampling(**{field: value})


def test_log_softmax_of_large_logits_is_finite() -> None:
    values = log_softmax(np.array([1e4, 0.0, -1e4]))
    np.testing.assert_allclose(np.exp(values).sum(), 1.0)
    assert values[0] == 0.0
