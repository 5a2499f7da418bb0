"""One pipeline stage: the whole model's class without the parts of other stages, the loss at its end, what its routers
say, and what this process holds of each of its parameters. Without a pipeline there is one stage and it is the model.
Built on the meta device, then cut, then given memory: no process ever holds more than its part.

Shape letters: B batch, S positions of a row, P those of this process, W width.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models.config import BERTConfig, GPTConfig, ModelConfig
from ..models.experts import RoutedFeedForward, Routing
from ..planner.tables import Box, Coordinates, ShardSpec, is_of_experts, make_shard_spec, stage_holds
from .loss import Batch, Model, Sums, router_sums, wide_dtype
from .parallel.context import chunk_documents
from .parallel.data import sum_gradients
from .parallel.mesh import ALONE, Axis, Mesh, reduced

# of a step's record
ROUTER_FIGURES = ("balance_loss", "router_z_loss", "router_entropy", "dropped_tokens", "expert_imbalance")


class Stage(nn.Module):
    """Maps the micro-batch it is at, and the activations of the stage before, to activations or to the loss. Every
    schedule runs a stage's forwards in their order, so a counter tells which micro-batch is meant. `sums` collects what
    `head` computes on the last stage: the losses, (terms,) each.
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
        self.row_length = (
            model.config.sequence_length
        )  # which `dynamic` rotary scaling sees: the same in every layout

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
        sums, config = self.head(self.model, x_BPW, batch, self.mesh.tensor), self.model.config
        if "targets_1" in batch:
            depths, further = config.blocks_ahead, []
            weight = config.predict_ahead_loss / depths
            for depth in range(1, depths + 1):
                x_BPW, aims = self.encode(x_BPW, batch, depth), {"targets": batch[f"targets_{depth}"]}
                further.append(self.head(self.model, x_BPW, batch | aims, self.mesh.tensor).sum())
            sums = torch.cat((sums, weight * torch.stack(further).sum(0, keepdim=True)))
        self.sums.append(sums.detach())
        loss = (sums * self.inverse_counts).sum()
        return loss if self.loss_scale == 1.0 else loss * self.loss_scale

    def encode(self, x: Tensor, batch: Batch, depth: int = 0) -> Tensor:
        """Embeddings on the first stage, this stage's blocks, the final norm where the model has one; with `depth` the
        block that predicts the token so many places after the next.
        """
        ids, trunk = batch["input_ids"], self.trunk
        positions = batch.get("positions")
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        inputs: dict[str, Any] = {"document_bounds": batch.get("document_bounds")}
        if self.mesh.context.group is not None:
            inputs = {"mask": chunk_documents(batch, self.mesh.context)}
        inputs["row_length"] = self.row_length
        if depth:
            inputs |= {"depth": depth, "further_ids": batch[f"input_ids_{depth}"]}
        elif self.is_first:
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


class Routers:
    """What training asks of the routers of this process's stages: losses, figures of a step, the balance bias.

    A router's losses are sums over tokens, as every loss is, and enter backward where the weights of its experts'
    answers are: so a stage that does not end in the loss has them too. Figures are counted in that backward, which
    comes once for each micro-batch however often a forward is repeated.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.layers = [layer for layer in range(config.block_count) if config.has_experts(layer)]
        self.names = ROUTER_FIGURES if self.layers else ()
        size = len(self.layers) * (4 + self._experts)
        # the sums of `router_sums`, then the tokens that chose each expert, of each layer
        self.totals = torch.zeros(size, dtype=torch.float64, device=mesh.device)
        self.loads_LE = self.totals[:0].view(0, self._experts)  # of the last step, of all processes

    @property
    def _experts(self) -> int:
        return self.config.experts if isinstance(self.config, GPTConfig) else 0

    def watch(self, stage: Stage) -> None:
        for name, block in stage.trunk.blocks.items():
            if isinstance(block.mlp, RoutedFeedForward):
                block.mlp.watch = partial(self._watch, stage, self.layers.index(int(name)))

    def _watch(self, stage: Stage, place: int, routing: Routing, rows: int) -> Routing:
        if not torch.is_grad_enabled() or not stage.training:
            return routing
        counts_RE = torch.zeros(rows, self._experts, dtype=torch.float64, device=self.mesh.device)
        chosen = routing.chosen_NK.view(rows, -1)
        counts_RE.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=torch.float64))
        whole_RE = counts_RE
        for axis in (self.mesh.tensor, self.mesh.context):  # who has another part of the same rows
            whole_RE = whole_RE if axis.group is None else reduced(whole_RE, axis)
        sums = router_sums(routing, whole_RE)
        config: Any = self.config
        factors = sums.new_tensor((config.balance_loss, config.router_z_loss, 0.0, 0.0))
        factors = factors * stage.inverse_counts[0] * stage.loss_scale
        figures = torch.cat((sums.detach().double(), counts_RE.sum(0)))
        into = self.totals.view(len(self.layers), -1)[place]
        return routing._replace(weights_NK=_Joined.apply(routing.weights_NK, sums, factors, figures, into))

    def figures(self, totals: Tensor, inverse_count: Tensor) -> Tensor:
        """ROUTER_FIGURES, of the sums of all processes: means over tokens and layers, the largest load by the mean."""
        table = totals.view(len(self.layers), -1)
        self.loads_LE = table[:, 4:]
        rows = self.loads_LE.sum() / len(self.layers)
        tokens = rows / getattr(self.config, "experts_per_token", 1)
        balance, z, entropy, dropped = table[:, :4].mean(0).unbind()
        largest = (self.loads_LE.amax(1) / self.loads_LE.mean(1)).amax()
        losses = balance * inverse_count, z * inverse_count
        return torch.stack((*losses, entropy / tokens, dropped / rows, largest))

    def move_biases(self, shards: Iterable[Any], finite: Tensor | None) -> None:
        """Raise the balance bias of every expert with less than the mean load of the step, lower the others'
        (Wang et al. 2024, "Auxiliary-loss-free load balancing", algorithm 1).
        """
        rate = getattr(self.config, "balance_rate", 0.0)
        for local in shards if self.layers else ():
            if local.name.endswith(".balance_bias"):
                load_E = self.loads_LE[self.layers.index(int(local.name.split(".")[1]))]
                step_E = (load_E.mean() - load_E).sign() * rate
                step = step_E[local.spec.box.slices()].to(local.value.dtype)
                local.value.add_(step if finite is None else step * finite)


class _Joined(torch.autograd.Function):
    """`x`, with losses that are `sums * factors` besides; the figures are added where they belong in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sums: Tensor, factors: Tensor, figures: Tensor, into: Tensor) -> Tensor:
        ctx.factors, ctx.figures, ctx.into = factors, figures, into
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.into.add_(ctx.figures)
        return grad, ctx.factors, None, None, None


