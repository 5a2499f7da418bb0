"""TensorRT and TensorRT-RTX as they are installed, and whether an engine is for them and for this GPU: it belongs to
one library version and one compute capability.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...core.artifact import Manifest
from ...core.errors import Refused, WrongUse, extra
from ...core.hardware import machine

LEAST = (10, 15)  # strong typing, Attention, TensorScatter and RotaryEmbedding in the parser


def load_library(name: str) -> Any:
    """The module `tensorrt` or `tensorrt_rtx`. Raises MissingExtra, WrongUse for a version that is too old."""
    library = extra(name, "building an engine", name.replace("_", "-"))
    version = tuple(int(part) for part in re.findall(r"\d+", library.__version__)[:2])
    if name == "tensorrt" and version < LEAST:
        raise WrongUse(
            f"TensorRT {library.__version__} is too old",
            why=f"its parser lacks operators of these graphs; {LEAST[0]}.{LEAST[1]} has them",
            fix="pip install 'throughline[tensorrt]'",
        )
    return library


def check_engine(manifest: Manifest, where: Path, library: Any, capability: Callable[[], str]) -> None:
    """Raise Refused, with the command that builds it again, when an engine is not for this library and GPU."""
    facts = manifest.facts
    fix = f"build it again here: {manifest.command}"
    for what, built, here in (
        ("library", facts["library"], library.__name__),
        ("version", facts["library_version"], library.__version__),
        ("compute capability", facts["compute_capability"], capability()),
    ):
        if built != here:
            raise Refused(
                f"this engine was built for another {what}",
                where=where,
                why=f"it was built for {built}, here is {here}",
                fix=fix,
            )


def gpu_facts(device: str = "cuda:0") -> dict[str, Any]:
    """A GPU's name, compute capability, driver and CUDA version. Raises WrongUse when there is none."""
    import torch

    if not torch.cuda.is_available():
        fix = "build on the machine that has the GPU; --to tensorrt-rtx compiles without one"
        raise WrongUse("there is no GPU here", why="torch sees no CUDA device", fix=fix)
    major, minor = torch.cuda.get_device_capability(device)
    return {
        "gpu": torch.cuda.get_device_name(device),
        "compute_capability": f"{major}.{minor}",
        "driver": next((gpu.driver for gpu in machine().gpus), "unknown"),
        "cuda": torch.version.cuda,
    }
