"""Checkpoints: everything a run needs to go on to the last bit, written beside the training and never half there.

A checkpoint is an artifact directory:

    weights-00000.safetensors    parameters under their names; one file per process that holds some of them
    optimizer-00000.safetensors  optimizer state as `<parameter>.<slot>`
    rng-00000.safetensors        random generator states of that process
    tensors.json                 group -> name -> global shape, dtype and chunks (file, key, offset, shape)
    model.json, tokenizer.json, state.json, manifest.json

The chunk table says where each piece of a tensor lies in the whole, so that other layouts write and read the same format.
The training waits only while the tensors are copied; a thread writes, hashes, renames, reads everything back against the
hashes, and then lets `latest` name the new directory. There is no pickle anywhere.
"""

import json
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..core.artifact import MANIFEST, Input, create_artifact, is_artifact, read_manifest, verify_artifact
from ..core.console import warn
from ..core.errors import Refused, ThroughlineError, WrongUse
from ..core.files import read_json, write_atomic
from ..models.config import FAMILIES, family_of
from ..models.init import empty_model
from .step import Trainer

LATEST = "latest"
TENSORS = "tensors.json"
GROUPS = ("weights", "optimizer", "rng")


@dataclass
class Snapshot:
    """A copy of a run's state at one step: tensors on the host by group, the rest as JSON values."""

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    model: dict[str, Any]


@dataclass
class CheckpointWriter:
    """Writes the checkpoints of one run into `directory`, one at a time, in a thread of its own."""

    directory: Path
    keep: int
    tokenizer_json: bytes | None = None
    inputs: Sequence[Input] = ()
    recipe_hash: str | None = None
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "checkpoint"))
    _pending: Future[Path] | None = None

    def save(self, trainer: Trainer, facts: dict[str, Any] | None = None) -> float:
        """Start a checkpoint of this moment; returns the seconds for which training stood still.

        Waits for the one before, so at most one copy of the state is in memory; its failure is raised here.
        """
        start = time.perf_counter()
        self.wait()
        snapshot = take_snapshot(trainer)
        self._pending = self._thread.submit(self._write, snapshot, facts or {})
        return time.perf_counter() - start

    def wait(self) -> Path | None:
        """Wait until the last checkpoint is complete; raises what went wrong with it."""
        pending, self._pending = self._pending, None
        return pending.result() if pending else None

    def close(self) -> None:
        """Wait for the last checkpoint and end the thread."""
        try:
            self.wait()
        finally:
            self._thread.shutdown(wait=True)

    def _write(self, snapshot: Snapshot, facts: dict[str, Any]) -> Path:
        path = self.directory / f"step-{snapshot.state['step']:08d}"
        if not is_artifact(path):
            shutil.rmtree(path, ignore_errors=True)  # remains of a removal; a damaged one is replaced below
        with create_artifact(path, "checkpoint", inputs=self.inputs, recipe_hash=self.recipe_hash, overwrite=True) as draft:
            write_snapshot(draft.path, snapshot)
            if self.tokenizer_json is not None:
                (draft.path / "tokenizer.json").write_bytes(self.tokenizer_json)
            state, weights = snapshot.state, snapshot.tensors["weights"]
            draft.facts |= {name: state[name] for name in ("step", "samples", "layout", "threads", "precision")}
            draft.facts |= {"family": snapshot.model["family"], "parameters": sum(t.numel() for t in weights.values())}
            draft.facts |= facts
        verify_artifact(path)
        write_atomic(self.directory / LATEST, path.name + "\n")
        self._retire()
        return path

    def _retire(self) -> None:
        """Remove the oldest checkpoints beyond `keep`; the manifest goes first, so that a part is never taken for a whole."""
        complete = checkpoints(self.directory)
        for path in complete[self.keep :] if self.keep else []:
            (path / MANIFEST).unlink()
            shutil.rmtree(path, ignore_errors=True)


