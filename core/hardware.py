"""Hardware facts: what the CPU and the GPUs of this machine are, what a chip can do, and the memory of a process.

Without torch: GPUs are read from `nvidia-smi`, the CPU from the kernel, peaks from `chips.toml`. Freed memory: glibc
gives large blocks back to the kernel at once. A training step takes them again, page by page: for GPT-2 124M in bf16 on
a CPU 214,000 page faults a step, 0.4 to 1 s of 3.5 s; kept, the heap is 4 % larger. Scoring after the weights have been
read needs the opposite.
"""

import ctypes
import functools
import gc
import os
import platform
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from .artifact import read_manifest
from .errors import Refused
from .files import read_json, shipped_table

# the first compute capability whose tensor cores take a dtype (CUDA programming guide, arithmetic tables)
NEEDS_CAPABILITY = {"fp32": 0.0, "fp16": 7.0, "int8": 7.2, "bf16": 8.0, "tf32": 8.0, "fp8": 8.9}
# instruction sets with which a CPU computes matrix products in a dtype without converting to fp32 first
CPU_DTYPE_FLAGS = {
    "bf16": ("avx512_bf16", "amx_bf16", "bf16"),
    "fp16": ("avx512_fp16", "amx_fp16"),
    "int8": ("avx512_vnni", "avx_vnni"),
}

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
_kept = False  # what is freed


@dataclass(frozen=True)
class Chip:
    """A row of `chips.toml`: peaks in TFLOP/s by dtype (dense), memory in GiB (the GB that cards are sold by),
    bandwidths in GB/s, the share of the 16-bit (or measured fp8) peak that the best large product reaches.
    """

    key: str
    name: str
    memory_gib: float
    bandwidth_gb_s: float
    tflops: dict[str, float]
    capability: str = ""
    nvlink_gb_s: float = 0.0
    achieved: float = 0.8
    achieved_fp8: float = 0.0
    watts: float = 0.0
    process_nm: float = 0.0
    processors: int = 0
    match: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True)
class Cpu:
    """This machine's processor: model name, usable cores, memory in bytes, dtypes it multiplies natively."""

    name: str
    cores: int
    memory_bytes: int
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class Gpu:
    """One CUDA device as the driver describes it, with its row of `chips.toml` when known."""

    index: int
    name: str
    capability: str
    memory_bytes: int
    driver: str
    chip: Chip | None = None


@dataclass(frozen=True)
class Machine:
    """The machine: its CPU and GPUs."""

    cpu: Cpu
    gpus: tuple[Gpu, ...] = ()


@functools.cache
def chips() -> dict[str, Chip]:
    """Every known chip by key."""
    raw = shipped_table(__file__, "chips.toml")
    return {key: Chip(key=key, **{**row, "match": tuple(row["match"])}) for key, row in raw.items()}


def find_chip(name: str, memory_bytes: int = 0) -> Chip | None:
    """The chip whose match words all stand in a driver's device name (its memory size is a word), or None."""
    text = f" {name} {round(memory_bytes / 2**30)}gb ".lower().replace("-", " ")

    def stands(word: str) -> bool:  # as whole words: "l4" is not in "l40s"
        return f" {word.replace('-', ' ')} " in text

    hits = [chip for chip in chips().values() if all(map(stands, chip.match))]
    if not hits and memory_bytes:  # V100 and A100 come in two sizes: take the nearer one
        hits = [chip for chip in chips().values() if stands(chip.match[0])]
        hits.sort(key=lambda chip: abs(chip.memory_gib * 2**30 - memory_bytes))
    return hits[0] if hits else None


@functools.cache
def machine() -> Machine:
    """Facts of this machine, read once."""
    return Machine(_cpu(), _gpus())


def read_calibration() -> dict[str, Any]:
    """What study measured on this machine: chip, constants, provenance; empty without THROUGHLINE_CALIBRATION."""
    place = os.environ.get("THROUGHLINE_CALIBRATION")
    if not place:
        return {}
    read_manifest(place, "calibration")
    return read_json(Path(place) / "calibration.json")


def _cpu() -> Cpu:
    info = Path("/proc/cpuinfo")
    facts: dict[str, str] = {}
    if info.exists():
        for line in info.read_text().partition("\n\n")[0].splitlines():
            key, _, value = line.partition(":")
            facts[key.strip()] = value.strip()
    name = facts.get("model name") or platform.processor() or platform.machine()
    # a virtual machine may say "AMD EPYC" of any generation
    if "cpu family" in facts and not any(map(str.isdigit, name)):
        name = f"{name} (family {facts['cpu family']}, model {facts.get('model', '?')})"
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    dtypes = ("fp32", *(dtype for dtype, needs in CPU_DTYPE_FLAGS.items() if flags.intersection(needs)))
    return Cpu(name, usable_cores(), memory_limit_bytes(), dtypes)


def usable_cores() -> int:
    """Cores this process may run on: in a job or a container fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_limit_bytes() -> int:
    """Main memory this process may use: the machine's, or its control group's limit when that is lower."""
    limit = psutil.virtual_memory().total
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" is no number
            limit = min(limit, int(Path(file).read_text()))
    return limit


def _gpus() -> tuple[Gpu, ...]:
    if shutil.which("nvidia-smi") is None:
        return ()
    query = "--query-gpu=index,name,compute_cap,memory.total,driver_version"
    words = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        out = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return ()
    gpus = []
    for line in out.splitlines():
        index, name, capability, mib, driver = (part.strip() for part in line.split(","))
        size = int(float(mib) * 2**20) if mib[:1].isdigit() else 0  # [N/A] where the memory is the CPU's
        gpus.append(Gpu(int(index), name, capability, size, driver, find_chip(name, size)))
    return tuple(gpus)


def computes_in(dtype: str, capability: str) -> bool:
    """Whether GPUs of a compute capability (`8.0`) compute fast in a dtype."""
    return float(capability) >= NEEDS_CAPABILITY[dtype]


def check_dtype(dtype: str, *, capability: str, name: str) -> None:
    """Refuse a dtype that a GPU cannot compute fast, naming the alternative."""
    if computes_in(dtype, capability):
        return
    what, where = f"{name} cannot compute in {dtype}", f"compute capability {capability}"
    why = f"{dtype} needs compute capability {NEEDS_CAPABILITY[dtype]} or later"
    instead = next(other for other in ("bf16", "fp16", "fp32") if computes_in(other, capability))
    scaled = " (with loss scaling, which is on by default for fp16)" if instead == "fp16" else ""
    raise Refused(what, where=where, why=why, fix=f"use {instead}{scaled}")


def keep_freed_memory() -> None:
    """From here on this process keeps what it frees, whoever returns it: a run that scores trains on."""
    global _kept
    _kept = True
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(M_MMAP_MAX, 0)  # all from the heap
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # which never shrinks


def return_freed_memory() -> None:
    """Give back what is free now: 15 MB after GPT-2's weights have been read, 25 after its tokenizer."""
    if _kept:
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def restart_peak() -> None:
    """Give back what is free, kept or not, and count the peak of this process (`peak_bytes`) from here."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(process: int | str = "self") -> int:
    """The largest resident memory of a process since it started, or since its `restart_peak`; 0 when it is gone."""
    with suppress(OSError, IndexError):
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
        return 1024 * int(status.split("VmHWM:")[1].split()[0])
    return 0
