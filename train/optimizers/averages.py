"""Moving averages of the weights (Polyak and Juditsky 1992), a slot of the optimizer's state beside its moments: what
shards, offloads, saves and reads those does the same with them. As in torch.optim.swa_utils the weights after the first
step begin an average, and those after each later one come in by 1 - decay; a skipped step leaves it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

SLOT = "ema"
Engine = Any  # of the floor above (train/engine.py), which takes `follow` from here


@torch.no_grad()
def follow(optimizer: Optimizer, values: Iterable[Tensor], finite: Tensor | None = None) -> None:
    """Take values into their averages, if any, after a step; `finite`: whether one of fused AdamW has moved them."""
    weight: Any = 1 - optimizer.param_groups[0].get("ema_decay", 0.0)
    moved = [value for value in values if optimizer.state.get(value)] if weight < 1 else []
    if not moved:
        return
    states = [optimizer.state[value] for value in moved]
    for value, state in zip(moved, states):
        if SLOT not in state:
            state[SLOT] = value.detach().clone()
    if finite is not None:
        weight = [torch.where(states[0]["step"] > 1, weight, 1.0) * finite] * len(moved)
    torch._foreach_lerp_([state[SLOT] for state in states], moved, weight)


@contextmanager
def averaged(engine: Engine, optimizer: Optimizer) -> Iterator[None]:
    """Within it the engine computes with the averages, if there are any; then with its weights, the same to the bit."""
    _exchange(engine, optimizer)
    try:
        yield
    finally:
        _exchange(engine, optimizer)


@torch.no_grad()
def _exchange(engine: Engine, optimizer: Optimizer) -> None:
    engine.wait()
    values = [value for _, value in engine.named_parameters() if SLOT in optimizer.state.get(value, {})]
    if not values:
        return
    if engine.copied is not None:  # a checkpoint's copies of both
        engine.copied.synchronize()
    for value in values:
        kept, average = value.clone(), optimizer.state[value][SLOT]
        value.copy_(average)
        average.copy_(kept)
    engine.publish()
    for module in (module for stage in engine.stages for module in stage.modules()):
        reshard: Any = getattr(module, "reshard", None)
        if reshard is not None:  # of `fully_shard`: what it has gathered is not gathered again
            reshard()
