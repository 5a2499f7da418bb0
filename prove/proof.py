"""One layout against the single process: losses, gradient norms, first gradients and final parameters, to rounding.

Used by `throughline prove` (one recipe), by `benchmarks/prove_layouts.py` (a whole table) and by the tests (a small
grid, and planted bugs that must be caught). The reference is the plain single-process step over the plain model; the
layout runs the same recipe on forked ranks.
"""

import dataclasses
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from ..core.recipe import build_recipe
from ..models.config import FAMILIES, ModelConfig
from ..models.init import initial_values
from ..planner.layout import Layout
from ..train.engine import Engine
from ..train.loss import wide_dtype
from ..train.objective import StepBatch, prepare, pretraining
from ..train.optimizers.averages import averaged
from ..train.optimizers.build import build_optimizer
from ..train.parallel.mesh import Mesh, make_mesh, start_group
from ..train.precision import HALVES, computing_dtype
from ..train.recipes.recipe import Recipe
from ..train.step import LossScaler, Trainer, train_step
from .forked import run_ranks

STEPS, ROWS, LENGTH, LEARNING_RATE, CLIP_NORM, SEED = 10, 16, 32, 1e-3, 0.5, 7
# of the loss in fp16: the first one that needs no step to be skipped here, and below it gradients underflow
SCALE = 2.0**10
SHAPE = {"vocab_size": 256, "sequence_length": LENGTH, "layers": 4, "width": 64, "heads": 4}
# float64 noise is 1e-15 (measured over all layouts: loss 2e-15, gradients 3e-15, parameters 1e-13), so these
# leave a factor of a hundred and more, and planted bugs stand ten orders above; float32 noise is 2e-6.
BOUNDS = {
    "fp64": {"loss": 1e-12, "norm": 1e-12, "gradient": 1e-11, "parameter": 1e-10},
    "fp32": {"loss": 1e-5, "norm": 1e-5, "gradient": 1e-5, "parameter": 0.2 * LEARNING_RATE},
    # In 16 bits with masters, equal micro-batches in equal products. Copies and pipelines compute what one process
    # computes and add it up in fp32, in another order (seen: gradients 6e-9); `fully_shard` adds the two gradients of
    # a tied table in 16 bits (1.3e-3 in bf16, 1.5e-4 in fp16). Later steps differ where that moves a master across
    # the middle between two 16-bit numbers. The parameter's error is a share of the way that the parameters went. A
    # product of shared experts has the rows of several processes and rounds once for all (seen: 1.8e-3 in bf16).
    "bf16 copies": {"loss": 1e-3, "norm": 3e-3, "gradient": 1e-6, "parameter": 0.05},
    "fp16 copies": {"loss": 2e-4, "norm": 1e-3, "gradient": 1e-6, "parameter": 0.03},
    "bf16 shards": {"loss": 1e-3, "norm": 5e-3, "gradient": 4e-3, "parameter": 0.1},
    "fp16 shards": {"loss": 2e-4, "norm": 1e-3, "gradient": 5e-4, "parameter": 0.05},
    # cut matrices and rows round other partial sums, 2**-8 and 2**-11 a product (seen: gradients 2e-2, 4e-3)
    "bf16 cuts": {"loss": 2e-3, "norm": 1e-2, "gradient": 5e-2, "parameter": 0.3},
    "fp16 cuts": {"loss": 5e-4, "norm": 2e-3, "gradient": 1e-2, "parameter": 0.15},
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
    rows: int = ROWS  # of a step
    length: int = LENGTH  # of a row
    optimizer: str = "adamw"
    z_loss: float = 0.0
    ema_decay: float = 0.0  # above 0 the averages of the parameters are compared in their place

    @property
    def config(self) -> ModelConfig:
        return FAMILIES[self.family].from_dict(SHAPE | {"sequence_length": self.length} | self.model)

    def key(self) -> str:
        """What the single process depends on."""
        same = self.reference_rows, self.documents, self.steps, self.optimizer, self.rows, self.length
        also = self.family, self.precision, self.z_loss, self.ema_decay, sorted(self.model.items())
        return repr((*same, *also))

    def engine(self, mesh: Mesh) -> Engine:
        objective = pretraining(self.config, z_loss=self.z_loss)
        return Engine(self.config, mesh, self.precision, SEED, self.recompute, objective=objective)

    @property
    def bounds(self) -> str:
        """Which of the BOUNDS hold: in 16 bits it depends on what the layout does to products and sums."""
        if self.precision not in HALVES:
            return self.precision
        cut = self.layout.tensor > 1 or self.layout.context > 1
        whole = self.layout.shards == self.layout.expert == 1
        kind = "cuts" if cut else "copies" if whole else "shards"
        return f"{self.precision} {kind}"

    @property
    def reference_rows(self) -> int:
        """Of a micro-batch of the single process: all; the layout's in 16 bits, where each rounds its gradients, and
        where its experts drop tokens.
        """
        drops = getattr(self.config, "expert_capacity_factor", 0) > 0
        return self.micro_rows if self.precision in HALVES or drops else self.rows


@dataclass
class Errors:
    """The largest differences from the single process, and where they are."""

    loss: float = 0.0
    norm: float = 0.0
    gradient: float = 0.0
    parameter: float = 0.0
    worst: str = ""  # the parameter whose gradient differs most
    pss_mib: float = 0.0  # memory of all processes, what they share counted once

    def beyond(self, bounds: str) -> list[str]:
        """Which of the BOUNDS of that name are broken (a NaN breaks its bound)."""
        return [name for name, bound in BOUNDS[bounds].items() if not getattr(self, name) <= bound]


@dataclass
class Reference:
    """What the single process did."""

    steps: list[tuple[float, float]]  # loss, gradient norm before clipping
    gradients: dict[str, Tensor]  # of the first step
    parameters: dict[str, Tensor]  # after the last


def make_rows(case: Case, step: int) -> dict[str, np.ndarray]:
    """The batch of a step: 5 to 90 % of a row's targets are ignored, so that all micro-batches have another count."""
    total, length = case.rows, case.length
    config, generator = case.config, np.random.default_rng(1000 + step)
    ids = generator.integers(1, config.vocab_size, (total, length + 1))
    ids[:, 1::2] = (ids[:, 0:-1:2] * 7 + 3) % config.vocab_size  # half of the tokens can be learnt
    keep = generator.random((total, length)) > np.linspace(0.05, 0.9, total)[:, None]
    rows: dict[str, np.ndarray] = {}
    if case.family == "gpt":
        rows = {"input_ids": ids[:, :-1], "targets": np.where(keep, ids[:, 1:], -100)}
    else:
        keep &= generator.random((total, length)) < 0.4
        keep[:, 3] = True
        first_length = generator.integers(length // 4, length // 2, (total, 1))
        rows = {
            "input_ids": np.where(keep, 0, ids[:, :-1]),
            "targets": np.where(keep, ids[:, :-1], -100),
            "token_types": (np.arange(length) >= first_length).astype(np.int64),
            "nsp_targets": generator.integers(0, 2, total),
        }
        rows["nsp_targets"][::5] = -100
        if not config.to_dict()["nsp"]:
            del rows["nsp_targets"]
        if not case.documents:
            real = generator.integers(length // 2, length + 1, (total, 1))
            rows["attention_mask"] = np.arange(length) < real
            rows["targets"] = np.where(rows["attention_mask"], rows["targets"], -100)
    if case.documents:
        starts = np.arange(length) >= generator.integers(4, length - 4, (total, 1))
        rows["document_ids"] = starts.astype(np.int32)
        rows["positions"] = np.where(starts, np.arange(length) - starts.argmax(1)[:, None], np.arange(length))
    return rows


def value_of(case: Case, name: str, shape: torch.Size) -> Tensor:
    """Initial values with biases and norm scales that are not all alike, so that a wrong one shows."""
    values = initial_values(name, shape, case.config, SEED).to(wide_dtype(computing_dtype(case.precision)))
    if len(shape) == 1:
        generator = torch.Generator().manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:8], 16))
        values += 0.02 * torch.randn(shape, generator=generator, dtype=values.dtype)
    return values


