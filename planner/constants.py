"""The constants of the time model: fourteen, physical, and the same for every table, model and layout.

Three were measured by others; eleven were fitted on one half of the published rows, by a hash of their names, with
`benchmarks/planner_fit.py` (soft L1 on the log error, every table with the same weight), and rounded within what that
fit can tell apart. The other half judges (`plan validate`). `throughline study` replaces them for one machine. What
differs between chips stands in `core/chips.toml`.
"""

import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any


@cache
def shipped_table(name: str) -> dict[str, Any]:
    """The TOML table of that name beside this file: clusters, programs, bands, failures, grids."""
    return tomllib.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Constants:
    """Fractions of what the chips of `chips.toml` can do, and times in seconds."""

    vector_fraction: float = 0.91  # of the peak by products without tensor cores: fp32 and fp64
    product_inner: float = 0.12  # K per TFLOP/s at which filling the chip doubles a product's time; fitted
    attention_fraction: float = 0.38  # of the best product's speed, by the attention core; fitted
    memory_fraction: float = 0.66  # of the memory bandwidth, by element-wise kernels; fitted
    launch_s: float = 21e-6  # of one kernel, with the chip's filling and draining; fitted
    issue_s: float = 0.94e-3  # of the host, to issue one layer forward in eager execution; measured
    start_s: float = 22e-6  # of a collective of two ranks, again for each doubling; measured: 46 us (vTrain)
    pass_s: float = 37e-6  # of a ring's gather for every node that it passes; fitted
    link_fraction: float = 0.757  # of NVLink by collectives; measured: 227 of 300 GB/s (vTrain, A100)
    network_fraction: float = 0.80  # of the adapters by collectives between nodes; fitted
    overlap: float = 0.39  # of the time behind which traffic can hide; fitted
    expert_fraction: float = 0.49  # of a product's speed, by products of several experts one by one; fitted
    expert_issue_s: float = 3.5e-3  # of the host, to issue a layer's experts one by one, forward; fitted
    expert_overlap: float = 0.77  # of another micro-batch, behind which rows of experts can go; fitted


FITTED = Constants()


def constants_here(measured: dict[str, Any]) -> Constants:
    """The constants with those that a calibration replaces (`hardware.read_calibration`)."""
    return replace(FITTED, **measured.get("constants", {}))
