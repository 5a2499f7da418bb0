"""What a checkpoint holds: a copy of a run's tensors as its layout cuts them, and the table of the pieces."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ...core.errors import Failed
from ...core.files import read_json, sha256_file, sync
from ...models.config import family_of
from ...planner.tables import Box
from ..step import Trainer

TENSORS = "tensors.json"
GROUPS = ("weights", "optimizer", "rng")
COUNTS = ("step", "samples", "skipped", "skipped_in_row")  # of a trainer
SCALES = ("scale", "good_steps")  # of its loss scaler
SUMMED_DIM = {"row_square": 1, "column_square": 0}  # Adafactor's slots, and the dim over which each is a mean

Index = tuple[slice, ...]
Table = dict[str, dict[str, Any]]  # group -> name -> {"shape", "dtype", "chunks"}
Key = tuple[str, str]  # group and name
Part = tuple[tuple[int, ...], Box]  # of a whole shape, the part that is held


@dataclass
class Snapshot:
    """A copy of a run's state at one step: tensors on the host, each with its part of the whole; the rest as JSON."""

    tensors: dict[str, dict[str, tuple[Tensor, Part]]]
    state: dict[str, Any]
    model: dict[str, Any]
    arrived: torch.cuda.Event | None = None  # of copies from a GPU, for which whoever reads them waits

    def write_tensors(self, directory: Path, process: int) -> tuple[Table, dict[str, str]]:
        """Write the files of one process, flushed and read back: their table and hashes. Failed where one differs."""
        table: Table = {}
        hashes: dict[str, str] = {}
        for group, pieces in self.tensors.items():
            file = directory / f"{group}-{process:05d}.safetensors"
            save_file({name: tensor for name, (tensor, _) in pieces.items()}, file)
            sync(file)
            with safe_open(file, framework="pt") as found:
                both = ((_bytes(found.get_tensor(name)), _bytes(x)) for name, (x, _) in pieces.items())
                if not all(starmap(torch.equal, both)):
                    raise Failed("a file of a checkpoint is not what was written", where=file)
            hashes[file.name] = sha256_file(file)
            table[group] = {}
            for name, (tensor, (shape, box)) in pieces.items():
                chunk = {"file": file.name, "key": name, "offset": list(box.start), "shape": list(box.size)}
                dtype = str(tensor.dtype).removeprefix("torch.")
                table[group][name] = {"shape": list(shape), "dtype": dtype, "chunks": [chunk]}
        return table, hashes

    def write_table(self, directory: Path, parts: Sequence[Table]) -> Table:
        """Write what is written once: the table of all processes' tensors, which is returned, state and model."""
        table: Table = {group: {} for group in GROUPS}
        for part in parts:
            for group, entries in part.items():
                for name, entry in entries.items():
                    known: Any = table[group].setdefault(name, entry)
                    if known is not entry:
                        assert (known["shape"], known["dtype"]) == (entry["shape"], entry["dtype"]), name
                        known["chunks"] += entry["chunks"]
        groups = []
        for group, entries in table.items():
            lines = []
            for name, entry in entries.items():
                wanted = math.prod(entry["shape"])
                stored = sum(math.prod(chunk["shape"]) for chunk in entry["chunks"])
                assert stored == wanted, f"{group} {name}: {stored} of {wanted} elements"
                lines.append(f"{json.dumps(name)}: {json.dumps(entry)}")
            groups.append(f'"{group}": {{\n' + ",\n".join(lines) + "\n}")
        (directory / TENSORS).write_text("{" + ",\n".join(groups) + "}\n")
        for file, facts in (("state.json", self.state), ("model.json", self.model)):
            (directory / file).write_text(json.dumps(facts, indent=1) + "\n")
        return table


def _whole(tensor: Tensor) -> Part:
    shape = tuple(tensor.shape)
    return shape, Box.whole(shape)


def _saved(trainer: Trainer) -> Iterator[tuple[Key, Any, Part | None]]:
    """All that changes in a run and that this process saves: tensors as they are, not copied, and numbers."""
    trainer.engine.wait()
    for local in trainer.engine.local_shards:
        if not local.spec.primary or not local.value.numel():
            continue
        place = (local.spec.shape, local.spec.box)
        yield ("weights", local.name), local.value, place
        for slot, value in trainer.optimizer.state.get(local.value, {}).items():
            key = ("optimizer", f"{local.name}.{slot}")
            if not isinstance(value, Tensor):
                yield key, value, None
            elif slot in SUMMED_DIM:
                dim = SUMMED_DIM[slot]
                if local.spec.box.start[dim] == 0:  # those with the rest of the dim hold the same
                    whole = Box.whole(local.spec.shape).cut(dim, 0, 1).size
                    yield key, value, (whole, local.spec.box.cut(dim, 0, 1))
            elif value.shape == local.value.shape:
                yield key, value, place
            elif not any(local.spec.box.start):  # a number for the whole parameter: one process saves it
                yield key, value, _whole(value)
    for name, state in trainer.engine.states().items():
        yield ("rng", name), state, _whole(state)


