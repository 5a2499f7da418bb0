"""All that is done to a model before it trains, in the order in which it is done; recomputation and compilation.

Each line of `parallelize` puts something on from outside and does nothing where its axis is alone or its option is
off, so one process and a thousand go through the same lines. The model is on the meta device.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..core.console import warn, warn_once
from ..core.errors import Failed, WrongUse
from ..core.hardware import machine
from ..models.attention import Documents
from ..models.attention_cuda import take_newest
from ..models.config import ModelConfig
from ..models.experts import RoutedFeedForward
from ..models.linear import onednn_is_faster
from .loss import pad_vocabulary
from .parallel.context import run_ring_eagerly
from .parallel.data import shard_stage, share_experts
from .parallel.mesh import FIT_A_GRAPH
from .parallel.tensor import apply_tensor_parallel
from .precision import computing_dtype, convert_products
from .stage import Stage

if TYPE_CHECKING:
    from .recipes.recipe import Recipe


# What `auto` assumes, on the side of not compiling: eager FLOP/s of a core or GPU, share of a step saved, seconds of a
# cold compile and of each layer. A CPU's are measured (bf16 5 to 13 % faster, fp32 through oneDNN 7 % slower), a GPU's
# are not: ptxas takes a minute for the graph that blocks share, and a third of an eager step are kernels that fuse.
RATES = {"cpu": (40e9, 0.1, 11.0, 4.0), "cuda": (100e12, 0.3, 60.0, 0.0)}
OTHERS = "other shapes"
SHAPES = 16  # of batches that are compiled by themselves; what comes then shares a program for all shapes


def parallelize(stage: Stage, precision: str, matmul: str, compiling: str, recomputing: str) -> None:
    """Cut, change and wrap a stage of the model by the recipe's words for it."""
    trunk, mesh = stage.trunk, stage.mesh  # the trunk has the blocks, the model its heads too
    apply_tensor_parallel(stage.model, mesh.tensor, recomputing == "full")  # cut layers for plain ones
    share_experts(trunk, mesh.expert)  # each process its part of them, and their rows sent there
    pad_vocabulary(trunk, mesh.device)  # of what was cut: every process has whole tiles
    # the context axis: `Stage.encode` gives the blocks documents of whole rows, which attend around the ring
    convert_products(trunk, matmul)  # fp8, in the layers that the tensor axis left
    if not trunk.config.dropout:
        take_newest(mesh.device)
    if compiling != "off":
        compile_stage(stage, compiling)  # blocks and head; what gathers or waits around them stays outside
    recompute(trunk, recomputing)  # repeats a block's compiled forward
    shard_stage(stage, trunk.blocks.values(), mesh, computing_dtype(precision))  # last: it gathers for all


def recompute(model: Any, kind: str) -> None:
    """Make `model` keep fewer activations: `none`, `full` (one per layer, for a third more FLOPs), `selective` (all but
    the attention core's: Korthikanti et al. 2022, section 5). Dropout is drawn again alike.
    """
    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=model.config.dropout > 0)
    blocks: Any = model.blocks.values() if kind != "none" else ()
    for block in blocks:
        if kind == "full":
            block.forward = partial(again, block.forward)
        else:
            block.attention.attend = partial(again, block.attention.attend)


def compile_stage(stage: Stage, wanted: str) -> None:
    """Compile each block's forward and the head with its loss. Where it breaks `on` raises Failed, `auto` goes on."""
    if stage.mesh.tensor.group is not None and not FIT_A_GRAPH:
        return
    # each layer of a pattern with random blocks has a graph of its own
    graphs = 2 * SHAPES * (len(stage.trunk.blocks) if stage.trunk.config.attention_random_blocks else 1)
    torch.compiler.config.recompile_limit = graphs  # torch's 8 would leave the others eager without a word
    run_ring_eagerly()
    for module in stage.trunk.modules():
        if isinstance(module, RoutedFeedForward):  # whose groups have sizes that only the tokens tell
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    for block in stage.trunk.blocks.values():
        block.forward = _compiled(block.forward, wanted, block.parameters)
    if stage.is_last:
        named = stage.model.named_parameters
        stage.head = _compiled(stage.head, wanted, lambda: (p for n, p in named() if "blocks." not in n))


