"""Bytes of a step at the sockets are those of the published sharding: bf16 `full` gathers 2 + 2 bytes a parameter and
reduces 4, zero1 gathers 2.
"""

import time
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.prove.proof import SEED, Case, make_trainer, own_rows  # noqa: E402
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


def sent_in_a_step(case: Case, sent: Callable[[], int]) -> tuple[float, float]:
    """(bytes this process sent in its third step, those that the sharding promises), a parameter.

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
    found = counted(lambda: train_step(trainer, batches[2], 1.0), sent)
    blocks, whole = case.config.layers * case.config.block_parameters(), case.config.parameter_count()
    promised = 4 * cost["sum"] * whole
    if case.layout.shards > 1:
        gathered = 2 * (whole + (blocks if case.layout.sharding == "full" else 0))
        promised = cost["gather"] * gathered + 4 * cost["reduce"] * whole
    return found / whole, promised / whole


@pytest.mark.parametrize("sharding", ["full", "zero1", "replicated"])
def test_a_step_sends_what_the_sharding_promises(sharding: str, socket_bytes: Callable[[], int]) -> None:
    """A block of `full` is gathered for its forward and again for its backward, everything else once, in 16 bits;
    gradients are reduced in fp32.
    """
    warm()
    case = Case("bytes", Layout(data=2, sharding=sharding), precision="bf16", micro_rows=8)
    for found, promised in run_ranks(2, lambda: sent_in_a_step(case, socket_bytes)):
        assert found == pytest.approx(promised, rel=HEADERS)