def make_trainer(case: Case, engine: Engine) -> Trainer:
    """The product's trainer around an engine, with the product's optimizer."""
    section = {"name": case.optimizer, "learning_rate": LEARNING_RATE, "weight_decay": 0.1}
    section |= {"ema_decay": case.ema_decay}
    sizes = {"steps": case.steps, "sequence_length": case.length, "batch_rows": case.rows}
    train = sizes | {"precision": case.precision}
    optimizer = build_optimizer(engine, build_recipe({"train": train, "optimizer": section}, Recipe))
    scaler = LossScaler(SCALE, active=True) if case.precision == "fp16" else LossScaler()
    return Trainer(engine, optimizer, scaler, case.precision, CLIP_NORM)


def reference(case: Case) -> Reference:
    """Train the case in this process."""
    engine = dataclasses.replace(case, recompute="none").engine(Mesh(Layout(), torch.device("cpu")))
    shapes = {local.name: torch.Size(local.spec.shape) for local in engine.local_shards}
    engine.fill(lambda name, box: value_of(case, name, shapes[name]))
    trainer = make_trainer(case, engine)
    gradients: dict[str, Tensor] = {}

    def take(phase: str) -> None:
        if phase == "backward" and trainer.step == 0:
            for local in engine.local_shards:
                if not local.parameter.requires_grad:
                    continue
                assert local.computed.grad is not None, f"{local.name} has no gradient"
                gradients[local.name] = local.computed.grad.clone()

    steps = []
    for step in range(case.steps):
        how = case.family, case.reference_rows, engine.device, 1.0
        batch = prepare(make_rows(case, step), *how, ahead=case.config.blocks_ahead)
        result = train_step(trainer, batch, 1.0, take)
        steps.append((sum(result.terms), result.grad_norm))
    with averaged(engine, trainer.optimizer):
        ends = {local.name: local.value.detach().clone() for local in engine.local_shards}
    return Reference(steps, gradients, ends)


