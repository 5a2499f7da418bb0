"""The event simulation of a pipeline: equal to the closed form, on the lists that also run."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from throughline.models.config import preset
from throughline.planner.cost import (
    head_kernels,
    kernel_times,
    layer_kernels,
    step_time,
    sum_of,
    table_kernels,
)
from throughline.planner.hardware import FITTED, find_cluster
from throughline.planner.kernels import Share
from throughline.planner.layout import Layout
from throughline.planner.memory import needed_bytes, stage_memory
from throughline.planner.schedule import Event, simulate
from throughline.planner.tables import Coordinates
from throughline.planner.traffic import held
from throughline.planner.work import Layouts, Work, find_software


def closed_form(micro_batches: int, stages: Sequence[float], turns: int = 1) -> float:
    """Seconds of a 1F1B step whose processes take `stages` seconds for one micro-batch, forward and backward:
    m t_max + (sum t - t_max) / v (Narayanan et al. 2021, section 2.2, for stages that differ).
    """
    slowest = max(stages)
    return micro_batches * slowest + (sum(stages) - slowest) / turns


def bubble_fraction(events: Sequence[Event]) -> float:
    """Share of the step during which a process waits, mean over processes."""
    span = max(event.end for event in events)
    ranks = {event.rank for event in events}
    return 1 - sum(event.end - event.start for event in events) / (span * len(ranks))


@pytest.mark.parametrize(("pipeline", "micro_batches"), [(2, 2), (4, 8), (8, 32), (16, 64), (64, 128)])
def test_unequal_last_stage_equals_the_closed_form(pipeline: int, micro_batches: int) -> None:
    """1F1B with a slower last stage (the head): m t_max + the rest once, to rounding."""
    draw = random.Random(pipeline)
    forward, backward = [1.0] * pipeline, [2.0] * pipeline
    forward[-1], backward[-1] = 1 + draw.random(), 2 + 2 * draw.random()
    end = max(event.end for event in simulate(Layout(pipeline=pipeline), micro_batches, forward, backward))
    assert end == pytest.approx(
        closed_form(micro_batches, [a + b for a, b in zip(forward, backward)]), rel=1e-12
    )


@pytest.mark.parametrize(
    ("pipeline", "turns", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 4, 16), (8, 3, 32)]
)
def test_interleaving_divides_the_bubble(pipeline: int, turns: int, micro_batches: int) -> None:
    """Equal stages: the bubble is (p - 1) / (m v) of the work (Narayanan et al. 2021, section 2.2)."""
    layout = Layout(pipeline=pipeline, schedule="interleaved-1f1b", stages_per_process=turns)
    events = simulate(layout, micro_batches, [1.0] * layout.stages, [2.0] * layout.stages)
    end = max(event.end for event in events)
    assert end == pytest.approx(closed_form(micro_batches, [3.0 * turns] * pipeline, turns), rel=1e-12)
    waited = (pipeline - 1) / (micro_batches * turns)
    assert bubble_fraction(events) == pytest.approx(waited / (1 + waited), rel=1e-12)


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble-v", "interleaved-zero-bubble"])
def test_other_schedules_are_worked_off(schedule: str) -> None:
    """Every action once, none of two on a process at the same time; a zero-bubble schedule waits less than 1F1B."""
    layout = Layout(pipeline=4, schedule=schedule, stages_per_process=1 if schedule == "gpipe" else 2)  # type: ignore[arg-type]
    events = simulate(layout, 8, [1.0] * layout.stages, [2.0] * layout.stages, hop=0.01)
    assert len(
        {(event.action.stage, event.action.kind, event.action.micro_batch) for event in events}
    ) == len(events)
    for rank in range(4):
        own = sorted((event for event in events if event.rank == rank), key=lambda event: event.start)
        assert all(first.end <= second.start + 1e-12 for first, second in itertools.pairwise(own))
    usual = simulate(Layout(pipeline=4), 8, [2.0] * 4, [4.0] * 4, hop=0.01)
    if schedule != "gpipe":
        assert bubble_fraction(events) < bubble_fraction(usual)


FREE = replace(FITTED, issue_s=0.0, start_s=0.0, link_fraction=1e9)  # sends take no time
GPT = preset("gpt2-355m")  # 24 layers


@pytest.mark.parametrize("split", [(2, 19, 3), (3, 3, 18), (16, 4, 4), (8, 8, 8)])
def test_a_given_split_is_priced_as_it_runs(split: tuple[int, ...]) -> None:
    """Step time against the simulation of the stages as they are: the fullest one in the middle, last or first. 0.1 %:
    the tables of a fullest first stage are shared out over its layers.
    """
    layout = Layout(pipeline=3, layers_per_stage=split)
    software = replace(find_software("throughline", "bf16"), pass_bytes=0)
    work, layouts = Work(GPT, 32, 1024), Layouts.of(layout, 1, "none", False)
    cluster, share = replace(find_cluster("dgx-a100-80gb"), constants=FREE), Share(1, 1024)
    lists = (
        layer_kernels(GPT, share, software),
        table_kernels(GPT, share, software),
        head_kernels(GPT, share, software, 1024),
    )
    layer, table, head = (sum_of(kernel_times(kernels, cluster, software)) for kernels in lists)
    stages = [count * layer + (index == 0) * table + (index == 2) * head for index, count in enumerate(split)]
    events = simulate(layout, 32, [time / 3 for time in stages], [2 * time / 3 for time in stages])
    parts = step_time(work, layouts, cluster, software)
    spent = sum(value for name, value in parts.items() if name not in ("optimizer", "step overhead"))
    assert spent == pytest.approx(max(event.end for event in events), rel=0.001)


@pytest.mark.parametrize("split", [(2, 19, 3), (3, 3, 18), (16, 4, 4)])
def test_memory_of_a_given_split_is_that_of_each_process(split: tuple[int, ...]) -> None:
    """Weights against the tables that build the model (without the position table and the last norm: 1.5 %),
    activations by the layers of each process and the micro-batches that it holds: 3, 2 and 1.
    """
    layout, software = Layout(pipeline=3, layers_per_stage=split), find_software("throughline", "bf16")
    work, layouts = Work(GPT, 32, 1024), Layouts.of(layout, 1, "none", False)
    stages = stage_memory(work, layouts, software)
    even = stage_memory(work, Layouts.of(Layout(pipeline=3), 1, "none", False), software)[0]["terms"]
    for rank, stage in enumerate(stages):
        weights = 2 * held(GPT, layout, Coordinates(pipeline=rank))
        assert stage["terms"]["weights"] == pytest.approx(weights, rel=0.015)
        kept = even["activations"] / 8 / 3 * split[rank] * (3 - rank)
        assert stage["terms"]["activations"] == pytest.approx(kept, rel=1e-12)
    worst = max(max(stage["moments"].values()) for stage in stages)
    assert float(needed_bytes(work, layouts, software)) == pytest.approx(worst, rel=1e-12)


def test_an_even_split_costs_what_it_costs_ungiven() -> None:
    """The bubble within 0.5 %: its closed form leaves the tables of the first stage out."""
    software, cluster = find_software("throughline", "bf16"), find_cluster("dgx-a100-80gb")
    given, plain = (
        step_time(Work(GPT, 32, 1024), Layouts.of(layout, 1, "none", False), cluster, software)
        for layout in (Layout(pipeline=3, layers_per_stage=(8, 8, 8)), Layout(pipeline=3))
    )
    for name, value in given.items():
        assert float(value) == pytest.approx(float(plain[name]), rel=5e-3 if name == "bubble" else 1e-12)


@pytest.mark.parametrize(("pipeline", "turns"), [(2, 1), (4, 1), (2, 3), (4, 2)])
def test_the_bubble_of_the_time_model_is_that_of_the_lists(pipeline: int, turns: int) -> None:
    """An even split, interleaved or not: the step's work and waiting are the simulation of its stages."""
    software, work = replace(find_software("throughline", "bf16"), pass_bytes=0), Work(GPT, 32, 1024)
    schedule = "interleaved-1f1b" if turns > 1 else "1f1b"
    layout = Layout(pipeline=pipeline, schedule=schedule, stages_per_process=turns)  # type: ignore[arg-type]
    cluster = replace(find_cluster("dgx-a100-80gb"), constants=FREE)
    parts = step_time(work, Layouts.of(layout, 1, "none", False), cluster, software)
    busy = sum(parts[name] for name in ("matrix products", "attention", "memory-bound kernels"))
    share = Share(1, 1024)
    head = sum_of(kernel_times(head_kernels(GPT, share, software, 1024), cluster, software))
    table = sum_of(kernel_times(table_kernels(GPT, share, software), cluster, software))
    stages = [float(busy / 32 - head) / turns] * layout.stages  # the slowest process has the head
    stages[-1] += float(head)
    stages[0] += float(table) * (turns == 1)
    events = simulate(layout, 32, [time / 3 for time in stages], [2 * time / 3 for time in stages])
    waited = max(event.end for event in events) - float(busy)
    assert float(parts["bubble"]) == pytest.approx(waited, rel=0.01)


@pytest.mark.parametrize(
    ("layers", "pipeline", "turns", "micro_batches"),
    [
        (126, 16, 7, 16),
        (126, 16, 4, 128),
        (126, 8, 2, 8),
        (62, 16, 3, 16),
        (62, 4, 8, 4),
        (97, 8, 4, 64),
        (30, 4, 4, 4),
    ],
)
def test_unequal_stages_that_interleave(layers: int, pipeline: int, turns: int, micro_batches: int) -> None:
    """Where layers do not divide, the closed form is within a tenth of the simulation of the lists that run: rounds
    wait for the fullest stage of each turn, which it does not see, or less than it thinks.
    """
    layout = Layout(pipeline=pipeline, schedule="interleaved-1f1b", stages_per_process=turns)
    stages = [len(layout.layers_of(stage, layers)) for stage in range(layout.stages)]
    events = simulate(layout, micro_batches, stages, [2 * layers for layers in stages])
    fullest = max(sum(stages[stage] for stage in layout.stages_of(rank)) for rank in range(pipeline))
    closed = 3 * (micro_batches * fullest + (layers - fullest) / turns)
    assert closed == pytest.approx(max(event.end for event in events), rel=0.1)
