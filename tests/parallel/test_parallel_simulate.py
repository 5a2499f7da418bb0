"""Simulated processes of giant layouts hold, compute, keep and send what the published formulas and
`--show-layout` say.
"""

import pytest

torch = pytest.importorskip("torch")

from throughline.benchmarks.prove_scale import (  # noqa: E402
    FLOPS_PERCENT,
    KEPT_PERCENT,
    RECIPES,
    Row,
    Scale,
    measure,
    per_axis,
)
from throughline.benchmarks.simulate import simulate  # noqa: E402
from throughline.models.config import BERTConfig, GPTConfig  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.planner.tables import Coordinates  # noqa: E402
from throughline.planner.traffic import StepShape, held, traffic  # noqa: E402

BY_NAME = {name: Scale.of(name) for name in RECIPES}
EVERYTHING = [
    (scale, rank, recompute)
    for scale in BY_NAME.values()
    for rank in scale.pipeline_ranks()
    for recompute in ("none", "selective", "full")
]


def assert_as_published(row: Row) -> None:
    assert row.found.parameters == row.parameters
    assert row.flops_percent < FLOPS_PERCENT
    assert row.kept_percent < KEPT_PERCENT
    assert per_axis(row.found.traffic) == per_axis(row.printed)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_stage_of_a_trillion_parameters(recompute: str) -> None:
    """34 s b h / t bytes a layer, of which 2 are dropout masks, and 2 with full recomputation, which keeps no
    mask.
    """
    row = measure(BY_NAME["gpt-1t-megatron"], 31, recompute)
    assert_as_published(row)
    assert row.share(row.found.masks_of_layers) == (0 if recompute == "full" else 2)
    assert row.found.layers == 2 and row.parameters == 1_966_432_000


def test_the_ends_of_the_pipeline() -> None:
    """The first stage keeps the mask of its embeddings, the last one the gradient of its part of
    the logits, in 16 bits.
    """
    scale = BY_NAME["gpt-1t-megatron"]
    first, last = measure(scale, 0, "full"), measure(scale, 63, "full")
    for row in (first, last):
        assert_as_published(row)
    tokens, tensor = scale.rows * scale.length, scale.layout.tensor
    assert first.found.kept_by_embeddings >= tokens * scale.config.width // tensor
    assert last.found.kept_by_head >= 2 * tokens * scale.config.vocab_size // tensor


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scale", "rank", "recompute"),
    EVERYTHING,
    ids=[f"{scale.name}-{rank}-{again}" for scale, rank, again in EVERYTHING],
)
def test_every_published_layout(scale: Scale, rank: int, recompute: str) -> None:
    """Of the 481B encoder, whose attention is multi-query, the one key head stands on every process of the axis."""
    assert_as_published(measure(scale, rank, recompute))


SHAPE = {"vocab_size": 250, "sequence_length": 64, "layers": 4, "width": 64, "heads": 4}
LLAMA = {"tied": False, "kv_heads": 2, "gated": True, "positions": "rotary", "norm": "rmsnorm", "bias": False}
SMALL = [
    (GPTConfig(**SHAPE), Layout(tensor=2, data=2, sharding="zero1"), "none"),
    (GPTConfig(**SHAPE), Layout(data=4, sharding="full", replicas=2), "full"),
    (GPTConfig(**SHAPE, **LLAMA), Layout(tensor=2), "none"),
    (
        GPTConfig(**SHAPE),
        Layout(pipeline=2, tensor=2, data=2, schedule="interleaved-1f1b", stages_per_process=2),
        "full",
    ),
    (BERTConfig(**SHAPE), Layout(pipeline=2, tensor=2), "selective"),
    (GPTConfig(**SHAPE), Layout(pipeline=2, schedule="zero-bubble-v", stages_per_process=2), "none"),
]


@pytest.mark.parametrize(
    ("config", "layout", "recompute"), SMALL, ids=[layout.describe() for _, layout, _ in SMALL]
)
def test_any_layout_can_be_simulated(config: GPTConfig | BERTConfig, layout: Layout, recompute: str) -> None:
    """Its parameters and collectives are those printed, for every pipeline rank and all its stages together."""
    batch = StepShape(1, 2, 64, 2 * 10 if isinstance(config, BERTConfig) else 128, "bf16", recompute)
    for rank in range(layout.pipeline):
        stages = simulate(config, layout, batch, rank)
        assert [stage.stage for stage in stages] == layout.stages_of(rank)
        assert sum(stage.parameters for stage in stages) == held(config, layout, Coordinates(rank))
        found = per_axis(entry for stage in stages for entry in stage.traffic)
        assert found == per_axis(traffic(config, layout, batch, rank))
        assert not torch.distributed.is_initialized()
