"""The matrix product with a weight, on the kernel that is fastest for it here.

torch sends fp32 products on a CPU to MKL, which takes AMD processors for ones of 256 bits. From Zen 5 on they add and
multiply 512 at a time, and oneDNN, the library that torch uses for bf16 and for compiled inference, computes at twice
the rate of MKL: 370 against 180 GFLOP/s on two cores, 768 x 128 by 128 x 512, and the gradients of the input and of the
weight alike; at GPT-2's sizes 1.5 to 3 times from one row upwards. Zen 4 knows AVX-512 but takes two turns for it:
there both compute at 80 to 100 GFLOP/s a core, and the copy that oneDNN makes of a transposed gradient is lost time.
Everything else (GPUs, other processors and dtypes, autocast, sharded tensors, products too small to matter) goes to
torch. Models are written with torch's own `nn.Linear`; whoever makes one (`init.empty_model`) puts this on.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.flop_counter import register_flop_formula

LEAST_PRODUCTS = 1 << 21  # rows x in x out below which the start of a oneDNN primitive (20 us) does not pay
ZEN_5 = 26  # its family


class Linear(nn.Linear):
    """`nn.Linear` through `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def use_fastest_product(model: nn.Module) -> None:
    """Let a model's layers and its head compute by `linear` where that is not torch's own product alone."""
    for module in model.modules() if onednn_is_faster() else ():
        if type(module) is nn.Linear:
            module.__class__ = Linear
        elif hasattr(module, "product"):
            module.product = linear  # type: ignore[assignment]


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """(..., I) -> (..., O), as torch's own, to rounding."""
    if (
        x.dtype == weight_OI.dtype == torch.float32
        and type(x) is Tensor
        and type(weight_OI) in (Tensor, nn.Parameter)
        and x.device.type == "cpu"
        and x.numel() * weight_OI.shape[0] >= LEAST_PRODUCTS
        and not torch.is_autocast_enabled("cpu")
        and onednn_is_faster()
    ):
        return _Linear.apply(x, weight_OI, bias_O)
    return F.linear(x, weight_OI, bias_O)


@contextmanager
def one_kernel() -> Iterator[None]:
    """Every matrix product on the same kernel, whatever its size, which what shares a batch decides. One without rows,
    of an expert that no token chose, computes nothing and stays torch's.
    """
    global LEAST_PRODUCTS
    before, LEAST_PRODUCTS = LEAST_PRODUCTS, 1
    try:
        yield
    finally:
        LEAST_PRODUCTS = before


def onednn_is_faster() -> bool:
    """Whether oneDNN is faster at fp32 products than torch: on AMD from Zen 5 on, where torch has MKL."""
    return ONEDNN_IS_FASTER


def _ask() -> bool:
    libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    if not libraries or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    try:
        with open("/proc/cpuinfo") as facts:
            return _multiplies_512_bits(facts.read(1024))  # the first core's; a large machine's take a while
    except OSError:
        return False


def _multiplies_512_bits(cpu_facts: str) -> bool:
    """Whether these lines of /proc/cpuinfo are of an AMD processor from Zen 5 (family 26) on."""
    family = re.search(r"^cpu family\s*: (\d+)$", cpu_facts, re.MULTILINE)
    return "AuthenticAMD" in cpu_facts and family is not None and int(family[1]) >= ZEN_5


ONEDNN_IS_FASTER = _ask()  # now: a compiler that met the question in a block would break its graph there


def _onednn(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], "")


@torch.library.custom_op("throughline::product", mutates_args=())
def _opaque(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """For a compiler, whose own lowering of this kernel wants a weight that never changes."""
    return _onednn(x_NI, weight_OI, bias_O)


@_opaque.register_fake
def _(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_NI.new_empty(x_NI.shape[0], weight_OI.shape[0])


if hasattr(torch.ops.mkldnn, "_linear_pointwise"):  # torch's counter of FLOPs knows neither

    @register_flop_formula([torch.ops.mkldnn._linear_pointwise, torch.ops.throughline.product])
    def _flops(x_shape: torch.Size, weight_shape: torch.Size, *rest: object, **named: object) -> int:
        return 2 * x_shape.numel() * weight_shape[0]


def _product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return (_opaque if torch.compiler.is_compiling() else _onednn)(x_NI, weight_OI, bias_O)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.biased = bias_O is not None
        return _product(x.reshape(-1, x.shape[-1]), weight_OI, bias_O).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight_OI = ctx.saved_tensors
        gradient_NO = gradient.reshape(-1, gradient.shape[-1])
        x_NI = x.reshape(-1, x.shape[-1])
        for_x = _product(gradient_NO, weight_OI.t(), None).view(x.shape) if ctx.needs_input_grad[0] else None
        for_weight = _product(gradient_NO.t(), x_NI.t(), None) if ctx.needs_input_grad[1] else None
        for_bias = gradient_NO.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None
        return for_x, for_weight, for_bias
