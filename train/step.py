"""One optimizer step: micro-batches, sum of losses over the global target count, clip, update or skip.

The device is waited for once a step, when losses, gradient norm and what signals the processes have received are
read together; in a layout they have been summed by one small collective.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .engine import Engine, Mark
from .objective import StepBatch
from .precision import LossScaler


@dataclass
class Trainer:
    """What a run changes as it goes: everything here is in its checkpoints."""

    engine: Engine
    optimizer: torch.optim.Optimizer
    scaler: LossScaler
    precision: str
    clip_norm: float
    step: int = 0
    samples: int = 0  # rows consumed, those of skipped steps included: the data position
    skipped: int = 0  # steps skipped so far because the loss or a gradient was not finite
    skipped_in_row: int = 0


@dataclass(frozen=True)
class StepResult:
    """What one step did: mean loss of each term, their sum, the gradient norm before clipping."""

    loss: float
    terms: tuple[float, ...]
    grad_norm: float
    skipped: bool
    gradient_bytes: int = 0  # that this process sent to sum the gradients of copies of the model
    signal: int = 0  # the largest that any process had received
    read_at: float = 0.0  # time.perf_counter() when the figures were there


def train_step(
    trainer: Trainer,
    batch: StepBatch,
    lr_factor: float,
    mark: Mark = lambda phase: None,
    signal: Callable[[], int] = lambda: 0,
    upcoming: StepBatch | None = None,
) -> StepResult:
    """Forward and backward over the micro-batches, then one update, or none when a number is not finite.

    `lr_factor` multiplies each group's `base_lr`; `mark` is told the end of each phase; `signal` says which
    one this process has received when backward has ended, `upcoming` is the batch of the next step.
    """
    engine, scale, sent = trainer.engine, trainer.scaler.scale, trainer.engine.communicator.bytes_sent
    figures = engine.accumulate(batch, trainer.step, scale, mark, signal, upcoming)
    *terms, norm, heard = figures.tolist()  # the wait
    read_at = time.perf_counter()
    norm /= scale
    finite = all(map(math.isfinite, (*terms, norm)))
    if finite:
        for group in trainer.optimizer.param_groups:
            group["lr"] = group["base_lr"] * lr_factor
        clips = trainer.clip_norm and norm > trainer.clip_norm
        engine.update(trainer.optimizer, (trainer.clip_norm / (norm + 1e-6) if clips else 1.0) / scale)
    else:
        engine.discard()
    trainer.scaler.update(finite)
    if trainer.scaler.scale != scale:
        engine.rescale(trainer.scaler.scale / scale)
    trainer.step += 1
    trainer.samples += batch.rows
    trainer.skipped += not finite
    trainer.skipped_in_row = 0 if finite else trainer.skipped_in_row + 1
    mark("optimizer")
    sent_bytes = round(engine.communicator.bytes_sent - sent)
    return StepResult(sum(terms), tuple(terms), norm, not finite, sent_bytes, int(heard), read_at)
