"""What training asks of the routers of a model with experts: their losses, the figures of a step, the balance bias.

A router's losses are sums over tokens, as every loss is, and enter backward where the weights of its experts' answers
are: so a stage of a pipeline that does not end in the loss has them too. Figures are counted in that backward, which
comes once for each micro-batch however often a forward is repeated.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..models.config import GPTConfig, ModelConfig
from ..models.experts import RoutedFeedForward, Routing
from .loss import router_sums
from .parallel.collectives import reduced
from .parallel.mesh import Mesh
from .shards import LocalShard
from .stage import Stage

FIGURES = ("balance_loss", "router_z_loss", "router_entropy", "expert_imbalance")  # of a step's record


class Routers:
    """Those of this process's stages. Without experts there is nothing to count: `totals` is empty."""

    def __init__(self, config: ModelConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.layers = [layer for layer in range(config.layers) if config.has_experts(layer)]
        self.names = FIGURES if self.layers else ()
        size = len(self.layers) * (3 + self._experts)
        # the sums of `router_sums`, then the tokens of each expert, of each layer
        self.totals = torch.zeros(size, dtype=torch.float64, device=mesh.device)
        self.loads_LE = self.totals[:0].view(0, self._experts)  # of the last step, of all processes

    @property
    def _experts(self) -> int:
        return self.config.experts if isinstance(self.config, GPTConfig) else 0

    def watch(self, stage: Stage) -> None:
        """Have the routers of a stage report, and add their losses."""
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
        factors = sums.new_tensor((config.balance_loss, config.router_z_loss, 0.0))
        factors = factors * stage.inverse_counts[0] * stage.loss_scale
        figures = torch.cat((sums.detach().double(), counts_RE.sum(0)))
        into = self.totals.view(len(self.layers), -1)[place]
        return routing._replace(weights_NK=_Joined.apply(routing.weights_NK, sums, factors, figures, into))

    def figures(self, totals: Tensor, inverse_count: Tensor) -> Tensor:
        """FIGURES of the sums of all processes: means over tokens and layers; of the loads the largest by the mean."""
        table = totals.view(len(self.layers), -1)
        self.loads_LE = table[:, 3:]
        tokens = self.loads_LE.sum() / max(len(self.layers), 1) / getattr(self.config, "experts_per_token", 1)
        balance, z, entropy = table[:, :3].mean(0).unbind()
        largest = (self.loads_LE.amax(1) / self.loads_LE.mean(1)).amax()
        return torch.stack((balance * inverse_count, z * inverse_count, entropy / tokens, largest))

    def move_biases(self, shards: Iterable[LocalShard], finite: Tensor | None) -> None:
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
