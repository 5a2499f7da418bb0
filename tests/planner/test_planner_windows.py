"""Windows: what is planned of attention is the number of pairs of a query and a key, counted one by one."""

import dataclasses

import numpy as np
import pytest
from throughline.models.config import BERTConfig, GPTConfig, preset
from throughline.models.transformer import AttentionPattern
from throughline.planner.kernels import Share, attention
from throughline.planner.serve import mean_keys
from throughline.planner.work import find_software

LENGTHS = [1, 2, 7, 64, 200]
WINDOWS = [1, 2, 5, 63, 64, 65, 199, 200, 201, 999]


def counted(pattern: AttentionPattern, length: int, causal: bool) -> float:
    """Keys of a query, the mean over a row, by the pattern's own mask."""
    places = np.arange(length)
    return float(pattern.sees(places[:, None], places[None], causal).sum()) / length


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_sliding_window_is_counted_exactly(window: int, length: int, causal: bool) -> None:
    pattern = AttentionPattern("sliding", window)
    assert pattern.keys_per_query(length, causal) == pytest.approx(counted(pattern, length, causal))


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("window", WINDOWS)
def test_global_blocks_of_a_decoder_are_counted_exactly(window: int, blocks: int) -> None:
    pattern = AttentionPattern("sliding", window, 8, blocks)
    assert pattern.keys_per_query(200, True) == pytest.approx(counted(pattern, 200, True))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_fixed_stretches_are_counted_exactly(blocks: int, causal: bool) -> None:
    pattern = AttentionPattern("fixed", 32, 8, blocks)
    assert pattern.keys_per_query(256, causal) == pytest.approx(counted(pattern, 256, causal))


@pytest.mark.parametrize("window", [1, 7, 256, 1000, 1024, 5000])
@pytest.mark.parametrize("layers", ["", "lg", "llg"])
def test_the_kernel_does_the_products_of_the_pairs(window: int, layers: str) -> None:
    """4 D FLOPs forward for each pair and head; alternating layers by their share. A window never costs more than
    none, but for the diagonal, which the count of a whole triangle leaves out.
    """
    length, config = (
        1024,
        GPTConfig(layers=6, width=64, heads=2, attention_window=window, layer_pattern=layers),
    )
    software = find_software("throughline", "bf16")
    (kernel, _) = attention(config, Share(1.0, float(length)), software)
    near = (layers or "l").count("l") / len(layers or "l")
    pairs = sum(min(query + 1, window) for query in range(length))
    full = length * length / 2
    assert kernel.flops == pytest.approx(4 * 32 * 2 * (near * pairs + (1 - near) * full))
    plain = GPTConfig(layers=6, width=64, heads=2)
    (without, _) = attention(plain, Share(1.0, float(length)), software)
    assert kernel.flops <= without.flops * (1 + 1 / length)
    assert mean_keys(config, length, length) == pytest.approx((near * pairs + (1 - near) * full) / length)


def test_the_convention_of_mfu_counts_the_band_of_a_square() -> None:
    """As a whole square counts twice what a causal mask leaves, a band counts what it leaves to an encoder."""
    config = dataclasses.replace(preset("gpt-toy"), attention_window=48)
    length = config.sequence_length
    places = np.arange(length)
    pairs = (abs(places[:, None] - places[None]) < 48).sum()
    whole = dataclasses.replace(config, attention_window=0)
    left = config.blocks_flops_per_token(length) - whole.blocks_flops_per_token(length)
    each = 3 * 4 * config.layers * config.width
    assert left == pytest.approx(each * (pairs / length - length), rel=1e-3)


def test_an_encoders_window_reaches_both_ways() -> None:
    config = BERTConfig(layers=2, width=64, heads=2, attention_window=16)
    (kernel, _) = attention(config, Share(1.0, 128.0), find_software("throughline", "bf16"))
    places = np.arange(128)
    pairs = (abs(places[:, None] - places[None]) < 16).sum()
    assert kernel.flops == pytest.approx(4 * 32 * 2 * pairs)
