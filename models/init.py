"""Models without values and with their first ones, which are the same in every layout and on every processor.

Each parameter is drawn from a stream of its own, of the key (seed, its name), by element number: a rank that holds
one shard or one pipeline stage gets the numbers that the single process has, without drawing the others.

Philox (Salmon et al. 2011) is a counter-based generator: word i of a stream is a function of (key, i). A word's
upper 16 bits choose a cell of a table of the normal quantile function, its lower 16 a place in the cell. What is
done to an element are one multiplication and one addition, which IEEE 754 rounds alike on every
processor; an inverse error function is not, nor is one drawn by a vector library. The table ends at 5.3 standard
deviations; mean, variance and kurtosis are those of the normal distribution to 1e-4.
"""

import functools
import hashlib
import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .bert import BERT, BERTWithHead, Head
from .config import BERTConfig, GPTConfig, ModelConfig
from .experts import RoutedFeedForward
from .gpt import GPT
from .linear import use_fastest_product

CELL_BITS = 16
BLOCK = 8  # words of 32 bits that the generator makes at a time
AT_ONCE = 1 << 18  # elements: their temporaries stay in the cache


@functools.cache
def _cells() -> tuple[np.ndarray, np.ndarray]:
    """Where each cell of the quantile function begins, and its rise for one unit of a word's lower half; float32."""
    quantile, cells = NormalDist().inv_cdf, 1 << CELL_BITS
    upper = [quantile(0.5 + i / cells) for i in range(cells // 2)] + [quantile(1 - 2.0**-24)]
    whole = np.array([-x for x in reversed(upper[1:])] + upper).astype(np.float32)
    rise = (whole[1:].astype(np.float64) - whole[:-1]) / (1 << (32 - CELL_BITS))
    return whole[:-1], rise.astype(np.float32)


def _fill(out: np.ndarray, key: tuple[int, int], first: int) -> None:
    """Elements first, first + 1, ... of the stream, in place."""
    starts, rises = _cells()
    generator = np.random.Philox(key=np.array(key, np.uint64))
    generator.advance(first // BLOCK)
    start, skip = 0, first % BLOCK
    while start < len(out):
        here = out[start : start + AT_ONCE - skip]
        blocks = -(-(skip + len(here)) // BLOCK)
        words = generator.random_raw(blocks * BLOCK // 2).astype("<u8", copy=False).view("<u4")
        words = words[skip : skip + len(here)]
        cells = (words >> CELL_BITS).astype(np.intp)
        np.multiply(rises.take(cells), (words & 0xFFFF).astype(np.float32), out=here)
        here += starts.take(cells)
        start, skip = start + len(here), 0


def normal(key: tuple[int, int], shape: tuple[int, ...], part: tuple[slice, ...] | None = None) -> Tensor:
    """The slices `part` (of steps of 1; None: all) of a standard normal tensor of this shape, float32, on the CPU."""
    bounds = [
        (cut.start or 0, size if cut.stop is None else cut.stop)
        for cut, size in zip(part or (slice(None),) * len(shape), shape, strict=True)
    ]
    out = np.empty([stop - start for start, stop in bounds], np.float32)
    whole = 1  # elements of the trailing dims that are taken whole
    while bounds and bounds[-1] == (0, shape[len(bounds) - 1]):
        whole *= shape[len(bounds) - 1]
        bounds.pop()
    start, stop = bounds.pop() if bounds else (0, 1)
    run = (stop - start) * whole  # neighbours in the whole tensor and in the part
    outer, stride = np.zeros(1, np.int64), whole * (shape[len(bounds)] if len(shape) > len(bounds) else 1)
    for dim in reversed(range(len(bounds))):
        places = np.arange(*bounds[dim]) * stride
        outer, stride = (places[:, None] + outer).reshape(-1), stride * shape[dim]
    for piece, first in zip(out.reshape(-1, run) if out.size else (), outer + start * whole):
        _fill(piece, key, int(first))
    return torch.from_numpy(out)


STD = 0.02  # GPT-2 and BERT alike
Module = TypeVar("Module", bound=nn.Module)
RESIDUAL = ("attention.out.weight", "mlp.down.weight", "mlp.shared.down.weight", "mlp.experts.down")


def initial_values(
    name: str, shape: torch.Size, config: ModelConfig, seed: int = 0, part: tuple[slice, ...] | None = None
) -> Tensor:
    """The float32 values on the CPU of one parameter of this shape, or of the slices `part` of it.

    Matrices are normal with std 0.02; where the norm comes first, those that write into the residual stream
    are divided by sqrt(2 L), so that the sum of L layers keeps its variance (Radford et al. 2019, section
    2.3). Biases and sinks are 0, norm scales 1 (their weights 0 where the norm adds 1).
    """
    zero = name.endswith(("bias", "sinks"))
    if zero or len(shape) == 1:
        size = shape if part is None else torch.empty(shape, device="meta")[part].shape
        from_one = isinstance(config, GPTConfig) and config.norm_from_one
        return torch.zeros(size) if zero or from_one else torch.ones(size)
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
    """The module that `make` makes, as `empty_model` gives one: of `dtype`, but for the routers of experts."""
    with torch.device("meta"), Unfilled():
        model = make()
    use_fastest_product(model)
    model = model.to(dtype=dtype)
    for module in model.modules():
        if isinstance(module, RoutedFeedForward):
            module.keep_wide(torch.promote_types(module.router.weight.dtype, torch.float32))
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


def empty_with_head(
    config: BERTConfig, head: Head, device: torch.device | str = "meta", dtype: torch.dtype | None = None
) -> BERTWithHead:
    """The module without values: on `meta` it takes no memory."""
    return without_values(lambda: BERTWithHead(config, head), device, dtype)


@torch.no_grad()
def build_with_head(encoder: BERT, head: Head, seed: int = 0) -> BERTWithHead:
    """A copy of a trained BERT with a new head, drawn from `seed`; a pooler that it lacks is drawn too."""
    reference = encoder.token_table.weight
    model = empty_with_head(encoder.config, head, reference.device, reference.dtype)
    initialise(model, seed)
    trained = dict(encoder.named_parameters())
    for name, parameter in model.encoder.named_parameters():
        if name in trained:
            parameter.copy_(trained[name])
    return model
