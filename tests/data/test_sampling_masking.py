"""Dynamic masks: rates within binomial bounds, never a special token, replacements uniform, whole words
whole.
"""

import numpy as np
import pytest
from throughline.data.bert import Masker
from throughline.data.dataset import DatasetOptions
from throughline.data.order import key

VOCABULARY, SPECIAL, MASK = 1000, (0, 100, 101, 102, 103, 999), 103


def make(**others) -> Masker:
    known = {
        "vocab_size": VOCABULARY,
        "special_ids": SPECIAL,
        "pad_id": 0,
        "cls_id": 101,
        "sep_id": 102,
        "mask_id": MASK,
    }
    return Masker(DatasetOptions("bert", 128, **(known | others)).validate())


def text(segments, length, seed=0) -> tuple[np.ndarray, np.ndarray]:
    """Segments [CLS] words [SEP] laid end to end, some words being special ids."""
    tokens = np.random.default_rng(seed).integers(0, VOCABULARY, segments * length)
    tokens[::length], tokens[length - 1 :: length] = 101, 102
    return tokens, np.full(segments, length)


def within(count: int, trials: int, rate: float, sigmas: float = 4.5) -> bool:
    """Whether a binomial count is within `sigmas` standard deviations (4.5: wrong alarm once in 1.5e5)."""
    return abs(count - rate * trials) <= sigmas * (trials * rate * (1 - rate)) ** 0.5


def special(tokens: np.ndarray) -> np.ndarray:
    return np.isin(tokens, SPECIAL)


@pytest.mark.parametrize("length", [12, 128, 512])
def test_rates(length):
    tokens, lengths = text(200_000 // length, length)
    inputs, targets = make()(tokens, lengths, key(1, 2, np.arange(len(lengths))))
    chosen = targets != -100
    candidates = int((~special(tokens)).sum())
    assert within(int(chosen.sum()), candidates, 0.15)
    assert np.array_equal(targets[chosen], tokens[chosen]) and np.array_equal(
        inputs[~chosen], tokens[~chosen]
    )
    assert within(int((inputs[chosen] == MASK).sum()), int(chosen.sum()), 0.8)
    other = chosen & (inputs != MASK) & (inputs != tokens)
    drawable = VOCABULARY - len(SPECIAL)
    assert within(int(other.sum()), int(chosen.sum()), 0.1 * (1 - 1 / drawable))
    per_place = (chosen.reshape(-1, length).sum(0) / (~special(tokens)).reshape(-1, length).sum(0).clip(1))[
        1:-1
    ]
    sigma = (0.15 * 0.85 / (len(lengths) * 0.99)) ** 0.5
    assert np.abs(per_place - 0.15).max() < 5 * sigma, "every place is as likely as another"


@pytest.mark.parametrize("extra", [{}, {"whole_word": True, "continuation_ids": tuple(range(500, 700))}])
def test_special_tokens_are_neither_masked_nor_drawn(extra):
    tokens, lengths = text(2000, 128)
    inputs, targets = make(**extra)(tokens, lengths, key(3, 0, np.arange(2000)))
    chosen = targets != -100
    assert not (chosen & special(tokens)).any()
    replaced = chosen & (inputs != MASK)
    assert not special(inputs[replaced]).any()


def test_replacements_are_uniform_over_the_ordinary_vocabulary():
    tokens, lengths = text(20_000, 128)
    tokens[tokens == 500] = 501  # so that a drawn 500 is never a kept token
    inputs, targets = make(mask_rate=0.5)(tokens, lengths, key(4, 0, np.arange(20_000)))
    drawn = inputs[(targets != -100) & (inputs != MASK) & (inputs != tokens)]
    counts = np.bincount(drawn, minlength=VOCABULARY)[[i for i in range(VOCABULARY) if i not in SPECIAL]]
    expected = counts.mean()
    assert expected > 100
    degrees = len(counts) - 1
    assert ((counts - expected) ** 2 / expected).sum() < degrees + 4.5 * (2 * degrees) ** 0.5 + 20


def test_whole_words_are_chosen_whole():
    continues = tuple(range(400, 900))
    tokens, lengths = text(3000, 128)
    _, targets = make(whole_word=True, continuation_ids=continues)(
        tokens, lengths, key(6, 0, np.arange(3000))
    )
    chosen = targets != -100
    ordinary = ~special(tokens)
    inside = np.isin(tokens, continues) & ordinary
    glued = np.flatnonzero(inside[1:] & ordinary[:-1]) + 1  # continues the word of the token before it
    assert np.array_equal(chosen[glued], chosen[glued - 1])
    # the mean is kept although words are 2 tokens long on average
    assert abs(chosen[ordinary].mean() - 0.15) < 0.003


def test_draws_belong_to_the_key_not_to_the_neighbours():
    """A segment gets the same mask alone, among others, and beyond a cacheful; another epoch gives another
    mask.
    """
    masker = make()
    tokens, lengths = text(300, 128)
    keys = key(7, 0, np.arange(300))
    inputs, targets = masker(tokens, lengths, keys)
    for segment in (0, 7, 127, 128, 299):
        part = slice(segment * 128, segment * 128 + 128)
        alone = masker(tokens[part], lengths[:1], keys[segment : segment + 1])
        assert np.array_equal(alone[0], inputs[part]) and np.array_equal(alone[1], targets[part])
    other = masker(tokens, lengths, key(7, 1, np.arange(300)))[1]
    assert ((other != -100) & (targets != -100)).sum() < 0.25 * (targets != -100).sum()


def test_short_and_empty_segments():
    masker = make()
    tokens = np.array([101, 102, 101, 7, 102, 101, 7, 8, 9, 102])
    lengths = np.array([2, 3, 5])
    for epoch in range(50):
        _, targets = masker(tokens, lengths, key(8, epoch, np.arange(3)))
        chosen = targets != -100
        assert [chosen[:2].sum(), chosen[2:5].sum(), chosen[5:].sum()] == [0, 1, 1]
    assert [len(part) for part in masker(np.empty(0, np.int64), np.empty(0, np.int64), key(8, 0)[:0])] == [
        0,
        0,
    ]