def own_rows(case: Case, engine: Engine, step: int) -> StepBatch:
    """This rank's part of a step's rows."""
    mesh = engine.mesh
    own = case.rows // case.layout.data
    part = slice(mesh.data.rank * own, (mesh.data.rank + 1) * own)
    rows = {name: values[part] for name, values in make_rows(case, step).items()}
    how, ahead = (case.family, case.micro_rows, mesh.device, 1.0), case.config.blocks_ahead
    return prepare(rows, *how, context=mesh.context, ahead=ahead)


Plant = Callable[[Engine], None]


def train_rank(case: Case, expected: Reference, plant: Plant | None = None) -> Errors:
    """Train this rank's part of the case and compare it with the single process."""
    device = torch.device("cpu")
    start_group(device, 60)
    engine = case.engine(make_mesh(case.layout, device, 60))
    shapes = {local.name: torch.Size(local.spec.shape) for local in engine.local_shards}
    engine.fill(lambda name, box: value_of(case, name, shapes[name])[box.slices()])
    if plant is not None:
        plant(engine)
    trainer, errors = make_trainer(case, engine), Errors()

    def compare(phase: str) -> None:
        if phase == "backward" and trainer.step == 0:
            _compare_gradients(engine, expected, case, errors)

    for step, (loss, norm) in enumerate(expected.steps):
        result = train_step(trainer, own_rows(case, engine, step), 1.0, compare)
        errors.loss = _largest(errors.loss, abs(sum(result.terms) - loss))
        errors.norm = _largest(errors.norm, abs(result.grad_norm - norm) / norm)
        if case.ema_decay and step == 1:  # what it gathers must not be trained with
            with averaged(engine, trainer.optimizer):
                engine.evaluate([make_rows(case, step)], 1.0)
    with averaged(engine, trainer.optimizer):
        _compare_parameters(engine, expected, case, errors)
    errors.pss_mib = getattr(psutil.Process().memory_full_info(), "pss", 0) / 2**20  # 0 where none is counted
    return errors


def _compare_gradients(engine: Engine, expected: Reference, case: Case, errors: Errors) -> None:
    """Beside its own size; that of a bias of all keys, with which softmax does not change, beside its norm's scale."""
    for local in engine.local_shards:
        if not local.parameter.requires_grad:  # moved by the load of experts
            continue
        whole = expected.gradients[local.name]
        assert local.computed.grad is not None, f"{local.name} has no gradient"
        rounding = local.name.endswith("k_norm.bias") and case.config.positions != "rotary"
        size = expected.gradients[local.name.replace(".bias", ".weight") if rounding else local.name].norm()
        difference = (local.computed.grad - whole[local.spec.box.slices()]).norm() / size
        if _nan_last(difference.item()) > _nan_last(errors.gradient):
            errors.gradient, errors.worst = difference.item(), local.name


def _compare_parameters(engine: Engine, expected: Reference, case: Case, errors: Errors) -> None:
    """In float32 the biases of the keys are left out: softmax does not change with them, so their gradient is
    pure rounding, of which Adam makes steps of full size. In 16 bits the error is that of all parameters together,
    as a share of the way that they went.
    """
    if case.precision in HALVES:
        away = way = 0.0
        for local in engine.local_shards:
            box, value = local.spec.box.slices(), local.value.detach()
            start = value_of(case, local.name, torch.Size(local.spec.shape))
            away += (value - expected.parameters[local.name][box]).square().sum().item()
            way += (expected.parameters[local.name] - start)[box].square().sum().item()
        errors.parameter = math.sqrt(away / way)
        return
    for local in engine.local_shards:
        difference = (local.value.detach() - expected.parameters[local.name][local.spec.box.slices()]).abs()
        if case.precision == "fp32" and local.name.endswith("qkv.bias"):
            size = case.config.head_size
            rows = torch.arange(*(local.spec.box.start[0] + offset for offset in (0, local.spec.box.size[0])))
            difference = difference[rows // size % 3 != 1]
        if difference.numel():
            errors.parameter = _largest(errors.parameter, difference.max().item())


def _nan_last(error: float) -> tuple[bool, float]:
    """Orders errors with NaN as the largest, which a plain `max` loses."""
    return math.isnan(error), error


def _largest(*errors: float) -> float:
    return max(errors, key=_nan_last)


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
        names = ("loss", "norm", "gradient", "parameter")
        largest = {name: _largest(*(getattr(errors, name) for errors in ranks)) for name in names}
        return Errors(**largest, worst=worst.worst, pss_mib=sum(errors.pss_mib for errors in ranks))
