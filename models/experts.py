"""Experts: a feed-forward of several, of which each token goes through a few (Shazeer et al. 2017, Fedus et al. 2021).

The tokens are sorted by their expert, and a token gets the sum of its experts' answers, weighted by the router's
scores. Sorting and putting back are permutations, whose gradients need no sums in an order that a GPU leaves open. With
`expert_capacity_factor` an expert has room for so many rows in training; the others have no answer from it.

Who trains has two plain attributes: `RoutedFeedForward.watch` is told each routing and may change its weights, and a
forward of `Experts` that sends tokens elsewhere can be put in place of its own.

Shape letters: N tokens, E experts, K experts of a token, M = N x K tokens in the order of their experts, W width, F
width of an expert.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .config import GPTConfig
from .linear import linear

SWIGLU_GAIN = 1.702  # of gpt-oss: x sigmoid(1.702 x) is near a GELU (Hendrycks and Gimpel 2016)
ROWS = 64  # of one expert's product on a CPU a multiple, beyond so many
ALIGNED = 8  # numbers of bf16 in the 16 bytes that rows of `grouped_mm` begin at


class Routing(NamedTuple):
    """Where the tokens of rows go."""

    logits_NE: Tensor  # in float32 at least, as the scores
    scores_NE: Tensor
    chosen_NK: Tensor  # experts
    weights_NK: Tensor  # of their answers
    dropped_NK: Tensor | None = None  # those without one: their expert has no room; None: none


def gated(gate: Tensor, up: Tensor, activation: Callable[[Tensor], Tensor], limit: float) -> Tensor:
    """activation(gate) * up; with a limit as in gpt-oss, both clamped and 1 added to `up`."""
    if not limit:
        return activation(gate) * up
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(SWIGLU_GAIN * gate) * (up + 1)


class RoutedFeedForward(nn.Module):
    """A router, its experts, and a `shared` feed-forward that every token goes through."""

    def __init__(
        self, config: GPTConfig, activation: Callable[[Tensor], Tensor], shared: nn.Module | None
    ) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.width, config.experts, bias=config.has_bias("mlp"))
        self.balance_bias = None
        if config.balance_bias:  # moved by the load of the experts, not by a gradient (Wang et al. 2024)
            self.balance_bias = nn.Parameter(torch.empty(config.experts), requires_grad=False)
        self.experts = Experts(config, activation)
        self.shared = shared
        self.watch: Callable[[Routing, int], Routing] | None = None

    def forward(self, x_BSW: Tensor) -> Tensor:
        x_NW = x_BSW.flatten(0, 1)
        routing = self.route(x_NW)
        if self.watch is not None:
            routing = self.watch(routing, len(x_BSW))
        chosen_NK, dropped_NK, experts = routing.chosen_NK, routing.dropped_NK, self.config.experts
        if dropped_NK is not None:
            chosen_NK = chosen_NK.masked_fill(dropped_NK, experts)  # behind those of all experts
        chosen_M = chosen_NK.flatten()
        order_M = chosen_M.argsort(stable=True)
        places_M = torch.arange(len(order_M), device=x_NW.device)
        place_M = torch.empty_like(order_M).scatter_(0, order_M, places_M)
        counts_E = torch.bincount(chosen_M, minlength=experts)[:experts]
        copies = chosen_NK.shape[1]
        sorted_MW = _Taken.apply(x_NW, order_M // copies, place_M, copies)
        if dropped_NK is None:
            answers = self.experts(sorted_MW, counts_E)
        else:  # the host asks how many rows are left, and a GPU is waited for
            answers = self.experts(sorted_MW[: int(counts_E.sum())], counts_E)
            answers = F.pad(answers, (0, 0, 0, len(sorted_MW) - len(answers)))
        answers_MW = _Taken.apply(answers, place_M, order_M, 1)
        weights_N1K = routing.weights_NK[:, None].to(answers_MW.dtype)
        y_BSW = torch.bmm(weights_N1K, answers_MW.unflatten(0, (-1, copies))).view_as(x_BSW)
        return y_BSW if self.shared is None else y_BSW + self.shared(x_BSW)

    def route(self, x_NW: Tensor) -> Routing:
        """Scores in float32 at least, the best experts by them and the balance bias, their weights."""
        config, router = self.config, self.router
        if router.weight.dtype == x_NW.dtype:
            logits_NE = router(x_NW)
            logits_NE = logits_NE.to(torch.promote_types(logits_NE.dtype, torch.float32))
        else:
            logits_NE = _WideProduct.apply(x_NW, router.weight)
            logits_NE = logits_NE if router.bias is None else logits_NE + router.bias
        scores_NE = logits_NE.softmax(-1) if config.router_scores == "softmax" else logits_NE.sigmoid()
        ranked_NE = scores_NE.detach()
        if self.balance_bias is not None:
            ranked_NE = ranked_NE + self.balance_bias
        if config.router_groups > 1:
            ranked_NE = self._in_best_groups(ranked_NE)
        chosen_NK = ranked_NE.topk(config.experts_per_token, -1).indices
        weights_NK = scores_NE.gather(-1, chosen_NK)
        if config.router_normalised:
            weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        routing = Routing(logits_NE, scores_NE, chosen_NK, weights_NK * config.router_scale)
        drops = self.training and config.expert_capacity_factor > 0
        return routing._replace(dropped_NK=self._dropped(routing)) if drops else routing

    def _dropped(self, routing: Routing) -> Tensor:
        """Of the tokens of a forward, so of one process, an expert takes those whose answers weigh most, of equal ones
        the first (Megatron-LM's `moe_token_drop_policy` "probs").
        """
        chosen_NK, weights_NK = routing.chosen_NK, routing.weights_NK.detach()
        room = math.ceil(chosen_NK.numel() / self.config.experts * self.config.expert_capacity_factor)
        weights_NE = torch.full_like(routing.scores_NE, -1.0).scatter_(1, chosen_NK, weights_NK)
        first_NE = weights_NE.argsort(dim=0, descending=True, stable=True)[:room]
        dropped_NE = torch.ones_like(weights_NE, dtype=torch.bool).scatter_(0, first_NE, False)
        return dropped_NE.gather(1, chosen_NK)

    def _in_best_groups(self, ranked_NE: Tensor) -> Tensor:
        """Minus infinity outside a token's groups (DeepSeek-AI 2024, V3, section 2.1.2)."""
        groups = ranked_NE.unflatten(-1, (self.config.router_groups, -1))  # (N, groups, experts)
        best = groups.topk(2, -1).values.sum(-1).topk(self.config.router_groups_per_token, -1).indices
        kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        return groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)

    def keep_wide(self, dtype: torch.dtype) -> None:
        """Hold the router and the balance bias in a wider dtype than the rest: a bias that moves by 0.001 stands still
        in bf16, and equal logits choose other experts. They are small.
        """
        self.router.to(dtype)
        if self.balance_bias is not None:
            self.balance_bias.data = self.balance_bias.data.to(dtype)


