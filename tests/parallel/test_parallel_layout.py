"""Degrees are checked together: every refusal names its field, and the nearest layouts are legal and near."""

import dataclasses
import json
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from throughline.core.errors import WrongUse
from throughline.core.recipe import build_recipe, dump_toml, load_recipe
from throughline.models.config import BERTConfig, GPTConfig
from throughline.planner.layout import (
    AXES,
    Layout,
    default_micro_rows,
    divisors,
    layout_problems,
    nearest_layouts,
    set_options,
    wrong_world,
)
from throughline.planner.tables import (
    Coordinates,
    bucket_slices,
    even_part,
    parameter_shapes,
    shard_specs,
    sharded_part,
)
from throughline.train.parallel.context import head_tail_order
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import resolve
from throughline.train.recipes.rules import RULES, can_be_had

GPT = GPTConfig(vocab_size=257, sequence_length=64, layers=8, width=64, heads=8)
BERT = BERTConfig(vocab_size=257, sequence_length=64, layers=8, width=64, heads=8, relative_buckets=8)
V = {"pipeline": 2, "schedule": "zero-bubble-v", "stages_per_process": 2}


@pytest.mark.parametrize(
    ("layout", "field", "words"),
    [
        (Layout(tensor=3), "tensor", "8 heads"),
        (Layout(data=5), "data", "whole number of micro-batches"),
        (Layout(context=3), "context", "2 x 3 equal parts"),
        (Layout(data=0), "data", "at least 1"),
        (Layout(data=4, replicas=2), "replicas", "whole copy already"),
        (Layout(data=4, replicas=4, sharding="full"), "replicas", "proper divisor"),
        (Layout(pipeline=16), "pipeline", "cannot fill 16 stages"),
        (Layout(pipeline=2, layers_per_stage=(3, 4)), "layers_per_stage", "with 7 layers"),
        (Layout(pipeline=2, stages_per_process=2), "stages_per_process", "1f1b needs 1"),
        (Layout(pipeline=2, schedule="interleaved-1f1b"), "stages_per_process", "at least 2"),
        (Layout(**V, sharding="full", data=2), "sharding", "split backward"),
        (Layout(pipeline=8), "train.micro_batch_rows", "4 micro-batches for 8 stages"),
        (Layout(stages_per_process=2), "pipeline", "one pipeline process"),
        (Layout(pipeline=2, layers_per_stage=(0, 8)), "layers_per_stage", "a stage of 0 layers"),
        # no micro-batch is small enough
        (Layout(pipeline=8, data=4), "pipeline", "train.batch_rows of at least 32"),
        # the batch may not change from start to start
        (Layout(data=8), "data", "train.micro_batch_rows = 2"),
        # it would train seven of eight layers
        (Layout(tensor=2, layers_per_stage=(7,)), "pipeline", "one pipeline process"),
    ],
)
def test_each_problem_names_the_field(layout: Layout, field: str, words: str) -> None:
    found = layout_problems(layout, GPT, 64, 16, 4)
    assert any(problem.field == field and words in problem.text + problem.fix for problem in found), found


def test_a_bias_shared_by_all_layers_is_not_spread() -> None:
    for layout in (Layout(pipeline=2), Layout(context=2)):
        assert any("relative" in problem.text for problem in layout_problems(layout, BERT, 64, 16, 4))
    assert not layout_problems(Layout(tensor=2), BERT, 64, 16, 4)


def test_another_world_is_refused_with_the_nearest_legal_layouts() -> None:
    wanted = Layout(tensor=4, data=2, sharding="full")
    error = wrong_world(wanted, 4, GPT, 64, 16, 2)
    assert error.why == "pipeline 1 x data 2 x context 1 x tensor 4 = 8"
    near = nearest_layouts(wanted, 4, GPT, 64, 16, 2)
    assert {(found.tensor, found.data) for found in near[:2]} == {(2, 2), (4, 1)}
    for found in near:
        assert found.world == 4
        assert not layout_problems(found, GPT, 64, 16, 2)
        assert found.product() in error.fix


