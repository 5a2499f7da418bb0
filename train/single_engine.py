"""The engine of one process: a whole model, its loss, and plain backward passes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..models.config import family_of
from ..planner.layout import Layout
from .engine import Engine, Mark, make_master, no_mark, whole_shard
from .float8 import plain_products
from .heads import FIGURES
from .objective import LOSSES, LossFunction, StepBatch, hidden, prepare
from .offload import HostOffload
from .parallel.gradients import GradientBuffer
from .parallel.mesh import ALONE, Mesh
from .precision import computing_dtype, weight_dtype


class SingleEngine(Engine):
    """A whole model on one device.

    `model` comes with weights of any dtype. Where `precision` computes in 16 bits and those are wider, they
    become the masters and the model gets copies; with `offload`, which has masters of its own, they stay.
    `loss` may be a compiled form of the family's.
    """

    def __init__(
        self,
        model: Any,
        precision: str,
        device: torch.device,
        *,
        loss: LossFunction | None = None,
        offload: HostOffload | None = None,
    ) -> None:
        self.model, self.offload, self.mesh = model, offload, Mesh(Layout(), device)
        self.config, self.dtype = model.config, computing_dtype(precision)
        self.family = family_of(model.config)
        self.loss: LossFunction = loss or LOSSES[self.family]
        self.wide = weight_dtype(precision)  # of masters and of summed gradients
        self.buffer: GradientBuffer | None = None
        if offload is not None:
            masters = dict(offload.named_parameters())
            self.local_shards = [whole_shard(name, p, masters[name]) for name, p in model.named_parameters()]
            return
        masters = {}
        if self.dtype != self.wide:
            for name, parameter in model.named_parameters():
                masters[name] = (
                    nn.Parameter(parameter.data) if parameter.dtype == self.wide else make_master(parameter)
                )
                parameter.data = parameter.data.to(self.dtype)
        self.local_shards = [whole_shard(name, p, masters.get(name)) for name, p in model.named_parameters()]

    def accumulate(
        self,
        batch: StepBatch,
        step: int,
        loss_scale: float = 1.0,
        mark: Mark = no_mark,
        signal: int = 0,
        upcoming: StepBatch | None = None,
    ) -> Tensor:
        if self.buffer is None and self.offload is None and self.dtype != self.wide:
            self.buffer = GradientBuffer(list(self.model.parameters()), self.wide)
        if self.offload is not None:
            self.offload.micro_batches = len(batch.micro_batches)
        sums = torch.zeros_like(batch.inverse_counts)
        for micro_batch in batch.micro_batches:
            loss, terms = self.loss(self.model, micro_batch, batch.inverse_counts)
            mark("forward")
            (loss if loss_scale == 1.0 else loss * loss_scale).backward()
            sums += terms
        mark("backward")
        if self.offload is None:
            norm = torch.nn.utils.get_total_norm(self.gradients())
        else:
            norm = self.offload.gradient_norm()
        norm = norm.view(1).to(sums.device)
        return torch.cat((sums * batch.inverse_counts, norm, torch.full_like(norm, float(signal))))

    @torch.no_grad()
    def evaluate(self, rows: dict[str, np.ndarray], mask_fraction: float) -> Tensor:
        (batch,) = prepare(
            rows, self.family, len(rows["input_ids"]), self.device, self.wide, mask_fraction
        ).micro_batches
        training = self.model.training
        self.model.eval()
        try:
            return FIGURES[self.family](self.model, hidden(self.model, batch), batch, ALONE).cpu()
        finally:
            self.model.train(training)

    @contextmanager
    def exact_model(self) -> Iterator[Any]:
        """The model with the weights that a checkpoint saves, for scores that are to be those of the checkpoint."""
        masters = [local for local in self.local_shards if local.value is not local.computed]
        if self.offload is not None:
            masters = []
        rounded = [local.parameter.data for local in masters]
        try:
            for local in masters:
                local.parameter.data = local.value.data
            with plain_products(self.model):
                yield self.model
        finally:
            for local, data in zip(masters, rounded):
                local.parameter.data = data

    def discard(self) -> None:
        if self.offload is not None:
            self.offload.discard()
        if self.buffer is not None:
            self.buffer.zero()
            return
        for local in self.local_shards:
            local.computed.grad = None

    def states(self) -> dict[str, Tensor]:
        """The generators, which draw on from step to step."""
        states = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def load_states(self, names: Iterable[str], read: Callable[[str], Tensor], same_layout: bool) -> None:
        known = set(names)
        if "cpu" in known:
            torch.set_rng_state(read("cpu"))
            if self.device.type == "cuda" and "cuda" in known:
                torch.cuda.set_rng_state(read("cuda"), self.device)
