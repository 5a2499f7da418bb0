"""How fast this process multiplies, copies, starts kernels and sums with the others: for `doctor` and `study`."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.benchmark import Timer

from .mesh import Axis, running_processes, start_group

REPEATS = 5  # of a probe; the best counts, as others may use the machine
LEAST_SECONDS = 0.02  # of a timing
SLOW = 0.8  # of the median of all processes: a process below it holds the others up
# products (rows, inner, outer) of which the best counts; numbers copied and summed: beyond any cache
PRODUCTS = {"cpu": ((512, 512, 512), (1024, 512, 2048), (1024, 1024, 1024)), "cuda": ((8192, 8192, 8192),)}
COPIED = {"cpu": 1 << 24, "cuda": 1 << 28}
SUMMED = {"cpu": 1 << 22, "cuda": 1 << 26}


@dataclass(frozen=True)
class Rates:
    """What one process reached; `all_reduce` is None when it is alone."""

    rank: int
    product: float  # FLOP/s of a matrix product, in bf16 on a GPU and fp32 on a CPU
    copy: float  # bytes/s read and written by a copy
    all_reduce: float | None  # bytes/s that each process sends in a ring: 2 (n - 1) / n of the tensor


def best_seconds(work: Callable[[], Any]) -> float:
    """The shortest of some timings of `work`, each long enough to be timed; torch's clock waits for the GPU."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return min(timer.blocked_autorange(min_run_time=REPEATS * LEAST_SECONDS).times)


def probe_machine(device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """TFLOP/s of the best product of a sweep, GB/s of a copy (read and written), seconds of the smallest kernel."""
    speeds = []
    for rows, inner, outer in PRODUCTS[device.type]:
        left, right = (torch.randn(size, device=device).to(dtype) for size in ((rows, inner), (inner, outer)))
        seconds = best_seconds(lambda left=left, right=right: left @ right)  # type: ignore[misc]
        speeds.append(2 * rows * inner * outer / seconds)
    source, one = torch.zeros(COPIED[device.type], device=device), torch.zeros(1, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / best_seconds(lambda: target.copy_(source))
    launch = best_seconds(lambda: one.add_(1.0))
    return {"tflops": max(speeds) / 1e12, "bandwidth_gb_s": copied / 1e9, "launch_s": launch}


def group_sizes(world: int) -> list[int]:
    """Sizes of groups to probe: the powers of two that divide the processes, and all of them."""
    powers = [2**power for power in range(1, world.bit_length()) if world % 2**power == 0]
    return sorted({*powers, world} - {1})


def probe_all_reduce(device: torch.device) -> list[dict[str, float]]:
    """For each size of a group of neighbours the seconds of the smallest sum and the GB/s of a large one."""
    rank, world = running_processes()
    if world == 1:
        return []
    start_group(device, 60)
    found = []
    for size in group_sizes(world):
        firsts = range(0, world, size)
        groups = [torch.distributed.new_group(list(range(first, first + size))) for first in firsts]
        numbers = SUMMED[device.type]
        small, large = (_sum_seconds(count, device, groups[rank // size]) for count in (1, numbers))
        moved = 2 * (size - 1) / size * 4 * numbers
        found.append({"ranks": size, "start_s": small, "gb_s": moved / max(large - small, 1e-9) / 1e9})
    return found


def _sum_seconds(numbers: int, device: torch.device, group: Any) -> float:
    """Median seconds of a sum of so many numbers, of the slowest process."""
    values, times = torch.zeros(numbers, device=device), []
    for _ in range(2 * REPEATS):
        start = time.perf_counter()
        torch.distributed.all_reduce(values, group=group)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    median = torch.tensor([statistics.median(times)], device=device)
    torch.distributed.all_reduce(median, torch.distributed.ReduceOp.MAX)
    return float(median.item())


def measure(device: torch.device, world: Axis) -> list[Rates]:
    """The rates of every process, by rank. Collective."""
    probes = probe_machine(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    sums = [row["gb_s"] for row in probe_all_reduce(device)]
    table = torch.zeros(world.size, 3, dtype=torch.float64, device=device)
    mine = (1e12 * probes["tflops"], 1e9 * probes["bandwidth_gb_s"], 1e9 * sums[-1] if sums else 0.0)
    table[world.rank] = torch.tensor(mine, dtype=torch.float64)
    return [Rates(rank, a, b, c or None) for rank, (a, b, c) in enumerate(world.all_reduce(table).tolist())]


def slowest(rates: Sequence[Rates]) -> str:
    """The process that holds the others up, and by how much, in one line; "" when all are about as fast."""
    shares = []
    for name in ("product", "copy"):  # an all-reduce takes as long for all of them
        median = statistics.median_high(getattr(each, name) for each in rates)
        shares += [(getattr(each, name) / median, each.rank, name) for each in rates]
    share, rank, name = min(shares)
    said = f"process {rank} is the slowest: {name} at {100 * share:.0f} % of the median"
    return said if share < SLOW else ""
