"""Adafactor: the mean square of a matrix's gradient kept as its row and column means, R + C numbers for R x C.

Shazeer and Stern 2018 (arXiv:1804.04235), algorithms 4 and 5, without momentum. The recipe's learning rate is the
paper's relative step rho. Vectors keep their whole mean square. A stored matrix counts as one, query, key and value
together. Not torch's Adafactor, which would take the root mean squares of a part for those of the whole: row sums are
completed over the tensor axis where columns are cut, column sums over shards and where rows are cut, norms over both.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..stage import LocalShard, WholeParameters

EPSILON_SQUARE, EPSILON_SCALE = 1e-30, 1e-3  # the paper's epsilon 1 and 2
DECAY_POWER = 0.8
CLIP = 1.0


class Adafactor(torch.optim.Optimizer):
    """State: `step`; of a matrix part (r, c) `row_square` (r, 1) and `column_square` (1, c), of a vector `square`."""

    def __init__(self, groups: list[dict[str, Any]], whole: WholeParameters, *, lr: float) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self.whole = whole

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is not evaluated again"
        parts = self.whole.parts
        matrices = [part for part in parts if len(part.spec.shape) > 1]
        cuts = [part.cut for part in matrices]
        by_row, by_column = ([_squares(part, dim) for part in matrices] for dim in (1, 0))
        rows = self.whole.sums(by_row, [cut == 1 for cut in cuts], over_shards=False)
        columns = self.whole.sums(by_column, [cut == 0 for cut in cuts])
        for part, row, column in zip(matrices, rows, columns):
            # a row has as many numbers as the whole matrix has columns
            width, height = part.spec.shape[1], part.spec.shape[0]
            self._divide(part, row_square=row / width, column_square=column / height)
        for part in parts:
            if len(part.spec.shape) == 1 and part.value.grad is not None:
                self._divide(part, square=part.value.grad.square())
        mine = [self._squared_norms(part) for part in parts]
        sums = self.whole.sums(mine, [part.cut is not None for part in parts])
        groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        for part, found in zip(parts, sums):
            if part.value.numel() and part.value.grad is not None:
                _move(part, found, groups[part.value])

    def _divide(self, part: LocalShard, **squares: Tensor) -> None:
        """Take new mean squares into those that are kept; the gradient is divided by the roots of all of them."""
        gradient = part.value.grad
        if gradient is None or not gradient.numel():
            return
        state = self.state[part.value]
        if not state:
            state["step"] = torch.zeros(())  # on the host, where it is read
        state["step"] += 1
        decay = 1 - float(state["step"]) ** -DECAY_POWER
        for name, square in squares.items():
            square = (square + EPSILON_SQUARE).to(gradient.dtype)
            if name not in state:
                state[name] = torch.zeros_like(square)
            gradient.mul_(state[name].lerp_(square, 1 - decay).rsqrt())

    def _squared_norms(self, part: LocalShard) -> Tensor:
        """(3,): squares of the gradient now and of the weight, and the part's share of the sum of row means."""
        parameter = part.value
        if not parameter.numel() or parameter.grad is None:
            return torch.zeros(3, dtype=torch.float64, device=parameter.device)
        both = parameter.grad, parameter
        pair = [torch.linalg.vector_norm(tensor, dtype=torch.float64).square() for tensor in both]
        state = self.state[parameter]
        if "row_square" in state:
            share = part.spec.box.size[1] / part.spec.shape[1] if part.cut == 1 else 1.0
            pair.append(state["row_square"].double().sum() * share)
        else:
            pair.append(torch.ones_like(pair[0]))
        return torch.stack(pair)


def _squares(part: LocalShard, dim: int) -> Tensor:
    """Sums of the gradient's squares along a dim of the part, kept as a dim of 1."""
    gradient = part.value.grad
    if gradient is None:
        size = [1 if index == dim else length for index, length in enumerate(part.spec.box.size)]
        return torch.zeros(size, dtype=torch.float64, device=part.value.device)
    return torch.linalg.vector_norm(gradient, dim=dim, keepdim=True).double().square()


def _move(part: LocalShard, found: Tensor, group: dict[str, Any]) -> None:
    parameter, direction = part.value, part.value.grad
    assert direction is not None
    count = math.prod(part.spec.shape)
    squares, weights, row_sum = found.unbind()
    mean = row_sum / part.spec.shape[0] if len(part.spec.shape) > 1 else torch.ones_like(row_sum)
    norm = (squares / count * mean).sqrt()  # root mean square of the update
    rate = group["lr"] * (weights / count).sqrt().clamp(min=EPSILON_SCALE)
    if group["weight_decay"]:
        parameter.mul_((1 - rate * group["weight_decay"]).to(parameter.dtype))
    factor = -rate * mean.sqrt() / (norm / CLIP).clamp(min=1.0)
    parameter.addcmul_(direction, factor.to(parameter.dtype))
