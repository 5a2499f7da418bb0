"""Compressed gradients beside tensor and pipeline processes: sums over the copies lose what their rounding loses, and
nothing is forgotten.
"""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.prove.proof import SEED, Case, Prover, own_rows  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.parallel.compression import Bf16Sum, PowerSum, orthonormal  # noqa: E402
from throughline.train.parallel.mesh import make_mesh, start_group  # noqa: E402

LAYOUTS = {
    "pipeline x data": Layout(pipeline=2, data=2),
    "tensor x data": Layout(tensor=2, data=2),
    "interleaved x data": Layout(pipeline=2, data=2, schedule="interleaved-1f1b", stages_per_process=2),
}


@pytest.fixture(scope="module")
def prover() -> Prover:
    warm()
    return Prover()


def install(engine: Engine) -> None:
    engine.communication_hook = Bf16Sum(engine.communicator)


def forget_a_stage(engine: Engine) -> None:
    """A bug: one pipeline rank does not sum."""
    install(engine)
    if engine.mesh.pipeline.rank == 1:
        engine.communication_hook.sum_gradients = lambda gradients: None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_gradients_are_off_by_the_rounding(layout: str, prover: Prover) -> None:
    """Two roundings to 8 bits are 2^-8 of a gradient; tensor processes round partial sums, which cancel in part."""
    case = Case("compressed", LAYOUTS[layout], steps=3)
    errors = prover.prove(case, install)
    assert 1e-5 < errors.gradient < (2**-8 if case.layout.tensor == 1 else 2**-6), errors
    assert errors.loss < 1e-3, errors


def test_a_stage_that_does_not_sum_is_caught(prover: Prover) -> None:
    errors = prover.prove(Case("compressed", LAYOUTS["pipeline x data"], steps=3), forget_a_stage)
    assert errors.gradient > 0.1


def conserved(case: Case) -> tuple[int, float]:
    """(matrices summed by factors, the largest part of what went into two sums that neither came out nor is owed)."""
    device = torch.device("cpu")
    start_group(device, 60)
    engine = Engine(case.config, make_mesh(case.layout, device, 60), case.precision, SEED)
    engine.fill()
    hook = engine.communication_hook = PowerSum(engine.communicator, 4, dense_steps=0)
    compress, axis = hook.sum_gradients, engine.mesh.gradient
    put_in: list[torch.Tensor] = []
    came_out: list[torch.Tensor] = []

    def watch(gradients: list[torch.Tensor]) -> None:
        put_in.extend(gradient.clone() for gradient in gradients)
        compress(gradients)
        came_out.extend(gradient.clone() for gradient in gradients)

    hook.sum_gradients = watch
    for step in range(2):
        engine.accumulate(own_rows(case, engine, step), step)
        engine.discard()
    count, missing = len(put_in) // 2, 0.0
    lost = {int(name[5:]): owed for name, owed in hook.kept.items() if name.startswith("lost.")}
    for index, owed in lost.items():
        sums = [
            axis.all_reduce(part.flatten(1).clone()) for part in (put_in[index] + put_in[index + count], owed)
        ]
        found = (came_out[index] + came_out[index + count]).flatten(1) + sums[1]
        missing = max(missing, ((found - sums[0]).norm() / sums[0].norm()).item())
    return len(lost), missing


@pytest.mark.parametrize("layout", LAYOUTS)
def test_thin_factors_forget_nothing(layout: str) -> None:
    """What was put in = what came out + what is owed, for each part of a matrix that a process holds."""
    warm()
    case = replace(Case("compressed", LAYOUTS[layout]), rows=8)
    for matrices, missing in run_ranks(case.layout.world, lambda: conserved(case)):
        assert matrices >= 4
        assert missing < 1e-12


def test_factors_of_one_shape_are_made_orthonormal_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bits that one by one have: a GPU waits for each call."""
    calls, plain = [], torch.linalg.qr
    monkeypatch.setattr(torch.linalg, "qr", lambda x: calls.append(x.shape) or plain(x))
    drawn = torch.Generator().manual_seed(0)
    factors = [torch.randn(rows, 4, generator=drawn) for rows in (40, 30, 40, 40)]
    found = orthonormal(factors)
    assert len(calls) == 2
    assert all(torch.equal(basis, plain(factor).Q) for basis, factor in zip(found, factors, strict=True))
