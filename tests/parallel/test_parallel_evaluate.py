"""Validation in a layout counts what one process counts, of any number of rows and any length that the layout
may train.
"""

import time

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
from throughline.models.init import build  # noqa: E402
from throughline.planner.layout import Layout, layout_problems  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.prove.proof import SEED, Case, make_rows  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.parallel.mesh import make_mesh, start_group  # noqa: E402

# lengths that are multiples of no more than the layout asks for: as many as there are positions
LAYOUTS = [
    (Layout(data=2), 31),
    (Layout(tensor=2), 30),
    (Layout(context=2), 28),
    (Layout(context=2, tensor=2), 28),
    (Layout(pipeline=2, schedule="zero-bubble-v", stages_per_process=2), 31),
    (Layout(data=2, sharding="full", pipeline=2), 31),
]


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize(
    ("layout", "length"), LAYOUTS, ids=[layout.describe().replace(" ", "-") for layout, _ in LAYOUTS]
)
def test_counts_what_one_process_counts(family: str, layout: Layout, length: int) -> None:
    """Five rows, which two data processes cannot share evenly, and of a GPT a shorter row alone, as at the
    end of a split.
    """
    warm()
    case = Case("", layout, family=family, model={"sequence_length": length, "vocab_size": 257})
    assert not layout_problems(layout, case.config, length, 8, 1)
    rows = {
        name: values[:5, :length] if values.ndim == 2 else values[:5]
        for name, values in make_rows(case, 0).items()
    }
    batches = (
        [rows]
        if family == "bert"
        else [rows, {name: values[:1, : length - 3] for name, values in rows.items()}]
    )

    def count() -> list[np.ndarray]:
        device = torch.device("cpu")
        start_group(device, 60)
        engine = Engine(case.config, make_mesh(layout, device, 60), "fp64", SEED)
        engine.fill()
        return [engine.evaluate([batch], 1.0).numpy() for batch in batches]

    model = build(case.config, SEED, dtype=torch.float64).eval()
    single = Engine.holding(model, "fp64", torch.device("cpu"))
    expected = [single.evaluate([dict(batch)], 1.0) for batch in batches]
    assert all(sums[0] > 0 for sums in expected)
    for rank in run_ranks(layout.world, count):
        for found, sums in zip(rank, expected, strict=True):
            assert found == pytest.approx(sums.numpy(), rel=1e-12)


def test_a_stage_does_not_wait_for_the_end_of_a_batch() -> None:
    """Each stage of a pipeline is slow alike: three batches on two stages take four turns and not six."""
    warm()
    case = Case("", Layout(pipeline=2), model={"vocab_size": 257})
    turn = 0.5

    def count() -> tuple[float, list[float]]:
        device = torch.device("cpu")
        start_group(device, 60)
        engine = Engine(case.config, make_mesh(case.layout, device, 60), "fp64", SEED)
        engine.fill()
        (stage,) = engine.stages
        stage.register_forward_pre_hook(lambda *_: time.sleep(turn))
        whole = engine.evaluate([make_rows(case, 0)], 1.0)
        torch.distributed.barrier()
        begun = time.monotonic()
        sums = engine.evaluate([make_rows(case, 0)] * 3, 1.0)
        seconds = time.monotonic() - begun
        return seconds / turn, (sums / whole)[:2].tolist()

    for turns, times in run_ranks(2, count):
        assert turns < 5.5 and times == pytest.approx([3, 3], rel=1e-12)
