"""One optimizer step: forward and backward, then clip and update, or skip.

Losses, gradient norm and signals are read together. A CPU decides by them whether to clip or to skip. On a GPU with
AdamW the device decides, in the optimizer's own kernel, and nothing waits: the figures go to the host behind the update
and are read when the next step is under way. Other optimizers, compressed sums and offload are decided by the host.

fp16 underflows below 6e-8, so its loss is scaled up and the gradients are divided again (Micikevicius et al. 2018,
section 3.2), with the scale found by the run itself.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .engine import Engine, Mark
from .objective import AUXILIARY, StepBatch

LEAST_SCALE = 1.0  # below it a gradient that overflows would overflow in bf16 as well
FIRST_SCALE = 2.0**16  # 65,504 is the largest fp16: the first steps halve the scale until the gradients fit
GROWTH_INTERVAL = 2000  # good steps before the scale is doubled, as in torch.amp


@dataclass
class LossScaler:
    """fp16's scale of the loss, else 1: halved by an overflow, doubled after good steps; on a GPU a step later."""

    scale: float = 1.0
    good_steps: int = 0
    active: bool = False

    @classmethod
    def of(cls, precision: str) -> "LossScaler":
        return cls(FIRST_SCALE, 0, True) if precision == "fp16" else cls()

    def update(self, finite: bool) -> None:
        """After each step: whether its gradients were finite."""
        self.good_steps += self.active
        if self.active and not finite:
            self.scale, self.good_steps = max(self.scale / 2, LEAST_SCALE), 0
        elif self.good_steps == GROWTH_INTERVAL:
            self.scale, self.good_steps = self.scale * 2, 0


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
    planned_steps: int = 0  # train.steps, by which the schedule decays
    earlier_lengths: list[tuple[int, int]] = field(default_factory=list)
    """(step, steps): the run was planned with so many steps until this step, where a resume changed train.steps."""

    def __post_init__(self) -> None:
        engine = self.engine
        elsewhere = engine.offload or engine.communication_hook
        plain = type(self.optimizer) is torch.optim.AdamW and not elsewhere
        # the device, whether to clip or to skip: the fused kernel takes both, as float32
        self.decides_there = plain and engine.device.type == "cuda" and self.precision != "fp64"


@dataclass(frozen=True)
class StepResult:
    """What one step did: the loss without auxiliary terms, the mean loss of each term, the norm before clipping."""

    step: int  # how many there are with it
    loss: float
    terms: tuple[float, ...]
    grad_norm: float
    skipped: bool
    overflowed: bool = (
        False  # skipped for fp16's scale alone: the loss is finite, and the scale can be lowered
    )
    gradient_bytes: int = 0  # that this process sent to sum the gradients of copies of the model
    routers: tuple[float, ...] = ()  # `stage.ROUTER_FIGURES`, of experts
    signal: int = 0  # the largest that any process had received
    read_at: float = 0.0  # time.perf_counter() when the figures were there


@dataclass
class Launched:
    """A step that the device has been given; `read` once, and in the order of the steps."""

    trainer: Trainer
    figures: list[float] | Tensor  # what `accumulate` returns: on the host, or on its way there
    arrived: torch.cuda.Event | None
    scale: float  # of its loss
    sent: int
    step: int  # how many there are with it

    @property
    def is_there(self) -> bool:
        return isinstance(self.figures, list)

    def read(self) -> StepResult:
        """The figures, when they are there; the trainer counts the step as good or skipped."""
        if self.arrived is not None:
            self.arrived.synchronize()
        read_at, trainer = time.perf_counter(), self.trainer
        *terms, norm, heard = self.figures if isinstance(self.figures, list) else self.figures.tolist()
        count = len(trainer.engine.routers.names)
        routed, terms, norm = terms[:count], terms[count:], norm / self.scale
        finite = all(map(math.isfinite, (*terms, norm)))
        overflowed = not finite and self.scale > LEAST_SCALE and all(map(math.isfinite, terms))
        before, hook = trainer.scaler.scale, trainer.engine.communication_hook
        if finite or self.scale == before:  # else the step before, which had the same scale, has lowered it
            trainer.scaler.update(finite)
        if hook is not None and trainer.scaler.scale != before:
            hook.rescale(trainer.scaler.scale / before)  # as every gradient to come is
        trainer.skipped += not finite
        trainer.skipped_in_row = 0 if finite else trainer.skipped_in_row + 1
        rest = norm, not finite, overflowed, self.sent, tuple(routed), int(heard), read_at
        names = trainer.engine.objective.terms
        loss = sum(term for name, term in zip(names, terms, strict=True) if name not in AUXILIARY)
        return StepResult(self.step, loss, tuple(terms), *rest)


def train_step(trainer: Trainer, batch: StepBatch, lr_factor: float, *more: Any, **named: Any) -> StepResult:
    """`launch_step`, and what it came to."""
    return launch_step(trainer, batch, lr_factor, *more, **named).read()


def launch_step(
    trainer: Trainer,
    batch: StepBatch,
    lr_factor: float,
    mark: Mark = lambda phase: None,
    signal: Callable[[], int] = lambda: 0,
    upcoming: StepBatch | None = None,
) -> Launched:
    """Forward and backward over the micro-batches, then one update, or none when a number is not finite. `lr_factor`
    multiplies each group's `base_lr`, `signal` says what this process has received, `upcoming` is the next batch.
    """
    engine, scale, sent = trainer.engine, trainer.scaler.scale, trainer.engine.communicator.bytes_sent
    figures = engine.accumulate(batch, trainer.step, scale, mark, signal, upcoming)
    for group in trainer.optimizer.param_groups:
        group["lr"] = group["base_lr"] * lr_factor
    numbers: list[float] | Tensor
    clip, arrived = trainer.clip_norm or math.inf, None
    if trainer.decides_there:
        norm = figures[-2] / scale
        factor = torch.where(norm > clip, clip / (norm + 1e-6), 1.0)
        engine.update(trainer.optimizer, factor / scale, figures[:-1].isfinite().all())
        numbers = torch.empty_like(figures, device="cpu", pin_memory=figures.is_cuda)
        numbers.copy_(figures, non_blocking=True)
        arrived = torch.cuda.current_stream().record_event() if figures.is_cuda else None
    else:
        numbers = figures.tolist()  # the wait
        norm_here = numbers[-2] / scale
        if all(map(math.isfinite, (*numbers[:-2], norm_here))):
            engine.update(trainer.optimizer, (clip / (norm_here + 1e-6) if norm_here > clip else 1.0) / scale)
        else:
            engine.discard()
    trainer.step += 1
    trainer.samples += batch.rows
    mark("optimizer")
    sent_bytes = round(engine.communicator.bytes_sent - sent)
    return Launched(trainer, numbers, arrived, scale, sent_bytes, trainer.step)