def to_compile(recipe: "Recipe", config: ModelConfig, device: torch.device) -> bool:
    """Whether this run is compiled. Raises WrongUse where it is asked for and there is no compiler."""
    wanted = recipe.train.compile
    if wanted == "off" or (wanted == "auto" and not pays(recipe, config, device)):
        return False
    if device.type == "cpu" and not cpp_compiler():
        if wanted == "on":
            fix = 'install g++ or clang++ (or name one in CXX), or set train.compile = "auto"'
            raise WrongUse("there is no C++ compiler for torch.compile", where="train.compile", fix=fix)
        warn("no C++ compiler: training without torch.compile")
        return False
    return True


def pays(recipe: "Recipe", config: ModelConfig, device: torch.device) -> bool:
    """Whether the whole run saves twice what compiling costs; not what is left of it: a resumed run computes alike."""
    train = recipe.train
    if device.type == "cpu" and train.precision == "fp32" and onednn_is_faster():
        return False
    tokens = train.steps * train.rows_per_step * train.sequence_length
    flops = tokens * config.flops_per_token(train.sequence_length)
    speed, saved, cold, cold_per_layer = RATES[device.type]
    workers = machine().cpu.cores if device.type == "cpu" else 1
    return saved * flops / (speed * workers) > 2 * (cold + cold_per_layer * config.layers)


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile would use, if there is one."""
    named = os.environ.get("CXX", "g++").split()
    return shutil.which(named[0]) if named else None


@contextmanager
def _without_wide_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """The compiler breaks its graph at every parameter whose gradient has another dtype, as 16-bit weights have."""
    wide = [(p, p.grad) for p in parameters if p.grad is not None and p.grad.dtype != p.dtype]
    for parameter, _ in wide:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in wide:
            parameter.grad = gradient


def _compiled(
    plain: Callable[..., Any], wanted: str, weights: Callable[[], Iterable[nn.Parameter]]
) -> Callable[..., Any]:
    """A compiled function, or the plain one when the first call, at which `weights` have memory, cannot be compiled."""
    # shapes repeat from step to step; a compiled program for free shapes is slower
    fixed, free = (torch.compile(plain, dynamic=dynamic) for dynamic in (False, True))
    programs: dict[Any, Callable[..., Any]] = {}
    parameters: list[nn.Parameter] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        shapes: Any = (torch.is_grad_enabled(), _shapes((args, kwargs)))
        if len(programs) >= SHAPES and shapes not in programs:
            shapes = OTHERS
            warn_once(f"more than {SHAPES} shapes of batches: the others share a slower compiled program")
        first = shapes not in programs
        if first:
            parameters[:] = weights()
            programs[shapes] = free if shapes is OTHERS else fixed
        try:
            with _without_wide_gradients(parameters):
                return programs[shapes](*args, **kwargs)
        except getattr(torch._dynamo.exc, "TorchDynamoException", RuntimeError) as error:  # a private name
            if not first:
                raise
            reason = str(error).strip().splitlines()[0]
            if wanted == "on":
                fix = 'set train.compile = "off"'
                raise Failed("torch.compile failed", where="train.compile", why=reason, fix=fix) from error
            warn(f"training without torch.compile, which failed: {reason}")
            programs[shapes] = plain
            return plain(*args, **kwargs)

    return call


def _shapes(value: Any) -> Any:
    """The shapes of all tensors that a call is given: what a compiled program is for."""
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, dict):
        value = value.values()
    elif isinstance(value, Documents):
        return value.bounds_N.shape, value.longest
    elif not isinstance(value, tuple):
        return None
    return tuple(map(_shapes, value))
