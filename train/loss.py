"""Cross-entropy as a sum over targets, in float32 (float64 stays float64)."""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Sum of the cross-entropies (scalar) over the targets that are not IGNORED."""
    if logits_NV.dtype in (torch.bfloat16, torch.float16):
        logits_NV = logits_NV.float()
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")
