"""Which cores are near which memory, so that a process computes where its memory is (Linux).

Memory of another node is half as fast and shares a link. `throughline launch` binds each of its processes; torchrun
leaves that to the job's launcher (Slurm's --cpu-bind). GPUs are numbered along the nodes on the usual machines, so that
process i of n beside GPU i is on node i * nodes / n.
"""

import os
from pathlib import Path

NODES = Path("/sys/devices/system/node")


def numa_nodes(root: Path = NODES) -> list[set[int]]:
    """The cores of each memory node that this process may use; nodes without any are left out."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    usable = os.sched_getaffinity(0)
    lists = sorted(root.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name[4:]))
    return [cores for file in lists if (cores := _cores(file.read_text()) & usable)]


def _cores(text: str) -> set[int]:
    """`0-3,8` as a set."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return {core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)}


def near_cores(nodes: list[set[int]], rank: int, processes: int) -> set[int] | None:
    """The cores to which a process of a machine is bound: those of its node, or of its share of the nodes; None
    where there is nothing to choose.
    """
    if len(nodes) < 2:
        return None
    first = rank * len(nodes) // processes
    last = max((rank + 1) * len(nodes) // processes, first + 1)
    return set().union(*nodes[first:last])
