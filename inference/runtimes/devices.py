"""Which device and which dtype a model runs in: what was asked for, or refused; never silently another."""

import re
from typing import TYPE_CHECKING

from ...core.backend import BackendOptions
from ...core.errors import WrongUse

if TYPE_CHECKING:
    import torch


def pick_device(wanted: str, where: str = "--device") -> str:
    """One of "cpu" and "cuda:N"; "auto" is the first GPU, if any. Raises WrongUse for one that is not here."""
    if wanted == "cpu":
        return "cpu"
    if wanted != "auto" and not re.fullmatch(r"cuda(:\d+)?", wanted):
        raise WrongUse(f"no device is called {wanted!r}", where=where, fix="give auto, cpu, cuda or cuda:N")
    import torch

    if not torch.cuda.is_available():
        if wanted == "auto":
            return "cpu"
        fix = "leave --device out, or see: throughline doctor"
        raise WrongUse("no CUDA device here", where=where, fix=fix)
    number, there = int(wanted.partition(":")[2] or 0), torch.cuda.device_count()
    if number >= there:
        why = f"this machine has {there}"
        raise WrongUse(f"no {wanted} here", where=where, why=why, fix=f"0 … {there - 1}")
    return f"cuda:{number}"


def pick_dtype(wanted: str, stored: "torch.dtype | None", device: str) -> "torch.dtype":
    """The dtype of a torch model. "auto" is the one the weights are stored in, where the device computes in it;
    else fp16 for bf16 on a GPU without it, and fp32.

    Raises Refused when the device cannot compute in the dtype that was asked for.
    """
    import torch

    from ...core.hardware import check_dtype, computes_in, machine

    by_name = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if wanted not in ("auto", *by_name):
        fix = f"give auto or one of {', '.join(by_name)}"
        raise WrongUse(f"no dtype is called {wanted!r}", where="--dtype", fix=fix)
    native: tuple[str, ...] = machine().cpu.dtypes
    if device != "cpu":
        capability = "{}.{}".format(*torch.cuda.get_device_capability(device))
        native = tuple(name for name in by_name if computes_in(name, capability))
        if wanted != "auto":
            check_dtype(wanted, "cuda", capability=capability, name=torch.cuda.get_device_name(device))
    if wanted != "auto":
        return by_name[wanted]
    name = next((name for name, dtype in by_name.items() if dtype == stored), "fp32")
    if name not in native:
        name = "fp16" if name == "bf16" and "fp16" in native and device != "cpu" else "fp32"
    return by_name[name]


def check_options(options: BackendOptions, kind: str, runtimes: tuple[str, ...]) -> str:
    """The runtime for a file of this kind ("auto" stays). Raises WrongUse when it has none of that name, or a
    dtype is asked of a file that has its own.
    """
    if options.runtime not in ("own", "auto", *runtimes):
        fix = f"give one of {', '.join(runtimes)}, or export the model for the other"
        raise WrongUse(f"{options.runtime} does not run {kind}", where="--backend", fix=fix)
    if options.dtype != "auto" and "torch" not in runtimes:
        raise WrongUse(
            f"{kind} has its own precision",
            where=f"--dtype {options.dtype}",
            why="it was decided when it was exported",
            fix="leave --dtype out, or export the model again with another precision",
        )
    return runtimes[0] if options.runtime == "own" else options.runtime
