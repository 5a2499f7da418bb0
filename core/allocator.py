"""What glibc does with memory that a program has freed. Another C library is left as it is.

glibc gives large blocks back to the kernel at once and keeps the small ones. A training step takes its blocks
again, page by page: for GPT-2 124M in bf16 on a CPU 214,000 page faults a step, 0.4 to 1 s of 3.5 s; kept,
the heap is 4 % larger. Scoring after the weights have been read needs the opposite. GPUs have torch's own
allocator.
"""

import ctypes
import gc
from contextlib import suppress
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h
_kept = False


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
