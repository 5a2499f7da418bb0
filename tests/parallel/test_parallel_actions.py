"""The lists of pipeline work are those of torch's schedules that run, and can be worked off without waiting
in a circle.
"""

from unittest import mock

import pytest
from throughline.core.recipe import build_recipe
from throughline.planner.cost import step_time
from throughline.planner.hardware import find_cluster
from throughline.planner.layout import STAGES_PER_PROCESS, Layout
from throughline.planner.schedule import Action, pipeline_actions
from throughline.train.parallel.pipeline import SCHEDULES
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import described, layout_facts, model_config, resolve
from throughline.train.recipes.rules import RULES
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

CASES = [
    (Layout(pipeline=pipeline, schedule=schedule, stages_per_process=chunks), rounds * pipeline)
    for schedule in SCHEDULES
    for pipeline in (2, 3, 4, 8)
    for chunks in (
        (1,) if STAGES_PER_PROCESS[schedule][1] == 1 else (2,) if schedule == "zero-bubble-v" else (2, 3)
    )
    for rounds in (1, 2, 5)
]
CASES += [(Layout(pipeline=3, schedule="1f1b"), 7), (Layout(pipeline=4, schedule="gpipe"), 2)]
CASES += [(Layout(pipeline=4, schedule="interleaved-1f1b", stages_per_process=2), 10)]  # rounds of five
NAMES = [
    f"{layout.schedule}-{layout.pipeline}x{layout.stages_per_process}-{count}" for layout, count in CASES
]


def recorded(layout: Layout, micro_batches: int, rank: int) -> list[str]:
    """What torch's schedule of one stage a process does with a stage that only writes down what is asked of
    it.

    Its printed order will not do: torch 2.13 numbers the forwards of the last stage from 1.
    """
    order: list[str] = []
    stage = mock.create_autospec(PipelineStage, instance=True)
    stage.num_stages, stage.stage_index, stage.has_backward = layout.pipeline, rank, True
    for name in ("fwd_recv", "fwd_send", "bwd_recv", "bwd_send"):
        getattr(stage, f"get_{name}_ops").return_value = []
    stage.forward_one_chunk.side_effect = lambda i, *_, **__: order.append(f"{rank}F{i}")
    stage.backward_one_chunk.side_effect = lambda i, *_, **__: order.append(f"{rank}B{i}")
    schedule = getattr(pipelining, SCHEDULES[layout.schedule])(stage, micro_batches)
    with mock.patch.object(schedule, "_initialize_stage"):
        schedule._step_microbatches([()] * micro_batches, [{}] * micro_batches)
    return order


@pytest.mark.parametrize(("layout", "micro_batches"), CASES, ids=NAMES)
def test_equal_the_schedules_that_run(layout: Layout, micro_batches: int) -> None:
    if layout.stages_per_process == 1:
        theirs = [recorded(layout, micro_batches, rank) for rank in range(layout.pipeline)]
    else:
        printed = get_schedule_ops(
            getattr(pipelining, SCHEDULES[layout.schedule]),
            layout.pipeline,
            micro_batches,
            layout.stages_per_process,
        )
        theirs = [
            [str(action) for action in rank if action is not None and action.is_compute_op]
            for rank in printed
        ]
    assert [[str(action) for action in rank] for rank in pipeline_actions(layout, micro_batches)] == theirs


@pytest.mark.parametrize(("layout", "micro_batches"), CASES, ids=NAMES)
def test_can_be_worked_off(layout: Layout, micro_batches: int) -> None:
    """Every action once, each after what it needs, on processes that go through their lists in order."""
    lists = pipeline_actions(layout, micro_batches)
    done: set[Action] = set()
    last = layout.stages - 1

    def ready(action: Action) -> bool:
        stage, i = action.stage, action.micro_batch
        if action.kind == "F":
            return stage == 0 or Action(stage - 1, "F", i) in done
        if action.kind == "W":
            return Action(stage, "I", i) in done
        return Action(stage, "F", i) in done and (stage == last or Action(stage + 1, action.kind, i) in done)

    waiting = [list(reversed(rank)) for rank in lists]
    moved = True
    while moved:
        moved = False
        for rank in waiting:
            while rank and ready(rank[-1]):
                done.add(rank.pop())
                moved = True
    assert not any(waiting)
    kinds = "FIW" if "zero-bubble" in layout.schedule else "FB"
    assert len(done) == sum(map(len, lists)) == layout.stages * micro_batches * len(kinds)


def test_1f1b_keeps_as_many_as_there_are_stages_from_here_on() -> None:
    for rank, actions in enumerate(pipeline_actions(Layout(pipeline=4), 12)):
        flying = [0]
        for action in actions:
            flying.append(flying[-1] + (1 if action.kind == "F" else -1))
        assert max(flying) == 4 - rank


def test_the_layout_prints_them() -> None:
    train = {"steps": 1, "sequence_length": 32, "batch_rows": 32, "micro_batch_rows": 1}
    tree = {
        "data": {"train": "tokens"},
        "model": {"preset": "gpt-toy"},
        "train": train,
        "parallel": {"pipeline": 2},
    }
    recipe = resolve(build_recipe(tree, Recipe, RULES))
    facts, lines = layout_facts(recipe, model_config(recipe))
    assert facts["actions"] == [
        [str(action) for action in rank] for rank in pipeline_actions(Layout(pipeline=2), 32)
    ]
    assert any(
        line.startswith("0: 0F0 0F1 0B0 0F2 ") and " ... " in line and line.endswith(" 0B30 0B31")
        for line in lines
    )


def test_zero_bubble_is_priced_by_its_own_lists_and_without_a_compiler() -> None:
    """Against interleaved 1F1B of as many stages: less waiting, and more memory-bound kernels."""

    def parts(schedule: str, compiled: str = "auto") -> dict[str, float]:
        tree = {
            "data": {"train": "tokens"},
            "model": {"preset": "gpt3-1.3b"},
            "train": {"steps": 1, "sequence_length": 1024, "batch_rows": 16, "micro_batch_rows": 1},
            "parallel": {"pipeline": 4, "schedule": schedule, "stages_per_process": 2},
        }
        tree["train"] |= {"compile": compiled}
        recipe = resolve(build_recipe(tree, Recipe, RULES))
        work, layouts, software = described(model_config(recipe), recipe)
        return step_time(work, layouts, find_cluster("dgx-a100-80gb"), software)

    plain, split = parts("interleaved-1f1b"), parts("zero-bubble-v")
    assert split["bubble"] < 0.7 * plain["bubble"]
    assert split["memory-bound kernels"] > 1.2 * plain["memory-bound kernels"]
    assert split["matrix products"] == pytest.approx(plain["matrix products"])
    assert parts("interleaved-1f1b", "off")["memory-bound kernels"] == pytest.approx(
        split["memory-bound kernels"]
    )
