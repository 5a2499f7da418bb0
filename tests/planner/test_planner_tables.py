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
from throughline.planner.kernels import Share, layer_kernels  # noqa: E402
from throughline.planner.serve import plan_service  # noqa: E402
from throughline.planner.tables import parameter_shapes  # noqa: E402
from throughline.planner.work import find_software  # noqa: E402

SHAPES = [
    GPTConfig(layers=2),
    GPTConfig(layers=2, bias=False),
    GPTConfig(layers=2, bias=False, norm="rmsnorm", gated=True, positions="rotary", tied=False, kv_heads=4),
    GPTConfig(
        layers=2, bias=False, positions="rotary", rope_width=32, kv_latent=96, q_latent=80, value_width=48
    ),
    GPTConfig(layers=2, bias=False, positions="rotary", rope_width=32, kv_latent=96),
    GPTConfig(layers=2, kv_heads=1, head_width=80, mlp_width=1000),
    BERTConfig(layers=2),
    BERTConfig(layers=2, norm_first=True, nsp=False, token_types=0, bias=False),
    BERTConfig(layers=2, mlm_transform=False, relative_buckets=32, kv_heads=1, norm="rmsnorm", gated=True),
]


@pytest.mark.parametrize("config", [*SHAPES, preset("google-481b"), preset("llama-70b")], ids=str)
def test_shapes_are_those_of_the_model(config: ModelConfig) -> None:
    built = {name: tuple(parameter.shape) for name, parameter in empty_model(config).named_parameters()}
    assert list(parameter_shapes(config).items()) == list(built.items())


@pytest.mark.parametrize("config", SHAPES, ids=str)
def test_a_token_meets_every_number_of_a_block_once(config: ModelConfig) -> None:
    """The forward products of a layer are two FLOPs of each number of its matrices, latents' among them."""
    kernels = layer_kernels(config, Share(4, 128), find_software("throughline"))
    forward = sum(kernel.flops for kernel in kernels if (kernel.phase, kernel.kind) == ("forward", "product"))
    assert forward == 2 * 4 * 128 * config.block_matrix_parameters()


def test_an_engine_with_latents_is_refused_by_name() -> None:
    latent = next(config for config in SHAPES if getattr(config, "kv_latent", 0))
    with pytest.raises(WrongUse, match="latent attention"):
        plan_service(latent, find_cluster("dgx-h100"))
