"""Ranks forked from a warmed parent: every process of a layout on this machine without importing torch again.

The parent imports what the ranks need and computes what they share; a fork costs milliseconds and shares its memory. It
must stay at one intra-op thread: a child of a parent that used OpenMP threads hangs at its first parallel operation.
"""

import gc
import multiprocessing.connection
import os
import pickle
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from ..train.parallel.launch import end_with_parent, free_port


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
    """Run a backward while no device is known, where there is none. In a CUDA build of torch without a GPU the compiler
    registers a stand-in for one; a first backward after that would start a thread for it, which no fork survives.
    """
    import torch

    if torch.cuda.device_count() == 0:  # unlike is_available it does not start CUDA, which no fork survives
        torch.zeros((), requires_grad=True).backward()


def run_ranks(world: int, function: Callable[[], Any], timeout_s: float = 120.0) -> list[Any]:
    """What `function` returns in each of `world` forked processes, by rank. The first failure ends all and is raised as
    RuntimeError with that rank's traceback; so is a run beyond `timeout_s`.
    """
    fork, port, end = multiprocessing.get_context("fork"), free_port(), time.monotonic() + timeout_s
    ranks: dict[Any, int] = {}  # by the end of the pipe on which its answer comes
    processes, answers = [], [None] * world
    try:
        for rank in range(world):
            reading, writing = fork.Pipe(duplex=False)
            ranks[reading] = rank
            processes.append(fork.Process(target=_child, args=(rank, world, port, function, writing)))
            processes[-1].start()
            writing.close()
        while ranks:
            ready: Any = multiprocessing.connection.wait(ranks, max(end - time.monotonic(), 0))
            if not ready:
                raise RuntimeError(f"ranks {sorted(ranks.values())} of {world} did not finish in time")
            for reading in ready:
                rank = ranks.pop(reading)
                answers[rank] = _answer(reading, f"rank {rank} of {world}")
        return answers
    finally:
        for process in processes:
            process.kill()
            process.join()


def _child(rank: int, world: int, port: int, function: Callable[[], Any], writing: Connection) -> None:
    end_with_parent()
    os.environ |= {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ |= {name: str(world) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        answer = pickle.dumps((function(), ""))
    except BaseException:
        answer = pickle.dumps((None, traceback.format_exc()))
    writing.send_bytes(answer)  # pickled here: multiprocessing's own way would share its tensors
    os._exit(0)  # destructors of process groups wait for peers


def _answer(reading: Connection, who: str) -> Any:
    try:
        answer, failure = pickle.loads(reading.recv_bytes())  # noqa: S301 (written by `_child`)
    except EOFError:
        raise RuntimeError(f"{who} died without a word") from None
    if failure:
        raise RuntimeError(f"{who} failed:\n{failure}")
    return answer
