"""Models with experts: computed by what a token goes through, held by what there is, exchanged over the expert axis."""

import dataclasses
import json

import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.models.config import preset
from throughline.planner.cost import step_time
from throughline.planner.hardware import find_cluster
from throughline.planner.kernels import Share, layer_kernels
from throughline.planner.layout import Layout
from throughline.planner.traffic import StepShape, expert_sends, traffic, with_compression
from throughline.planner.work import Layouts, Work, find_software

MIXTRAL = preset("mixtral-8x7b", sequence_length=4096)
OURS = find_software("throughline", "bf16")


@pytest.mark.parametrize("name", ["mixtral-8x7b", "qwen3-30b-a3b", "olmoe-toy"])
@pytest.mark.parametrize("expert", [1, 4])
def test_products_are_those_of_the_parameters_that_a_token_goes_through(name: str, expert: int) -> None:
    config = preset(name)
    kernels = layer_kernels(config, Share(2, 1024, expert=expert), OURS)
    flops = sum(kernel.flops for kernel in kernels if kernel.kind == "product")
    matrices = config.block_matrix_parameters() + config.expert_parameters(active=True) / config.layers
    assert flops == pytest.approx(6 * 2048 * matrices, rel=1e-9)


def test_memory_is_that_of_all_experts_over_the_expert_axis() -> None:
    routed = MIXTRAL.layers * MIXTRAL.experts * 3 * MIXTRAL.width * MIXTRAL.expert_size
    whole = MIXTRAL.parameter_count()
    for expert in (1, 2, 8):
        layouts = Layouts(data=8, expert=expert, sharding=1)
        assert layouts.held_parameters(MIXTRAL) == pytest.approx(whole - routed + routed / expert)
        # every parameter is updated once, whoever holds it
        assert 8 * layouts.owned_parameters(MIXTRAL, OURS) == pytest.approx(whole)


def test_rows_are_sent_to_every_expert_of_a_token_and_back() -> None:
    batch = StepShape(4, 2, 4096, 0, "bf16")
    (sent,) = (
        entry for entry in traffic(MIXTRAL, Layout(data=8, expert=8), batch, 0) if entry.axis == "expert"
    )
    assert sent.calls == 4 * 4 * MIXTRAL.layers
    assert sent.bytes == sent.calls * 2 * 4096 * 2 * MIXTRAL.width * 2
    assert expert_sends(preset("llama-8b"), OURS.precision, 4096, 1, 0) == (0.0, 0.0)


def test_exchange_takes_longer_between_nodes_and_less_when_rows_go_once() -> None:
    config, cluster = preset("qwen3-30b-a3b", sequence_length=4096), find_cluster("dgx-h100")
    work = Work(config, 512, 4096)

    def seconds(expert: int, **changes: object) -> float:
        layouts, software = Layouts(data=64, expert=expert, sharding=1), dataclasses.replace(OURS, **changes)
        return float(step_time(work, layouts, cluster, software)["expert"])

    assert seconds(1) == 0 < seconds(8) < seconds(16) / 3
    assert seconds(16, rows_once=True) < seconds(16) / 2


def test_plan_holds_the_expert_axis_and_refuses_it_where_there_are_no_experts() -> None:
    words = ["plan", "mixtral-8x7b", "--gpus", "64", "--on", "dgx-h100", "--rows", "256", "--length", "4096"]
    result = CliRunner().invoke(main, [*words, "--layout", "expert=8", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.output)
    assert facts["active_parameters"] < facts["parameters"] / 3
    assert all("E8" in row["layout"] and row["parallel"]["expert"] == 8 for row in facts["layouts"])
    for model, layout in (("llama-8b", "expert=2"), ("mixtral-8x7b", "expert=16")):
        result = CliRunner().invoke(main, [words[0], model, *words[2:], "--layout", layout])
        assert result.exit_code != 0 and "experts cannot be shared" in result.output + result.stderr


def test_compressed_gradients_take_less_time_on_the_way() -> None:
    """Of fp32 gradients 16 bits are half, and PowerSGD's factors of rank 4 below a tenth; the update reads more."""
    config, cluster = preset("gpt2-124m"), find_cluster("aws-p3.16xlarge")
    work, layouts = Work(config, 512, 1024), Layouts(data=64, micro_rows=8)
    parts = {}
    for scheme in ("none", "bf16", "powersgd"):
        software = OURS if scheme == "none" else with_compression(OURS, config, scheme, 4)
        parts[scheme] = software.gradient_share, step_time(work, layouts, cluster, software)
    assert parts["none"][0] == 1 and parts["bf16"][0] == pytest.approx(0.5, rel=0.01)
    assert parts["powersgd"][0] < 0.1
    exposed = [float(parts[scheme][1]["data exposed"]) for scheme in ("none", "bf16", "powersgd")]
    assert exposed == sorted(exposed, reverse=True) and exposed[0] > 0
    assert parts["bf16"][1]["optimizer"] > parts["none"][1]["optimizer"]
