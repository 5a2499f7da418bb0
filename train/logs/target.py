"""Training to a target instead of to a number of steps, and what it took beside the published points."""

from typing import Any

from ..recipes.sections import TargetSection

# MLPerf training 1.1.0, BERT: batch -> samples until 0.720 masked-token accuracy from the reference's checkpoint, mean
# without the best and the worst run (mlcommons/logging, rcp_checker/training_1.1.0/rcps_bert.json).
REFERENCE_POINTS = {
    256: 2_549_220,
    448: 2_621_696,
    1536: 2_776_278,
    3072: 2_764_499,
    4096: 2_843_989,
    6144: 3_319_125,
    6912: 3_601_920,
    8192: 4_186_112,
    8704: 4_273_707,
    12288: 4_465_067,
    13056: 4_645_333,
}


def reached(target: TargetSection | None, figures: dict[str, Any]) -> bool:
    """Whether an evaluation meets the target: an accuracy at least, a loss at most."""
    if target is None or (figure := figures.get(target.figure)) is None:
        return False
    return figure <= target.value if target.figure.endswith("loss") else figure >= target.value


def convergence(
    target: TargetSection, figures: dict[str, Any], samples: int, batch_rows: int, seconds: float
) -> dict[str, Any]:
    """The summary's account: what was asked for, what it took, and the published point of the nearest batch.

    A sample is a row; of packed rows, which hold several sentence pairs, fewer are needed. The published points
    are for BERT-Large at 512 from the reference's own checkpoint: other runs stand beside them, not against them.
    """
    near = min(REFERENCE_POINTS, key=lambda batch: abs(batch - batch_rows))
    return {
        "figure": target.figure,
        "value": target.value,
        "reached": reached(target, figures),
        "measured": figures.get(target.figure),
        "samples": samples,
        "seconds": round(seconds, 2),
        "mlperf_reference": {"batch": near, "samples": REFERENCE_POINTS[near], "mlm_accuracy": 0.72},
    }
