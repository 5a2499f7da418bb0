"""First values of the parameters, the same for every layout.

Each parameter is drawn from a stream of its own, of the key (seed, its name), by element number: a rank that holds
one shard or one pipeline stage gets the numbers that the single process has, without drawing the others.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .bert import BERT
from .config import BERTConfig, GPTConfig, ModelConfig
from .draw import normal
from .gpt import GPT
from .linear import use_fastest_product

STD = 0.02  # GPT-2 and BERT alike
Module = TypeVar("Module", bound=nn.Module)
RESIDUAL = ("attention.out.weight", "mlp.down.weight", "mlp.shared.down.weight", "mlp.experts.down")


def initial_values(
    name: str,
    shape: torch.Size,
    config: ModelConfig,
    seed: int = 0,
    part: tuple[slice, ...] | None = None,
) -> Tensor:
    """The float32 values on the CPU of one parameter of this shape, or of the slices `part` of it.

    Matrices are normal with std 0.02; where the norm comes first, those that write into the residual stream
    are divided by sqrt(2 L), so that the sum of L layers keeps its variance (Radford et al. 2019, section
    2.3). Biases are 0, norm scales 1 (their weights 0 where the norm adds 1).
    """
    if name.endswith("bias") or len(shape) == 1:
        size = shape if part is None else torch.empty(shape, device="meta")[part].shape
        from_one = isinstance(config, GPTConfig) and config.norm_from_one
        return torch.zeros(size) if name.endswith("bias") or from_one else torch.ones(size)
    scaled = name.endswith(RESIDUAL) and (isinstance(config, GPTConfig) or config.norm_first)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    key = int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")
    return normal(key, tuple(shape), part).mul_(STD / math.sqrt(2 * config.layers) if scaled else STD)


@torch.no_grad()
def initialise(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter of a model that has a `config` with its first values."""
    config = cast(ModelConfig, model.config)
    for name, parameter in model.named_parameters():
        parameter.copy_(initial_values(name, parameter.shape, config, seed))


class Unfilled(TorchFunctionMode):
    """Leaves out modules' default values: on the meta device torch imports its compiler for them, a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return kwargs["tensor"] if kwargs else args[0]
        return func(*args, **(kwargs or {}))


def empty_model(
    config: ModelConfig, device: torch.device | str = "meta", dtype: torch.dtype | None = None
) -> GPT | BERT:
    """The module without values: on `meta` it takes no memory, elsewhere its memory is not filled yet."""
    family: type[BERT] | type[GPT] = BERT if isinstance(config, BERTConfig) else GPT
    return without_values(lambda: family(config), device, dtype)  # type: ignore[arg-type]


def without_values(
    make: Callable[[], Module], device: torch.device | str, dtype: torch.dtype | None
) -> Module:
    """The module that `make` makes, as `empty_model` gives one."""
    with torch.device("meta"), Unfilled():
        model = make()
    use_fastest_product(model)
    model = model.to(dtype=dtype)
    if str(device) == "meta":
        return model
    # to_empty() goes through empty_like of meta tensors, which imports torch's symbolic shapes: 70 MB
    return model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))


def build(
    config: ModelConfig, seed: int = 0, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> GPT | BERT:
    """The model of this config with its first values."""
    model = empty_model(config, device, dtype)
    initialise(model, seed)
    return model
