"""`throughline doctor`: what this machine is and what is installed."""

import importlib.util
import platform
import shutil
from dataclasses import asdict
from importlib import metadata

import click

from ..core import console, hardware
from ..core.version import version
from .common import throughline_command

REQUIRED = (
    "torch",
    "numpy",
    "pyarrow",
    "tokenizers",
    "datasets",
    "safetensors",
    "pydantic",
    "onnx",
    "onnxruntime",
    "fastapi",
    "uvicorn",
)
OPTIONAL = {"gigatoken": "fast", "ray": "ray", "lm_eval": "eval", "transformers": "test"}  # package -> extra


@click.command()
@throughline_command
def command() -> None:
    """Print versions, hardware, free disk and which optional packages are installed.

    \b
    Example:  throughline doctor
    """
    machine = hardware.machine()
    packages = {name: _version(name) for name in (*REQUIRED, *OPTIONAL)}
    compiler = shutil.which("g++") or shutil.which("clang++")
    lines = [
        f"throughline {version()}, Python {platform.python_version()}, {platform.platform()}",
        f"CPU   {machine.cpu.name}, {machine.cpu.cores} cores, {console.amount(machine.cpu.memory_bytes, 'B')}, "
        f"native {' '.join(machine.cpu.dtypes)}",
    ]
    for gpu in machine.gpus:
        lines.append(
            f"GPU {gpu.index} {gpu.name}, capability {gpu.capability}, {console.amount(gpu.memory_bytes, 'B')}, driver {gpu.driver}"
        )
    if not machine.gpus:
        lines.append("GPU   none (training, export and serving run on the CPU)")
    lines.append(f"disk  {console.amount(shutil.disk_usage('.').free, 'B')} free here")
    lines.append(f"C++   {compiler or 'no compiler: torch.compile is off, steps run eagerly'}")
    for name in REQUIRED:
        lines.append(f"  {name:<14}{packages[name] or 'MISSING: pip install throughline'}")
    for name, extra in OPTIONAL.items():
        lines.append(f"  {name:<14}{packages[name] or f'not installed (optional: pip install throughline[{extra}])'}")
    console.result(
        {"version": version(), "machine": asdict(machine), "packages": packages, "compiler": compiler}, lines
    )


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "installed"
