"""Whether forward and backward are compiled, and what happens where they cannot be.

torch.compile fuses everything between the matrix products. On a CPU that saves about 10 % of a step in bf16
and costs up to a minute at first, so `auto` compiles only runs that are long enough to earn it back; on a
machine without a working C++ compiler (or without Triton on a GPU) it trains eagerly and says so in one line.

Blocks are compiled one by one, which share a graph, and the head with its loss: gathers of sharded weights and waits
for offloaded ones stay between them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.console import warn
from ..core.errors import Failed, WrongUse
from ..core.hardware import machine
from ..models.config import ModelConfig
from ..models.linear import onednn_is_faster
from .parallel.collectives import FIT_A_GRAPH
from .parallel.context import run_ring_eagerly

if TYPE_CHECKING:
    from .recipes.recipe import Recipe

# What the rule of `auto` assumes; rough on purpose, and on the side of not compiling. Cold compiles took 11 s
# + 4 s per layer of CPU time here (4 to 12 layers); a step in bf16 became 5 to 13 % faster, one in fp32
# through oneDNN 7 % slower.
COLD_SECONDS, COLD_SECONDS_PER_LAYER = 11.0, 4.0
SAVED = 0.1
EAGER_FLOPS = {"cpu": 40e9, "cuda": 100e12}  # per core, per GPU


def compile_stage(stage: Any, wanted: str) -> None:
    """Compile each block's forward, and the head with its loss. Before `recompute`, which repeats the compiled forward.

    `on` raises Failed in the first step when compilation breaks; `auto` goes on eagerly.
    """
    if stage.mesh.tensor.group is not None and not FIT_A_GRAPH:
        return
    run_ring_eagerly()
    for block in stage.trunk.blocks.values():
        block.forward = _compiled(block.forward, wanted, block.parameters)
    if stage.is_last:
        named = stage.model.named_parameters
        outside = lambda: (parameter for name, parameter in named() if "blocks." not in name)  # noqa: E731
        stage.head = _compiled(stage.head, wanted, outside)


def to_compile(recipe: Recipe, config: ModelConfig, device: torch.device) -> bool:
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


def pays(recipe: Recipe, config: ModelConfig, device: torch.device) -> bool:
    """Whether the whole run saves twice what compiling costs; not what is left of it: a resumed run computes alike."""
    train = recipe.train
    if device.type == "cpu" and train.precision == "fp32" and onednn_is_faster():
        return False
    tokens = train.steps * train.rows_per_step * train.sequence_length
    flops = tokens * config.flops_per_token(train.sequence_length)
    rate = EAGER_FLOPS[device.type] * (machine().cpu.cores if device.type == "cpu" else 1)
    return SAVED * flops / rate > 2 * (COLD_SECONDS + COLD_SECONDS_PER_LAYER * config.layers)


def cpp_compiler() -> str | None:
    """The C++ compiler that torch.compile would use, if there is one."""
    named = os.environ.get("CXX", "g++").split()
    return shutil.which(named[0]) if named else None


def _not_compiled() -> type[Exception]:
    """What torch.compile raises when it fails. The name is private: without it any RuntimeError is taken for one,
    and what is wrong with the step itself is raised again by the plain loss.
    """
    return getattr(torch._dynamo.exc, "TorchDynamoException", RuntimeError)


@contextmanager
def _without_wide_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """The compiler breaks its graph at every parameter whose gradient has another dtype, as 16-bit weights have whose
    gradients are added up in fp32. A forward needs none of them: they are taken off and put back.
    """
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
    """A compiled function, or the plain one from the first call on when that call cannot be compiled. `weights` are
    asked for then, when they have memory.
    """
    # shapes repeat from step to step; a compiled program for free shapes is slower
    compiled, ready = torch.compile(plain, dynamic=False), False
    parameters: list[nn.Parameter] = []

    def chosen(*args: Any, **kwargs: Any) -> Any:
        with _without_wide_gradients(parameters):
            return compiled(*args, **kwargs)

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal chosen, ready
        if ready:
            return chosen(*args, **kwargs)
        parameters[:] = weights()
        try:
            result = chosen(*args, **kwargs)
        except _not_compiled() as error:
            reason = str(error).strip().splitlines()[0]
            if wanted == "on":
                fix = 'set train.compile = "off"'
                raise Failed("torch.compile failed", where="train.compile", why=reason, fix=fix) from error
            warn(f"training without torch.compile, which failed: {reason}")
            chosen = plain
            result = plain(*args, **kwargs)
        ready = True
        return result

    return call
