"""What a run writes down: `metrics.jsonl` is the truth, the terminal and the dashboards show the same
records.

One record per logged step: step, loss and its terms, lr, grad_norm, step_s, tokens_per_s (padding left out),
sequences_per_s (of a BERT: its pairs, or without pairs its stretches of text), mfu, the bytes that the first
process sent to sum the gradients of copies of the model, and every now and then memory by phase.
One record per evaluation: step and `validation`. The file is only ever appended to; after a resume a step can
stand in it twice, and the later one counts (`read_metrics`).
"""

import importlib.util
import math
import time
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from ...core.errors import MissingExtra
from ...core.hardware import find_chip
from ...core.workspace import Workspace, read_records

FILE = "metrics.jsonl"
FLUSH_EVERY_S = 1.0
Record = dict[str, Any]


class Metrics:
    """Buffers records and writes them about once a second; close() at the end."""

    def __init__(self, workspace: Workspace, sinks: list[str], name: str) -> None:
        self.workspace = workspace
        self._buffer: list[Record] = []
        self._written = time.monotonic()
        self._sinks = [SINKS[sink](workspace.path, name) for sink in sinks]

    def add(self, record: Record) -> Record:
        """Keep a record, and return what is kept: null for numbers that are not finite, as JSON has none."""
        kept = _finite(record)
        self._buffer.append(kept)
        if time.monotonic() - self._written > FLUSH_EVERY_S:
            self.flush()
        return kept

    def flush(self) -> None:
        """Write what is buffered."""
        records, self._buffer = self._buffer, []
        self._written = time.monotonic()
        if records:
            self.workspace.append(FILE, *records)
            for sink in self._sinks:
                sink(records)


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
    numbers: dict[str, float] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            numbers |= {f"{key}/{name}": number for name, number in flat(value).items()}
        elif isinstance(value, int | float) and key != "step":
            numbers[key] = value
    return numbers


Sink = Callable[[Sequence[Record]], None]


def check_sinks(names: Sequence[str]) -> None:
    """Raise MissingExtra for a dashboard whose package is not here, before anything is written."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(name, f"the sink {name}", name)


def _tensorboard(run: Path, name: str) -> Sink:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(run / "tensorboard"))

    def sink(records: Sequence[Record]) -> None:
        for record in records:
            for key, value in flat(record).items():
                writer.add_scalar(key, value, record["step"])
        writer.flush()  # its own thread writes every two minutes, and what it holds is lost with the process

    return sink


def _wandb(run: Path, name: str) -> Sink:
    import wandb

    session = wandb.init(project="throughline", name=name, dir=str(run))

    def sink(records: Sequence[Record]) -> None:
        for record in records:
            session.log(flat(record), step=record["step"])

    return sink


SINKS: dict[str, Callable[[Path, str], Sink]] = {"tensorboard": _tensorboard, "wandb": _wandb}


class PhaseMemory:
    """Bytes at the end of each phase of a step: resident on the host, and the phase's peak on the GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process = device, psutil.Process()
        self.host: dict[str, int] = {}
        self.gpu: dict[str, int] = {}
        self.phase = ""  # the last one that ended
        self.peak = 0  # over all phases: of the GPU where there is one, of the host otherwise

    def start(self) -> None:
        """Forget the step before."""
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
        """As it stands in metrics.jsonl."""
        return {"host": self.host} | ({"gpu": self.gpu} if self.gpu else {})


def peak_flops(device: torch.device, precision: str) -> tuple[float, str]:
    """FLOP/s against which utilisation is stated, and where the figure is from.

    A GPU's is the dense peak of its row in chips.toml. A CPU's clock and vector units are not known well
    enough, so the fastest of a few 768-wide matrix products in the run's dtype is taken (some 20 ms).
    """
    if device.type == "cuda":
        facts = torch.cuda.get_device_properties(device)
        chip = find_chip(facts.name, facts.total_memory)
        if chip is None or precision not in chip.tflops:
            return 0.0, "unknown"
        return chip.tflops[precision] * 1e12, f"{chip.name}, dense {precision}"
    dtype = {"bf16": torch.bfloat16, "fp64": torch.float64}.get(precision, torch.float32)
    size = 768
    a = torch.ones(size, size, dtype=dtype)
    a @ a
    best = min(timeit.repeat(lambda: a @ a, number=1, repeat=4))
    return 2 * size**3 / best, f"measured matrix product, {size} wide, {torch.get_num_threads()} threads"
