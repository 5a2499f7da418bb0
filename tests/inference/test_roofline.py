"""The floor of a forward by hand, and the reported rows that stand beside it."""

import dataclasses

import pytest
from throughline.core.hardware import chips
from throughline.inference.runtimes.bench import floor_ms, reported
from throughline.models.config import preset


def test_the_floor_is_weights_over_bandwidth_or_products_over_peak() -> None:
    """BERT-Base has 85 M weights in its blocks: 170 MB at 320 GB/s, and at 1 x 128 less arithmetic."""
    bert, gpt, t4 = preset("bert-base"), preset("gpt2-124m"), chips()["t4"]
    weights = 12 * 12 * 768**2
    assert floor_ms(bert, t4, 1, 128, "fp16") == pytest.approx(weights * 2 / 320e9 * 1e3)
    assert floor_ms(bert, t4, 1, 128, "int8") == pytest.approx(weights / 320e9 * 1e3)
    flops = 2 * weights * 8 * 128 + 4 * 12 * 768 * 8 * 128 * 128
    assert floor_ms(bert, t4, 8, 128, "fp16") == pytest.approx(flops / 65e12 * 1e3)
    head, cache = 768 * gpt.vocab_size, 2 * 2 * 12 * 768 * 128
    expected = ((weights + head) * 2 + cache) / 320e9 * 1e3
    assert floor_ms(gpt, t4, 1, 128, "fp16", decode=True) == pytest.approx(expected)
    assert floor_ms(bert, dataclasses.replace(t4, tflops={}), 1, 128) is None


def test_a_token_reads_its_experts_and_many_tokens_read_all() -> None:
    """Of Mixtral's 46.7 B parameters a token goes through 12.9 B, of which one table is looked up, not multiplied."""
    mixtral, t4 = preset("mixtral-8x7b"), chips()["t4"]
    table = mixtral.vocab_size * mixtral.width
    cache = 2 * 2 * mixtral.layers * mixtral.key_value_heads * mixtral.head_size
    for rows, read in ((1, mixtral.active_parameter_count()), (10_000, mixtral.parameter_count())):
        slow = dataclasses.replace(t4, tflops={"fp16": 1e9})  # what is read decides
        found = floor_ms(mixtral, slow, rows, 1, "fp16", decode=True)
        assert found == pytest.approx((2 * (read - table) + cache * rows) / 320e9 * 1e3, rel=1e-4)


def test_reported_rows_are_those_of_the_shape() -> None:
    found = reported(preset("bert-base"), 1, 128)
    assert found is not None and found["tensorrt"].startswith("8.4") and found["fp16_ms"] == 1.95
    assert reported(preset("gpt2-124m"), 1, 128) is None and reported(preset("bert-base"), 1, 100) is None
