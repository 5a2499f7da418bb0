"""One process of each kind of layout, the others pretended by torch's fake process group: it makes a step on every
card, waits no oftener than one process does, and sends what Megatron-LM sends.
"""

from typing import Any

import pytest
import torch.distributed as dist
from cases import Seen, card, make, model
from test_steps import OWN_READ
from throughline.planner.layout import Layout
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining._utils import InferenceMode

LAYOUTS: dict[str, dict[str, Any]] = {
    "replicated": {"data": 4},
    "zero1": {"data": 4, "sharding": "zero1"},
    "zero2": {"data": 4, "sharding": "zero2"},
    "full": {"data": 4, "sharding": "full"},
    "hybrid": {"data": 4, "sharding": "full", "replicas": 2},
    "tensor": {"tensor": 2},
    "tensor, full": {"tensor": 2, "data": 2, "sharding": "full"},
    "context": {"context": 2},
    "context, full": {"context": 2, "data": 2, "sharding": "full"},
    "1f1b": {"pipeline": 2},
    "gpipe": {"pipeline": 2, "schedule": "gpipe"},
    "interleaved": {"pipeline": 2, "schedule": "interleaved-1f1b", "stages_per_process": 2},
    "zero bubble, V": {"pipeline": 2, "schedule": "zero-bubble-v", "stages_per_process": 2},
    "zero bubble": {"pipeline": 2, "schedule": "interleaved-zero-bubble", "stages_per_process": 2},
    "512 processes": {"pipeline": 4, "tensor": 8, "data": 16, "sharding": "zero1"},
}
SIZE = {"layers": 4, "width": 512, "heads": 8}


@pytest.fixture(autouse=True)
def shapes_are_agreed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of a pipeline vote whether their shapes stand, and a fake group answers nothing: they stand."""

    def agree(self: Any, stages: Any, *_: Any, **__: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    for kind in (schedules._PipelineSchedule, schedules._PipelineScheduleRuntime):
        monkeypatch.setattr(kind, "_warmup_p2p", agree)


def cases() -> list:
    """All on a T4, an A100 and an H100 in the precision that each is used in, and in fp32 once."""
    return [
        pytest.param(
            *(capability, precision, family, name),
            id=f"SM{capability}-{precision}-{family}-{name}",
        )
        for capability, precision in (
            (70, "fp16"),
            (75, "fp16"),
            (80, "bf16"),
            (90, "bf16"),
            (90, "fp32"),
            (100, "bf16"),
        )
        for family in ("gpt", "llama", "bert")
        for name in LAYOUTS
        if capability in (75, 80, 90)
        or (family == "gpt" and name in ("full", "tensor", "context", "512 processes"))
    ]


@pytest.mark.parametrize(("capability", "precision", "family", "name"), cases())
def test_a_process_of_a_layout_makes_a_step(capability, precision, family, name):
    layout = Layout(**LAYOUTS[name])
    deeper = {"layers": 8} if layout.pipeline == 4 else {}
    grouped = {"kv_heads": 8} if family == "llama" else {}  # plain products of grouped heads: test_steps.py
    config = model(family, **SIZE | deeper | grouped)
    # the last process has head and loss, and of a V both ends
    case = make(config, precision, card(capability), layout=layout, rank=layout.world - 1, steps=4)
    case.step()
    with Seen() as seen:
        case.step()
    assert {place.split(":")[0] for place in seen.waits} <= {OWN_READ}
    assert seen.counted["waits"] <= 1


def counted_in_a_layer(family: str, **parallel: Any) -> tuple[dict[str, float], float]:
    """Calls by kind and bytes, in one layer of one micro-batch, forward and backward: by two depths."""
    found = []
    for layers in (2, 4):
        config = model(family, **SIZE | {"layers": layers, "kv_heads": 8})
        case = make(config, "bf16", card(80), layout=Layout(**parallel), steps=1)
        with Seen() as seen:
            case.step()
        found.append(seen)
        dist.destroy_process_group()
    one, two = found
    calls = {name: (two.collectives[name] - one.collectives[name]) / 2 for name in two.collectives}
    return calls, sum(two.sent.values()) / 2 - sum(one.sent.values()) / 2


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_layer_over_the_tensor_axis_sends_what_megatron_sends(family):
    """With sequence parallelism each half of a layer gathers its input and scatters its sums, and backward the other
    way round: 8 (Korthikanti et al. 2022, section 4.2.2). As in Megatron-LM, what was gathered is not kept but
    gathered again for the weights' gradients: 2 more.
    """
    calls, size = counted_in_a_layer(family, tensor=2)
    assert sum(calls.values()) == 8 + 2
    whole = 2 * 256 * SIZE["width"] * 2  # rows, positions, width, bytes
    assert size == pytest.approx(10 * whole, rel=0.01)  # and the norms' gradients
