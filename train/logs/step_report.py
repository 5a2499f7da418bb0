"""What is told of the steps of a run: how long each took, what memory it held, its record and its line."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...core.console import progress
from ..build import RunPlan
from ..engine import Mark
from ..memory import out_of_memory
from ..objective import TERMS, StepBatch
from ..parallel.heartbeat import Heartbeat
from ..step import StepResult, Trainer
from .metrics import Metrics, PhaseMemory, Record, peak_flops, read_metrics

MEMORY_EVERY_S = 1.0
WATCHED = 3  # first steps whose memory is read, whenever they come
NEXT_PHASE = {"forward": "backward", "backward": "the optimizer"}  # after anything else: forward


class StepReport:
    """The clock and the memory of a run's steps, from the step where the trainer stands."""

    def __init__(self, plan: RunPlan, trainer: Trainer, metrics: Metrics) -> None:
        self.plan, self.trainer, self.metrics, self.heartbeat = plan, trainer, metrics, Heartbeat(None)
        self.memory, self._memory_read, self._watch = PhaseMemory(plan.device), float("-inf"), False
        self._start: float | None = None  # when the last step's figures were read, if nothing came after it
        self.peak, self.peak_source = peak_flops(plan.device, plan.recipe.train.precision)
        self.peak *= trainer.engine.layout.world
        objective, length = plan.recipe.objective, plan.recipe.train.sequence_length
        predicted = {} if objective is None else {"predicted": objective.mask_fraction}
        self._flops_per_token = plan.config.flops_per_token(length, **predicted)
        self.first_step = trainer.step
        # of this process, without its first step, which compiles and allocates
        self._tokens, self._seconds = 0, 0.0
        records = reversed(read_metrics(metrics.workspace.path))
        self.last: Record = next((record for record in records if "loss" in record), {})

    @contextmanager
    def step(self) -> Iterator[Mark]:
        """Around a step: what is told the end of each phase. Raises Failed, with the phase, where memory runs out."""
        now, here = time.perf_counter(), self.trainer.step - self.first_step
        self._start = self._start or now  # so that a step's time has an update in it
        self._watch = here < WATCHED or now - self._memory_read > MEMORY_EVERY_S
        if self._watch:
            self.memory.start()
            self._memory_read = now

        def mark(phase: str) -> None:
            self.heartbeat.mark(phase)
            if self._watch:
                self.memory.mark(phase)

        self.heartbeat.mark("its batch", self.trainer.step)
        try:
            yield mark
        except torch.OutOfMemoryError as error:
            phase = NEXT_PHASE.get(self.memory.phase, "forward") if self._watch else "a step"
            raise out_of_memory(self.plan.config, self.plan.recipe, self.plan.device, phase) from error

    def pause(self) -> None:
        """Something else than a step comes now."""
        self._start = None

    def add(self, result: StepResult, factor: float, batch: StepBatch, bar: progress) -> None:
        """The record and the line of a step that has ended."""
        assert self._start is not None
        seconds, self._start = result.read_at - self._start, result.read_at
        step, recipe, scaler = result.step, self.plan.recipe, self.trainer.scaler
        if step > self.first_step + 1:
            self._tokens, self._seconds = self._tokens + batch.tokens, self._seconds + seconds
        mfu = self._mfu(rate := batch.tokens / seconds)
        shown = f"  MFU {100 * mfu:.0f}%" if mfu is not None else ""
        tokens = batch.rows * recipe.train.sequence_length
        bar.advance(tokens, f"step {step:,}  loss {result.loss:.4f}{shown}")
        if step % recipe.log.every_steps and not result.skipped and step != recipe.train.steps:
            return
        record: Record = {
            "step": step,
            "loss": result.loss,
            "lr": recipe.optimizer.learning_rate * factor,
            "grad_norm": result.grad_norm,
            "tokens": batch.tokens,
            "step_s": round(seconds, 6),
            "tokens_per_s": round(rate, 1),
            "mfu": mfu,
        }
        if len(result.terms) > 1:
            record |= dict(zip(TERMS[self.plan.family], result.terms))
        record |= {
            name: round(figure, 5) for name, figure in zip(self.trainer.engine.routers.names, result.routers)
        }
        if batch.sequences:
            record["sequences_per_s"] = round(batch.sequences / seconds, 1)
        if scaler.active:
            record["scale"] = scaler.scale
        if result.skipped:
            record["skipped"] = True
        if result.gradient_bytes:
            record["gradient_bytes"] = result.gradient_bytes
        if self._watch:
            record["memory"] = self.memory.record()
        self.last = self.metrics.add(record)

    def _mfu(self, rate: float) -> float | None:
        """None above 1 too: that peak was measured while other programs took the processor."""
        share = rate * self._flops_per_token / self.peak if self.peak else math.inf
        return round(share, 4) if share <= 1 else None

    def summary(self) -> dict[str, Any]:
        """What the steps of this process came to."""
        rate = self._tokens / self._seconds if self._seconds else 0.0
        return {
            "loss": self.last.get("loss"),
            "steps_here": self.trainer.step - self.first_step,
            "tokens_per_s": round(rate, 1),
            "mfu": self._mfu(rate),
            "step_seconds": round(self.plan.tokens_per_step / rate, 6) if rate else None,
        }
