"""Experts in layouts: shared by data processes they train as one process does, and planted bugs are caught."""

from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from throughline.benchmarks import prove_layouts  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import warm  # noqa: E402
from throughline.prove.proof import BOUNDS, Case, Prover  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402


@pytest.fixture(scope="module")
def prover() -> Prover:
    warm()
    return Prover()


def test_shared_experts_equal_one_process(prover: Prover) -> None:
    """One row of the table, with tensor processes beside them."""
    (case,) = (case for case in prove_layouts.read_table() if case.name == "experts-shared-data-2-tensor-2")
    assert not prover.prove(replace(case, steps=3)).beyond(case.bounds)


EXPERTS = {
    "norm": "rmsnorm",
    "bias": False,
    "gated": True,
    "experts": 6,
    "expert_width": 40,
    "shared_experts": 1,
}
EXPERTS |= {"balance_loss": 0.5, "balance_bias": True, "balance_rate": 0.02}


def forgotten_shared_expert(engine: Engine) -> None:
    """A layer answers with the experts that were chosen alone."""
    engine.stages[0].model.blocks["1"].mlp.shared = None


def own_load(engine: Engine) -> None:
    """The balance bias follows the tokens of this process: the processes' models drift apart."""
    routers, counted = engine.routers, engine.routers.figures

    def figures(totals: torch.Tensor, inverse_count: torch.Tensor) -> torch.Tensor:
        found = counted(totals, inverse_count)
        routers.loads_LE = here.pop()
        return found

    here: list[torch.Tensor] = []
    totals = engine._totals

    def before(*given: object) -> torch.Tensor:
        here.append(routers.totals.clone().view(len(routers.layers), -1)[:, 4:])
        return totals(*given)

    engine._totals, routers.figures = before, figures


def load_of_a_part(engine: Engine) -> None:
    """The balance loss takes the part of a row that a process has for all of it."""
    import throughline.train.stage as routers

    routers.reduced = lambda x, axis: x


def wrong_split(engine: Engine) -> None:
    """The rows are divided among processes as if each expert had those of the next."""
    for block in engine.stages[0].model.blocks.values():
        experts = block.mlp.experts
        experts.forward = lambda x, counts, forward=experts.forward: forward(x, counts.roll(1))


def answers_to_others(engine: Engine) -> None:
    """Answers come back in the order in which they were computed, by expert and not by process."""
    from throughline.train.parallel import data

    transposed = data._transposed
    data._transposed = lambda x, counts: transposed(x, counts) if counts.is_contiguous() else x


def experts_summed_with_the_rest(engine: Engine) -> None:
    """Gradients of experts are summed over all data processes, which hold different ones."""
    for buffer in engine.buffers:
        buffer.axis = engine.mesh.gradient


def experts_left_out_of_the_norm(engine: Engine) -> None:
    """The norm counts the experts of the first process alone."""
    for local in engine.local_shards:
        if ".mlp.experts." in local.name and engine.mesh.expert.rank:
            local.spec = replace(local.spec, primary=False)


PLANTED_IN_EXPERTS = {
    wrong_split: (Layout(data=2, expert=2), "loss"),
    answers_to_others: (Layout(data=2, expert=2), "loss"),
    experts_summed_with_the_rest: (Layout(data=2, expert=2), "gradient"),
    experts_left_out_of_the_norm: (Layout(data=2, expert=2, sharding="zero1"), "norm"),
    forgotten_shared_expert: (Layout(data=2, expert=2), "loss"),
    own_load: (Layout(data=2), "parameter"),
    load_of_a_part: (Layout(tensor=2), "gradient"),
}


@pytest.mark.parametrize("plant", PLANTED_IN_EXPERTS, ids=lambda plant: plant.__name__)
def test_planted_bug_of_experts_is_caught(plant: Callable[[Engine], None], prover: Prover) -> None:
    layout, witness = PLANTED_IN_EXPERTS[plant]
    errors = prover.prove(Case(plant.__name__, layout, steps=2, model=EXPERTS), plant)
    assert getattr(errors, witness) > 1e5 * BOUNDS["fp64"][witness], errors


def room_for_all(engine: Engine) -> None:
    """A process drops none of its tokens."""
    for block in engine.stages[0].model.blocks.values():
        block.mlp.config = replace(block.mlp.config, expert_capacity_factor=0.0)


def test_processes_drop_what_one_process_drops(prover: Prover) -> None:
    """Of the same micro-batches; with room for all their losses are others, so some are dropped."""
    (case,) = (one for one in prove_layouts.read_table() if one.name == "experts-dropping-shared-data-2-full")
    case = replace(case, steps=2)
    assert not prover.prove(case).beyond(case.bounds)
    assert prover.prove(case, room_for_all).loss > 1e5 * BOUNDS["fp64"]["loss"]
