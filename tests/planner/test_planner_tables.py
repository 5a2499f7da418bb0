"""The closed-form shapes of parameters are those of the built model, names, order and all."""

import pytest

torch = pytest.importorskip("torch")

from throughline.core.errors import WrongUse  # noqa: E402
from throughline.models.config import (  # noqa: E402
    BERTConfig,
    GPTConfig,
    ModelConfig,
    preset,
)
from throughline.models.init import empty_model  # noqa: E402
from throughline.planner.hardware import find_cluster  # noqa: E402
from throughline.planner.kernels import Share, head_kernels, layer_kernels  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.planner.serve import plan_service  # noqa: E402
from throughline.planner.tables import Coordinates, parameter_shapes, shard_specs  # noqa: E402
from throughline.planner.work import Layouts, find_software  # noqa: E402

SHAPES = [
    GPTConfig(layers=2),
    GPTConfig(layers=2, bias=False),
    GPTConfig(layers=2, bias=False, norm="rmsnorm", gated=True, positions="rotary", tied=False, kv_heads=4),
    GPTConfig(
        layers=2, bias=False, positions="rotary", rope_width=32, kv_latent=96, q_latent=80, value_width=48
    ),
    GPTConfig(layers=2, bias=False, positions="rotary", rope_width=32, kv_latent=96),
    GPTConfig(layers=2, kv_heads=1, head_width=80, mlp_width=1000),
    GPTConfig(layers=2, predict_ahead=2),
    BERTConfig(layers=2),
    BERTConfig(layers=2, norm_first=True, nsp=False, token_types=0, bias=False),
    BERTConfig(layers=2, mlm_transform=False, relative_buckets=32, kv_heads=1, norm="rmsnorm", gated=True),
]


AHEAD = GPTConfig(
    layers=3, bias=False, norm="rmsnorm", experts=4, expert_every=2, tied=False, predict_ahead=1
)


@pytest.mark.parametrize("config", [*SHAPES, AHEAD, preset("google-481b"), preset("llama-70b")], ids=str)
def test_shapes_are_those_of_the_model(config: ModelConfig) -> None:
    built = {name: tuple(parameter.shape) for name, parameter in empty_model(config).named_parameters()}
    assert list(parameter_shapes(config).items()) == list(built.items())


@pytest.mark.parametrize("config", SHAPES, ids=str)
def test_a_token_meets_every_number_of_a_block_once(config: ModelConfig) -> None:
    """The forward products of a layer are two FLOPs of each number of its matrices, latents' among them."""
    kernels = layer_kernels(config, Share(4, 128), find_software("throughline"))
    forward = sum(kernel.flops for kernel in kernels if (kernel.phase, kernel.kind) == ("forward", "product"))
    assert forward == 2 * 4 * 128 * config.block_matrix_parameters()


def test_a_further_token_is_counted_and_an_engine_has_none() -> None:
    """Its block stands on the last process of a pipeline, whose head has the joining product and more logits."""
    plain, cluster, share = AHEAD.in_use(), find_cluster("dgx-h100"), Share(4, 128)
    for layout in (Layout(), Layout(pipeline=2), Layout(pipeline=2, layers_per_stage=(2, 1))):
        layouts = Layouts.of(layout, 1, "none", False)
        first, last = (layouts.layers_on(config)[-1] for config in (plain, AHEAD))
        assert last - first == 1
        held = layouts.held_parameters(AHEAD)
        specs = [list(shard_specs(AHEAD, layout, Coordinates(rank))) for rank in range(layout.pipeline)]
        assert held == pytest.approx(max(sum(spec.box.numel for spec in each) for each in specs), rel=0.15)
    found = []
    for config in (plain, AHEAD):
        kernels = head_kernels(config, share, find_software("throughline"), share.tokens)
        found.append(sum(kernel.flops for kernel in kernels if kernel.kind == "product"))
    joined = 12 * share.tokens * AHEAD.width**2
    assert found[1] == pytest.approx(2 * found[0] + joined, rel=1e-12)
    assert plan_service(AHEAD, cluster) == plan_service(plain, cluster)


def test_an_engine_with_latents_is_refused_by_name() -> None:
    latent = next(config for config in SHAPES if getattr(config, "kv_latent", 0))
    with pytest.raises(WrongUse, match="latent attention"):
        plan_service(latent, find_cluster("dgx-h100"))