@dataclass
class LocalShard:
    """This process's box of one parameter. The module computes with `parameter`, which may be sharded or have rows of
    zeros below; `computed` is the local part of it, with its gradient after backward; `value` is what an optimizer
    moves and a checkpoint saves: a master in fp32, or `computed` itself.
    """

    spec: ShardSpec
    parameter: nn.Parameter
    computed: nn.Parameter
    value: nn.Parameter

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def cut(self) -> int | None:
        """The dim that is cut over the tensor axis."""
        return self.spec.placement if isinstance(self.spec.placement, int) else None

    def take_gradient(self) -> None:
        """Let `computed` have its part of the gradient of `parameter`."""
        if self.parameter.grad is not None:
            gradient = local_part(self.parameter.grad)[: len(self.computed)]
            self.computed.grad_dtype = gradient.dtype  # of 16-bit weights fp32, as `GradientBuffer` has them
            self.computed.grad = gradient


def local_part(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor that `fully_shard` may have cut (a DTensor), sharing its memory."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_shards(stage: Stage, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[LocalShard]:
    """The boxes of a stage that has memory, by whole shapes. Rows below the vocabulary become 0 and stay so."""
    mesh, config = stage.mesh, stage.model.config
    at = Coordinates(mesh.pipeline.rank, mesh.tensor.rank, mesh.replica.rank, mesh.shard.rank)
    for name, parameter in stage.model.named_parameters():
        spec = make_shard_spec(name, shapes[name], config, stage.index, mesh.layout, at, rows=len(parameter))
        part, rows = local_part(parameter.detach()), spec.box.size[0]
        computed = parameter
        if hasattr(parameter, "to_local") or len(part) != rows:
            part[rows:].zero_()
            computed = nn.Parameter(part[:rows], parameter.requires_grad)
        assert tuple(computed.shape) == spec.box.size, (name, tuple(computed.shape), spec.box)
        yield LocalShard(spec, parameter, computed, computed)


def summed_over(shards: Iterable[LocalShard], mesh: Mesh) -> Iterator[tuple[Axis, list[nn.Parameter]]]:
    """The trained parameters by the axis over which their copies sum gradients: shared experts have fewer copies."""
    parts: dict[str, list[nn.Parameter]] = {"gradient": [], "expert_gradient": []}
    for local in shards:
        if local.parameter.requires_grad:
            shared = mesh.expert.size > 1 and is_of_experts(local.name)
            parts["expert_gradient" if shared else "gradient"].append(local.parameter)
    yield from ((getattr(mesh, name), part) for name, part in parts.items() if part)


def make_master(parameter: nn.Parameter, device: torch.device | str | None = None) -> nn.Parameter:
    """An fp32 copy of a weight (fp64 of an fp64 one), its own memory, by default where it is."""
    wide = parameter.detach().to(device, wide_dtype(parameter.dtype), copy=True)
    return nn.Parameter(wide, parameter.requires_grad)


@dataclass(frozen=True)
class WholeParameters:
    """Every parameter of a process, of some of which it may hold nothing, with the axes over which their parts lie."""

    parts: Sequence[LocalShard]
    tensor: Axis = ALONE
    shard: Axis = ALONE

    @classmethod
    def of(cls, model: Any) -> "WholeParameters":
        """Those of a plain model or of an engine, in the same order on all processes of an axis."""
        if not isinstance(model, nn.Module):
            return cls(model.local_shards, model.mesh.tensor, model.mesh.shard)
        parts = []
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            spec = ShardSpec(name, shape, Box.whole(shape), 0, "same", True)
            parts.append(LocalShard(spec, parameter, parameter, parameter))
        return cls(parts)

    def sums(self, numbers: list[Tensor], cut: Sequence[bool], over_shards: bool = True) -> list[Tensor]:
        """Each tensor summed in place over the tensor axis where `cut`, and over the shards."""
        if over_shards:
            sum_gradients(numbers, self.shard)
        sum_gradients([tensor for tensor, flag in zip(numbers, cut) if flag], self.tensor)
        return numbers
