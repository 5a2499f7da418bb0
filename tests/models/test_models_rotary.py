"""Rotary positions: precise in 16 bits, and the same for every part of a row."""

import dataclasses
from typing import Any

import pytest
import torch
from throughline.core.recipe import build_recipe
from throughline.models.config import GPTConfig
from throughline.models.rotary import frequencies, rotary_table, rotate
from throughline.prove.twin import twin
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import resolve
from throughline.train.recipes.rules import RULES
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CONFIG = GPTConfig(layers=1, width=64, heads=1, sequence_length=4096, positions="rotary")
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "linear": {"rope_factor": 4.0},
    "yarn": {"rope_factor": 4.0, "rope_original_length": 1024},
    "llama3": {"rope_factor": 8.0, "rope_original_length": 1024, "rope_low": 1.0, "rope_high": 4.0},
    "dynamic": {"rope_factor": 4.0, "rope_original_length": 1024},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_rotation_in_16_bits_is_rounded_once(scaling: str, dtype: torch.dtype) -> None:
    """It is the float64 rotation by the same angles, rounded: anything rounded before would show in some number."""
    config = dataclasses.replace(CONFIG, rope_scaling=scaling, **SCALINGS[scaling])
    positions = torch.arange(0, 4096, 37)
    x_BASD = torch.randn(1, 1, len(positions), 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    tables = rotary_table(config, positions, dtype)
    assert {table.dtype for table in tables} == {torch.float32}
    exact = rotate(x_BASD.double(), (tables[0].double(), tables[1].double()))
    turned = rotate(x_BASD, tables)
    assert turned.dtype == dtype
    # fp32's own rounding may tip a number that lies between two of the 16 bits
    assert (turned == exact.to(dtype)).float().mean() > 0.999


@pytest.mark.parametrize("row_length", [512, 1024, 2048, 4096])
def test_dynamic_scaling_by_the_row_is_that_of_transformers(row_length: int) -> None:
    config = dataclasses.replace(CONFIG, rope_scaling="dynamic", **SCALINGS["dynamic"])
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": config.rope_theta}
    theirs = LlamaConfig(
        hidden_size=64, num_attention_heads=1, max_position_embeddings=1024, rope_parameters=rope
    )
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](theirs, torch.device("cpu"), seq_len=row_length)
    found = frequencies(config, torch.arange(3), row_length=row_length)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_part_of_a_row_is_turned_as_in_the_whole(scaling: str) -> None:
    """Whatever part of a row a process holds, and however short its documents are."""
    config = dataclasses.replace(CONFIG, rope_scaling=scaling, **SCALINGS[scaling])
    whole = rotary_table(config, torch.arange(4096), torch.float32, row_length=4096)
    part = rotary_table(config, torch.arange(256, 512), torch.float32, row_length=4096)
    for all_places, some in zip(whole, part):
        assert torch.equal(all_places[:, :, 256:512], some)


def test_a_twin_has_rows_beyond_the_trained_length_where_its_recipe_has() -> None:
    """Or the scaling would be switched off in what `throughline prove` proves."""
    fields = {"positions": "rotary", "rope_scaling": "dynamic", "rope_factor": 4.0, "sequence_length": 4096}
    tree = {
        "data": {"train": "tokens"},
        "model": {"family": "gpt", "overrides": fields | {"rope_original_length": 1024}},
        "train": {"steps": 10, "sequence_length": 4096, "batch_rows": 4},
        "parallel": {"context": 2},
    }
    case, _ = twin(resolve(build_recipe(tree, Recipe, RULES)))
    assert case.config.rope_original_length == case.length // 4
