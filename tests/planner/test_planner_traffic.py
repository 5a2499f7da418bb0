"""The time model prices the bytes that the account of a layout lists: what sockets carry is what is planned for."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from throughline.core.hardware import Chip
from throughline.models.config import preset
from throughline.planner.cost import step_time
from throughline.planner.hardware import FITTED, Cluster
from throughline.planner.layout import Layout, layout_problems
from throughline.planner.traffic import StepShape, traffic
from throughline.planner.work import Layouts, Work

# links of a byte a second and nothing that hides behind work: seconds of an axis are the bytes that a process sends
BYTES = replace(FITTED, link_fraction=1.0, network_fraction=1.0, start_s=0.0, overlap=0.0)
CLUSTER = Cluster(
    "slow",
    Chip("chip", "chip", 1e9, 1e9, {"bf16": 1e9, "fp32": 1e9}),
    "slow",
    4096,
    node_gb_s=1e-9,
    constants=BYTES,
)
MODELS = {
    "gpt2-124m": {"vocab_size": 50304, "sequence_length": 1024},
    "bert-base": {"sequence_length": 512},
    "llama-8b": {"layers": 4, "width": 512, "sequence_length": 1024},
}
ROUNDS = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}


def drawn(seed: int) -> tuple[Layout, StepShape, Work]:
    """A legal layout of a drawn model and step."""
    draw = random.Random(seed)
    while True:
        name = draw.choice(list(MODELS))
        layout = Layout(
            data=draw.choice((1, 2, 4)), tensor=draw.choice((1, 2, 4)), pipeline=draw.choice((1, 1, 2)),
            context=draw.choice((1, 1, 2)), sharding=draw.choice(("replicated", "zero1", "zero2", "full")),
        )  # fmt: skip
        if layout.sharding != "replicated" and layout.data == 4:
            layout = replace(layout, replicas=draw.choice((1, 2)))
        rows, config = draw.choice((1, 2)), preset(name, **MODELS[name])
        count, length = draw.choice((2, 4)), config.sequence_length
        recompute = draw.choice(("none", "full"))
        if not layout_problems(layout, config, length, rows * count * layout.data, rows) and layout.world > 1:
            tokens = rows * length // layout.context
            shape = StepShape(count, rows, length, tokens // 8, draw.choice(("bf16", "fp32")), recompute)
            return layout, shape, Work(config, rows * count * layout.data, length, 0.125)


AXES = {"tensor": "tensor", "context": "context", "pipeline": "pipeline sends", "data": "data exposed"}


def sent_bytes(layout: Layout, shape: StepShape, work: Work, rank: int) -> Counter[str]:
    """By axis, what a ring sends for the entries of the account; both ways between two stages."""
    found: Counter[str] = Counter()
    for entry in traffic(work.config, layout, shape, rank):
        ranks = {"tensor": layout.tensor, "pipeline": 2, "data": layout.shards}.get(entry.axis, 1)
        if entry.what == "gradients of the copies" or (entry.axis == "data" and layout.shards == 1):
            ranks = layout.data * layout.context // layout.shards
        both = 2 if entry.axis == "pipeline" else 1
        times = both if entry.kind == "send" else ROUNDS[entry.kind] * (ranks - 1) / ranks
        found[entry.axis] += entry.bytes * times
    return found


@pytest.mark.parametrize("seed", range(60))
def test_seconds_at_a_byte_a_second_are_the_bytes_of_the_account(seed: int) -> None:
    """On one of the processes: exactly what is sent of activations; where parameters are sent within 5 %, because the
    time model divides all of them by the tensor degree and rounds no shard.
    """
    layout, shape, work = drawn(seed)
    ranks = [sent_bytes(layout, shape, work, rank) for rank in range(layout.pipeline)]
    layouts = Layouts.of(layout, shape.rows, shape.recompute, False)
    parts = step_time(work, layouts, CLUSTER, shape.software)
    for axis, part in AXES.items():
        near = 1e-9 if axis == "context" else 0.05
        said = [sent[axis] for sent in ranks]
        assert any(float(parts[part]) == pytest.approx(bytes_, rel=near) for bytes_ in said), (
            axis,
            said,
            parts,
        )
