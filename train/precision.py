"""Arithmetic: the device of a recipe, the dtype of the products, products in fp8.

In 16 bits the optimizer moves fp32 masters, of which the model has rounded copies, and gradients are added up in fp32.
"""

import importlib.util
import logging
import os
from typing import Any

import torch
from torch import Tensor, nn

from ..core.console import warn_once
from ..core.errors import MissingExtra, WrongUse
from ..core.hardware import machine
from ..models.attention_cuda import check_computes
from .parallel.tensor import ColumnLinear, Product, RowLinear, Which

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def pick_device(wanted: str, precision: str) -> torch.device:
    """The recipe's device. Raises WrongUse where there is none such, Refused where it cannot compute in `precision`."""
    if wanted == "cuda" and not torch.cuda.is_available():
        fix = 'set train.device = "cpu", or see: throughline doctor'
        raise WrongUse("no CUDA device here", where="train.device", fix=fix)
    if wanted == "cpu" or not torch.cuda.is_available():
        if precision == "tf32":
            why, fix = "tf32 is an arithmetic of NVIDIA's GPUs", 'train.precision = "fp32"'
            raise WrongUse("a CPU has no tf32", where="train.precision", why=why, fix=fix)
        if precision in HALVES and precision not in machine().cpu.dtypes:
            warn_once(f'this processor has no {precision} products: train.precision = "fp32" is faster here')
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


def check_products(matmul: str, device: torch.device) -> None:
    """Raises WrongUse for fp8 on a CPU, Refused for a GPU without it, MissingExtra where its package is not there."""
    if matmul == "same":
        return
    if matmul == "fp8" and device.type == "cpu":
        why = "they are made by tensor cores of compute capability 8.9 and later"
        fix = 'train.matmul = "same", or "fp8-emulated" to see what the rounding does (slow)'
        raise WrongUse("a CPU has no fp8 products", where="train.matmul", why=why, fix=fix)
    if matmul == "fp8":
        check_computes("fp8", device)
    if importlib.util.find_spec("torchao") is None:
        raise MissingExtra("torchao", f'train.matmul = "{matmul}"', "'throughline[fp8]'")


def convert_products(model: Any, matmul: str) -> None:
    """Let the linear layers of the blocks compute in fp8, by torchao, which replaces them in place: factors scaled by
    their largest element and rounded, activations and weights to e4m3, gradients to e5m2 (Micikevicius et al. 2022,
    "FP8 formats for deep learning", section 3). Layers cut over tensor processes keep their collectives and take
    torchao's products: each part of a factor is scaled by its own largest element, which rounds no coarser.
    """
    if matmul == "same":
        return
    for noisy in ("torchao", "torch.utils._pytree"):  # of kernels for other things, which fit another torch
        logging.getLogger(noisy).setLevel(logging.ERROR)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # products of whole tiles only: a count of tokens that is no multiple of 16 is filled up with zeros
    config = Float8LinearConfig(emulate=matmul == "fp8-emulated", pad_inner_dim=True)
    product = _fp8_product(config)
    for block in model.blocks.values():
        convert_to_float8_training(block, config=config)
        for module in block.modules():
            if isinstance(module, (ColumnLinear, RowLinear)):
                module.product = product


def _fp8_product(config: Any) -> Product:
    """torchao's product of two factors that it scales and rounds, without its layer around it."""
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    kernels = Float8Linear.from_float(nn.Linear(16, 16, device="meta"), config).linear_mm_config
    gradient, values = config.cast_config_grad_output.target_dtype, config.cast_config_input.target_dtype
    inputs, weights, gradients = GemmInputRole.INPUT, GemmInputRole.WEIGHT, GemmInputRole.GRAD_OUTPUT
    roles = {
        "output": (values, inputs, weights),
        "input": (gradient, gradients, weights),
        "weight": (gradient, gradients, inputs),
    }

    def product(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None, which: Which) -> Tensor:
        dtype, role, other = roles[which]
        x_NI = x.reshape(-1, x.shape[-1])
        x8 = hp_tensor_to_float8_dynamic(x_NI, dtype, kernels, gemm_input_role=role)
        weight8_IO = hp_tensor_to_float8_dynamic(weight_OI.t(), values, kernels, gemm_input_role=other)
        y = torch.mm(x8, weight8_IO).reshape(*x.shape[:-1], -1)
        return y if bias_O is None else y + bias_O

    return torch.compiler.allow_in_graph(product)
