"""Chips are found by the names drivers print; a card is refused what it cannot compute, with the alternative
named. Freed memory goes back to the kernel when asked, and stays where a training loop has asked to keep it.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from throughline.core import hardware
from throughline.core.errors import Refused

PROGRAM = """
import sys
from throughline.core.hardware import keep_freed_memory, return_freed_memory

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

if "keep" in sys.argv:
    keep_freed_memory()
blocks = [b"x" * 100_000 for _ in range(1000)]  # from the heap: below glibc's threshold for memory of its own
last = b"x" * 100_000  # holds the end of the heap
full = resident()
del blocks
return_freed_memory()
print(full - resident())
"""


@pytest.mark.parametrize(
    ("driver_name", "memory_bytes", "key"),
    [
        ("Tesla V100-SXM2-32GB", 34089730048, "v100-32gb"),
        ("Tesla V100-SXM2-16GB", 16944988160, "v100-16gb"),
        ("Tesla T4", 15843721216, "t4"),
        ("NVIDIA A100-SXM4-80GB", 85e9, "a100-80gb"),
        ("NVIDIA A100-PCIE-40GB", 42e9, "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", 85e9, "h100-80gb"),
        ("NVIDIA H100 PCIe", 85e9, "h100-pcie"),
        ("NVIDIA H100 NVL", 100e9, "h100-nvl"),
        ("NVIDIA H200", 150e9, "h200"),
        ("NVIDIA H200 NVL", 150e9, "h200-nvl"),
        ("NVIDIA L4", 24e9, "l4"),
        ("NVIDIA L40S", 48e9, "l40s"),
        ("NVIDIA GeForce RTX 4090", 25e9, "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", 25e9, None),
    ],
)
def test_chip_by_driver_name(driver_name: str, memory_bytes: float, key: str | None) -> None:
    chip = hardware.find_chip(driver_name, int(memory_bytes))
    assert (chip.key if chip else None) == key


def test_dtype_rules_agree_with_the_chip_table() -> None:
    """A chip lists bf16 exactly when its compute capability allows it: two sources, one truth."""
    for chip in hardware.chips().values():
        if chip.capability:
            assert ("bf16" in chip.tflops) == (float(chip.capability) >= hardware.NEEDS_CAPABILITY["bf16"]), (
                chip.key
            )


def test_t4_refuses_bf16_and_names_fp16() -> None:
    with pytest.raises(Refused) as caught:
        hardware.check_dtype("bf16", capability="7.5", name="Tesla T4")
    assert "use fp16" in caught.value.fix
    hardware.check_dtype("fp16", capability="7.5", name="Tesla T4")


def test_a_gpu_without_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where CPU and GPU share one memory the driver prints [N/A]."""
    rows = "0, NVIDIA GB10, 12.1, [N/A], 580.95\n1, Tesla T4, 7.5, 15360, 580.95\n"
    monkeypatch.setattr(hardware.shutil, "which", lambda name: name)
    monkeypatch.setattr(hardware.subprocess, "run", lambda *words, **settings: SimpleNamespace(stdout=rows))
    first, second = hardware._gpus()
    assert (first.name, first.memory_bytes) == ("NVIDIA GB10", 0)
    assert second.memory_bytes == 15360 * 2**20 and second.chip is not None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system binds no process to cores")
def test_cores_are_those_that_the_process_may_run_on() -> None:
    allowed = os.sched_getaffinity(0)
    assert hardware.usable_cores() == len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert hardware.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(
    ("limit", "bytes_"), [("1073741824\n", 2**30), ("max\n", 2**36), ("99999999999999\n", 2**36)]
)
def test_a_cpu_is_what_the_kernels_files_say(
    limit: str, bytes_: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Name and dtypes from the first processor; memory is the control group's limit where that is lower."""
    (tmp_path / "proc").mkdir()
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(limit)
    info = "model name\t: Some CPU\nflags\t\t: fpu avx512_bf16\n\nmodel name\t: Another\nflags\t\t: fpu avx512_fp16\n"
    (tmp_path / "proc/cpuinfo").write_text(info)
    monkeypatch.setattr(hardware, "Path", lambda name: tmp_path / name.lstrip("/"))
    monkeypatch.setattr(hardware.psutil, "virtual_memory", lambda: SimpleNamespace(total=2**36))
    cpu = hardware._cpu()
    assert (cpu.name, cpu.memory_bytes, cpu.dtypes) == ("Some CPU", bytes_, ("fp32", "bf16"))
    for name, said in (("EPYC", "EPYC (family 25, model 17)"), ("EPYC 9R14", "EPYC 9R14")):
        (tmp_path / "proc/cpuinfo").write_text(f"cpu family : 25\nmodel : 17\nmodel name : {name}\n\n" + info)
        assert hardware._cpu().name == said


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
@pytest.mark.parametrize("wish", ["return", "keep"])
def test_freed_memory_goes_where_it_is_wanted(wish: str) -> None:
    """Of 98,000 KiB freed, nearly all go back; kept, none: between them is a wide bound."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, wish], capture_output=True, text=True, check=True)
    returned_kib = int(done.stdout)
    assert returned_kib > 80_000 if wish == "return" else returned_kib < 8_000
