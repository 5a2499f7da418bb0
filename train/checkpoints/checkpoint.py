"""Checkpoints: everything a run needs to go on to the last bit, written beside the training and never half there.

A checkpoint is an artifact directory:

    weights-00000.safetensors    parameters under their names; one file per process that holds some of them
    optimizer-00000.safetensors  optimizer state as `<parameter>.<slot>`
    rng-00000.safetensors        random generator states of that process, and what compressed gradients still owe
    tensors.json                 group -> name -> global shape, dtype and chunks (file, key, offset, shape)
    model.json, tokenizer.json, state.json, manifest.json

Training waits only while the tensors are copied; a thread of each process writes its own files, reads them back
against the copy and hashes them, that of the first renames, and then lets `latest` name the new directory.

Not `torch.distributed.checkpoint`, though the boxes are its planners' idea: its metadata are a pickle that
runs what it holds, its files are written in place without hashes, and reading 3,200 chunks on 32 processes
took it 34 s where a mapped file is sliced.
"""

import json
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...core.artifact import MANIFEST, Draft, Input, create_artifact, is_artifact, verify_artifact
from ...core.console import warn
from ...core.errors import Refused
from ...core.files import full_disk, read_json, write_atomic
from ...data.model_settings import copy_chat
from ...models.config import FAMILIES
from ...models.init import empty_model
from ..engine import Engine
from ..optimizers.averages import SLOT
from ..parallel.ranks import Lost
from ..stage import LocalShard, WholeParameters
from ..step import Trainer
from .run_directory import LATEST, checkpoints, earlier_lengths, locate
from .snapshot import COUNTS, SCALES, SUMMED_DIM, Buffers, Snapshot, Table, TensorReader, take_snapshot

PART = "part.json"
LEAST_PRIORITY = 19  # nice(2)