def test_degrees_that_do_not_fit_are_shown_together_with_the_nearest_that_do() -> None:
    train = {"steps": 10, "sequence_length": 64, "batch_rows": 16}
    model = {"overrides": {"layers": 8, "width": 64, "heads": 8}}
    tree = {"data": {"train": "tokens"}, "model": model, "train": train, "parallel": {"tensor": 16}}
    with pytest.raises(WrongUse) as caught:
        build_recipe(tree, Recipe, RULES)
    assert "8 heads cannot be shared by 16 processes" in caught.value.why
    assert "pipeline 1 x data 1 x context 1 x tensor 16 = 16" in caught.value.why
    assert "--set parallel.data=2 --set parallel.tensor=8" in caught.value.why
    assert len(divisors(10**9)) == 100  # a slip of the finger is answered at once


@pytest.mark.parametrize(
    ("sections", "world", "nearest"),
    [
        (
            {"optimizer": {"name": "muon"}, "train": {"offload": True}},
            4,
            [{"data": 4}, {"data": 2, "context": 2}, {"context": 4}],
        ),
        ({"train": {"offload": True}}, 2, [{"data": 2}, {"context": 2}, {"tensor": 2}]),
        ({"compression": {"scheme": "one-bit-adam"}, "parallel": {"data": 2}}, 4, [{"data": 4}]),
        ({"parallel": {"pipeline": 2, "layers_per_stage": [1, 7]}}, 1, [{}]),
    ],
    ids=["muon", "offload", "one-bit-adam", "one process"],
)
def test_the_nearest_layouts_can_be_had_with_the_rest_of_the_recipe(
    sections: dict, world: int, nearest: list[dict], tmp_path: Path
) -> None:
    """Muon with offload needs whole matrices, offload no pipeline, 1-bit Adam data processes alone: no layout is named
    that is refused next.
    """
    train = {"steps": 10, "sequence_length": 64, "batch_rows": 16} | sections.get("train", {})
    model = {"overrides": {"layers": 8, "width": 64, "heads": 8, "vocab_size": 257}}
    given = build_recipe(
        {"data": {"train": "tokens"}, "model": model} | sections | {"train": train}, Recipe, RULES
    )
    recipe = resolve(given)
    (tmp_path / "recipe.toml").write_text(dump_toml(given))
    layout, rows = recipe.parallel.layout(), (recipe.train.rows_per_step, recipe.train.rows_per_micro_batch)
    near = nearest_layouts(layout, world, GPT, 64, *rows, partial(can_be_had, recipe))
    assert [
        {axis: getattr(found, axis) for axis in AXES if getattr(found, axis) > 1} for found in near
    ] == nearest
    for found in near:
        options = shlex.split(set_options(layout, found))
        assert options[::2] == ["--set"] * (len(options) // 2)
        assert load_recipe(tmp_path / "recipe.toml", Recipe, options[1::2], RULES).parallel.layout() == found
    error = wrong_world(layout, world, GPT, 64, *rows, partial(can_be_had, recipe))
    assert all(found.product() in error.fix for found in near)


def test_the_nearest_layout_of_a_plain_recipe_is_data_parallel() -> None:
    """One process computes all 16 rows at once unless told otherwise; two would compute 8 each."""
    assert nearest_layouts(Layout(), 2, GPT, 64, 16, default_micro_rows(Layout(), 16))[0] == Layout(data=2)


def test_facts_are_what_a_checkpoint_gives_back() -> None:
    """Else every start of an uneven pipeline would say that its layout has changed."""
    layout = Layout(pipeline=2, layers_per_stage=(1, 7))
    assert json.loads(json.dumps(layout.facts())) == layout.facts()


def test_stages_hold_every_layer_once() -> None:
    for layout in (
        Layout(pipeline=4),
        Layout(pipeline=3),
        Layout(**V),
        Layout(pipeline=2, schedule="interleaved-1f1b", stages_per_process=3),
        Layout(pipeline=2, layers_per_stage=(1, 7)),
    ):
        stages = sorted(stage for rank in range(layout.pipeline) for stage in layout.stages_of(rank))
        assert stages == list(range(layout.stages))
        assert [layer for stage in stages for layer in layout.layers_of(stage, 8)] == list(range(8))
    assert Layout(**V).stages_of(0) == [0, 3]


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=4),
        Layout(data=3, sharding="full"),
        Layout(pipeline=4, tensor=2),
        Layout(**V, tensor=2, data=2, sharding="zero1"),
        Layout(data=4, replicas=2, sharding="zero2", context=2),
    ],
    ids=Layout.describe,
)
def test_primary_pieces_are_the_model_once(layout: Layout) -> None:
    """Every element of every parameter is in exactly one primary spec: in the norm once, in a checkpoint
    once.
    """
    for config in (GPT, dataclasses.replace(BERT, relative_buckets=0)):
        counted = dict.fromkeys(parameter_shapes(config), 0)
        for pipeline in range(layout.pipeline):
            for tensor in range(layout.tensor):
                for shard in range(layout.shards):
                    for spec in shard_specs(config, layout, Coordinates(pipeline, tensor, 0, shard)):
                        counted[spec.name] += spec.box.numel if spec.primary else 0
        assert sum(counted.values()) == config.parameter_count()
        assert not any(spec.primary for spec in shard_specs(config, layout, Coordinates(0, 0, 1, 0)))