class Buffers:
    """Host memory for the copies of a save, kept for the next: fresh memory costs far more than the copy."""

    def __init__(self) -> None:
        self._kept: dict[Key, Tensor] = {}

    def like(self, key: Key, tensor: Tensor) -> Tensor:
        """Memory for a copy of the tensor of that key; page-locked where the copy comes from a GPU."""
        kept = self._kept.get(key)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = self._kept[key] = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return kept

    def plan(self, trainer: Trainer) -> list[tuple[Key, Tensor]]:
        return [(key, value.detach()) for key, value, part in _saved(trainer) if part is not None]

    def prepare(self, plan: Sequence[tuple[Key, Tensor]]) -> None:
        """Make the memory of the first save and touch every page of it, ahead of time."""
        for key, tensor in plan:
            self.like(key, tensor).zero_()


def take_snapshot(trainer: Trainer, buffers: Buffers | None = None) -> Snapshot:
    """Copy what this process is to save to the host, a GPU's beside the next step, whose update waits for it
    (`Engine.copied`). A snapshot in `buffers` is good until the next one in them.
    """
    buffers, device, config = buffers or Buffers(), trainer.engine.device, trainer.engine.config
    aside = torch.cuda.Stream(device) if device.type == "cuda" else None
    if aside is not None:
        aside.wait_stream(torch.cuda.current_stream(device))
    tensors: dict[str, dict[str, tuple[Tensor, Part]]] = {group: {} for group in GROUPS}
    scalars = {}
    for (group, name), value, part in _saved(trainer):
        if part is None:
            scalars[name] = value
        else:
            with torch.cuda.stream(aside):
                copy = buffers.like((group, name), value).copy_(value.detach(), non_blocking=True)
            tensors[group][name] = copy, part
    trainer.engine.copied = None if aside is None else aside.record_event()
    return Snapshot(
        tensors=tensors,
        state={
            **{name: getattr(trainer, name) for name in COUNTS},
            **{name: getattr(trainer.scaler, name) for name in SCALES},
            "planned_steps": trainer.planned_steps,
            "earlier_lengths": trainer.earlier_lengths,
            "optimizer_scalars": scalars,
            "precision": trainer.precision,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "device": device.type,
            "layout": trainer.engine.layout.facts(),
        },
        model={"family": family_of(config), "config": config.to_dict()},
        arrived=trainer.engine.copied,
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class TensorReader:
    """Parts of a group's tensors, whatever layout wrote them. A line of the table is decoded when it is asked for."""

    def __init__(self, directory: Path, group: str) -> None:
        self.directory, self.lines, within = directory, dict[str, str](), ""
        self._files: dict[str, Any] = {}
        self._entry: tuple[str, dict[str, Any]] = ("", {})
        with open(directory / TENSORS) as table:
            for line in table:
                name, _, entry = line.removeprefix("{").partition(": ")
                if entry == "{\n":
                    within = json.loads(name)
                elif not within:  # of an earlier checkpoint: one JSON
                    known = read_json(directory / TENSORS)[group]
                    self.lines = {name: json.dumps(entry) for name, entry in known.items()}
                    break
                elif entry and within == group:
                    self.lines[json.loads(name)] = entry.rstrip(",\n")

    def entry(self, name: str) -> dict[str, Any]:
        if name != self._entry[0]:
            self._entry = name, json.loads(self.lines[name])
        return self._entry[1]

    def __call__(self, name: str) -> Tensor:
        return self.part(name, Box.whole(tuple(self.entry(name)["shape"])))

    def part(self, name: str, box: Box) -> Tensor:
        """The part of a tensor that `box` cuts out; only the bytes it needs are read."""
        entry = self.entry(name)
        made = None
        for chunk in entry["chunks"]:
            shared = _overlap(chunk["offset"], chunk["shape"], box)
            if shared is None:
                continue
            file = self._open(chunk["file"])
            if (chunk["offset"], chunk["shape"]) == (list(box.start), list(box.size)):
                return file.get_tensor(chunk["key"]).clone()  # two reads would share the file's mapping
            there, here = shared
            if made is None:
                made = torch.empty(box.size, dtype=getattr(torch, entry["dtype"]))
            made[here] = file.get_slice(chunk["key"])[there]
        assert made is not None, f"{name} has no chunk within {box}"
        return made

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self.directory / name, framework="pt")
        return self._files[name]


def _overlap(offset: list[int], shape: list[int], box: Box) -> tuple[Index, Index] | None:
    """Where a chunk and a box meet, as an index into the chunk and one into the box; None when they do not."""
    there, here = [], []
    for chunk_start, chunk_size, start, size in zip(offset, shape, box.start, box.size, strict=True):
        first, end = max(chunk_start, start), min(chunk_start + chunk_size, start + size)
        if first >= end:
            return None
        there.append(slice(first - chunk_start, end - chunk_start))
        here.append(slice(first - start, end - start))
    return tuple(there), tuple(here)
