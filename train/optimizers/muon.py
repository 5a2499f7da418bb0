"""Muon for the matrices of the blocks, AdamW for the rest (Jordan et al. 2024).

Where a layout cuts a matrix, it is put together on one process of those that hold its parts, which orthogonalises it
and sends the parts of the result back: as many matrices at once as there are processes, in the dtype of the products.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...planner.tables import even_part, is_hidden_matrix, sharded_part
from ..parallel.mesh import ALONE, Axis
from ..stage import LocalShard, WholeParameters

ITERATIONS = 5
# of Jordan et al. 2024 ("Muon"): singular values go fast to about 1 (0.7 to 1.2), and need not get nearer
QUINTIC = (3.4445, -4.7750, 2.0315)


class MuonAdamW(torch.optim.AdamW):
    """Groups with `interleaved`, which says of which matrices (query, key, value) a weight is made up, move by Muon.

    It replaces the momentum M = U S V' of a matrix by about U V': a mean of gradients with decay beta1 and Nesterov's
    look ahead, Newton-Schulz iterations in `dtype` (None: the parameters') for all whole matrices of one shape
    together, a step of sqrt(max(1, rows / columns)) x lr.
    """

    def __init__(
        self,
        params: Any,
        whole: WholeParameters,
        interleaved: Callable[[str], tuple[int, int]],
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, **options)
        self.whole, self.interleaved, self.dtype = whole, interleaved, dtype
        # the hidden matrices of which other processes hold parts, and the others
        self.cut: list[LocalShard] = []
        self.alone: list[LocalShard] = []
        for part in whole.parts:
            if is_hidden_matrix(part.name, len(part.spec.shape)):
                cut = whole.shard.group is not None or self._tensor(part).group is not None
                (self.cut if cut else self.alone).append(part)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the loss is not evaluated again"
        groups = {p: group for group in self.param_groups if "interleaved" in group for p in group["params"]}
        aheads = {p: self._ahead(p, group["betas"][0]) for p, group in groups.items() if p.grad is not None}
        for parameter in aheads:
            parameter.grad = None  # so that AdamW passes it by
            parameter.mul_(1 - groups[parameter]["lr"] * groups[parameter]["weight_decay"])
        whole = [part.value for part in self.alone if part.value in aheads]
        self._move([(p, aheads[p], groups[p]["interleaved"], groups[p]["lr"]) for p in whole])
        for part, direction in self._spread(aheads):
            if part.value in aheads:
                part.value.sub_(direction, alpha=groups[part.value]["lr"])
        super().step()

    def _tensor(self, part: LocalShard) -> Axis:
        return ALONE if part.cut is None else self.whole.tensor

    def _spread(self, aheads: dict[Tensor, Tensor]) -> Iterator[tuple[LocalShard, Tensor]]:
        """For every part of a cut matrix its part of the direction. Collective, also for who holds nothing of it."""
        alike: dict[Any, list[LocalShard]] = {}
        for part in self.cut:
            alike.setdefault((part.spec.shape, self.interleaved(part.name), part.cut), []).append(part)
        for (shape, kind, dim), parts in alike.items():
            shard, tensor = self.whole.shard, self._tensor(parts[0])
            columns = [even_part(shape[dim or 0], tensor.size, rank)[1] for rank in range(tensor.size)]
            held = columns[tensor.rank] if dim == 0 else shape[0]
            rows = [sharded_part(held, shard.size, rank)[1] for rank in range(shard.size)]
            count = shard.size * tensor.size
            for first in range(0, len(parts), count):
                these = parts[first : first + count]
                own = [aheads.get(part.value, torch.zeros_like(part.value)) for part in these]
                own += [torch.zeros_like(own[0])] * (count - len(own))
                sent = [x.to(self.dtype or x.dtype) for x in own]
                (ahead,) = _gathered(_gathered(sent, 0, rows, shard), dim or 0, columns, tensor)
                direction = torch.zeros_like(ahead)
                self._move([(direction, ahead, kind, -1.0)])
                back = _scattered(_scattered([direction], dim or 0, columns, tensor), 0, rows, shard)
                yield from zip(these, (x.to(own[0].dtype) for x in back))

    def _move(self, moves: Sequence[tuple[Tensor, Tensor, tuple[int, int], float]]) -> None:
        """Of each (weight, look ahead, kind, rate) subtract from every matrix `rate` times its direction."""
        batches: dict[torch.Size, list[tuple[Tensor, Tensor, float]]] = {}
        for whole, ahead, kind, rate in moves:
            for target, update in zip(_parts(whole, *kind), _parts(ahead, *kind)):
                matrix = update.flatten(0, 1)
                step = rate * max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.t()
                batches.setdefault(wide.shape, []).append((target, wide, step))
        for batch in batches.values():
            matrices = torch.stack([wide for _, wide, _ in batch])
            for (target, _, step), wide in zip(batch, orthogonalise(matrices, self.dtype or matrices.dtype)):
                tall = target.shape[0] * target.shape[1] > target.shape[2]
                target.sub_((wide.t() if tall else wide).reshape(target.shape), alpha=step)

    def _ahead(self, parameter: Tensor, decay: float) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())  # AdamW expects one in every state that it loads
            state["momentum"] = torch.zeros_like(parameter)
        state["step"] += 1
        gradient = parameter.grad
        assert gradient is not None
        state["momentum"].lerp_(gradient, 1 - decay)
        return gradient.lerp(state["momentum"], decay)


def _gathered(parts: Sequence[Tensor], dim: int, sizes: Sequence[int], axis: Axis) -> Sequence[Tensor]:
    """Of every process the parts of `len(parts)` tensors, those for process 0 first, as many for each; here the
    tensors of this process, whole along `dim`, on which process r has `sizes[r]`.
    """
    if axis.group is None:
        return parts
    share = len(parts) // axis.size
    whole = parts[0].shape
    shapes = [(*whole[:dim], size, *whole[dim + 1 :]) for size in sizes]
    counts = [share * torch.Size(shape).numel() for shape in shapes]
    received = _all_to_all([parts[r * share : (r + 1) * share] for r in range(axis.size)], counts, axis)
    pieces = [flat.view(share, *shape) for flat, shape in zip(received, shapes)]
    return list(torch.cat(pieces, dim + 1).unbind())


def _scattered(wholes: Sequence[Tensor], dim: int, sizes: Sequence[int], axis: Axis) -> Sequence[Tensor]:
    """The way back of `_gathered`: whole tensors of this process -> this process's parts of all."""
    if axis.group is None:
        return wholes
    split = [whole.split(list(sizes), dim) for whole in wholes]
    outgoing = [[pieces[r] for pieces in split] for r in range(axis.size)]
    own = split[0][axis.rank].shape
    received = _all_to_all(outgoing, [len(wholes) * own.numel()] * axis.size, axis)
    return [part for flat in received for part in flat.view(len(wholes), *own).unbind()]


def _all_to_all(outgoing: Sequence[Sequence[Tensor]], counts: Sequence[int], axis: Axis) -> Sequence[Tensor]:
    flats = [torch.cat([part.reshape(-1) for part in parts]) for parts in outgoing]
    received, width = flats[0].new_empty(sum(counts)), flats[0].element_size()
    bytes_in, bytes_out = [width * count for count in counts], [flat.nbytes for flat in flats]
    # as bytes: gloo sends no 16-bit numbers this way
    sent = torch.cat(flats).view(torch.uint8)
    dist.all_to_all_single(received.view(torch.uint8), sent, bytes_in, bytes_out, group=axis.group)
    return received.split(list(counts))


def _parts(weight: Tensor, count: int, rows: int) -> list[Tensor]:
    """The matrices in a weight (out, in), each as a view (pieces, rows, in)."""
    return [weight[None]] if count == 1 else list(weight.view(-1, count, rows, weight.shape[-1]).unbind(1))


def orthogonalise(matrices_NRC: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """About U V' for each matrix U S V' of a batch (N, R, C) with R <= C, computed in `dtype`: bf16 is exact enough."""
    a, b, c = QUINTIC
    x = (matrices_NRC / (matrices_NRC.norm(dim=(-2, -1), keepdim=True) + 1e-7)).to(dtype)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.to(matrices_NRC.dtype)
