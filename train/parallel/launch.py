"""Start a command on several processes of this machine, watch them, and start them again after one was lost.

Not torch's elastic agent: after a process that stands still, which hears no SIGTERM, it took 45 to 49 s where we
promise 25 (this launcher 23); it starts a user's error again, and its own exit code is 1 for a run that stopped with
everything saved (benchmarks/faults.py's faults on 2 cores, torch 2.13). On several machines torchrun starts the
processes (`throughline launch --emit`), with the same environment variables.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType

from ...core.console import say, warn
from ...core.errors import EXIT_FAILED, EXIT_FILE, EXIT_REFUSED, EXIT_WRONG_USE
from ...core.hardware import usable_cores
from ...core.signals import STOP_SIGNALS, handling

POLL_SECONDS = 0.05
GRACE_SECONDS = 3.0  # that the others get to say why and end, after one has ended
STEADY_SECONDS = 60.0  # a start that lived this long was a good one: the count of failures begins again
FINAL = (EXIT_WRONG_USE, EXIT_REFUSED)  # exit codes of what the user has to mend
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run_processes(processes: int, arguments: Sequence[str], restarts: int) -> int:
    """Run `throughline ARGUMENTS` on so many processes; the exit code of the first, or of who met a user's error. After
    a process was lost all start again, at most `restarts` times in a row. They get SIGTERM, SIGHUP and Ctrl-C,
    save and end.
    """
    left, start = restarts, 0
    while True:
        begun = time.monotonic()
        code, stopped, lost = _run_once(processes, arguments, start)
        if code is not None:
            return code
        if stopped:
            warn("the processes ended before they could save")
            return EXIT_FAILED
        left = restarts if time.monotonic() - begun > STEADY_SECONDS else left
        if left == 0:
            warn(f"{lost}, and {restarts} restarts in a row did not help" if restarts else lost)
            return EXIT_FAILED
        left, start = left - 1, start + 1
        say(f"{lost}: all {processes} start again")


def _run_once(processes: int, arguments: Sequence[str], start: int) -> tuple[int | None, bool, str]:
    """The exit code if final (None: a process was lost), whether a signal asked to stop, who was lost."""
    with tempfile.TemporaryDirectory(prefix="throughline-") as directory:
        file, port, nodes = Path(directory) / "exit", free_port(), numa_nodes()
        running: list[subprocess.Popen] = []
        received: list[tuple[int, int]] = []  # signals, and how many processes had been started by then

        def forward(number: int, frame: FrameType | None) -> None:
            received.append((number, len(running)))
            _signal(running, number)

        with handling(forward, (signal.SIGINT, *STOP_SIGNALS)):
            try:
                for rank in range(processes):
                    process = subprocess.Popen(
                        [sys.executable, "-m", "throughline.cli.main", *arguments],
                        env=environment(rank, processes, port, file, start),
                        start_new_session=True,
                        preexec_fn=partial(begin, near_cores(nodes, rank, processes)),
                    )
                    running.append(process)
                for number, started in received:
                    _signal(running[started:], number)
                codes, first = _watch(running, file)
            finally:
                _signal(running, signal.SIGKILL)
        stopped = bool(received)
        said = _said(file)
    if said is not None and codes[0] in (said, -signal.SIGKILL):  # killed here when it took its time to end
        return said, stopped, ""
    code = codes[first]
    if code in FINAL:
        warn(f"process {first} ended with exit code {code}, which another start would not mend")
        return code, stopped, ""
    how = f"was lost ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code}"
    return None, stopped, f"process {first} {how}"


def _said(file: Path) -> int | None:
    """The exit code of the first process, if it is final."""
    text = file.read_text().split() if file.exists() else []
    return int(text[0]) if text and text[1] != "Lost" else None


def _watch(running: Sequence[subprocess.Popen], file: Path) -> tuple[list[int], int]:
    """Wait for all; once one has failed the others get a grace, then SIGKILL (without it they have nothing to save, and
    one that stands still hears no SIGTERM): exit codes, and which failed first. There is no grace when the first
    process has said why: the others would say it again. One that is done hurries nobody: the first closes the run last.
    """
    end, first = 0.0, 0
    while None in (codes := [worker.poll() for worker in running]):
        failed = {rank: code for rank, code in enumerate(codes) if code}
        if failed and not end:  # of several at once the one that was killed
            first, end = min(failed, key=failed.__getitem__), time.monotonic() + GRACE_SECONDS
        told = codes[0] in (EXIT_FAILED, *FINAL) and _said(file) == codes[0]
        if failed and (told or time.monotonic() > end):
            _signal(running, signal.SIGKILL)
        time.sleep(POLL_SECONDS)
    if not end:
        first = min(range(len(codes)), key=lambda rank: (codes[rank] == 0, codes[rank]))
    return [worker.returncode for worker in running], first


def _signal(running: Sequence[subprocess.Popen], number: int) -> None:
    for worker in running:
        if worker.poll() is None:
            worker.send_signal(number)


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def environment(rank: int, processes: int, port: int, exit_file: Path, start: int) -> dict[str, str]:
    """What torchrun would set, and the cores shared out unless the user decided."""
    given = {"OMP_NUM_THREADS": str(max(usable_cores() // processes, 1))} | dict(os.environ)
    ours: dict[str, object] = {"RANK": rank, "WORLD_SIZE": processes}
    ours |= {f"LOCAL_{name}": number for name, number in ours.items()}
    ours |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RESTART_COUNT": start}
    return given | {name: str(value) for name, value in ours.items()} | {EXIT_FILE: str(exit_file)}


def begin(cores: set[int] | None) -> None:
    """In a new process: bind it to its cores, and end it with its parent."""
    if cores is not None:
        os.sched_setaffinity(0, cores)
    end_with_parent()


def end_with_parent() -> None:
    """Let the kernel (Linux) end this process with the thread that started it: it would train on beside the next start.
    Only our own launcher asks for it. A launcher that starts processes from a worker thread (Ray, submitit) would end
    them with that thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> list[set[int]]:
    """The cores of each memory node that this process may use (Linux); nodes without any are left out."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    nodes = []
    for file in sorted(root.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name[4:])):
        spans = [part.split("-") for part in file.read_text().strip().split(",") if part]  # 0-3,8
        nodes.append({core for span in spans for core in range(int(span[0]), int(span[-1]) + 1)})
    return [usable for cores in nodes if (usable := cores & os.sched_getaffinity(0))]


def near_cores(nodes: list[set[int]], rank: int, processes: int) -> set[int] | None:
    """The cores of a process's node or nodes, as GPUs are usually numbered along them; None without a choice."""
    if len(nodes) < 2:
        return None
    first = rank * len(nodes) // processes
    return set().union(*nodes[first : max((rank + 1) * len(nodes) // processes, first + 1)])
