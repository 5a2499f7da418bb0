"""A batch that grows: the sizes of the published run, the rows in the order of a fixed batch, the same run after
a resume and in a pipeline.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from throughline.core.errors import WrongUse
from throughline.core.recipe import build_recipe, load_recipe
from throughline.data.dataset import Loader
from throughline.prove.forked import run_ranks, warm
from throughline.train.build import RunPlan, plan_run
from throughline.train.checkpoints.checkpoint import load_model
from throughline.train.logs.metrics import read_metrics
from throughline.train.loop import train
from throughline.train.optimizers.build import learning_rate_factor
from throughline.train.recipes.recipe import BatchRampSection, Recipe, TrainSection
from throughline.train.recipes.resolved import resolve
from throughline.train.recipes.rules import RULES

RAMP = {"start_rows": 2, "step_rows": 2, "over_rows": 17}  # 2, 4, 6 and then 8 rows


def published_rows(consumed: int, start: int, increment: int, over: int, whole: int) -> int:
    """Megatron-LM's rule for --rampup-batch-size, as its documentation has it."""
    if consumed > over:
        return whole
    each = over / ((whole - start) / increment)
    return min(start + int(consumed / each) * increment, whole)


def test_the_sizes_are_those_of_the_530b_run() -> None:
    """32 to 1,920 rows by 32 over 12 G tokens: every size of 60, and what a step begins at by adding them up."""
    recipe = load_recipe("gpt-530b", Recipe, (), RULES)
    section, position, step, seen = recipe.train, 0, 0, set()
    while position < 6_000_000:
        rows = section.rows_at(position)
        assert rows == published_rows(position, 32, 32, 5_859_375, 1920), position
        if step % 97 == 0:
            assert section.rows_before(step) == position
        seen.add(rows)
        position, step = position + rows, step + 1
    assert seen == set(range(32, 1921, 32))
    assert section.rows_before(section.steps) * 2048 == pytest.approx(270e9, rel=1e-3)


def test_steps_of_any_ramp_add_up() -> None:
    """Sizes that are passed over in one step, and ends that no step meets."""
    for start, add, over, whole in ((1, 1, 3, 9), (2, 3, 40, 14), (8, 8, 1, 16), (5, 5, 1000, 20)):
        ramp = BatchRampSection(start_rows=start, step_rows=add, over_rows=over)
        section = TrainSection(steps=1, sequence_length=8, batch_rows=whole, batch_ramp=ramp)
        position = 0
        for step in range(200):
            assert section.rows_before(step) == position
            position += section.rows_at(position)


