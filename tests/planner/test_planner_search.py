"""The search finds what is legal, says why the rest lost, and is fast."""

import time

import numpy as np
import pytest
from throughline.core.hardware import chips
from throughline.models.config import preset
from throughline.planner.cost import step_time
from throughline.planner.hardware import find_cluster, shipped_clusters
from throughline.planner.memory import MOMENTS, needed_bytes, stage_memory
from throughline.planner.report import explain
from throughline.planner.run import Run
from throughline.planner.search import (
    Search,
    candidate_at,
    enumerate_layouts,
    fewest_chips,
    find_layouts,
    find_or_offload,
    is_legal,
    neighbours,
    why_not,
)
from throughline.planner.work import Work, find_software


def search(
    model: str, chips: int, on: str, rows: int, length: int = 2048, **fixed: tuple[int, ...]
) -> Search:
    cluster = find_cluster(on)
    dtype = "bf16" if "bf16" in cluster.chip.tflops else "fp16"
    return Search(
        Work(preset(model), rows, length, 0.15), cluster, find_software("throughline", dtype), chips, fixed
    )


@pytest.mark.parametrize(
    ("model", "chips", "rows"), [("gpt3-13b", 64, 512), ("llama-8b", 48, 96), ("bert-large", 12, 1536)]
)
def test_every_layout_is_legal(model: str, chips: int, rows: int) -> None:
    """What the array rules let through, the trainer's own rules accept: a random sample of all."""
    asked = search(model, chips, "dgx-a100-80gb", rows, preset(model).sequence_length)
    layouts = enumerate_layouts(asked)
    count = len(layouts.tensor)
    assert count > 20 and np.all(layouts.world == chips)
    for index in np.random.default_rng(0).choice(count, min(count, 60), replace=False):
        assert is_legal(asked, candidate_at(asked, layouts.take(index)))


def test_ten_thousand_layouts_a_second() -> None:
    """CPU time of pricing every layout of 1T on 3,072 chips, memory and time: at least 10,000 a second."""
    asked = search("gpt-1t-megatron", 3072, "dgx-a100-80gb", 3072)
    find_layouts(asked)
    start = time.process_time()
    for _ in range(5):
        layouts = enumerate_layouts(asked)
        step_time(asked.work, layouts, asked.cluster, asked.software)
        needed_bytes(asked.work, layouts, asked.software)
    assert 5 * len(layouts.tensor) / (time.process_time() - start) > 10_000


def test_breakdowns_sum_exactly() -> None:
    asked = search("gpt3-13b", 64, "dgx-a100-80gb", 512)
    best = find_layouts(asked).best[0]
    assert sum(best.parts.values()) == best.seconds
    stages = stage_memory(asked.work, best.layouts, asked.software)
    for stage in stages:
        names = MOMENTS[stage["peak"]]
        assert stage["moments"][stage["peak"]] == sum(stage["terms"][name] for name in names)
    assert max(max(stage["moments"].values()) for stage in stages) == pytest.approx(
        best.needed_bytes, rel=1e-12
    )
    assert any("100.0%" in line for line in explain(asked, best, Run())[1])


def test_neighbours_say_why_they_lost() -> None:
    found = find_layouts(search("gpt-1t-megatron", 3072, "dgx-a100-80gb", 3072))
    reasons = [
        why_not(found.best[0], other, found.capacity) for _, other in neighbours(found.search, found.best[0])
    ]
    assert len(reasons) >= 6
    assert any("does not fit" in reason for reason in reasons) and any(
        "slower, most of it" in reason for reason in reasons
    )


def test_fewest_chips_and_offload() -> None:
    """13B does not fit one V100, fits it with the optimizer on the host, and fits a few without."""
    alone = search("gpt3-13b", 1, "v100-32gb", 8)
    assert not find_layouts(alone).best
    offloaded = find_or_offload(alone).best[0]
    # 4 + 8 + 2 bytes of each parameter on the host (Ren et al. 2021, figure 1), and 4 to add up two micro-batches
    assert offloaded.layouts.micro_rows == 4
    assert offloaded.host_bytes == pytest.approx(18 * preset("gpt3-13b").parameter_count(), rel=1e-9)
    found = fewest_chips(alone, (1, 2, 4, 8, 16, 32))
    assert found is not None and 8 <= found.search.world <= 16


def test_every_shipped_machine_says_where_its_figures_are_from() -> None:
    """A source, or the word unsourced; a price has its date."""
    for key in shipped_clusters():
        cluster = find_cluster(key)
        assert len(cluster.source) > 10, key
        assert cluster.priced or not cluster.price_per_chip_hour, key


@pytest.mark.parametrize("name", [*shipped_clusters(), *chips()])
def test_every_cluster_plans(name: str) -> None:
    """A small model on one chip of everything shipped: a time, and a peak share below one."""
    asked = search("bert-base", 1, name, 32, 128)
    best = find_layouts(asked).best[0]
    assert 0 < best.seconds < 60
