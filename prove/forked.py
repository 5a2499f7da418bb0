"""Ranks forked from a warmed parent: every process of a layout on this machine without importing torch again.

The parent imports what the ranks need and computes what they share; a fork costs milliseconds and shares its
memory. It must stay at one intra-op thread: a child of a parent that used OpenMP threads hangs at its first
parallel operation.
"""

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


def warm() -> None:
    """Import what every rank uses, once, at one thread."""
    import logging
    import warnings

    import torch
    import torch._dynamo
    import torch.distributed._functional_collectives
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor

    torch.set_num_threads(1)
    keep_forkable()
    warnings.filterwarnings("ignore", category=FutureWarning)
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    gc.collect()
    gc.freeze()


def keep_forkable() -> None:
    """Run a backward while no device is known, where there is none. In a CUDA build of torch without a GPU the
    compiler registers a stand-in for one; were the first backward to come after that, it would start a thread for the
    device, and a process forked later could run none.
    """
    import torch

    if torch.cuda.device_count() == 0:  # unlike is_available it does not start CUDA, which no fork survives
        torch.zeros((), requires_grad=True).backward()


def run_ranks(world: int, function: Callable[[], Any], timeout_s: float = 120.0) -> list[Any]:
    """What `function` returns in each of `world` forked processes, by rank, which it finds in the launcher's
    environment.

    The first failure ends all and is raised as RuntimeError with that rank's traceback; so is a run longer
    than `timeout_s`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    sys.stdout.flush()
    pipes: dict[int, int] = {}
    children: dict[int, int] = {}
    try:
        for rank in range(world):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                _child(rank, world, port, function, writing)
            os.close(writing)
            pipes[reading], children[reading] = rank, pid
        return _collect(world, pipes, time.monotonic() + timeout_s)
    finally:
        for reading, pid in children.items():
            os.close(reading)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _child(rank: int, world: int, port: int, function: Callable[[], Any], writing: int) -> None:
    os.environ.update({name: str(rank) for name in ("RANK", "LOCAL_RANK")})
    os.environ.update({name: str(world) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        answer = (True, function())
    except BaseException:
        answer = (False, traceback.format_exc())
    with os.fdopen(writing, "wb") as out:
        out.write(pickle.dumps(answer))
    os._exit(0)  # destructors of process groups wait for peers


def _collect(world: int, pipes: dict[int, int], end: float) -> list[Any]:
    received: dict[int, bytes] = dict.fromkeys(pipes, b"")
    results: dict[int, Any] = {}
    while len(results) < world:
        ready, _, _ = select.select(list(received), [], [], max(end - time.monotonic(), 0))
        if not ready:
            missing = sorted(pipes[reading] for reading in received)
            raise RuntimeError(f"ranks {missing} of {world} did not finish in time")
        for reading in ready:
            part = os.read(reading, 1 << 20)
            received[reading] += part
            if part:
                continue
            rank, data = pipes[reading], received.pop(reading)
            if not data:
                raise RuntimeError(f"rank {rank} died without a word")
            good, results[rank] = pickle.loads(data)  # noqa: S301 (written by the process forked above)
            if not good:
                raise RuntimeError(f"rank {rank} of {world} failed:\n{results[rank]}")
    return [results[rank] for rank in range(world)]
