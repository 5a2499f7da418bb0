"""The constants of the time model: ten, physical, and the same for every table, model and layout.

Three were measured by others; seven were fitted once on all published rows together by `benchmarks/planner_fit.py`
(soft L1 on the log error, every table with the same weight). docs/planning.md gives the errors with each table left out
of the fit. `throughline study` replaces them for one machine. What differs between chips stands in `core/chips.toml`.
"""

from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Constants:
    """Fractions of what the chips of `chips.toml` can do, and times in seconds."""

    vector_fraction: float = 0.89  # of the peak by products without tensor cores: fp32 and fp64
    product_inner: float = 0.60  # K per TFLOP/s at which filling the chip doubles a product's time; fitted
    attention_fraction: float = 0.40  # of the best product's speed, by the attention core; fitted
    memory_fraction: float = 0.63  # of the memory bandwidth, by element-wise kernels; fitted
    launch_s: float = 11e-6  # of one kernel, with the chip's filling and draining; fitted
    issue_s: float = 0.94e-3  # of the host, to issue one layer forward in eager execution; measured
    start_s: float = 22e-6  # of a collective of two ranks, again for each doubling; measured: 46 us (vTrain)
    link_fraction: float = (
        0.757  # of NVLink by collectives in a node; measured: 227 of 300 GB/s (vTrain, A100)
    )
    network_fraction: float = 0.70  # of the adapters by collectives between nodes; fitted
    overlap: float = 0.51  # of the time behind which traffic can hide; fitted


FITTED = Constants()
MEASURED = ("issue_s", "start_s", "link_fraction")  # not touched by a fit on published rows


def constants_here(measured: dict[str, Any]) -> Constants:
    """The constants with those that a calibration replaces (`hardware.read_calibration`)."""
    return replace(FITTED, **measured.get("constants", {}))
