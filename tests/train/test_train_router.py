"""Routers in 16-bit runs: a token chooses the experts that it would choose in fp32, in every way of holding weights."""

from typing import Any

import pytest
import torch
from throughline.models.config import GPTConfig
from throughline.models.experts import RoutedFeedForward
from throughline.models.init import initial_values
from throughline.planner.layout import Layout
from throughline.prove.forked import run_ranks, warm
from throughline.prove.proof import SEED, Case, make_trainer, own_rows
from throughline.train.engine import Engine
from throughline.train.parallel.ranks import Ranks
from throughline.train.step import train_step

EXPERTS = 8
MODEL: dict[str, Any] = {
    "experts": EXPERTS,
    "experts_per_token": 2,
    "balance_bias": True,
    "shared_experts": 1,
}
MODEL |= {
    "norm": "rmsnorm",
    "bias": False,
    "positions": "rotary",
    "router_scores": "sigmoid",
    "router_normalised": True,
}
# as after 300 steps of balance_rate = 0.001: neighbours are one number in bf16
BALANCE = torch.linspace(0.300, 0.307, EXPERTS)


def value(config: GPTConfig, name: str, shape: torch.Size) -> torch.Tensor:
    if name.endswith(".balance_bias"):
        return BALANCE
    return initial_values(name, shape, config, SEED)


def routed_as_in_fp32(precision: str, layout: Layout) -> int:
    """Tokens whose experts and weights are those of fp32 arithmetic on the same inputs, of all in two steps; the router
    and the bias that each step moved are read from the masters.
    """
    case = Case("", layout, precision=precision, model=MODEL, steps=2)
    ranks = Ranks.start(layout, torch.device("cpu"))
    engine = Engine(case.config, ranks.mesh, precision, SEED)
    shapes = {name: torch.Size(shape) for name, shape in engine.shapes.items()}
    engine.fill(lambda name, box: value(case.config, name, shapes[name])[box.slices()])
    trainer, seen = make_trainer(case, engine), 0
    for stage in engine.stages:
        for layer, block in stage.trunk.blocks.items():
            assert isinstance(block.mlp, RoutedFeedForward)
            watch_route(block.mlp, engine, f"blocks.{layer}.mlp")
    for step in range(2):
        train_step(trainer, own_rows(case, engine, step), 1.0)
    for stage in engine.stages:
        seen += sum(block.mlp.compared for block in stage.trunk.blocks.values())
    return seen


def whole(engine: Engine, name: str) -> torch.Tensor:
    """A parameter's master, put together from the shards of all processes."""
    local = next(local for local in engine.local_shards if local.name == name)
    out = torch.zeros(local.spec.shape)
    if local.spec.primary:
        out[local.spec.box.slices()] = local.value.detach()
    return engine.mesh.world.all_reduce(out)


def watch_route(routed: Any, engine: Engine, name: str) -> None:
    route, routed.compared = routed.route, 0

    def compared(x_NW: torch.Tensor) -> Any:
        found = route(x_NW)
        weight_EW, bias_E = whole(engine, f"{name}.router.weight"), whole(engine, f"{name}.balance_bias")
        scores_NE = (x_NW.float() @ weight_EW.t()).sigmoid()
        chosen_NK = (scores_NE + bias_E).topk(2, -1).indices
        assert torch.equal(found.chosen_NK, chosen_NK)
        torch.testing.assert_close(found.scores_NE, scores_NE, rtol=1e-5, atol=1e-6)
        routed.compared += len(x_NW)
        return found

    routed.route = compared


LAYOUTS = {
    "copies": Layout(data=2),
    "zero1": Layout(data=2, sharding="zero1"),
    "full": Layout(data=2, sharding="full"),
    "full, experts shared": Layout(data=2, sharding="full", expert=2),
}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_one_process_routes_as_in_fp32(precision: str) -> None:
    assert routed_as_in_fp32(precision, Layout()) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_way_of_holding_weights_routes_as_in_fp32(layout: str) -> None:
    warm()
    assert all(run_ranks(2, lambda: routed_as_in_fp32("bf16", LAYOUTS[layout])))


def test_a_router_is_its_own_master() -> None:
    """What the forward computes with is what the optimizer and the balance move: no digit is lost in between."""
    mesh = Ranks.start(Layout(), torch.device("cpu")).mesh
    engine = Engine(Case("", Layout(), model=MODEL).config, mesh, "bf16", SEED)
    for local in engine.local_shards:
        wide = ".router." in local.name or local.name.endswith(".balance_bias")
        assert (local.computed.dtype == torch.float32) == wide == (local.value is local.computed)
        assert local.value.dtype == torch.float32
