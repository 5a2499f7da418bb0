"""What a GPU can do, asked in one place: the least compute capability for each kind of kernel, and that of a device.

A test, or a machine that stands in for another, sets `CAPABILITIES`.
"""

import torch

NEEDS = {"flash": (8, 0), "flex": (8, 0)}  # Ampere; what dtypes need stands in core/hardware.py
CAPABILITIES: dict[int | None, tuple[int, int]] = {}  # by the index of a device, in place of what torch says


def capability(device: torch.device) -> tuple[int, int]:
    """(major, minor) of a GPU; where there is none, and one is simulated, of the oldest with every kernel."""
    if device.index in CAPABILITIES or not torch.cuda.is_available():
        return CAPABILITIES.get(device.index, NEEDS["flash"])
    return torch.cuda.get_device_capability(device)


# What torch.compiler.assume_constant_result does; calling it here would import the compiler.
capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def check_computes(dtype: str, device: torch.device) -> None:
    """Refuse a dtype that a GPU cannot compute fast, and a GPU for which this torch has no kernels at all."""
    from ..core.errors import Refused
    from ..core.hardware import check_dtype  # needs psutil, which a bare machine with a GPU may lack

    found, name = capability(device), torch.cuda.get_device_name(device)
    check_dtype(dtype, "cuda", capability="{}.{}".format(*found), name=name)
    compiled = [int(arch[3:].rstrip("af")) for arch in torch.cuda.get_arch_list() if arch.startswith("sm_")]
    if compiled and 10 * found[0] + found[1] < min(compiled):
        raise Refused(
            f"this torch has no kernels for {name}",
            where=f"compute capability {found[0]}.{found[1]}",
            why=f"torch {torch.__version__} was compiled for {', '.join(torch.cuda.get_arch_list())}",
            fix="install torch from its index for an older CUDA: https://download.pytorch.org/whl/cu126",
        )
