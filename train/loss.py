"""Cross-entropy as a sum over targets, in float32 (float64 stays float64).

With a large vocabulary on a CPU the logits are worked on a few rows at a time, while they are in the cache.
The plain form makes four arrays (N, V) in float32: with 50,257 words a tenth of a training step and 800 kB a
token.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ..planner.software import LARGE_VOCABULARY
from .precision import wide_dtype

IGNORED = -100
CHUNK_LOGITS = 1 << 20  # logits worked on at a time: 4 MiB in float32


def cross_entropy_sum(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Sum of the cross-entropies (scalar) over the targets that are not IGNORED."""
    large = logits_NV.shape[-1] >= LARGE_VOCABULARY and logits_NV.device.type == "cpu"
    if (
        large and type(logits_NV) is Tensor and not torch.compiler.is_compiling()
    ):  # a compiler fuses the plain form itself
        return _CrossEntropySum.apply(logits_NV, targets_N)
    logits_NV = logits_NV.to(wide_dtype(logits_NV.dtype))
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORED, reduction="sum")


class _CrossEntropySum(torch.autograd.Function):
    """Keeps the logits and each row's log of the sum of exponentials; backward makes the gradient from them, a few
    rows at a time.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        rows = max(CHUNK_LOGITS // logits_NV.shape[1], 1)
        kept = targets_N != IGNORED
        safe_N = targets_N.where(kept, 0)
        wide = wide_dtype(logits_NV.dtype)
        log_sum_N = torch.cat([chunk.to(wide).logsumexp(-1) for chunk in logits_NV.split(rows)])
        right_N = logits_NV.gather(1, safe_N[:, None]).squeeze(1).to(wide)
        ctx.save_for_backward(logits_NV, log_sum_N, safe_N, kept)
        ctx.rows = rows
        return ((log_sum_N - right_N) * kept).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        logits_NV, log_sum_N, safe_N, kept = ctx.saved_tensors
        scale_N = (kept * grad).to(log_sum_N.dtype)
        gradient_NV = torch.empty_like(logits_NV)
        parts = (logits_NV, log_sum_N, safe_N, scale_N, gradient_NV)
        for logits, log_sum, target, scale, out in zip(*(part.split(ctx.rows) for part in parts)):
            chunk = torch.sub(logits, log_sum[:, None]).exp_()  # float32: the wider of the two
            chunk.scatter_add_(1, target[:, None], torch.full_like(target[:, None], -1, dtype=chunk.dtype))
            torch.mul(chunk, scale[:, None], out=out)
        return gradient_NV, None
