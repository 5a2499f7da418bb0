"""One layout against the single process: losses, gradient norms, first gradients and final parameters, to rounding.

Used by `prove_layouts.py` (the whole table) and by the tests (a small grid, and planted bugs that must be caught). The
reference is the plain single-process step over the plain model; the layout runs the same recipe on forked ranks.
"""

import contextlib
import hashlib
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from throughline.benchmarks.forked import run_ranks
from throughline.models.config import FAMILIES, ModelConfig
from throughline.models.init import build, initial_values
from throughline.train.objective import LOSSES, StepBatch, prepare
from throughline.train.parallel.engine import Engine
from throughline.train.parallel.layout import Layout, layout_problems
from throughline.train.parallel.mesh import make_mesh, start_group
from throughline.train.precision import LossScaler, weight_dtype
from throughline.train.step import Trainer, train_step
from torch import Tensor

STEPS, ROWS, LENGTH, LEARNING_RATE, CLIP_NORM, SEED = 10, 16, 32, 1e-3, 0.5, 7
SHAPE = {"vocab_size": 256, "sequence_length": LENGTH, "layers": 4, "width": 64, "heads": 4}
# float64 noise is 1e-15 (measured over all layouts: loss 2e-15, gradients 3e-15, parameters 1e-13), so these leave a factor
# of a hundred and more, and planted bugs stand ten orders above; float32 noise is 2e-6.
BOUNDS = {
    "fp64": {"loss": 1e-12, "norm": 1e-12, "gradient": 1e-11, "parameter": 1e-10},
    # bf16 products round at 4e-3, in another order than one process does (seen: 4e-4, 2e-3, 1.4e-2, 7e-3)
    "bf16": {"loss": 2e-3, "norm": 1e-2, "gradient": 5e-2, "parameter": 20 * LEARNING_RATE},
    "fp32": {"loss": 1e-5, "norm": 1e-5, "gradient": 1e-5, "parameter": 0.2 * LEARNING_RATE},
}


@dataclass(frozen=True)
class Case:
    """A row of the table: a model, a batch and a layout."""

    name: str
    layout: Layout
    family: str = "gpt"
    precision: str = "fp64"
    micro_rows: int = 2
    documents: bool = False  # rows packed with documents kept apart
    recompute: str = "none"
    steps: int = STEPS
    model: dict[str, Any] = field(default_factory=dict)  # overrides of SHAPE

    @property
    def config(self) -> ModelConfig:
        return FAMILIES[self.family].from_dict(SHAPE | self.model)

    def key(self) -> str:
        """What the single process depends on."""
        return repr((self.family, self.precision, self.documents, self.steps, sorted(self.model.items())))


@dataclass
class Errors:
    """The largest differences from the single process, and where they are."""

    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    worst: str = ""  # the parameter whose gradient differs most
    pss_mib: float = 0.0

    def beyond(self, precision: str) -> list[str]:
        """The bounds that are broken (a NaN breaks its bound)."""
        return [name for name, bound in BOUNDS[precision].items() if not getattr(self, name) <= bound]


@dataclass
class Reference:
    """What the single process did."""

    steps: list[tuple[float, float]]  # loss, gradient norm before clipping
    gradients: dict[str, Tensor]  # of the first step
    parameters: dict[str, Tensor]  # after the last


def read_table(path: Path) -> list[Case]:
    """The rows of a layout table, every one of them a legal layout."""
    cases = []
    for row in tomllib.loads(path.read_text())["layout"]:
        fields = {name: row.pop(name) for name in Layout.__dataclass_fields__ if name in row}
        if "layers_per_stage" in fields:
            fields["layers_per_stage"] = tuple(fields["layers_per_stage"])
        case = Case(layout=Layout(**fields), **row)
        problems = layout_problems(case.layout, case.config, LENGTH, ROWS, case.micro_rows)
        assert not problems, f"{path.name}, {case.name}: {problems[0]}"
        cases.append(case)
    return cases


