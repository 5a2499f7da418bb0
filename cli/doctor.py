"""`throughline doctor`: what this machine is, what is installed, and how fast its processes are."""

import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from typing import TYPE_CHECKING, Any

import click

from ..core import console, hardware
from ..core.artifact import version
from .common import throughline_command

if TYPE_CHECKING:
    from ..train.parallel.rates import Rates

DEVELOPERS = ("test", "docs", "bench")  # extras that no user needs


@click.command()
@throughline_command
def command() -> None:
    """Print versions, hardware, free disk, which optional packages are installed, and measured rates.

    \b
    Example:  throughline doctor
              throughline launch --nproc 8 -- doctor
    Under launch every process multiplies, copies and adds up with the others, and the slowest is named.
    """
    rates, slow = _rates()
    if int(os.environ.get("RANK", 0)) > 0:
        return  # the first process says it
    from ..train.parallel.launch import numa_nodes

    machine = hardware.machine()
    wanted = _wanted()
    packages = {name: _version(name) for name in wanted}
    compiler = shutil.which("g++") or shutil.which("clang++")
    lines = [
        f"throughline {version()}, Python {platform.python_version()}, {platform.platform()}",
        f"CPU   {machine.cpu.name}, {machine.cpu.cores} cores, {console.amount(machine.cpu.memory_bytes, 'B')}, "
        f"native {' '.join(machine.cpu.dtypes)}",
    ]
    lines += [
        f"GPU {gpu.index} {gpu.name}, capability {gpu.capability}, "
        f"{console.amount(gpu.memory_bytes, 'B')}, driver {gpu.driver}"
        for gpu in machine.gpus
    ]
    if not machine.gpus:
        lines.append("GPU   none (training, export and serving run on the CPU)")
    network = {
        name: value for name, value in sorted(os.environ.items()) if name.startswith(("NCCL_", "GLOO_"))
    }
    nodes = [sorted(cores) for cores in numa_nodes()]
    bound = ": launch binds its processes to them" if len(nodes) > 1 else ""
    lines.append(f"NUMA  memory nodes: {len(nodes) or 'unknown'}{bound}")
    shown = " ".join(f"{name}={value}" for name, value in network.items())
    lines.append(f"net   {shown or 'no NCCL_ or GLOO_ variable is set'}")
    lines.append(f"disk  {console.amount(shutil.disk_usage('.').free, 'B')} free here")
    lines.append(f"C++   {compiler or 'no compiler: torch.compile is off, steps run eagerly'}")
    for name, extra in wanted.items():
        missing = f"not installed (optional: pip install '.[{extra}]' in the clone)" if extra else "MISSING"
        lines.append(f"  {name:<28}{packages[name] or missing}")
    if rates:
        lines += ["", *_rate_lines(rates), *([slow] if slow else [])]
    facts: dict[str, Any] = {"version": version(), "machine": asdict(machine), "packages": packages}
    facts |= {"compiler": compiler, "numa_nodes": nodes, "network": network}
    console.result(facts | {"rates": [asdict(each) for each in rates], "slowest": slow}, lines)


def _rates() -> "tuple[list[Rates], str]":
    """The rates of every process, and the slowest in words; none without torch."""
    if importlib.util.find_spec("torch") is None:
        return [], ""
    import torch

    from ..planner.layout import Layout
    from ..train.parallel.mesh import own_device, running_processes
    from ..train.parallel.ranks import Ranks
    from ..train.parallel.rates import measure, slowest

    device = own_device(torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu"))
    with Ranks.start(Layout(data=running_processes()[1]), device) as ranks:
        rates = measure(device, ranks.mesh.world)
    return rates, slowest(rates)


def _rate_lines(rates: "Sequence[Rates]") -> list[str]:
    """A row for each process: products, copies, and what it sends in a sum over all of them."""
    rows = [
        (each.rank, each.product / 1e9, each.copy / 1e9, each.all_reduce and each.all_reduce / 1e9)
        for each in rates
    ]
    return console.table(("process", "product GFLOP/s", "copy GB/s", "all-reduce GB/s"), rows)


def _wanted() -> dict[str, str]:
    """Package -> the extra that installs it ("" where it must be there), as the installed program states them."""
    with suppress(metadata.PackageNotFoundError):  # a checkout that was never installed states none
        texts = metadata.requires("throughline") or []
        found = {re.split(r"[^\w-]", text)[0]: text.partition("extra ==")[2].strip(" '\"") for text in texts}
        return {name: extra for name, extra in found.items() if extra not in DEVELOPERS}
    return {}


def _version(name: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    return None