@dataclass
class CheckpointWriter:
    """Writes the checkpoints of one run into `directory`, one at a time, in a thread of its own."""

    directory: Path
    keep: int
    tokenizer_json: bytes | None = None
    beside: Path | None = None  # a model directory whose chat template the tokenizer has
    inputs: Sequence[Input] = ()
    recipe_hash: str | None = None
    process: int = 0
    processes: int = 1  # each writes its part; the first puts them together
    token: str = ""  # of this start of the run: the parts of an earlier one are never taken
    may_write: Callable[[], None] = lambda: None  # raises when the run's directory is no longer ours
    patience_s: float = 600.0  # with a process that writes nothing: as long as a collective may take
    prepared: bool = False
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "saving", _give_way))
    _buffers: Buffers = field(default_factory=Buffers)
    _pending: Future[Any] | None = None
    _newest: Path | None = None  # complete, and none removed for it yet
    _abandoned: threading.Event = field(default_factory=threading.Event)

    def save(self, trainer: Trainer, facts: dict[str, Any] | None = None) -> None:
        """Start a checkpoint of this moment, when the one before is written; raises what went wrong with that."""
        self.wait()
        self.retire()
        self._pending = self._thread.submit(self._write, take_snapshot(trainer, self._buffers), facts or {})

    def prepare(self, trainer: Trainer) -> None:
        """Make room for the copies of the first save meanwhile; the optimizer must have moved once."""
        self.prepared = True
        self._pending = self._thread.submit(self._buffers.prepare, self._buffers.plan(trainer))

    @property
    def idle(self) -> bool:
        return self._pending is None or self._pending.done()

    def wait(self) -> Path | None:
        """Wait until the last checkpoint is complete; raises what went wrong with it."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else None

    def retire(self) -> None:
        """Remove the oldest checkpoints beyond `keep`. Called once a step after the newest one is known to be good: a
        run that diverges in the step that was saved still has the checkpoint before it.
        """
        if self._newest is not None and self.idle:
            newest, self._newest = self._newest, None
            self._retire(newest)

    def abandon(self) -> None:
        """The run has failed: wait no longer for other processes, whose parts may never come."""
        self._abandoned.set()
        self._thread.shutdown(wait=True)

    def close(self) -> None:
        try:
            self.wait()
            self.retire()
        finally:
            self._thread.shutdown(wait=True)

    def _write(self, snapshot: Snapshot, facts: dict[str, Any]) -> Path:
        part = self._part(snapshot.state["step"], self.process)
        if snapshot.arrived is not None:
            snapshot.arrived.synchronize()
        self.may_write()
        try:
            with full_disk(part):
                part.mkdir(parents=True)
                table, hashes = snapshot.write_tensors(part, self.process)
                aside = part / f"{PART}.tmp"
                write_atomic(aside, json.dumps({"table": table, "hashes": hashes}))
                # the last touch: from here on the first process takes the directory away
                os.rename(aside, part / PART)
            return part if self.process else self._put_together(snapshot, facts)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise

    def _put_together(self, snapshot: Snapshot, facts: dict[str, Any]) -> Path:
        step = snapshot.state["step"]
        path = self.directory / f"step-{step:08d}"
        if not is_artifact(path):
            shutil.rmtree(path, ignore_errors=True)  # remains of a removal; a damaged one is replaced below
        with create_artifact(
            path, "checkpoint", inputs=self.inputs, recipe_hash=self.recipe_hash, overwrite=True
        ) as draft:
            table = snapshot.write_table(draft.path, self._take_parts(step, draft))
            read_back = set(draft.known)
            if self.tokenizer_json is not None:
                (draft.path / "tokenizer.json").write_bytes(self.tokenizer_json)
                if self.beside is not None:
                    copy_chat(self.beside, draft.path)
            known = ("step", "samples", "layout", "threads", "precision")
            parameters = sum(math.prod(entry["shape"]) for entry in table["weights"].values())
            draft.facts |= {name: snapshot.state[name] for name in known}
            draft.facts |= {"family": snapshot.model["family"], "parameters": parameters} | facts
            self.may_write()
        verify_artifact(path, read_back=read_back)
        self.may_write()
        write_atomic(self.directory / LATEST, path.name + "\n")
        self._newest = path
        return path

    def _part(self, step: int, process: int) -> Path:
        """Where a process puts its files, flushed, hashed and read back; `part.json` comes last."""
        return self.directory / f".step-{step:08d}.{self.token}-{process:05d}.tmp"

    def _take_parts(self, step: int, draft: Draft) -> list[Table]:
        tables = []
        for process in range(self.processes):
            path, written, end = self._part(step, process), -1, 0.0
            while not (path / PART).exists():
                if (size := _size(path)) != written:  # it is at work
                    written, end = size, time.monotonic() + self.patience_s
                if time.monotonic() > end or self._abandoned.is_set():
                    why = f"process {process} of {self.processes} did not write its part"
                    raise Lost("a checkpoint could not be completed", where=path, why=why)
                time.sleep(0.02)
            part = read_json(path / PART)
            for name in part["hashes"]:
                os.rename(path / name, draft.path / name)
            draft.known |= part["hashes"]
            tables.append(part["table"])
            shutil.rmtree(path)
        return tables

    def _retire(self, newest: Path) -> None:
        """Remove the oldest beyond `keep`, manifests first; one of a later step is damaged and does not count."""
        complete = [path for path in checkpoints(self.directory) if path.name <= newest.name]
        for path in complete[self.keep :] if self.keep else []:
            (path / MANIFEST).unlink()
            shutil.rmtree(path, ignore_errors=True)


def _size(directory: Path) -> int:
    """Bytes in the files of a directory, as far as it is there: whoever writes it may take it away."""
    with suppress(FileNotFoundError):
        return sum(file.stat().st_size for file in directory.iterdir())
    return 0


def _give_way() -> None:
    """Let training go first where this thread wants the same processor (threads have priorities on Linux)."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LEAST_PRIORITY)