def take_snapshot(trainer: Trainer) -> Snapshot:
    """Copy everything that changes in a run to the host."""
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    optimizer, scalars = {}, {}
    for parameter, slots in trainer.optimizer.state.items():
        for slot, value in slots.items():
            if isinstance(value, Tensor):
                optimizer[f"{names[parameter]}.{slot}"] = _copy(value)
            else:
                scalars[f"{names[parameter]}.{slot}"] = value
    rng = {"cpu": torch.get_rng_state()}
    if trainer.device.type == "cuda":
        rng["cuda"] = torch.cuda.get_rng_state(trainer.device)
    config = trainer.model.config
    return Snapshot(
        tensors={"weights": {name: _copy(p) for p, name in names.items()}, "optimizer": optimizer, "rng": rng},
        state={
            "step": trainer.step,
            "samples": trainer.samples,
            "skipped": trainer.skipped,
            "skipped_in_row": trainer.skipped_in_row,
            "scale": trainer.scaler.scale,
            "good_steps": trainer.scaler.good_steps,
            "optimizer_scalars": scalars,
            "precision": trainer.precision,
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "device": trainer.device.type,
            "layout": {"world": 1},
        },
        model={"family": family_of(config), "config": config.to_dict()},
    )


def _copy(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to("cpu", copy=True).contiguous()


def write_snapshot(directory: Path, snapshot: Snapshot) -> None:
    """Write the files of one process into a directory being made."""
    table: dict[str, Any] = {}
    for group in GROUPS:
        tensors, file = snapshot.tensors[group], f"{group}-00000.safetensors"
        save_file(tensors, directory / file)
        table[group] = {
            name: {
                "shape": list(tensor.shape),
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "chunks": [{"file": file, "key": name, "offset": [0] * tensor.dim(), "shape": list(tensor.shape)}],
            }
            for name, tensor in tensors.items()
        }
    (directory / TENSORS).write_text(json.dumps(table, indent=1) + "\n")
    (directory / "state.json").write_text(json.dumps(snapshot.state, indent=1) + "\n")
    (directory / "model.json").write_text(json.dumps(snapshot.model, indent=1) + "\n")


class TensorReader:
    """Whole tensors of one group of a checkpoint, put together from their chunks, whatever layout wrote them."""

    def __init__(self, directory: Path, group: str) -> None:
        self.directory, self.table = directory, read_json(directory / TENSORS)[group]
        self._files: dict[str, Any] = {}

    def __call__(self, name: str) -> Tensor:
        """The tensor of that name, on the host."""
        entry = self.table[name]
        pieces = [(chunk, self._open(chunk["file"])) for chunk in entry["chunks"]]
        if len(pieces) == 1 and pieces[0][0]["shape"] == entry["shape"]:
            return pieces[0][1].get_tensor(pieces[0][0]["key"])
        whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        for chunk, file in pieces:
            place = tuple(slice(start, start + size) for start, size in zip(chunk["offset"], chunk["shape"]))
            whole[place] = file.get_tensor(chunk["key"])
        return whole

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self.directory / name, framework="pt")
        return self._files[name]


