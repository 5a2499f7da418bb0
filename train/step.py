"""One optimizer step: micro-batches, sum of losses over the global target count, clip, update or skip.

The device is waited for once a step, when losses and gradient norm are read together.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from .objective import LossFunction, StepBatch
from .precision import LossScaler, autocast

if TYPE_CHECKING:
    from .parallel.engine import Engine
    from .parallel.host_parts import HostParts
    from .parallel.offload import HostOffload


@dataclass
class Trainer:
    """What a run changes as it goes: everything here is in its checkpoints."""

    model: "nn.Module | Engine"  # the engine where the model is spread over processes
    optimizer: torch.optim.Optimizer
    loss: LossFunction  # perhaps compiled
    scaler: LossScaler
    precision: str
    device: torch.device
    clip_norm: float
    step: int = 0
    samples: int = 0  # rows consumed, those of skipped steps included: the data position
    skipped: int = 0  # steps skipped so far because the loss or a gradient was not finite
    skipped_in_row: int = 0
    offload: "HostOffload | HostParts | None" = (
        None  # holds what the optimizer moves, where that is not the model's own parameters
    )

    @property
    def holder(self) -> "nn.Module | Engine | HostOffload | HostParts":
        """What has the weights that the optimizer moves and a checkpoint saves."""
        return self.offload or self.model


@dataclass(frozen=True)
class StepResult:
    """What one step did: mean loss of each term, their sum, the gradient norm before clipping."""

    loss: float
    terms: tuple[float, ...]
    grad_norm: float
    skipped: bool
    gradient_bytes: int = 0  # that this process sent to sum the gradients of copies of the model


def no_mark(phase: str) -> None:
    """Nobody watches the phases of this step."""


def train_step(
    trainer: Trainer, batch: StepBatch, lr_factor: float, mark: Callable[[str], None] = no_mark
) -> StepResult:
    """Forward and backward over the micro-batches, then one update, or none when a number is not finite.

    `lr_factor` multiplies each group's `base_lr`; `mark` is told the end of each phase.
    """
    scale = trainer.scaler.scale
    wire = None if isinstance(trainer.model, nn.Module) else trainer.model.wire
    before = wire.bytes_sent if wire else 0
    if isinstance(trainer.model, nn.Module):
        means = _accumulate(trainer, batch, mark) * batch.inverse_counts
        mark("backward")
        gradients = [parameter.grad for parameter in trainer.model.parameters() if parameter.grad is not None]
        offload = cast("HostOffload | None", trainer.offload)
        total_norm = torch.nn.utils.get_total_norm(gradients) if offload is None else offload.gradient_norm()
    else:
        means, total_norm = trainer.model.accumulate(batch, trainer.step, scale)
        mark("backward")
        gradients = trainer.model.gradients()
    *terms, norm = torch.cat((means, total_norm.view(1).to(means.device))).tolist()
    norm /= scale
    finite = all(map(math.isfinite, (*terms, norm)))
    if finite:
        _update(trainer, gradients, norm, lr_factor)
    elif trainer.offload is not None:
        trainer.offload.discard()
    trainer.model.zero_grad()
    trainer.scaler.update(finite)
    if (
        not isinstance(trainer.model, nn.Module)
        and trainer.model.exchange is not None
        and trainer.scaler.scale != scale
    ):
        trainer.model.exchange.rescale(trainer.scaler.scale / scale)
    trainer.step += 1
    trainer.samples += batch.rows
    trainer.skipped += not finite
    trainer.skipped_in_row = 0 if finite else trainer.skipped_in_row + 1
    mark("optimizer")
    sent = round(wire.bytes_sent - before) if wire else 0
    return StepResult(sum(terms), tuple(terms), norm, not finite, sent)


def _accumulate(trainer: Trainer, batch: StepBatch, mark: Callable[[str], None]) -> Tensor:
    """Forward and backward of the micro-batches; the sums of the losses (terms,)."""
    scale = trainer.scaler.scale
    sums = torch.zeros_like(batch.inverse_counts)
    for micro_batch in batch.micro_batches:
        with autocast(trainer.precision, trainer.device):
            loss, terms = trainer.loss(trainer.model, micro_batch, batch.inverse_counts)
        mark("forward")
        (loss if scale == 1.0 else loss * scale).backward()
        sums += terms
    return sums


def _update(trainer: Trainer, gradients: list[Tensor], norm: float, lr_factor: float) -> None:
    """Undo the loss scale and clip in one pass over the gradients, then let the optimizer move."""
    factor = 1.0 / trainer.scaler.scale
    if trainer.clip_norm and norm > trainer.clip_norm:
        factor *= trainer.clip_norm / (norm + 1e-6)
    for group in trainer.optimizer.param_groups:
        group["lr"] = group["base_lr"] * lr_factor
    if trainer.offload is not None:
        trainer.offload.step(trainer.optimizer, factor)
        return
    if factor != 1.0:
        torch._foreach_mul_(gradients, factor)
    trainer.optimizer.step()