def load_weights(directory: Path, model: nn.Module | Engine, averages: bool = True) -> None:
    """Fill a model, or an engine's part of it, with weights, or `averages` of them, if any; Refused for another's."""
    read, parts = TensorReader(directory, "weights"), WholeParameters.of(model).parts
    states = TensorReader(directory, "optimizer")
    names = set(model.shapes) if isinstance(model, Engine) else {local.name for local in parts}
    if differing := names ^ set(read.lines):
        why = f"only one has {min(differing)}"
        raise Refused("the checkpoint is of another model", where=directory, why=why)
    with torch.no_grad():
        for local in parts:
            if list(local.spec.shape) != (there := read.entry(local.name)["shape"]):
                why = f"{local.name} is {there} there and {list(local.spec.shape)} here"
                raise Refused("the checkpoint is of another model", where=directory, why=why)
            if local.value.numel():
                average = f"{local.name}.{SLOT}"
                found = (states, average) if averages and average in states.lines else (read, local.name)
                local.value.copy_(found[0].part(found[1], local.spec.box))


def restore(directory: Path, trainer: Trainer, planned_before: int | None = None) -> None:
    """Bring a trainer to a checkpoint's state: on a CPU to the bit in a like layout and torch, on CUDA to rounding.

    `planned_before`: train.steps of the recipe before, for checkpoints of versions that did not save it.
    """
    state = read_json(directory / "state.json")
    engine = trainer.engine
    engine.wait()
    load_weights(directory, engine, averages=False)
    engine.publish()
    _restore_optimizer(directory, trainer, state["optimizer_scalars"])
    rng = TensorReader(directory, "rng")
    engine.load_states(rng.lines, rng, state["layout"] == engine.layout.facts())
    for names, owner in ((COUNTS, trainer), (SCALES, trainer.scaler)):
        for name in names:
            setattr(owner, name, state[name])
    trainer.earlier_lengths = earlier_lengths(state, trainer.planned_steps, planned_before)
    now: dict[str, Any] = {"threads": torch.get_num_threads(), "torch": torch.__version__}
    now |= {"device": engine.device.type, "layout": engine.layout.facts()}
    changed = [f"{name} was {state[name]}, is {value}" for name, value in now.items() if state[name] != value]
    if changed and engine.mesh.rank == 0:  # the others would say the same
        warn(f"the run goes on, but not to the last bit: {'; '.join(changed)}")


def _restore_optimizer(directory: Path, trainer: Trainer, scalars: dict[str, Any]) -> None:
    """Give every parameter, or part of one, its slots: tensors cut as it is, numbers whole."""
    read = TensorReader(directory, "optimizer")
    slots: dict[str, dict[str, Any]] = {}
    for key in (*read.lines, *scalars):
        name, slot = key.rsplit(".", 1)
        slots.setdefault(name, {})[slot] = key
    parts = {local.value: local for local in trainer.engine.local_shards}
    ordered = [parts[parameter] for group in trainer.optimizer.param_groups for parameter in group["params"]]
    fresh = trainer.optimizer.state_dict()
    fresh["state"] = {}
    for index, part in enumerate(ordered):
        if known := slots.get(part.name):
            fresh["state"][index] = {
                slot: scalars[key] if key in scalars else _read_slot(read, key, part)
                for slot, key in known.items()
            }
    trainer.optimizer.load_state_dict(fresh)


def _read_slot(read: TensorReader, key: str, local: LocalShard) -> torch.Tensor:
    if (dim := SUMMED_DIM.get(key.rsplit(".", 1)[1])) is not None:
        return read.part(key, local.spec.box.cut(dim, -local.spec.box.start[dim], 1))
    like = read.entry(key)["shape"] == list(local.spec.shape)
    return read.part(key, local.spec.box) if like else read(key)


def load_model(
    path: Path | str, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> tuple[nn.Module, Path | None]:
    """A run's model, in eval mode, and its tokenizer.json. Raises WrongUse without checkpoint, Refused if damaged."""
    directory = locate(path)
    verify_artifact(directory)
    described = read_json(directory / "model.json")
    model = empty_model(FAMILIES[described["family"]].from_dict(described["config"]), device, dtype)
    load_weights(directory, model)
    tokenizer = directory / "tokenizer.json"
    return model.eval(), tokenizer if tokenizer.is_file() else None
