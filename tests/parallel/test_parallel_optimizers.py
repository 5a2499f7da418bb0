"""LAMB and Adafactor move every layout's parts as the single process moves the whole, within the bounds of the
layout proofs, and their state goes on in another layout.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from throughline.planner.layout import Layout
from throughline.prove.forked import run_ranks, warm
from throughline.prove.proof import (
    SEED,
    Case,
    Prover,
    make_trainer,
    own_rows,
    reference,
    value_of,
)
from throughline.train.checkpoints.checkpoint import CheckpointWriter, restore
from throughline.train.engine import Engine
from throughline.train.parallel.ranks import Ranks
from throughline.train.step import train_step

LAYOUTS = {
    "tensor x zero1": Layout(tensor=2, data=2, sharding="zero1"),
    "tensor x full": Layout(tensor=2, data=2, sharding="full"),
    "pipeline x tensor": Layout(pipeline=2, tensor=2),
}
# 257 rows, which no layout cuts evenly, and a kv head that all tensor processes share
CASE = Case("optimizer", Layout(), "bert", steps=4, model={"vocab_size": 257, "kv_heads": 1})
# Without biases, as the giant BERT: a key's bias has a gradient of pure rounding, and Adafactor, unlike LAMB, has
# no epsilon of a size that would hold it still
CASES = {
    "lamb": replace(CASE, optimizer="lamb"),
    "adafactor": replace(CASE, optimizer="adafactor", model=CASE.model | {"bias": False}),
}


@pytest.fixture(scope="module")
def prover() -> Prover:
    warm()
    return Prover()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", CASES)
def test_a_layout_moves_as_the_single_process(optimizer: str, layout: str, prover: Prover) -> None:
    errors = prover.prove(replace(CASES[optimizer], layout=LAYOUTS[layout]))
    assert not errors.beyond("fp64"), errors


def test_query_key_and_value_have_ratios_of_their_own_in_a_layout(prover: Prover) -> None:
    """Shards cut the interleaved matrix in the middle of a head: 64 x 3 rows over 2 x 2 with heads of 16."""
    case = replace(CASES["lamb"], model={}, layout=LAYOUTS["tensor x zero1"])
    errors = prover.prove(case)
    assert not errors.beyond("fp64"), errors


def test_norms_of_parts_alone_are_caught(prover: Prover) -> None:
    """The proof can fail: ratios of the part that a process holds."""

    def plant(engine: Engine) -> None:
        for local in engine.local_shards:
            if local.name == "blocks.1.mlp.up.weight":
                local.spec = replace(local.spec, placement="same")

    case = replace(CASES["lamb"], layout=LAYOUTS["tensor x zero1"])
    assert "parameter" in prover.prove(case, plant).beyond("fp64")


def continue_from(case: Case, directory: Path, first: int, last: int) -> list[float]:
    ranks = Ranks.start(case.layout, torch.device("cpu"))
    engine = Engine(case.config, ranks.mesh, case.precision, SEED)
    shapes = {local.name: torch.Size(local.spec.shape) for local in engine.local_shards}
    engine.fill(lambda name, box: value_of(case, name, shapes[name])[box.slices()])
    trainer = make_trainer(case, engine)
    if first:
        restore(directory / f"step-{first:08d}", trainer)
    losses = [train_step(trainer, own_rows(case, engine, step), 1.0).loss for step in range(first, last)]
    writer = CheckpointWriter(
        directory, 0, process=ranks.mesh.rank, processes=case.layout.world, token=ranks.token
    )
    writer.save(trainer)
    writer.close()
    ranks.wait()
    return losses


@pytest.mark.parametrize(("saved", "resumed"), [("tensor x zero1", "one"), ("one", "tensor x full")])
def test_adafactors_rows_and_columns_go_on_in_another_layout(
    saved: str, resumed: str, prover: Prover, tmp_path: Path
) -> None:
    layouts = LAYOUTS | {"one": Layout()}
    case = CASES["adafactor"]
    expected = [loss for loss, _ in reference(case).steps]
    for name, first, last in ((saved, 0, 2), (resumed, 2, 4)):
        spread = replace(case, layout=layouts[name])
        found = run_ranks(spread.layout.world, lambda: continue_from(spread, tmp_path, first, last))  # noqa: B023
        assert found[0] == pytest.approx(expected[first:last], abs=1e-12)
