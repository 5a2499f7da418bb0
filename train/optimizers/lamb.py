"""LAMB: Adam's direction, scaled for every tensor to the length of its weights.

You et al. 2020, "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (ICLR 2020,
arXiv:1904.00962v5), algorithm 2, with bias correction and the identity for phi: no clamp on the ratio unless
`max_trust_ratio` is given. As in the authors' BERT code, vectors have neither weight decay nor a ratio; unlike AdamW
here, tables have both. The query, key and value matrices that attention stores as one have three ratios.

Bytes per parameter and step in fp32: weight, gradient, mean and square are read and the last three written
(28), then weight and direction are read and the weight is written (12): 40, where fused AdamW moves 28. The
direction takes the place of the gradient, so no memory beyond AdamW's is needed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam

from ..stage import LocalShard, WholeParameters

# elements of one round, of 20 bytes: what is read again at once stays in a core's cache, or in a GPU's of 40 MB
ROUND = {"cpu": 1 << 18, "cuda": 1 << 21}
Slice = tuple[int, Tensor, Tensor, Tensor, Tensor, Tensor]  # part, weight, gradient, mean, square, step


class Lamb(torch.optim.Optimizer):
    """Groups with `adapted` get a ratio for every tensor. `interleaved` says of a parameter's name how many matrices it
    holds and in pieces of how many rows they alternate. State is AdamW's; gradients end as what was subtracted.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        whole: WholeParameters,
        interleaved: Callable[[str], tuple[int, int]],
        max_trust_ratio: float | None = None,
        **usual: Any,  # lr, betas, eps
    ) -> None:
        # `fused` keeps the step counters on the device
        super().__init__(groups, usual | {"weight_decay": 0.0, "adapted": True, "fused": True})
        self._scratch = torch.empty(0)  # one round of directions, kept: fresh memory costs more than the step
        self.whole, self.interleaved, self.max_trust_ratio = whole, interleaved, max_trust_ratio

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is not evaluated again"
        squares: dict[int, list[Tensor]] = {}  # of weight and direction, in rounds
        for group in self.param_groups:
            for round_ in _rounds(self._slices(group), group["params"][0].device.type):
                self._directions(round_, group, squares)
        ratios = self._ratios(squares)
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            directions = [parameter.grad for parameter in moved]
            if group["adapted"] and moved:
                _move(moved, directions, [ratios[parameter] for parameter in moved], group["lr"])
            elif moved:
                torch._foreach_add_(moved, directions, alpha=group["lr"])

    def _slices(self, group: dict[str, Any]) -> Iterator[Slice]:
        known = {part.value: index for index, part in enumerate(self.whole.parts)}
        moved = [parameter for parameter in group["params"] if parameter.grad is not None]
        for parameter in moved:
            parameter.grad = parameter.grad.contiguous()
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
                state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.contiguous_format)
        if moved:
            torch._foreach_add_([self.state[parameter]["step"] for parameter in moved], 1)
        for parameter in moved:
            state = self.state[parameter]
            tensors = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            size = ROUND.get(parameter.device.type, ROUND["cuda"])
            for pieces in zip(*(tensor.detach().view(-1).split(size) for tensor in tensors)):
                yield known[parameter], *pieces, state["step"]

    def _directions(
        self, round_: list[Slice], group: dict[str, Any], squares: dict[int, list[Tensor]]
    ) -> None:
        """Turn gradients into minus the direction, r + decay x w, and note the squares of its norm and of the weight's.
        torch's fused Adam, let loose on zeros with a rate of 1, leaves minus m / (sqrt(v) + epsilon) there.
        """
        index, weights, gradients, means, variances, steps = (list(column) for column in zip(*round_))
        sizes = [weight.numel() for weight in weights]
        if self._scratch.numel() < sum(sizes) or self._scratch.dtype != weights[0].dtype:
            self._scratch = torch.empty_like(torch.cat(weights))
        ours = list(self._scratch[: sum(sizes)].zero_().split(sizes))
        beta1, beta2 = group["betas"]
        settings = {"lr": 1.0, "beta1": beta1, "beta2": beta2, "weight_decay": 0.0, "eps": group["eps"]}
        settings |= {"amsgrad": False, "maximize": False}
        # Adam adds 1 to the steps, which pieces of one parameter share
        before = list(torch._foreach_sub(steps, 1))
        adam(ours, gradients, means, variances, [], before, fused=True, **settings)
        if group["weight_decay"]:
            torch._foreach_add_(ours, weights, alpha=-group["weight_decay"])
        torch._foreach_copy_(gradients, ours)
        if group["adapted"]:
            for part, *pair in zip(index, torch._foreach_norm(weights), torch._foreach_norm(ours)):
                if self.interleaved(self.whole.parts[part].name)[0] == 1:
                    squares.setdefault(part, []).append(torch.stack(pair).double().square())

    def _ratios(self, squares: dict[int, list[Tensor]]) -> dict[Tensor, Tensor]:
        """Parameter -> its ratio, (1) or a column of one for each row."""
        adapted = {p for group in self.param_groups if group["adapted"] for p in group["params"]}
        parts, mine = [], []
        for index, part in enumerate(self.whole.parts):
            if part.value in adapted or (not part.value.numel() and len(part.spec.shape) > 1):
                parts.append(part)
                known = squares.get(index)
                mine.append(self._by_rows(part) if known is None else torch.stack(known).sum(0).view(1, 2))
        found: dict[Tensor, Tensor] = {}
        for part, sums in zip(parts, self.whole.sums(mine, [part.cut is not None for part in parts])):
            weight, direction = sums.sqrt().unbind(1)
            ratio = torch.where((weight > 0) & (direction > 0), weight / direction, 1.0)
            if self.max_trust_ratio is not None:
                ratio = ratio.clamp(max=self.max_trust_ratio)
            ratio = ratio.to(part.value.dtype)
            found[part.value] = ratio if len(ratio) == 1 else ratio[self._matrix_of_rows(part)][:, None]
        return found

    def _by_rows(self, part: LocalShard) -> Tensor:
        """Squared norms (matrices, 2) of the parts of the matrices that a weight holds, if any."""
        count, _ = self.interleaved(part.name)
        weight, gradient = part.value.detach(), part.value.grad
        sums = torch.zeros(count, 2, dtype=torch.float64, device=weight.device)
        if gradient is None:
            return sums
        rows = [torch.linalg.vector_norm(tensor, dim=1).double().square() for tensor in (weight, gradient)]
        if count == 1:
            return torch.stack(rows, 1).sum(0, keepdim=True)
        return sums.index_add_(0, self._matrix_of_rows(part), torch.stack(rows, 1))

    def _matrix_of_rows(self, part: LocalShard) -> Tensor:
        count, rows = self.interleaved(part.name)
        start, size = part.spec.box.start[0], part.spec.box.size[0]
        return torch.arange(start, start + size, device=part.value.device) // rows % count


def _move(weights: list[Tensor], directions: list[Tensor], ratios: list[Tensor], rate: float) -> None:
    """Add rate x ratio x direction. A CPU's kernel is twice as fast with a plain number."""
    if weights[0].device.type != "cpu":
        torch._foreach_addcmul_(weights, directions, ratios, value=rate)
        return
    for weight, direction, ratio in zip(weights, directions, ratios):
        if ratio.numel() == 1:
            weight.add_(direction, alpha=rate * float(ratio))
        else:
            weight.add_(direction.mul_(ratio), alpha=rate)


def _rounds(slices: Iterator[Slice], device: str) -> Iterator[list[Slice]]:
    limit, filled = ROUND.get(device, ROUND["cuda"]), 0
    gathered: list[Slice] = []
    for piece in slices:
        if gathered and filled + piece[1].numel() > limit:
            yield gathered
            gathered, filled = [], 0
        gathered.append(piece)
        filled += piece[1].numel()
    if gathered:
        yield gathered
