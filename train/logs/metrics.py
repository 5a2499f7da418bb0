"""What a run writes down: `metrics.jsonl` is the truth, the terminal and the dashboards show the same records.

One record per logged step (docs/formats.md) and one per evaluation. The file is only ever appended to; after a resume a
step can stand in it twice, and the later one counts.
"""

import math
import platform
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from ...core.artifact import version
from ...core.files import leaves
from ...core.hardware import find_chip, machine
from ...core.workspace import Workspace, read_records
from ..build import RunPlan
from ..engine import Mark
from ..memory import out_of_memory
from ..objective import StepBatch
from ..parallel.ranks import Heartbeat
from ..step import StepResult, Trainer

FILE = "metrics.jsonl"
FLUSH_EVERY_S = 1.0
MEMORY_EVERY_S = 1.0
WATCHED = 3  # first steps whose memory is read, whenever they come
NEXT_PHASE = {"forward": "backward", "backward": "the optimizer"}  # after anything else: forward
Record = dict[str, Any]


class Metrics:
    """Buffers records and writes them about once a second; flush() at the end."""

    def __init__(self, workspace: Workspace, sinks: list[str], name: str) -> None:
        self.workspace = workspace
        self._buffer: list[Record] = []
        self._written = time.monotonic()
        self._sinks = [_open_sink(kind, workspace.path, name) for kind in sinks]

    def add(self, record: Record) -> Record:
        """Keep a record, and return what is kept: null for numbers that are not finite, as JSON has none."""
        kept = _finite(record)
        self._buffer.append(kept)
        if time.monotonic() - self._written > FLUSH_EVERY_S:
            self.flush()
        return kept

    def flush(self) -> None:
        records, self._buffer = self._buffer, []
        self._written = time.monotonic()
        if records:
            self.workspace.append(FILE, *records)
            for sink in self._sinks:
                for record in records:
                    sink(flat(record), record["step"])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(run: Path | str) -> list[Record]:
    """The records of a run in step order, each step once, with the evaluation of that step."""
    merged: dict[int, Record] = {}
    for record in read_records(Path(run) / FILE):
        merged[record["step"]] = merged.get(record["step"], {}) | record
    return [merged[step] for step in sorted(merged)]


def flat(record: Record) -> dict[str, float]:
    """The numbers of a record under slash-joined names, for dashboards."""
    found = leaves(record, "/")
    return {name: value for name, value in found if isinstance(value, int | float) and name != "step"}


def _open_sink(kind: str, run: Path, name: str) -> Callable[[dict[str, float], int], None]:
    if kind == "wandb":
        import wandb

        session = wandb.init(project="throughline", name=name, dir=str(run))
        return lambda numbers, step: session.log(numbers, step=step)
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"))

    def write(numbers: dict[str, float], step: int) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)
        writer.flush()  # its own thread writes every two minutes, and what it holds is lost with the process

    return write


class PhaseMemory:
    """Bytes at the end of each phase of a step: resident on the host, and the phase's peak on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process = device, psutil.Process()
        self.host: dict[str, int] = {}
        self.gpu: dict[str, int] = {}
        self.phase = ""  # the last one that ended
        self.peak = 0  # over all phases: of the GPU where there is one, of the host otherwise

    def start(self) -> None:
        self.host, self.gpu = {}, {}
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def mark(self, phase: str) -> None:
        """A phase ended; of several forwards in a step the largest counts."""
        self.phase = phase
        resident = used = self._process.memory_info().rss
        self.host[phase] = max(self.host.get(phase, 0), resident)
        if self._device.type == "cuda":
            used = torch.cuda.max_memory_allocated(self._device)
            self.gpu[phase] = max(self.gpu.get(phase, 0), used)
            torch.cuda.reset_peak_memory_stats(self._device)
        self.peak = max(self.peak, used)

    def record(self) -> Record:
        return {"host": self.host} | ({"gpu": self.gpu} if self.gpu else {})


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """FLOP/s for utilisation and their source: a GPU's peak in chips.toml, a CPU's best of a few products (20 ms).

    A product is timed on one thread by that thread's CPU time, which other programs do not lengthen, and counts for all
    threads. By the clock it took ten times as long on two cores at a load of 15.
    """
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        chip = find_chip(facts.name, facts.total_memory)
        if chip is None or precision not in chip.tflops:
            return 0.0, "unknown"
        return chip.tflops[precision] * 1e12, f"{chip.name}, dense {precision}"
    dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for size in (192, 768):
            a = torch.ones(size, size, dtype=dtype)
            # the first one is slow
            best = min(timeit.repeat("a @ a", timer=time.thread_time, globals={"a": a}, number=1, repeat=5))
            if best > 3e-3:  # a CPU without products of this dtype, where a large one takes seconds
                break
    finally:
        torch.set_num_threads(threads)
    return (
        threads * 2 * size**3 / best,
        f"matrix product, {size} wide, by a thread's CPU time, x {threads} threads",
    )


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

    def environment(self) -> dict[str, Any]:
        plan, here = self.plan, machine()
        return {
            "throughline": version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": str(plan.device),
            "cpu": here.cpu.name,
            "gpus": [gpu.name for gpu in here.gpus],
            "threads": torch.get_num_threads(),
            "data": [Path(source.path).name for source in plan.recipe.data.sources()],
            "training_tokens": sum(store.tokens for store in plan.corpus.train),
            "sources": [asdict(source) for source in plan.source_passes()],
            "parameters": plan.config.parameter_count(),
            "predicted_memory": plan.memory,
            "peak_flops": self.peak,
            "peak_source": self.peak_source,
        }

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
        self._start = None

    def add(self, result: StepResult, factor: float, batch: StepBatch, bar: Any) -> None:
        assert self._start is not None
        seconds, self._start = result.read_at - self._start, result.read_at
        step, recipe, scaler, engine = result.step, self.plan.recipe, self.trainer.scaler, self.trainer.engine
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
            record |= dict(zip(engine.objective.terms, result.terms))
        record |= {name: round(figure, 5) for name, figure in zip(engine.routers.names, result.routers)}
        told = {
            "sequences_per_s": round(batch.sequences / seconds, 1),
            "scale": scaler.active and scaler.scale,
            "skipped": result.skipped,
            "gradient_bytes": result.gradient_bytes,
            "memory": self._watch and self.memory.record(),
        }
        self.last = self.metrics.add(record | {name: value for name, value in told.items() if value})

    def _mfu(self, rate: float) -> float | None:
        """None without a peak, and above 1: no product here is as fast as what that peak was measured with."""
        share = rate * self._flops_per_token / self.peak if self.peak else math.inf
        return round(share, 4) if share <= 1 else None

    def summary(self) -> dict[str, Any]:
        rate = self._tokens / self._seconds if self._seconds else 0.0
        return {
            "loss": self.last.get("loss"),
            "steps_here": self.trainer.step - self.first_step,
            "tokens_per_s": round(rate, 1),
            "mfu": self._mfu(rate),
            "step_seconds": round(self.plan.tokens_per_step / rate, 6) if rate else None,
        }
