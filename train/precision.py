"""Arithmetic: the dtype of the products, loss scaling for fp16, and what a device can do.

Weights are computed with in the dtype of the products: with bf16 and fp16 the optimizer moves fp32 masters, of
which the model has rounded copies, and gradients of 16 bits are added up in fp32. Otherwise everything is
fp32 (fp64 with precision fp64). fp16 underflows below 6e-8, so its loss is scaled up and the gradients
are divided again (Micikevicius et al. 2018, section 3.2), with the scale found by the run itself.
"""

import os
from dataclasses import dataclass

import torch

from ..core.errors import WrongUse
from ..models.attention_cuda import check_computes

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_SCALE = 2.0**16  # 65,504 is the largest fp16: the first steps halve the scale until the gradients fit
GROWTH_INTERVAL = 2000  # good steps before the scale is doubled, as in torch.amp


def pick_device(wanted: str, precision: str) -> torch.device:
    """The device of a recipe's `train.device`, able to compute in `precision`.

    Raises WrongUse when there is no such device and Refused when it cannot compute in that precision.
    """
    if wanted == "cuda" and not torch.cuda.is_available():
        raise WrongUse(
            "no CUDA device here",
            where="train.device",
            fix='set train.device = "cpu", or see: throughline doctor',
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        if precision == "tf32":
            why, fix = "tf32 is an arithmetic of NVIDIA's GPUs", 'train.precision = "fp32"'
            raise WrongUse("a CPU has no tf32", where="train.precision", why=why, fix=fix)
        return torch.device("cpu")
    device = torch.device("cuda", torch.cuda.current_device())
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    check_computes("fp32" if precision in ("auto", "fp64") else precision, device)
    return device


def use_deterministic_kernels() -> None:
    """Let torch refuse kernels whose sums come in any order, before a GPU's libraries start."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it only finds faults


def computing_dtype(precision: str) -> torch.dtype:
    """Dtype of the weights that the model computes with, of its products and activations."""
    return HALVES.get(precision, torch.float64 if precision == "fp64" else torch.float32)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over numbers of this dtype are kept in, and what an optimizer moves for weights of it."""
    return torch.promote_types(dtype, torch.float32)


@dataclass
class LossScaler:
    """The scale of the loss in fp16: halved after a step that overflowed, doubled after many that did not.

    In other precisions it is 1 and stays 1. On a GPU the scale follows a step later than on a CPU (`launch_step`).
    """

    scale: float = 1.0
    good_steps: int = 0
    active: bool = False

    @classmethod
    def of(cls, precision: str) -> "LossScaler":
        return cls(FIRST_SCALE, 0, True) if precision == "fp16" else cls()

    def update(self, finite: bool) -> None:
        """After each step: whether its gradients were finite."""
        if not self.active:
            return
        if not finite:
            self.scale, self.good_steps = max(self.scale / 2, 1.0), 0
            return
        self.good_steps += 1
        if self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0
