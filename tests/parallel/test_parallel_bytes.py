"""Bytes of a step at the sockets are those of the published sharding: bf16 `full` gathers 2 + 2 bytes a parameter and
reduces 4, zero1 gathers 2; and of rows to experts those that `traffic` has.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.planner.traffic import StepShape, traffic  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.prove.proof import LENGTH, SEED, Case, make_trainer, own_rows  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.parallel.mesh import make_mesh, start_group  # noqa: E402
from throughline.train.step import train_step  # noqa: E402

HEADERS = 0.03  # of messages, of the few small sums of a step and of rows that do not divide
NUMBERS = 1 << 20


def counted(work: Callable[[], object], sent: Callable[[], int]) -> int:
    """Bytes that this process sends while all of them work."""
    dist.barrier()
    time.sleep(0.1)  # acknowledged
    before = sent()
    work()
    dist.barrier()
    time.sleep(0.1)
    return sent() - before


def sent_in_a_step(case: Case, sent: Callable[[], int]) -> tuple[float, float, int]:
    """(bytes this process sent in its third step, those that the sharding promises), a parameter; rows of experts that
    left it there for those of others.

    What a collective of so many bytes costs at the sockets is the backend's (gloo's reduce-scatter sends what its
    all-reduce sends, NCCL's half of it), so each is measured once by itself.
    """
    device = torch.device("cpu")
    start_group(device, 60)
    numbers = torch.zeros(NUMBERS)
    part = torch.zeros(NUMBERS // 2)
    works = {
        "gather": lambda: dist.all_gather_into_tensor(numbers, part),
        "reduce": lambda: dist.reduce_scatter_tensor(part, numbers),
        "sum": lambda: dist.all_reduce(numbers),
        "exchange": lambda: dist.all_to_all_single(torch.empty_like(numbers), numbers),
    }
    for work in works.values():
        work()  # connections are made
    cost = {name: counted(work, sent) / numbers.nbytes for name, work in works.items()}
    engine = Engine(case.config, make_mesh(case.layout, device, 60), case.precision, SEED)
    engine.fill()
    trainer = make_trainer(case, engine)
    batches = [own_rows(case, engine, step) for step in range(3)]
    for batch in batches[:2]:
        train_step(trainer, batch, 1.0)
    left = leaving_rows(engine)
    found = counted(lambda: train_step(trainer, batches[2], 1.0), sent)
    blocks, whole = case.config.layers * case.config.block_parameters(), case.config.parameter_count()
    promised = 4 * cost["sum"] * whole
    if (
        case.layout.expert > 1
    ):  # half of the rows leave where they are spread evenly: the cost of half is known
        shape = StepShape(1, case.micro_rows, LENGTH, 0, case.precision)
        by_axis = {
            axis: sum(
                entry.bytes for entry in traffic(case.config, case.layout, shape, 0) if entry.axis == axis
            )
            for axis in ("data", "expert")
        }
        promised = cost["sum"] * by_axis["data"] + cost["exchange"] * by_axis["expert"]
    if case.layout.shards > 1:
        gathered = 2 * (whole + (blocks if case.layout.sharding == "full" else 0))
        promised = cost["gather"] * gathered + 4 * cost["reduce"] * whole
    return found / whole, promised / whole, sum(left)


def leaving_rows(engine: Engine) -> list[int]:
    """Filled with the rows of each layer's tokens that go to experts of other processes."""
    left: list[int] = []
    axis = engine.mesh.expert
    for block in engine.stages[0].model.blocks.values():
        if hasattr(block.mlp, "experts"):
            experts = block.mlp.experts

            def forward(x: torch.Tensor, counts: torch.Tensor, there: Any = experts.forward) -> torch.Tensor:
                left.append(len(x) - int(counts.chunk(axis.size)[axis.rank].sum()))
                return there(x, counts)

            experts.forward = forward
    return left


@pytest.mark.parametrize("sharding", ["full", "zero1", "replicated"])
def test_a_step_sends_what_the_sharding_promises(sharding: str, socket_bytes: Callable[[], int]) -> None:
    """A block of `full` is gathered for its forward and again for its backward, everything else once, in 16 bits;
    gradients are reduced in fp32.
    """
    warm()
    case = Case("bytes", Layout(data=2, sharding=sharding), precision="bf16", micro_rows=8)
    for found, promised, _ in run_ranks(2, lambda: sent_in_a_step(case, socket_bytes)):
        assert found == pytest.approx(promised, rel=HEADERS)


def test_a_step_sends_the_rows_of_experts_that_traffic_has(socket_bytes: Callable[[], int]) -> None:
    """Rows go to the processes of their experts and come back, forward and backward, in 16 bits; what a process keeps
    is not sent. Gradients of experts that one process has alone are not summed.
    """
    warm()
    model = {"bias": False, "experts": 4, "expert_width": 64}
    case = Case("rows", Layout(data=2, expert=2), precision="bf16", micro_rows=8, model=model)
    ranks = run_ranks(2, lambda: sent_in_a_step(case, socket_bytes))
    found, promised, left = (sum(values) for values in zip(*ranks, strict=True))
    rows = 2 * case.config.layers * 8 * LENGTH * case.config.experts_per_token
    whole = case.config.parameter_count()
    # `promised` is for half of the rows on their way: each row has 16-bit numbers of the width, four times in a step
    more = 4 * 2 * case.config.width * (left - rows / 2) / whole
    assert 0 < left < rows and found == pytest.approx(promised + more, rel=HEADERS)
