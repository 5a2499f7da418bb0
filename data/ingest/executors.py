"""Who runs the tasks: this process, local processes, elements of a job array, or Ray. The result is the same.

Workers are spawned, never forked (tokenizer libraries deadlock after a fork), each single-threaded, with its own pipe.
One that dies is replaced and its task tried once more; one whose parent has died ends at its next message.
"""

import multiprocessing
import os
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import cast

from ...core.console import warn
from ...core.errors import Failed, MissingExtra
from ...core.signals import STOP_SIGNALS
from ..backends import open_backend
from ..tokenizer import FILE, Tokenizer
from .task_plan import Task, TaskPlan, read_plan
from .tasks import run_task

TRIES = 2


def run_processes(
    work: Path, tasks: Sequence[Task], workers: int, backend: str, on_bytes: Callable[[int], None]
) -> None:
    """Run the tasks in local processes. Raises what a task raises, Failed when one kills its worker twice."""
    waiting = deque(task.index for task in tasks)
    tries: Counter[int] = Counter()
    pool: dict[Connection, tuple[BaseProcess, int]] = {}
    try:
        for _ in range(min(workers, len(waiting))):
            _start(pool, work, backend, waiting.popleft())
        while pool:
            for pipe in cast(list[Connection], wait(list(pool))):
                process, index = pool[pipe]
                try:
                    kind, value = pipe.recv()
                except (EOFError, OSError):
                    del pool[pipe]
                    process.join()
                    tries[index] += 1
                    _judge_death(process, index, tries[index], work)
                    _start(pool, work, backend, index)
                    continue
                if kind == "bytes":
                    on_bytes(value)
                elif kind == "error":
                    raise value
                elif waiting:
                    pool[pipe] = (process, waiting.popleft())
                    _tell(pipe, pool[pipe][1])
                else:
                    _tell(pipe, None)
                    process.join()
                    del pool[pipe]
    finally:
        for process, _ in pool.values():
            process.terminate()
        for process, _ in pool.values():
            process.join()


def _start(pool: dict[Connection, tuple[BaseProcess, int]], work: Path, backend: str, index: int) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_worker, args=(theirs, str(work), backend), daemon=True)
    process.start()
    theirs.close()  # so that the worker's death is the end of the pipe
    _tell(ours, index)
    pool[ours] = (process, index)


def _tell(pipe: Connection, index: int | None) -> None:
    with suppress(OSError):  # a worker that has died meanwhile: the end of its pipe is read next
        pipe.send(index)


def _judge_death(process: BaseProcess, index: int, tries: int, work: Path) -> None:
    code = process.exitcode or 0
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    if tries >= TRIES:
        why = f"it ended with {how} {tries} times; signal 9 is most often the system short of memory"
        fix = "use fewer --workers or a smaller --shard-bytes and run the same command again: finished shards are kept"
        raise Failed(f"the worker of task {index} died", where=work, why=why, fix=fix)
    warn(f"a worker died with {how} in task {index}; trying the task again")


def _open(folder: Path) -> tuple[TaskPlan, Tokenizer]:
    """The plan in a work directory, and its tokenizer with the roles of the plan: its file has none."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    plan = read_plan(folder)
    return plan, Tokenizer.load(folder / FILE, plan.special)


def _worker(pipe: Connection, work: str, backend_name: str) -> None:
    """Run tasks from the pipe until None comes or the parent is gone."""
    # Ctrl-C and a lost terminal reach the whole process group; the parent ends its workers by SIGTERM
    for number in (signal.SIGINT, *STOP_SIGNALS):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removing what is half-written
    folder = Path(work)
    try:
        plan, tokenizer = _open(folder)
        tasks = plan.tasks()
        backend = open_backend(tokenizer, backend_name, check=False)  # the parent has checked it
        while (index := pipe.recv()) is not None:
            run_task(folder, plan, tasks[index], tokenizer, backend, lambda done: pipe.send(("bytes", done)))
            pipe.send(("done", index))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:  # to the parent, which raises it
        pipe.send(("error", error))


def run_ray(work: Path, tasks: Sequence[Task], backend: str, on_bytes: Callable[[int], None]) -> None:
    """Run the tasks on a Ray cluster with a common file system. A lost node's tasks run again elsewhere."""
    try:
        import ray
    except ImportError:
        raise MissingExtra("ray", "--executor ray", "throughline[ray]") from None
    if not ray.is_initialized():
        ray.init(log_to_driver=False, configure_logging=False)
    remote = ray.remote(num_cpus=1, max_retries=-1)(_ray_task)
    sizes = {remote.remote(str(work.resolve()), task.index, backend): task.bytes for task in tasks}
    while sizes:
        for done in ray.wait(list(sizes), num_returns=1)[0]:
            try:
                ray.get(done)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            on_bytes(sizes.pop(done))


def _ray_task(work: str, index: int, backend_name: str) -> None:
    folder = Path(work)
    plan, tokenizer = _open(folder)
    backend = open_backend(tokenizer, backend_name)  # checked again: a node may have other packages
    run_task(folder, plan, plan.tasks()[index], tokenizer, backend)
