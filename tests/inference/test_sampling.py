"""Samplers: the filters are those of transformers, draws follow the distribution, and a row depends on no
neighbour.
"""

import numpy as np
import pytest
import torch
from throughline.core.backend import log_softmax
from throughline.core.errors import WrongUse
from throughline.inference.runtimes.sampling import (
    GREEDY,
    Chooser,
    Sampling,
    choose,
    filtered,
    penalised,
    probabilities,
)

NO_IDS = np.zeros(0, np.int64)


# How logits come from a CPU (a NumPy array) and from a GPU (a torch tensor, here of the device "cpu:0").
MAKERS = {"cpu": np.asarray, "cpu:0": torch.from_numpy}
on_both = pytest.mark.parametrize("device", MAKERS)


@pytest.fixture
def logits_BV() -> np.ndarray:
    return (np.random.default_rng(0).normal(size=(6, 500)) * 3).astype(np.float32)


def choosers(*settings: Sampling, device: str = "cpu") -> list[Chooser]:
    return [Chooser(setting, NO_IDS, 500, device) for setting in settings]


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
@on_both
def test_filters_are_those_of_transformers(logits_BV: np.ndarray, setting: Sampling, device: str) -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    theirs = TemperatureLogitsWarper(setting.temperature)(None, torch.from_numpy(logits_BV))
    if setting.top_k:
        theirs = TopKLogitsWarper(setting.top_k)(None, theirs)
    if setting.top_p < 1:
        theirs = TopPLogitsWarper(setting.top_p)(None, theirs)
    if setting.min_p:
        theirs = MinPLogitsWarper(setting.min_p)(None, theirs)
    # between rows that are not limited: limits are looked up for some rows of a batch alone
    settings = [setting, Sampling(), setting, setting, GREEDY, setting]
    weights = torch.as_tensor(filtered(MAKERS[device](logits_BV), settings))[[0, 2, 3, 5]]
    theirs = theirs[[0, 2, 3, 5]].softmax(-1)
    ours = weights / weights.sum(axis=1, keepdims=True)
    # 1e-5: probabilities of fp32 logits; a token too many or too few would show as its whole probability
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    assert ((ours > 0) == (theirs > 0)).all()


