"""Kind `program`: Python that the model writes, run with a task's tests in a process of its own.

The process has limits of time, memory and file size, an empty directory and no environment; where the kernel lets a
user have namespaces (`unshare`), it has no network either, and all that it starts ends with it. That stops accidents,
not malice: a program may read what its user may read.
"""

import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache
from typing import Any

from ...core.console import warn
from ..items import Form, Item
from .written import GenerateUntil

SECONDS, LONGEST = 3, 10  # of the processor, and of the clock
PASSED = 17  # exit status of a program that has come to its end: it may leave by any other before its tests
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
APART = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]
CHILD = f"""
import os, resource, sys
most = dict(CPU={SECONDS}, AS=1 << 30, FSIZE=1 << 20, NOFILE=64, CORE=0)
for name, value in most.items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
exec(compile(sys.stdin.read(), "program", "exec"), dict(__name__="__main__"))
os._exit({PASSED})
"""


class Program(GenerateUntil):
    """Python that the model writes behind `text`, judged by `answers`, its tests; run only with --run-programs."""

    metrics = ("pass@1",)
    runs_programs = True

    def item(self, form: Form) -> Item:
        return replace(super().item(form), original=form.text("text"))

    def of_answer(self, item: Item, answer: str) -> dict[str, float]:
        """1 where a program ends without an error (of one greedy answer, as HumanEval's own script counts)."""
        return {"pass@1": float(passes("\n".join([item.original + answer, *item.answers])))}


@cache
def _apart() -> list[str]:
    """What comes before a command to keep it apart."""
    try:
        subprocess.run([*APART, "true"], check=True, **QUIET)
    except (OSError, subprocess.CalledProcessError):
        warn("no namespaces here: the programs that a model writes can reach the network")
        return []
    return APART


def passes(program: str) -> bool:
    """Whether a program comes to its end without an error and within its limits."""
    command = [*_apart(), sys.executable, "-I", "-c", CHILD]
    with tempfile.TemporaryDirectory() as folder:
        where: dict[str, Any] = {"cwd": folder, "env": {"PATH": "/usr/bin:/bin"}, "timeout": LONGEST}
        try:
            return subprocess.run(command, input=program.encode(), **where, **QUIET).returncode == PASSED
        except subprocess.TimeoutExpired:
            return False