def load_weights(directory: Path, model: nn.Module) -> None:
    """Fill a model with a checkpoint's weights. Raises Refused when names or shapes differ."""
    read = TensorReader(directory, "weights")
    parameters = dict(model.named_parameters())
    differing = set(parameters) ^ set(read.table)
    if differing:
        raise Refused("the checkpoint is of another model", where=directory, why=f"only one has {sorted(differing)[0]}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if list(parameter.shape) != read.table[name]["shape"]:
                why = f"{name} is {read.table[name]['shape']} there and {list(parameter.shape)} here"
                raise Refused("the checkpoint is of another model", where=directory, why=why)
            parameter.copy_(read(name))


def restore(directory: Path, trainer: Trainer) -> None:
    """Bring a trainer to the state of a checkpoint, which must be verified.

    Continues to the last bit in the same layout, thread count, device and torch; a difference is said.
    """
    state = read_json(directory / "state.json")
    load_weights(directory, trainer.model)
    names = {parameter: name for name, parameter in trainer.model.named_parameters()}
    read = TensorReader(directory, "optimizer")
    ordered = [names[parameter] for group in trainer.optimizer.param_groups for parameter in group["params"]]
    slots: dict[str, dict[str, Any]] = {name: {} for name in ordered}
    for key in read.table:
        name, slot = key.rsplit(".", 1)
        slots[name][slot] = read(key)
    for key, value in state["optimizer_scalars"].items():
        name, slot = key.rsplit(".", 1)
        slots[name][slot] = value
    fresh = trainer.optimizer.state_dict()
    fresh["state"] = {index: slots[name] for index, name in enumerate(ordered) if slots[name]}
    trainer.optimizer.load_state_dict(fresh)
    rng = TensorReader(directory, "rng")
    torch.set_rng_state(rng("cpu"))
    if trainer.device.type == "cuda" and "cuda" in rng.table:
        torch.cuda.set_rng_state(rng("cuda"), trainer.device)
    trainer.step, trainer.samples = state["step"], state["samples"]
    trainer.skipped, trainer.skipped_in_row = state["skipped"], state["skipped_in_row"]
    trainer.scaler.scale, trainer.scaler.good_steps = state["scale"], state["good_steps"]
    now = {"threads": torch.get_num_threads(), "torch": torch.__version__, "device": trainer.device.type}
    changed = [f"{name} was {state[name]}, is {value}" for name, value in now.items() if state[name] != value]
    if changed:
        warn(f"the run goes on, but not to the last bit: {'; '.join(changed)}")


def checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints of a run's `checkpoints` directory, newest first."""
    return sorted((path for path in directory.glob("step-*") if is_artifact(path)), reverse=True)


def find_resumable(directory: Path) -> Path | None:
    """The newest checkpoint whose every byte is as written; None when there is none at all.

    A damaged one is named and passed over. Raises Refused when all are damaged. Remains of a killed save are removed.
    """
    for remains in directory.glob(".step-*.tmp"):
        shutil.rmtree(remains, ignore_errors=True)
    damaged: ThroughlineError | None = None
    for path in checkpoints(directory):
        try:
            verify_artifact(path)
        except ThroughlineError as error:
            warn(f"checkpoint passed over: {error}")
            damaged = damaged or error
            continue
        return path
    if damaged is not None:
        raise Refused(
            "no checkpoint of this run is whole",
            where=damaged.where,
            why=f"{damaged.what}: {damaged.why}".rstrip(": "),
            fix="restore a checkpoint from a copy, or start again in another directory: --run-dir",
        )
    return None


def locate(path: Path | str) -> Path:
    """The checkpoint that `path` means: itself, or the latest of a run. Raises WrongUse when there is none."""
    path = Path(path)
    pointer = path / "checkpoints" / LATEST
    if pointer.is_file():
        return path / "checkpoints" / pointer.read_text().strip()
    if is_artifact(path) and read_manifest(path).kind == "checkpoint":
        return path
    if not path.exists():
        raise WrongUse("no such run or checkpoint", where=path, fix="check the spelling; runs are under runs/")
    raise WrongUse(
        "neither a run with a checkpoint nor a checkpoint",
        where=path,
        why="it has no checkpoints/latest and no checkpoint manifest",
        fix="give a directory that `throughline train` wrote, or one under its checkpoints/",
    )


def load_model(
    path: Path | str, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
) -> tuple[nn.Module, Path | None]:
    """The model of a run (its latest checkpoint) or of a checkpoint, in eval mode, and its tokenizer.json if it has one.

    Raises WrongUse when there is no checkpoint and Refused when a file of it is cut or changed.
    """
    directory = locate(path)
    verify_artifact(directory)
    described = read_json(directory / "model.json")
    config = FAMILIES[described["family"]].from_dict(described["config"])
    model = empty_model(config, device, dtype)
    load_weights(directory, model)
    tokenizer = directory / "tokenizer.json"
    return model.eval(), tokenizer if tokenizer.is_file() else None
