"""The event simulation of a pipeline: equal to the closed form, on the lists that also run."""

import itertools
import random

import pytest
from throughline.planner.layout import Layout
from throughline.planner.schedule import bubble_fraction, closed_form, simulate


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
