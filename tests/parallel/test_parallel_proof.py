"""Layouts train the same model as the single process, in float64 to rounding; and the proof can fail.

`make prove-layouts` runs the whole table; here is a grid that touches every axis, schedule and sharding, for
three steps, and bugs planted one at a time, each of which must be caught.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from throughline.benchmarks import prove_layouts  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.prove.proof import BOUNDS, Case, Prover, make_trainer, own_rows  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.parallel.mesh import make_mesh, start_group  # noqa: E402
from throughline.train.step import train_step  # noqa: E402

# every axis, every schedule and every sharding at least once, with both families
GRID = (
    "bert-tensor-2",
    "bert-tensor-2-relative",
    "data-2-zero1",
    "pipeline-2-gpipe-data-2",
    "bert-pipeline-2-1f1b-tensor-2",
    "pipeline-2-zero-bubble-v-data-2-zero2",
    "bert-pipeline-2-interleaved",
    "pipeline-2-interleaved-zero-bubble-tensor-2",
    "data-2-full-context-2-documents",
    "muon-data-2-full-tensor-2",
    "muon-data-2-zero1-ema",
)


@pytest.fixture(scope="module")
def prover() -> Prover:
    warm()
    return Prover()


@pytest.fixture(scope="module")
def table() -> dict[str, Case]:
    return {case.name: case for case in prove_layouts.read_table()}


def test_table_covers_what_is_promised(table: dict[str, Case]) -> None:
    layouts = [case.layout for case in table.values()]
    assert len(table) >= 60
    for schedule in ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble-v", "interleaved-zero-bubble"):
        assert sum(layout.schedule == schedule and layout.pipeline > 1 for layout in layouts) >= 3, schedule
    axes = ("pipeline", "data", "context", "tensor")
    used = {tuple(axis for axis in axes if getattr(layout, axis) > 1) for layout in layouts}
    for count in (1, 2, 3, 4):
        assert set(combinations(axes, count)) <= used
    for sharding in ("zero1", "zero2", "full"):
        assert any(layout.sharding == sharding for layout in layouts)
    assert any(layout.replicas > 1 for layout in layouts)
    large = [
        case
        for case in table.values()
        if case.layout.world == 32 and case.layout.pipeline == case.layout.tensor == 4
    ]
    assert {(case.family, case.precision) for case in large} == {
        ("gpt", "fp64"),
        ("bert", "fp64"),
        ("gpt", "fp32"),
    }
    single = [case for case in table.values() if case.precision == "fp32"]
    assert {(axis,) for axis in axes} <= {
        tuple(axis for axis in axes if getattr(case.layout, axis) > 1) for case in single
    }
    assert {case.precision for case in table.values()} == {"fp32", "fp64", "bf16", "fp16"}
    families = ("gpt", "bert")
    schedules = {case.layout.schedule for case in table.values() if case.layout.pipeline > 1}
    halved = [case for case in table.values() if case.precision in ("bf16", "fp16")]
    assert len(halved) >= 60
    assert {(case.family, case.layout.schedule) for case in halved if case.layout.pipeline > 1} == {
        (family, schedule) for family in families for schedule in schedules
    }
    for precision in ("bf16", "fp16"):
        assert {case.bounds for case in table.values() if case.precision == precision} == {
            f"{precision} {kind}" for kind in ("copies", "shards", "cuts")
        }


def test_a_proof_of_nothing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["prove_layouts.py", "--only", "no such row"])
    with pytest.raises(SystemExit) as caught:
        prove_layouts.main()
    assert caught.value.code == 2


@pytest.mark.parametrize("name", GRID)
def test_layout_equals_single_process(name: str, prover: Prover, table: dict[str, Case]) -> None:
    errors = prover.prove(replace(table[name], steps=3))
    assert not errors.beyond("fp64"), errors


def norms_unreduced(engine: Engine) -> None:
    engine.partial = [local for local in engine.partial if "norm" not in local.name]


def one_bias_unreduced(engine: Engine) -> None:
    engine.partial = [local for local in engine.partial if local.name != "blocks.1.mlp_norm.bias"]


def tie_not_summed(engine: Engine) -> None:
    engine._sum_table = lambda: None


def mean_of_micro_batches(engine: Engine) -> None:
    for stage in engine.stages:
        original = stage.forward

        def forward(x: Any, stage: Any = stage, original: Callable = original) -> Any:
            targets = stage.micro_batches[stage.at]["targets"]
            stage.inverse_counts = (1.0 / (targets != -100).sum() / len(stage.micro_batches)).view(1)
            return original(x)

        stage.forward = forward


def mean_of_processes(engine: Engine) -> None:
    accumulate, size = engine.accumulate, engine.mesh.gradient.size

    def wrong(batch: Any, *rest: Any) -> Any:
        batch.agreed = torch.tensor([1.0 / count / size for count in batch.counts], dtype=engine.dtype)
        return accumulate(batch, *rest)

    engine.accumulate = wrong


def wrong_positions(engine: Engine) -> None:
    table = engine.stages[0].model.position_table
    table.axis = replace(table.axis, rank=0)


def norm_of_one_stage(engine: Engine) -> None:
    engine.mesh = replace(engine.mesh, world=engine.mesh.tensor)


def scaled_by_data_ranks(engine: Engine) -> None:
    finish = engine.finish_gradients

    def scaled() -> None:
        finish()
        torch._foreach_mul_(engine.gradients(), float(engine.mesh.data.size))

    engine.finish_gradients = scaled


def stale_shard(engine: Engine) -> None:
    """The optimizer moves a copy of the shard that the next gathering does not read."""
    for local in engine.local_shards:
        local.value = torch.nn.Parameter(local.value.detach().clone())
    engine.publish = lambda: None


def causal_by_place(engine: Engine) -> None:
    """The rows are cut in their own order, which attention takes for the head-tail order."""
    import throughline.train.parallel.context as context

    context.head_tail_order = lambda length, parts: context.np.arange(length)


def parts_of_a_row_weigh_alike(engine: Engine) -> None:
    """Results over parts of the keys are added up without their shares of the exponentials."""
    import throughline.train.parallel.context as context

    def merge(out: torch.Tensor, lse: torch.Tensor, part: torch.Tensor, part_lse: torch.Tensor) -> None:
        out.add_(part)
        lse.copy_(torch.logaddexp(lse, part_lse))

    context._merge = merge


def bias_added_by_everyone(engine: Engine) -> None:
    """The bias of a row-cut matrix enters the sum once for each process."""
    block = engine.stages[0].model.blocks["0"].mlp.down
    block.forward = lambda x, forward=block.forward: forward(x) + block.bias


PLANTED = {
    norms_unreduced: (Layout(tensor=2), "gradient"),
    one_bias_unreduced: (Layout(tensor=2), "gradient"),
    wrong_positions: (Layout(tensor=2), "loss"),
    bias_added_by_everyone: (Layout(tensor=2), "loss"),
    tie_not_summed: (Layout(pipeline=2), "gradient"),
    mean_of_micro_batches: (Layout(pipeline=2), "loss"),
    norm_of_one_stage: (Layout(pipeline=2), "norm"),
    mean_of_processes: (Layout(data=2), "gradient"),
    scaled_by_data_ranks: (Layout(data=2, sharding="zero1"), "norm"),
    stale_shard: (Layout(data=2, sharding="full"), "loss"),
    causal_by_place: (Layout(context=2), "loss"),
    parts_of_a_row_weigh_alike: (Layout(context=2), "loss"),
}


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_bug_is_caught(plant: Callable[[Engine], None], prover: Prover) -> None:
    layout, witness = PLANTED[plant]
    errors = prover.prove(Case(plant.__name__, layout, steps=2), plant)
    # what it does to its witness stands far above the bound, which is itself far above rounding
    assert getattr(errors, witness) > 1e5 * BOUNDS["fp64"][witness], errors


def no_update(engine: Engine) -> None:
    """The masters stay where they are."""
    engine.update = lambda optimizer, factor: engine.discard()


def stale_copy(engine: Engine) -> None:
    """The masters move and the 16-bit weights do not follow."""
    engine.publish = lambda: None


def reduced_in_16_bits(engine: Engine) -> None:
    (buffer,) = engine.buffers
    finish = buffer.finish

    def rounded() -> None:
        buffer.flat.copy_(buffer.flat.bfloat16())
        finish()

    buffer.expect = lambda passes: None  # no sum begins before
    buffer.finish = rounded


def one_bucket_left_out(engine: Engine) -> None:
    (buffer,) = engine.buffers
    flat = buffer.flat
    buffer.expect = lambda passes: None
    buffer.finish = lambda: engine.mesh.gradient.all_reduce(flat[: len(flat) // 2])


PLANTED_IN_16_BITS = {
    no_update: "parameter",
    stale_copy: "loss",
    reduced_in_16_bits: "gradient",
    one_bucket_left_out: "gradient",
}


@pytest.mark.parametrize("plant", PLANTED_IN_16_BITS, ids=lambda plant: plant.__name__)
def test_a_bug_of_16_bits_is_caught(plant: Callable[[Engine], None], prover: Prover) -> None:
    """And the same case without it is not."""
    case = Case("16 bits", Layout(data=2), precision="bf16", steps=4)
    witness = PLANTED_IN_16_BITS[plant]
    assert not prover.prove(case).beyond(case.bounds)
    errors = prover.prove(case, plant)
    assert getattr(errors, witness) > 2 * BOUNDS[case.bounds][witness], errors


@pytest.mark.parametrize("name", ["bf16-data-2-full", "fp16-bert-pipeline-2-1f1b"])
def test_layout_equals_single_process_in_16_bits(name: str, prover: Prover, table: dict[str, Case]) -> None:
    case = replace(table[name], steps=3)
    errors = prover.prove(case)
    assert not errors.beyond(case.bounds), errors


def test_a_nan_breaks_every_bound_it_touches(prover: Prover) -> None:
    """One gradient of the first process has a NaN in the first step: the step is skipped, and what follows is
    finite again.
    """

    def plant(engine: Engine) -> None:
        finish, steps = engine.finish_gradients, iter((True, False))

        def spoilt() -> None:
            finish()
            if next(steps) and engine.mesh.rank == 0:
                engine.local_shards[2].value.grad.view(-1)[0] = float("nan")

        engine.finish_gradients = spoilt

    errors = prover.prove(Case("nan", Layout(data=2), steps=2), plant)
    assert {"norm", "gradient"} <= set(errors.beyond("fp64")), errors
    assert math.isnan(errors.norm) and math.isnan(errors.gradient) and errors.worst


def test_failing_rank_is_named(prover: Prover) -> None:
    def fail(engine: Engine) -> None:
        if engine.mesh.rank == 1:
            raise ValueError("planted")

    with pytest.raises(RuntimeError, match=r"rank 1 of 2 failed:(.|\n)*planted"):
        prover.prove(Case("fail", Layout(data=2), steps=1), fail)


def test_a_number_that_is_not_finite_skips_the_step_everywhere(prover: Prover) -> None:
    """One weight of one rank overflows in the second step: all ranks skip that step, count it, and hold what
    they held.
    """

    def steps() -> list[tuple[bool, int, float]]:
        device = torch.device("cpu")
        start_group(device, 60)
        case = Case("skip", Layout(pipeline=2, tensor=2))
        engine = Engine(case.config, make_mesh(case.layout, device, 60), case.precision)
        engine.fill()
        trainer, seen = make_trainer(case, engine), []
        for step in range(3):
            bad = step == 1 and engine.mesh.rank == 3
            if bad:
                kept = engine.local_shards[0].value.detach().clone()
                engine.local_shards[0].value.data.fill_(float("inf"))
            result = train_step(trainer, own_rows(case, engine, step), 1.0)
            if bad:
                engine.local_shards[0].value.data.copy_(kept)
            seen.append(
                (
                    result.skipped,
                    trainer.skipped,
                    sum(p.detach().norm().item() for _, p in engine.named_parameters()),
                )
            )
        return seen

    for rank in run_ranks(4, steps):
        assert [(skipped, count) for skipped, count, _ in rank] == [(False, 0), (True, 1), (False, 1)]
        assert rank[0][2] != rank[2][2]
