"""Expert parallelism: neighbours on the data axis share the experts, and rows travel to where theirs are.

Each process holds an equal part of the experts of every layer. Of the rows that it has sorted by expert it sends every
process those of that one's experts, computes what it is sent, and sends the answers back (GShard,
Lepikhin et al. 2021). Counts go first, so no row is dropped and none is made up. Routing and the router's losses know
nothing of it.

Shape letters: M rows that this process has sorted, R rows that it is sent, P processes, H experts that it holds,
W width.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.experts import RoutedFeedForward
from ...planner.tables import even_part
from .collectives import Exchange
from .mesh import Axis


def share_experts(trunk: nn.Module, axis: Axis) -> None:
    """Cut the experts of a model on the meta device over an axis, and send rows to them. Names stay."""
    if axis.group is None:
        return
    for module in trunk.modules():
        if isinstance(module, RoutedFeedForward):
            experts = module.experts
            for name, parameter in list(experts.named_parameters()):
                held = even_part(len(parameter), axis.size, axis.rank)[1]
                setattr(experts, name, nn.Parameter(parameter.new_empty(held, *parameter.shape[1:])))
            experts.forward = partial(_there_and_back, experts.forward, axis)  # type: ignore[method-assign]


def _there_and_back(
    compute: Callable[[Tensor, Tensor], Tensor], axis: Axis, x_MW: Tensor, counts_E: Tensor
) -> Tensor:
    """`compute` of all experts on the rows of this process, by the processes that have them."""
    leaving_PH = counts_E.view(axis.size, -1)
    arriving_PH = torch.empty_like(leaving_PH)
    dist.all_to_all_single(arriving_PH, leaving_PH, group=axis.group)
    sent, received = leaving_PH.sum(1).tolist(), arriving_PH.sum(1).tolist()
    there, back = partial(_send, sent, received), partial(_send, received, sent)
    rows_RW = Exchange.apply(x_MW, axis, there, back)  # process by process, by expert in each
    answers_RW = compute(_transposed(rows_RW, arriving_PH), arriving_PH.sum(0))
    return Exchange.apply(_transposed(answers_RW, arriving_PH.t()), axis, back, there)


def _send(sent: list[int], received: list[int], x: Tensor, axis: Axis) -> Tensor:
    """Rows to and from each process, so many of them."""
    rows = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(rows, x.contiguous(), received, sent, group=axis.group)
    return rows


def _transposed(x: Tensor, counts: Tensor) -> Tensor:
    """Rows in groups of a table's sizes, line by line, in the order of its columns."""
    lines, columns = counts.shape
    groups = x.split(counts.flatten().tolist())
    return torch.cat([groups[line * columns + column] for column in range(columns) for line in range(lines)])
