"""How fast this process multiplies, copies and adds up with the others, and which process is slow: for
`throughline doctor`.

Each rate is the best of several short trials: what the hardware can do now, not what a busy moment left of
it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .mesh import Axis

TRIALS = 5
SLOW = 0.8  # of the median of all processes: a process below it holds the others up
SIZES = {
    "cpu": (1024, 1 << 26, 1 << 24),
    "cuda": (8192, 1 << 30, 1 << 28),
}  # of a matrix; bytes copied; bytes summed


@dataclass(frozen=True)
class Rates:
    """What one process reached; `all_reduce` is None when it is alone."""

    rank: int
    product: float  # FLOP/s of a matrix product, in bf16 on a GPU and fp32 on a CPU
    copy: float  # bytes/s read and written by a copy
    all_reduce: float | None  # bytes/s that each process sends in a ring: 2 (n - 1) / n of the tensor


def measure(device: torch.device, world: Axis) -> list[Rates]:
    """The rates of every process, by rank. Collective; products and copies of all run at the same time, as in
    training.
    """
    size, copied, summed = SIZES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    source = torch.ones(copied // 4, device=device)
    target = torch.empty_like(source)
    message = torch.ones(summed // 4, device=device)
    token = torch.zeros(1, device=device)

    def best(work: Callable[[], object]) -> float:
        """Seconds of the fastest trial; all processes begin together."""
        work()
        seconds = []
        for _ in range(TRIALS):
            world.all_reduce(token)
            _settle(device)
            start = time.perf_counter()
            work()
            _settle(device)
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    product = 2 * size**3 / best(lambda: matrix @ matrix)
    copy = 2 * copied / best(lambda: target.copy_(source))
    ring = 2 * (world.size - 1) / world.size * summed
    reduce = ring / best(lambda: world.all_reduce(message)) if world.group is not None else 0.0
    table = torch.zeros(world.size, 3, dtype=torch.float64, device=device)
    table[world.rank] = torch.tensor([product, copy, reduce], dtype=torch.float64)
    return [Rates(rank, a, b, c or None) for rank, (a, b, c) in enumerate(world.all_reduce(table).tolist())]


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(rates: Sequence[Rates]) -> str:
    """The process that holds the others up, and by how much, in one line; "" when all are about as fast.

    An all-reduce takes as long for all of them, so the others' rates tell.
    """
    worst: tuple[float, str] = (SLOW, "")
    for name in ("product", "copy"):
        values = sorted(getattr(each, name) for each in rates)
        median = values[len(values) // 2]
        for each in rates:
            share = getattr(each, name) / median
            if share < worst[0]:
                worst = (
                    share,
                    f"process {each.rank} is the slowest: {name} at {100 * share:.0f} % of the median",
                )
    return worst[1]
