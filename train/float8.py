"""Matrix products of the blocks in fp8, by torchao. Weights, masters and checkpoints stay what they are.

For each product both factors are scaled by their largest element and rounded, activations and weights to e4m3,
gradients to e5m2, and the sum is 16 bits again (Micikevicius et al. 2022, "FP8 formats for deep learning", section 3).
torchao replaces the layers in place. Those cut over tensor processes keep their collectives and take its products: a
factor that each process has a part of is scaled by that part's largest element, which rounds no coarser.
"""

import importlib.util
import logging
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import MissingExtra, WrongUse
from ..models.attention_cuda import check_computes
from .parallel.tensor import ColumnLinear, Product, RowLinear, Which


def check_products(matmul: str, device: torch.device) -> None:
    """Whether the device computes the products of `train.matmul`, and their package is there.

    Raises WrongUse for fp8 on a CPU, Refused for a GPU without it, MissingExtra.
    """
    if matmul == "same":
        return
    if matmul == "fp8" and device.type == "cpu":
        raise WrongUse(
            "a CPU has no fp8 products",
            where="train.matmul",
            why="they are made by tensor cores of compute capability 8.9 and later",
            fix='train.matmul = "same", or "fp8-emulated" to see what the rounding does (slow)',
        )
    if matmul == "fp8":
        check_computes("fp8", device)
    if importlib.util.find_spec("torchao") is None:
        raise MissingExtra("torchao", f'train.matmul = "{matmul}"', "'throughline[fp8]'")


def convert_products(model: Any, matmul: str) -> None:
    """Let the linear layers of the blocks compute in fp8, those cut over tensor processes too; nothing with "same"."""
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