class _WideProduct(torch.autograd.Function):
    """`x @ weight.T` in the dtype of the weight; `x` is kept for backward in its own."""

    @staticmethod
    def forward(ctx: Any, x_NW: Tensor, weight_EW: Tensor) -> Tensor:
        ctx.save_for_backward(x_NW, weight_EW)
        return F.linear(x_NW.to(weight_EW.dtype), weight_EW)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NE: Tensor) -> tuple[Tensor, Tensor]:
        x_NW, weight_EW = ctx.saved_tensors
        return (grad_NE @ weight_EW).to(x_NW.dtype), grad_NE.t() @ x_NW.to(weight_EW.dtype)


class Experts(nn.Module):
    """The matrices of all experts, and their biases if they have any, stacked: one is what `FeedForward` is."""

    def __init__(self, config: GPTConfig, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        outer, inner = (config.experts, config.expert_size, config.width), (config.width, config.expert_size)
        self.up = nn.Parameter(torch.empty(outer))
        self.gate = nn.Parameter(torch.empty(outer)) if config.gated else None
        self.down = nn.Parameter(torch.empty(config.experts, *inner))
        self.names = ["up", "gate", "down"] if config.gated else ["up", "down"]
        for name in list(self.names) if config.has_bias("mlp") else ():
            size = config.width if name == "down" else config.expert_size
            self.names.append(f"{name}_bias")
            self.register_parameter(self.names[-1], nn.Parameter(torch.empty(config.experts, size)))
        self.activation, self.limit = activation, config.gate_limit
        self.product: Callable[..., Tensor] = F.linear  # of one expert's rows

    def forward(self, x_MW: Tensor, counts_E: Tensor) -> Tensor:
        """Tokens in the order of their experts, of which each has so many -> (M, W)."""
        stacked = {name: getattr(self, name) for name in self.names}
        aligned = not any(size % ALIGNED for size in self.up.shape[1:])
        if x_MW.is_cuda and x_MW.dtype == torch.bfloat16 and aligned:
            ends = counts_E.cumsum(0, dtype=torch.int32)

            def grouped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
                y = F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
                if bias is None:
                    return y
                expert_M = torch.repeat_interleave(counts_E, output_size=len(x))
                return y + F.embedding(expert_M, bias)  # its gradient sums in 32 bits

            return self._answers(x_MW, stacked, grouped)
        each = zip(x_MW.split(counts_E.tolist()), *(given.unbind() for given in stacked.values()))
        return torch.cat([self._of_one(rows, dict(zip(stacked, given))) for rows, *given in each])

    def _of_one(self, x_NW: Tensor, given: dict[str, Tensor]) -> Tensor:
        """Of one expert. On a CPU oneDNN makes a kernel for every number of rows that it meets, which costs as much as
        eight products (256 rows, bf16): rows of zeros leave few such numbers.
        """
        by_onednn = x_NW.dtype.itemsize == 2 or self.product is linear
        more = -len(x_NW) % ROWS if by_onednn and not x_NW.is_cuda and len(x_NW) > ROWS else 0
        padded = F.pad(x_NW, (0, 0, 0, more)) if more else x_NW
        return self._answers(padded, given, self.product)[: len(x_NW)]

    def _answers(self, x: Tensor, given: dict[str, Tensor], product: Callable[..., Tensor]) -> Tensor:
        hidden = product(x, given["up"], given.get("up_bias"))
        if self.gate is None:
            hidden = self.activation(hidden)
        else:
            gate = product(x, given["gate"], given.get("gate_bias"))
            hidden = gated(gate, hidden, self.activation, self.limit)
        return product(hidden, given["down"], given.get("down_bias"))


class _Taken(torch.autograd.Function):
    """The rows of an index, in which each row is `copies` times; `back` are the places where they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        ctx.save_for_backward(back)
        return x.index_select(0, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        taken = grad.index_select(0, back)
        return taken if ctx.copies == 1 else taken.unflatten(0, (-1, ctx.copies)).sum(1), None, None, None