@pytest.mark.parametrize("scale", [0.3, 3.0])
@on_both
def test_filters_of_a_large_vocabulary_are_those_of_transformers(scale: float, device: str) -> None:
    """Nuclei within the leading 1,024 tokens and beyond them, and a top-k on either side, row by row."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = torch.from_numpy((np.random.default_rng(0).normal(size=(6, 5000)) * scale).astype(np.float32))
    settings = [
        Sampling(top_p=0.5),
        Sampling(top_p=0.95),
        Sampling(top_k=40, top_p=0.9),
        Sampling(top_k=2000, top_p=0.7),
        Sampling(top_k=1500),
        Sampling(top_p=0.05),
    ]
    weights = torch.as_tensor(filtered(MAKERS[device](logits.numpy()), settings))
    for row, setting in enumerate(settings):
        theirs = logits[row : row + 1]
        if setting.top_k:
            theirs = TopKLogitsWarper(setting.top_k)(None, theirs)
        if setting.top_p < 1:
            theirs = TopPLogitsWarper(setting.top_p)(None, theirs)
        ours = (weights[row] > 0).nonzero()[:, 0]
        expected = torch.isfinite(theirs[0]).nonzero()[:, 0]
        # fp32 sums in another order: one token more or less where its share decides
        assert len(set(ours.tolist()) ^ set(expected.tolist())) <= 1, setting


@on_both
def test_penalties_and_bias_are_those_of_transformers_and_openai(logits_BV: np.ndarray, device: str) -> None:
    """Repetition and bias as transformers' processors; frequency and presence by OpenAI's formula, mu[j] -
    c[j] * frequency - (c[j] > 0) * presence, over the answer alone.
    """
    from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

    rng = np.random.default_rng(1)
    prompt, answer = rng.integers(0, 500, 30), [3, 3, 3, 7, *rng.integers(0, 500, 10).tolist()]
    bias = ((3, -5.0), (400, 12.0))
    setting = Sampling(repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=-0.25, logit_bias=bias)
    chooser = Chooser(setting, prompt, 500, device)
    for token_id in answer:
        chooser.accept(token_id)
    row = torch.from_numpy(logits_BV[2:3])
    theirs = SequenceBiasLogitsProcessor({(i,): value for i, value in bias})(torch.zeros(1, 1).long(), row)
    everything = torch.tensor([[*prompt.tolist(), *answer]])
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(everything, theirs)
    counts = torch.from_numpy(np.bincount(answer, minlength=500))
    theirs = theirs - counts * 0.5 + (counts > 0) * 0.25
    before = logits_BV.copy()
    rows = [*choosers(*[GREEDY] * 2), chooser, *choosers(*[GREEDY] * 3)]
    ours = torch.as_tensor(penalised(MAKERS[device](logits_BV), rows))
    torch.testing.assert_close(ours[2:3], theirs)
    # the caller's logits stay: log-probabilities are read from them
    np.testing.assert_array_equal(logits_BV, before)
    np.testing.assert_array_equal(ours[[0, 1, 3, 4, 5]], before[[0, 1, 3, 4, 5]])


@on_both
def test_only_allowed_tokens_are_chosen(logits_BV: np.ndarray, device: str) -> None:
    limited = choosers(GREEDY, Sampling(seed=1), Sampling(seed=2, top_k=5), device=device)
    for chooser in limited:
        chooser.allowed_V = np.isin(np.arange(500), (17, 333))
    assert set(choose(MAKERS[device](logits_BV[:3]), limited).tolist()) <= {17, 333}


@on_both
def test_draws_follow_the_distribution(device: str) -> None:
    draws = 40_000
    logits = np.log(np.tile(np.float32([0.5, 0.25, 0.125, 0.125, 1e-30]), (draws, 1)))
    chooser = Chooser(Sampling(seed=5), NO_IDS, 5, device)
    ids = choose(MAKERS[device](logits), [chooser] * draws)
    shares = np.bincount(ids, minlength=5) / draws
    # five standard deviations of a share of one half among 40,000: 0.0125
    np.testing.assert_allclose(shares, [0.5, 0.25, 0.125, 0.125, 0], atol=0.0125)


@on_both
def test_greedy_and_extreme_settings_take_the_most_probable(logits_BV: np.ndarray, device: str) -> None:
    settings = [
        GREEDY,
        Sampling(top_k=1),
        Sampling(temperature=1e-9),
        Sampling(top_p=1e-6),
        Sampling(min_p=1.0),
        Sampling(top_k=1, top_p=0.5),
    ]
    chosen = choose(MAKERS[device](logits_BV), choosers(*settings, device=device))
    np.testing.assert_array_equal(chosen, logits_BV.argmax(1))


@on_both
def test_a_row_does_not_depend_on_its_neighbours(logits_BV: np.ndarray, device: str) -> None:
    settings = [Sampling(seed=i, top_p=0.9, temperature=0.5 + i) for i in range(4)]
    settings += [Sampling(seed=9, top_k=7), GREEDY]
    logits = MAKERS[device](logits_BV)
    together = choose(logits, choosers(*settings, device=device))
    alone = [int(choose(logits[i : i + 1], choosers(s, device=device))[0]) for i, s in enumerate(settings)]
    assert together.tolist() == alone


@on_both
def test_probabilities_are_the_log_softmax_and_its_best(logits_BV: np.ndarray, device: str) -> None:
    ids = np.array([1, 5, 499, 0, 7, 7])
    logits = MAKERS[device](logits_BV)
    found = probabilities(logits, MAKERS[device](ids), 4)
    expected = log_softmax(logits_BV.astype(np.float64))
    order = np.argsort(-expected, axis=1, kind="stable")[:, :4]
    np.testing.assert_array_equal([[i for i, _ in top] for _, top in found], order)
    # float32: a log-probability of 10 has a last bit of 1e-6
    values = [[value for _, value in top] for _, top in found]
    np.testing.assert_allclose(values, np.take_along_axis(expected, order, 1), atol=5e-6)
    np.testing.assert_allclose([of for of, _ in found], expected[np.arange(6), ids], atol=5e-6)
    assert [top for _, top in probabilities(logits, MAKERS[device](ids), 0)] == [()] * 6


@pytest.mark.parametrize(
    "field",
    ["temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"],
)
@pytest.mark.parametrize("value", [-3.0, float("nan"), float("inf")])
def test_settings_out_of_range_are_refused(field: str, value: float) -> None:
    with pytest.raises(WrongUse, match=field):
        Sampling(**{field: value})


def test_a_bias_out_of_range_is_refused() -> None:
    with pytest.raises(WrongUse, match=r"logit_bias\[5\]"):
        Sampling(logit_bias=((5, 101.0),))


def test_log_softmax_of_large_logits_is_finite() -> None:
    values = log_softmax(np.array([1e4, 0.0, -1e4]))
    np.testing.assert_allclose(np.exp(values).sum(), 1.0)
    assert values[0] == 0.0


@on_both
def test_top_k_beyond_the_leading_tokens_narrows_what_top_p_keeps(device: str) -> None:
    """The 1,024 most probable of 5,000 hold the half that top-p asks of everything, and top-k 1,200 leaves 70 % of the
    mass: the nucleus is then the half of those 70 %. Without top-k it has a third more tokens.
    """
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    shares = np.concatenate(
        (np.linspace(1.2, 0.8, 1024) * 0.6 / 1024, np.full(176, 0.1 / 176), np.full(3800, 0.3 / 3800))
    )
    logits = torch.from_numpy(np.log(np.random.default_rng(0).permutation(shares)).astype(np.float32)[None])
    theirs = TopPLogitsWarper(0.5)(None, TopKLogitsWarper(1200)(None, logits.clone()))
    ours = torch.as_tensor(filtered(MAKERS[device](logits.numpy()), [Sampling(top_k=1200, top_p=0.5)]))
    alone = torch.as_tensor(filtered(MAKERS[device](logits.numpy()), [Sampling(top_p=0.5)]))
    # one token more or less, where fp32 sums in another order decide
    assert abs(int((ours > 0).sum()) - int(torch.isfinite(theirs).sum())) <= 1
    assert int((alone > 0).sum()) > 1.3 * int((ours > 0).sum())
