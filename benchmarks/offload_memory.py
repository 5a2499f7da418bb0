"""ZeRO-Offload on a small GPT: what the device must hold, counted tensor by tensor, and the same losses.

python benchmarks/offload_memory.py [--quick]

The same recipe trains with and without `train.offload`. The device's side of a step is every tensor that exists
while it runs, less those of the host (masters, moments, transfer buffers and the work of the update): so it is
counted where a CPU is both, and the accelerator's memory would hold the same tensors. The prediction is that of
the planner for a step on a GPU, with the gradients that wait for their copy left out, since a copy on a CPU takes
no time. In bf16 for the bytes; in fp32, where nothing is rounded, the losses must be equal to the bit.
"""

import gc
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import claim, finish, parser, throughline
from throughline.core.recipe import build_recipe
from throughline.models.config import ModelConfig
from throughline.planner.memory import IN_A_STEP, MOMENTS, device_terms
from throughline.train.build import StepBatches, build_trainer, plan_run, training_rows
from throughline.train.parallel.mesh import ALONE
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import described, resolve
from throughline.train.step import Trainer, train_step
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "recipes" / "samples" / "tinyshakespeare" / "input.txt"
SHAPE = {"layers": 8, "width": 256, "heads": 8, "sequence_length": 128}
ROWS, LENGTH, STEPS, MEASURED = 8, 128, 6, 3  # the step that is counted: the moments exist, nothing is new
WITHIN = 0.15  # of the predicted fall: temporaries of a few tensors are in no formula


class DeviceBytes(TorchDispatchMode):
    """Bytes of the tensors that exist, those of the host left out; `peak` is the most there were at once."""

    def __init__(self, host: set[int]) -> None:
        super().__init__()
        self.host, self.peak, self._alive = host, 0, {}

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.host:
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def alive(self) -> int:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        return sum(size for _, size in self._alive.values())

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.add(tensor)
        self.peak = max(self.peak, self.alive())
        return result


@dataclass(frozen=True)
class Outcome:
    """Losses of the steps; bytes of the device at the peak of one, by what was counted and what was predicted."""

    losses: tuple[float, ...]
    device_bytes: int
    predicted_bytes: int
    config: ModelConfig


def every_tensor() -> list[Tensor]:
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), Tensor) and one.device.type == "cpu"]


def host_side(trainer: Trainer, before: set[int]) -> set[int]:
    """Addresses of the memory that would be the host's: of the masters, the moments and what the update works in."""
    offload = trainer.engine.offload
    if offload is None:
        return before
    offload.wait()
    kept = [value for slots in trainer.optimizer.state.values() for value in slots.values()]
    kept += [value for side in offload.sides for name, value in vars(side).items() if name != "parameter"]
    device = {
        parameter.untyped_storage().data_ptr() for parameter in trainer.engine.stages[0].model.parameters()
    }
    host = {value.untyped_storage().data_ptr() for value in kept if isinstance(value, Tensor)}
    return before | (host - device)


def run(place: Path, precision: str, offload: bool) -> Outcome:
    """Some steps of the product's own trainer; one of them under the count."""
    others = every_tensor()  # held, so that no address comes again
    before = {tensor.untyped_storage().data_ptr() for tensor in others}
    tree = {
        "version": 1,
        "data": {"train": str(place / "tokens")},
        "model": {"family": "gpt", "overrides": SHAPE},
        "train": {"steps": STEPS, "sequence_length": LENGTH, "batch_rows": ROWS, "device": "cpu"},
        "optimizer": {"name": "adamw", "learning_rate": 1e-3},
    }
    tree["train"] |= {"precision": precision, "offload": offload, "compile": "off"}
    recipe = resolve(build_recipe(tree, Recipe))
    plan = plan_run(recipe)
    trainer, batches = build_trainer(plan), StepBatches(plan, training_rows(plan), ALONE, ALONE)
    losses, peak = [], 0
    for step in range(STEPS):
        batch = batches.batch(step * ROWS, ROWS)
        if step != MEASURED:
            losses.append(train_step(trainer, batch, 1.0).loss)
            continue
        count = DeviceBytes(host_side(trainer, before))
        for tensor in every_tensor():
            count.add(tensor)
        with count:
            losses.append(train_step(trainer, batch, 1.0).loss)
        peak = count.peak
    terms = {
        name: float(size) for name, size in device_terms(*described(plan.config, recipe, "cuda")).items()
    }
    terms |= {"runtime": 0.0} | ({"gradients": 0.0} if offload else {})
    predicted = max(sum(terms[name] for name in MOMENTS[moment]) for moment in IN_A_STEP)
    return Outcome(tuple(losses), peak, int(predicted), plan.config)


def furthest(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def main() -> int:
    parser((__doc__ or "").splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        throughline("data", "tokenizer", TEXT, "--type", "bpe", "--vocab-size", 1024, "--out", place / "tok")
        throughline(
            "data",
            "tokenize",
            TEXT,
            "--documents",
            "block",
            "--tokenizer",
            place / "tok",
            "--out",
            place / "tokens",
        )
        plain, moved = (run(place, "bf16", offload) for offload in (False, True))
        exact, exact_moved = (run(place, "fp32", offload) for offload in (False, True))
    fall = plain.device_bytes - moved.device_bytes
    predicted = plain.predicted_bytes - moved.predicted_bytes
    equal = exact.losses == exact_moved.losses
    apart = furthest(plain.losses, moved.losses)
    parameters = plain.config.parameter_count()
    print(
        f"{parameters:,} parameters; device without offload {plain.device_bytes:,} B (predicted "
        f"{plain.predicted_bytes:,}), with {moved.device_bytes:,} B (predicted {moved.predicted_bytes:,})"
    )
    print(f"losses in fp32 {'equal to the bit' if equal else 'DIFFER'}; in bf16 at most {apart:.2g} apart")
    claims = [
        claim(
            "offload-fall",
            [fall / 2**20],
            [predicted / 2**20],
            peer="prediction",
            unit="MiB",
            better="higher",
            goal=1 - WITHIN,
        ),
        claim(
            "offload-losses",
            [float(equal)],
            [1.0],
            peer="without offload, fp32, to the bit",
            unit="equal",
            better="higher",
            goal=1.0,
        ),
    ]
    details = {
        "parameters": parameters,
        "device_bytes": {"without": plain.device_bytes, "with": moved.device_bytes},
        "predicted_bytes": {"without": plain.predicted_bytes, "with": moved.predicted_bytes},
        "bytes_a_parameter_less": round(fall / parameters, 2),
        "fall_over_predicted": round(fall / predicted, 4),
        "losses_bf16_apart": apart,
        "losses_fp32_apart": furthest(exact.losses, exact_moved.losses),
    }
    finish("offload_memory", claims, kind="proof", details=details)
    return 0 if equal and abs(fall / predicted - 1) <= WITHIN else 1


if __name__ == "__main__":
    sys.exit(main())