def make_rows(case: Case, step: int) -> dict[str, np.ndarray]:
    """The batch of a step: 5 to 90 % of a row's targets are ignored, so every process and micro-batch has another count."""
    config, generator = case.config, np.random.default_rng(1000 + step)
    ids = generator.integers(1, config.vocab_size, (ROWS, LENGTH + 1))
    ids[:, 1::2] = (ids[:, 0:-1:2] * 7 + 3) % config.vocab_size  # half of the tokens can be learnt
    keep = generator.random((ROWS, LENGTH)) > np.linspace(0.05, 0.9, ROWS)[:, None]
    rows: dict[str, np.ndarray] = {}
    if case.family == "gpt":
        rows = {"input_ids": ids[:, :-1], "targets": np.where(keep, ids[:, 1:], -100)}
    else:
        keep &= generator.random((ROWS, LENGTH)) < 0.4
        keep[:, 3] = True
        first_length = generator.integers(LENGTH // 4, LENGTH // 2, (ROWS, 1))
        rows = {
            "input_ids": np.where(keep, 0, ids[:, :-1]),
            "targets": np.where(keep, ids[:, :-1], -100),
            "token_types": (np.arange(LENGTH) >= first_length).astype(np.int64),
            "nsp_targets": generator.integers(0, 2, ROWS),
        }
        rows["nsp_targets"][::5] = -100
        if not config.to_dict()["nsp"]:
            del rows["nsp_targets"]
        if not case.documents:
            real = generator.integers(LENGTH // 2, LENGTH + 1, (ROWS, 1))
            rows["attention_mask"] = np.arange(LENGTH) < real
            rows["targets"] = np.where(rows["attention_mask"], rows["targets"], -100)
    if case.documents:
        starts = np.arange(LENGTH) >= generator.integers(4, LENGTH - 4, (ROWS, 1))
        rows["document_ids"] = starts.astype(np.int32)
        rows["positions"] = np.where(starts, np.arange(LENGTH) - starts.argmax(1)[:, None], np.arange(LENGTH))
    return rows


def value_of(case: Case, name: str, shape: torch.Size) -> Tensor:
    """Initial values with biases and norm scales that are not all alike, so that a wrong one shows."""
    values = initial_values(name, shape, case.config, SEED).to(weight_dtype(case.precision))
    if len(shape) == 1:
        generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
        values += 0.02 * torch.randn(shape, generator=generator, dtype=values.dtype)
    return values


def make_trainer(case: Case, model: torch.nn.Module | Engine, loss: Any) -> Trainer:
    """The product's trainer, around the plain model or around the engine."""
    group = {"params": [parameter for _, parameter in model.named_parameters()], "base_lr": LEARNING_RATE}
    optimizer = torch.optim.AdamW([group], lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95))
    device = torch.device("cpu")
    return Trainer(model, optimizer, loss, LossScaler(), case.precision, device, CLIP_NORM)


def reference(case: Case) -> Reference:
    """Train the case in this process, plainly."""
    dtype = weight_dtype(case.precision)
    model = build(case.config, SEED, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(value_of(case, name, parameter.shape))
    trainer = make_trainer(case, model, LOSSES[case.family])
    gradients: dict[str, Tensor] = {}

    def take(phase: str) -> None:
        if phase == "backward" and trainer.step == 0:
            gradients.update({name: parameter.grad.clone() for name, parameter in model.named_parameters()})

    steps = []
    for step in range(case.steps):
        batch = prepare(make_rows(case, step), case.family, ROWS, trainer.device, dtype, 1.0)
        result = train_step(trainer, batch, 1.0, take)
        steps.append((result.loss, result.grad_norm))
    return Reference(
        steps, gradients, {name: parameter.detach() for name, parameter in model.named_parameters()}
    )


def own_rows(case: Case, engine: Engine, step: int) -> StepBatch:
    """This rank's part of a step's rows."""
    mesh = engine.mesh
    own = ROWS // case.layout.data
    rows = {
        name: values[mesh.data.rank * own : (mesh.data.rank + 1) * own]
        for name, values in make_rows(case, step).items()
    }
    return prepare(engine.cut(rows), case.family, case.micro_rows, mesh.device, engine.dtype, 1.0)


Plant = Callable[[Engine], None]


def train_rank(case: Case, expected: Reference, plant: Plant | None = None) -> Errors:
    """Train this rank's part of the case and compare it with the single process."""
    device = torch.device("cpu")
    start_group(device, 60)
    engine = Engine(case.config, make_mesh(case.layout, device, 60), case.precision, SEED, case.recompute)
    shapes = {leaf.name: torch.Size(leaf.piece.shape) for leaf in engine.leaves}
    engine.fill(lambda name, box: value_of(case, name, shapes[name])[box.slices()])
    if plant is not None:
        plant(engine)
    trainer, errors = make_trainer(case, engine, None), Errors()

    def compare(phase: str) -> None:
        if phase == "backward" and trainer.step == 0:
            _compare_gradients(engine, expected, errors)

    for step, (loss, norm) in enumerate(expected.steps):
        result = train_step(trainer, own_rows(case, engine, step), 1.0, compare)
        errors.loss = _largest(errors.loss, abs(result.loss - loss))
        errors.norm = _largest(errors.norm, abs(result.grad_norm - norm) / norm)
    _compare_parameters(engine, expected, case, errors)
    errors.pss_mib = _pss_mib()
    return errors


def _compare_gradients(engine: Engine, expected: Reference, errors: Errors) -> None:
    for leaf in engine.leaves:
        whole = expected.gradients[leaf.name]
        assert leaf.value.grad is not None, f"{leaf.name} has no gradient"
        difference = (leaf.value.grad - whole[leaf.piece.box.slices()]).norm() / whole.norm()
        if _nan_last(difference.item()) > _nan_last(errors.gradient):
            errors.gradient, errors.worst = difference.item(), leaf.name


def _compare_parameters(engine: Engine, expected: Reference, case: Case, errors: Errors) -> None:
    """In float32 the biases of the keys are left out: softmax does not change with them, so their gradient is pure rounding,
    of which Adam makes steps of full size."""
    for leaf in engine.leaves:
        difference = (leaf.value.detach() - expected.parameters[leaf.name][leaf.piece.box.slices()]).abs()
        if case.precision == "fp32" and leaf.name.endswith("qkv.bias"):
            size = case.config.head_size
            rows = torch.arange(*(leaf.piece.box.start[0] + offset for offset in (0, leaf.piece.box.size[0])))
            difference = difference[rows // size % 3 != 1]
        if difference.numel():
            errors.parameter = _largest(errors.parameter, difference.max().item())


def _nan_last(error: float) -> tuple[bool, float]:
    """Orders errors with NaN as the largest, which a plain `max` loses."""
    return math.isnan(error), error


def _largest(*errors: float) -> float:
    return max(errors, key=_nan_last)


def _pss_mib() -> float:
    """Memory of this process, with what it shares with others divided among them."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    return 0.0


class Prover:
    """Proves cases one after another; single-process references are computed once."""

    def __init__(self) -> None:
        self.references: dict[str, Reference] = {}

    def prove(self, case: Case, plant: Plant | None = None, timeout_s: float = 180.0) -> Errors:
        """The largest errors over all ranks; `plant` changes each rank's engine (a planted bug)."""
        if case.key() not in self.references:
            self.references[case.key()] = reference(case)
        expected = self.references[case.key()]
        ranks = run_ranks(case.layout.world, lambda: train_rank(case, expected, plant), timeout_s)
        worst = max(ranks, key=lambda errors: _nan_last(errors.gradient))
        return Errors(
            **{
                name: _largest(*(getattr(errors, name) for errors in ranks))
                for name in ("loss", "norm", "gradient", "parameter")
            },
            worst=worst.worst,
            pss_mib=sum(errors.pss_mib for errors in ranks),
        )
