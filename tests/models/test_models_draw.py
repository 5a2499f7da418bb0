"""Normal numbers by element number: parts of the whole, the distribution, and the same bits on every machine."""

import hashlib

import numpy as np
import pytest
import torch
from throughline.models import init
from throughline.models.config import GPTConfig
from throughline.models.init import initial_values, normal

KEY = (1, 2**63 + 5)


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((1000, 37), (slice(3, 19), slice(0, 37))),
        ((1000, 37), (slice(0, 1000), slice(11, 24))),
        ((1000, 37), (slice(999, 1000), slice(36, 37))),
        ((1000, 37), (slice(5, 5), slice(0, 37))),
        ((6, 5, 7), (slice(1, 4), slice(2, 3), slice(0, 7))),
        ((6, 5, 7), (slice(1, 4), slice(0, 5), slice(1, 6))),
        ((6, 5, 7), (slice(None), slice(1, None), slice(None))),
    ],
)
def test_a_part_has_the_bits_of_the_whole(
    shape: tuple[int, ...], part: tuple[slice, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, columns, boxes, one element and none; with pieces smaller than a run."""
    whole = normal(KEY, shape)
    monkeypatch.setattr(init, "AT_ONCE", 64)
    assert torch.equal(normal(KEY, shape, part), whole[part])
    assert torch.equal(normal(KEY, shape), whole)


def test_the_numbers_are_normal() -> None:
    """Of 2^24: mean within four of its standard errors (2.4e-4), variance and kurtosis likewise, the share of the
    tails as the normal law has it, neighbours and other keys uncorrelated.
    """
    count = 1 << 24
    x = normal(KEY, (count,)).double()
    assert abs(x.mean()) < 4 / count**0.5
    assert abs(x.var() - 1) < 4 * (2 / count) ** 0.5
    assert abs((x**4).mean() - 3) < 4 * (96 / count) ** 0.5
    for sigma in (1.0, 2.0, 3.0, 4.0):
        expected = float(torch.special.erfc(torch.tensor(sigma / 2**0.5, dtype=torch.float64)))
        share = float((x.abs() > sigma).double().mean())
        assert abs(share - expected) < 4 * (expected / count) ** 0.5
    assert 5.0 < x.abs().max() <= 5.3
    assert abs((x[1:] * x[:-1]).mean()) < 4 / count**0.5
    assert abs((x * normal((1, 3), (count,))).mean()) < 4 / count**0.5


def test_bits_are_those_of_every_machine() -> None:
    """The hashes were taken on an AMD EPYC; a processor or library that computes otherwise fails here and not in a
    run over two kinds of machines.
    """
    starts, rises = init._cells()
    table = hashlib.sha256(np.concatenate((starts, rises)).astype("<f4").tobytes()).hexdigest()
    values = hashlib.sha256(normal(KEY, (100_003,)).numpy().astype("<f4").tobytes()).hexdigest()
    assert (table[:16], values[:16]) == ("c96ceab8ba2678b5", "bf09d31907a032ee")


def test_a_shard_of_a_large_matrix_is_drawn_alone() -> None:
    """A 4 TB parameter, of which a process holds 16 rows: no time or memory goes into the rest."""
    shape = torch.Size((1_000_000, 1_000_000))
    config = GPTConfig(width=64, heads=4)
    part = initial_values("mlp.up.weight", shape, config, 0, (slice(999_984, 1_000_000), slice(0, 1000)))
    assert part.shape == (16, 1000)
    assert abs(float(part.std()) - 0.02) < 0.02 * 4 / 32_000**0.5