def test_parts_cover_a_length_without_overlap() -> None:
    for cut in (even_part, sharded_part):
        for length in (1, 5, 8, 257):
            for parts in (1, 2, 3, 8):
                ranges = [cut(length, parts, index) for index in range(parts)]
                assert [i for start, size in ranges for i in range(start, start + size)] == list(
                    range(length)
                )
    assert min(even_part(5, 5, index)[1] for index in range(5)) == 1


def test_head_and_tail_balance_the_triangle() -> None:
    order = head_tail_order(16, 4).reshape(4, -1)
    assert order[0].tolist() == [0, 1, 14, 15]
    assert {row.sum() for row in order} == {30}  # keys seen by causal queries


def test_buckets_keep_order_and_limit() -> None:
    sizes = [3, 4, 5, 20, 1, 1]
    slices = bucket_slices(sizes, 8)
    assert [size for spec in slices for size in sizes[spec]] == sizes
    assert all(sum(sizes[spec]) <= 8 or len(sizes[spec]) == 1 for spec in slices)
    assert bucket_slices([]) == []


def test_micro_batches_fill_a_pipeline() -> None:
    assert default_micro_rows(Layout(data=2), 16) == 8
    assert default_micro_rows(Layout(pipeline=2), 16) == 2
    assert default_micro_rows(Layout(pipeline=4), 8) == 1


def test_a_layout_is_checked_without_torch() -> None:
    modules = "throughline.train.recipes.recipe, throughline.planner.layout"
    code = f"import sys; sys.modules['torch'] = None; import {modules}"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("schedule", ["zero-bubble-v", "interleaved-zero-bubble"])
@pytest.mark.parametrize(
    ("depths", "tied", "runs"),
    [(0, True, True), (1, False, True), (1, True, False), (2, False, False), (2, True, False)],
)
def test_further_tokens_that_the_split_backward_cannot_do_are_refused(
    schedule: str, depths: int, tied: bool, runs: bool
) -> None:
    """The token table is used more than once on the last stage; depth 1 of an untied model is proven
    (tests/layouts.toml). Other schedules do all of them.
    """
    config = dataclasses.replace(GPT, predict_ahead=depths, tied=tied)
    layout = Layout(pipeline=2, schedule=schedule, stages_per_process=2)
    problems = [found for found in layout_problems(layout, config, 64, 16, 2) if found.field == "schedule"]
    assert not problems if runs else "token table more than once" in problems[0].text
    assert not layout_problems(Layout(pipeline=2), config, 64, 16, 2)