def test_rows_are_read_in_the_order_of_a_fixed_batch() -> None:
    """Whatever the sizes, the processes together read every row once and in order."""

    class Numbers:
        def batch(self, position: int, count: int) -> list[int]:
            return list(range(position, position + count))

    section = TrainSection(
        steps=9, sequence_length=8, batch_rows=8, batch_ramp=BatchRampSection.model_validate(RAMP)
    )
    for workers in (0, 2):
        loaders = [
            Loader(Numbers(), lambda at: section.rows_at(at) // 2, rank=rank, world=2, workers=workers)
            for rank in range(2)
        ]
        steps = [[row for loader in loaders for row in next(loader)] for _ in range(9)]
        assert [len(step) for step in steps][:5] == [2, 2, 2, 4, 4] and len(steps[-1]) == 8
        assert [row for step in steps for row in step] == list(range(section.rows_before(9)))
        for loader in loaders:
            loader.close()


def test_the_rate_is_a_function_of_the_rows_read(make_recipe: Callable[..., Recipe]) -> None:
    """Where as many rows have been read, a growing batch has the rate of a fixed one."""
    schedule = {"kind": "cosine", "warmup_steps": 4}
    fixed = make_recipe("gpt", train={"steps": 20, "batch_rows": 8}, schedule=schedule)
    ramp = {"start_rows": 4, "step_rows": 4, "over_rows": 16}  # four steps of 4 rows: two of 8
    grown = make_recipe("gpt", train={"steps": 22, "batch_rows": 8, "batch_ramp": ramp}, schedule=schedule)
    assert grown.train.rows_before(4) == fixed.train.rows_before(2)
    assert learning_rate_factor(0, grown) == pytest.approx(0.5 / 4)
    for step in range(4, 22):
        assert learning_rate_factor(step, grown) == learning_rate_factor(step - 2, fixed)
    ramp = {"start_rows": 6, "step_rows": 2, "over_rows": 6}  # the step that ends the warm-up goes beyond it
    beyond = make_recipe("gpt", train={"steps": 22, "batch_rows": 8, "batch_ramp": ramp}, schedule=schedule)
    assert max(learning_rate_factor(step, beyond) for step in range(22)) == 1.0


def test_a_resume_changes_no_bit_and_the_log_has_the_sizes(
    make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    plan = make_plan("gpt", train={"steps": 9, "batch_rows": 8, "batch_ramp": RAMP, "micro_batch_rows": 2})
    half = make_plan("gpt", train={"steps": 4, "batch_rows": 8, "batch_ramp": RAMP, "micro_batch_rows": 2})
    constant = {"kind": "constant"}
    plan, half = (
        plan_run(p.recipe.model_copy(update={"schedule": p.recipe.schedule.model_copy(update=constant)}))
        for p in (plan, half)
    )
    train(plan, tmp_path / "whole")
    train(half, tmp_path / "parts")
    train(plan, tmp_path / "parts")
    runs = [read_metrics(tmp_path / name) for name in ("whole", "parts")]
    figures = [[(record["tokens"], record["loss"]) for record in run] for run in runs]
    assert figures[0] == figures[1]
    length = plan.recipe.train.sequence_length
    assert [tokens // length for tokens, _ in figures[0]] == [2, 2, 2, 4, 4, 6, 8, 8, 8]
    one, other = (load_model(tmp_path / name)[0].state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert plan.recipe.train.tokens == 44 * length


def test_a_pipeline_with_fewer_micro_batches_than_stages_trains_the_same(
    make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    """1F1B of two stages begins with one micro-batch and comes to four."""
    warm()
    section = {
        "steps": 6,
        "batch_rows": 4,
        "batch_ramp": {"start_rows": 1, "step_rows": 1, "over_rows": 8},
        "micro_batch_rows": 1,
        "precision": "fp64",
    }
    alone = make_plan("gpt", train=section)
    train(alone, tmp_path / "alone")
    recipe = alone.recipe.model_copy(
        update={"parallel": alone.recipe.parallel.model_copy(update={"pipeline": 2})}
    )

    def work() -> None:
        torch.set_num_threads(1)
        train(plan_run(recipe), tmp_path / "pipeline")

    run_ranks(2, work)
    one, other = (
        [record["loss"] for record in read_metrics(tmp_path / name)] for name in ("alone", "pipeline")
    )
    assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize(
    ("ramp", "more", "where"),
    [
        ({"start_rows": 2, "step_rows": 4, "over_rows": 9}, {}, "train.batch_ramp.step_rows"),
        ({"start_rows": 2, "step_rows": 2, "over_rows": 9}, {"data": 4}, "train.batch_ramp.start_rows"),
        (
            {"start_rows": 2, "step_rows": 2, "over_rows": 9},
            {"pipeline": 2, "schedule": "interleaved-1f1b", "stages_per_process": 2},
            "train.batch_ramp.start_rows",
        ),
    ],
)
def test_sizes_that_cannot_be_had_are_refused(ramp: dict[str, int], more: dict, where: str) -> None:
    tree = {
        "data": {"train": "tokens"},
        "model": {"overrides": {"layers": 4, "width": 32, "heads": 4, "vocab_size": 64}},
        "train": {
            "steps": 9,
            "sequence_length": 32,
            "batch_rows": 8,
            "micro_batch_rows": 1,
            "batch_ramp": ramp,
        },
        "parallel": more,
    }
    with pytest.raises(WrongUse) as caught:
        resolve(build_recipe(tree, Recipe, RULES))
    assert where in str(caught.value)
