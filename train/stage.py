"""One pipeline stage: the whole model's class without the parts of other stages, and the loss at its end.

Without a pipeline there is one stage and it is the model. Built on the meta device, then cut, then given
memory: no process ever holds more than its part.

Shape letters: B batch, S positions of a row, P those of this process, W width.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..models.config import BERTConfig
from ..planner.tables import stage_holds
from .loss import Batch, Model, Sums
from .parallel.context import chunk_documents
from .parallel.mesh import Mesh


class Stage(nn.Module):
    """Maps the micro-batch it is at, and the activations of the stage before, to activations or to the loss.

    `load` gives it the micro-batches of a step; every schedule runs a stage's forwards in their order, so a
    counter tells which one is meant. `sums` collects what `head` computes on the last stage: the losses,
    (terms,) each.
    """

    def __init__(self, model: Model, index: int, mesh: Mesh, head: Sums) -> None:
        super().__init__()
        self.model: Model = model
        self.index, self.mesh = index, mesh
        self.is_first, self.is_last = index == 0, index == mesh.layout.stages - 1
        self.causal = not isinstance(model.config, BERTConfig)
        self.micro_batches: Sequence[Batch] = []
        self.sums: list[Tensor] = []
        self.inverse_counts, self.loss_scale = torch.ones(()), 1.0
        self.head = head
        self.at = 0

    @property
    def trunk(self) -> Model:
        """What embeds and encodes: the model, or the encoder below a fine-tuned head."""
        return getattr(self.model, "encoder", self.model)

    def load(self, micro_batches: Sequence[Batch], inverse_counts: Tensor, loss_scale: float) -> None:
        """The micro-batches of the next step, 1 / targets (terms,) of its whole batch, and fp16's scale."""
        self.micro_batches, self.inverse_counts, self.loss_scale = micro_batches, inverse_counts, loss_scale
        self.sums, self.at = [], 0

    def forward(self, x: Tensor) -> Tensor:
        """Activations (B, P, W) of the stage before, if any -> activations, or the scaled loss on the last."""
        batch = self.micro_batches[self.at]
        self.at += 1
        x_BPW = self.encode(x, batch)
        if not self.is_last:
            return x_BPW
        sums = self.head(self.model, x_BPW, batch, self.mesh.tensor)
        self.sums.append(sums.detach())
        loss = (sums * self.inverse_counts).sum()
        return loss if self.loss_scale == 1.0 else loss * self.loss_scale

    def encode(self, x: Tensor, batch: Batch) -> Tensor:
        """Embeddings on the first stage, this stage's blocks, the final norm where the model has one."""
        ids, trunk = batch["input_ids"], self.trunk
        positions = batch.get("positions")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        inputs: dict[str, Any] = {}
        if self.mesh.context.group is not None:
            inputs["mask"] = chunk_documents(batch, self.mesh.context)
        else:
            inputs["document_bounds"] = batch.get("document_bounds")
        if self.is_first:
            kinds = () if self.causal else (batch.get("token_types"),)
            x = trunk.embed(ids, positions, *kinds)
        return trunk.encode(x, positions, **inputs)

    def activation_shape(self, rows: int, sequence_length: int) -> tuple[int, int, int]:
        """(B, P, W) of what passes between stages, for `rows` rows."""
        parts = self.mesh.context.size * self.mesh.tensor.size
        return rows, sequence_length // parts, self.model.config.width


def remove_other_stages(model: Any, index: int, mesh: Mesh) -> None:
    """Take out of the model what other stages hold; a final norm that is elsewhere lets everything pass."""
    for name, _ in list(model.named_parameters() if mesh.layout.stages > 1 else ()):
        if stage_holds(name, index, model.config, mesh.layout):
            continue
        parts = name.split(".")
        if parts[0] == "blocks":
            if parts[1] in model.blocks:
                del model.blocks[parts[1]]
        elif parts[0] == "norm":
            model.norm = nn.Identity()
        else:
            setattr(model, parts[0], None)
