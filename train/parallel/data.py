"""Data parallelism: gradients summed over copies, everything sharded by torch's `fully_shard`, experts shared out.

Copies sum their gradients in buckets; ZeRO-1, ZeRO-2, full and hybrid sharding are `fully_shard` with what it
frees and when it reduces (Rajbhandari et al. 2020):

| sharding | weights between layers | gradients of micro-batches | optimizer |
|---|---|---|---|
| replicated | whole | whole, summed once a step | whole |
| zero1 | whole during a step | whole, reduce-scattered once a step | sharded |
| zero2 | whole during a step | reduce-scattered each micro-batch | sharded |
| full | gathered for each layer, freed | reduce-scattered each micro-batch | sharded |

With 16-bit products the shards are fp32 masters: weights are gathered in 16 bits (routers and balance biases in fp32),
gradients reduced in fp32. In a pipeline gradients are reduced once a step and weights stay gathered, whatever the
sharding (torch's schedules).

Shape letters: M rows here sorted by expert, R rows that come, P processes, H experts of each, W width.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.experts import RoutedFeedForward
from ...planner.layout import Layout
from ...planner.tables import bucket_slices, even_part
from .mesh import ALONE, Axis, Exchange, Mesh


class GradientBuffer:
    """Gradients of `parameters` in `dtype`, one flat tensor of which every `.grad` is a view, summed over `axis`
    (nothing is sent where it is alone) while backward still runs.

    The last layer, which backward completes first, comes first. A bucket starts its all-reduce when the last
    micro-batch has completed it and all before it: every process issues the same collectives in the same order.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], dtype: torch.dtype, axis: Axis = ALONE) -> None:
        self.axis, self.parameters = axis, list(reversed(parameters))
        sizes = [parameter.numel() for parameter in self.parameters]
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=device)
        parts = zip(self.parameters, self.flat.split(sizes))
        self.views = [part.view(parameter.shape) for parameter, part in parts]
        slices = bucket_slices([size * dtype.itemsize for size in sizes])
        starts = [0, *accumulate(sizes)]
        self.buckets = [self.flat[starts[part.start] : starts[part.stop]] for part in slices]
        self._bucket_of = [bucket for bucket, part in enumerate(slices) for _ in range(part.start, part.stop)]
        self._missing = [-1] * len(self.buckets)  # gradients still to come; below 0: sums wait for `finish`
        self._works: list[dist.Work] = []
        for index, parameter in enumerate(self.parameters):
            # of 16-bit weights fp32: a small gradient is not lost beside a large sum
            if parameter.dtype != dtype:
                parameter.grad_dtype = dtype
            parameter.grad = self.views[index]
            if axis.group is not None:
                parameter.register_post_accumulate_grad_hook(lambda _, index=index: self._arrived(index))

    def expect(self, passes: int) -> None:
        """So many backward passes give every parameter its gradient; the last one may start the sums."""
        self._missing = [passes * self._bucket_of.count(bucket) for bucket in range(len(self.buckets))]

    def _arrived(self, index: int) -> None:
        self._missing[self._bucket_of[index]] -= 1
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            self._start()

    def _start(self) -> None:
        bucket = self.buckets[len(self._works)]
        self._works.append(dist.all_reduce(bucket, group=self.axis.group, async_op=True))

    def finish(self) -> None:
        if self.axis.group is not None:
            while len(self._works) < len(self.buckets):
                self._start()
        for work in self._works:
            work.wait()
        self._works, self._missing = [], [-1] * len(self.buckets)

    def zero(self) -> None:
        """Forget the gradients; whoever took a view away gives it back."""
        self.flat.zero_()
        for parameter, view in zip(self.parameters, self.views):
            parameter.grad = view


@torch.no_grad()
def sum_gradients(gradients: Sequence[Tensor], axis: Axis) -> None:
    """Sum gradients in place over an axis, in buckets: while one travels the next is packed."""
    if axis.group is None:
        return
    flying = []
    for bucket in buckets(gradients):
        flat = pack(bucket)
        flying.append((bucket, flat, dist.all_reduce(flat, group=axis.group, async_op=True)))
    for bucket, flat, work in flying:
        work.wait()
        unpack(flat, bucket)


def buckets(tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Consecutive tensors of one dtype, in pieces worth one collective."""
    return [tensors[spec] for spec in bucket_slices([tensor.nbytes for tensor in tensors])]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """All numbers in one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unpack(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """The numbers back where `pack` took them."""
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view_as(tensor))


class Communicator:
    """The collectives of an axis for gradients, and the bytes this process sent through them (without message headers),
    as the usual algorithms send them: a ring all-reduce of x bytes over n processes sends 2 (n-1)/n x.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis, self.bytes_sent = axis, 0.0

    def sum(self, tensors: Sequence[Tensor]) -> None:
        sum_gradients(tensors, self.axis)
        self.count_all_reduce(sum(tensor.nbytes for tensor in tensors), self.axis)

    def count_all_reduce(self, nbytes: int, axis: Axis) -> None:
        self.bytes_sent += 2 * nbytes * (axis.size - 1) / axis.size

    def all_to_all(self, parts: Tensor) -> Tensor:
        """Row r goes to process r; row r of the result comes from it."""
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=self.axis.group)
        self.bytes_sent += parts.nbytes * (self.axis.size - 1) / self.axis.size
        return received

    def all_gather(self, part: Tensor) -> Tensor:
        """(...) of each process -> (n, ...) on all."""
        parts = part.new_empty(self.axis.size, *part.shape)
        dist.all_gather(list(parts.unbind()), part, group=self.axis.group)
        self.bytes_sent += part.nbytes * (self.axis.size - 1)
        return parts


def shard_stage(stage: nn.Module, blocks: Iterable[nn.Module], mesh: Mesh, computed: torch.dtype) -> None:
    """Shard a stage on the meta device, its blocks and its rest; weights are gathered in the dtype `computed`."""
    device_mesh = mesh.sharding_mesh()
    if device_mesh is None:
        return
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # a second to import

    summed = torch.promote_types(computed, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=summed, cast_forward_inputs=False)
    layout = mesh.layout
    free = layout.sharding == "full" and layout.pipeline == 1
    wide = MixedPrecisionPolicy(param_dtype=summed, reduce_dtype=summed, cast_forward_inputs=False)
    for block in blocks:
        routed = block.mlp
        if isinstance(routed, RoutedFeedForward):
            shared_out, narrow = mesh.expert.group is not None, computed != summed
            if shared_out or narrow:
                among = mesh.sharding_mesh(experts=True) if shared_out else device_mesh
                fully_shard(routed.experts, mesh=among, reshard_after_forward=free, mp_policy=policy)
            if narrow and routed.shared is not None:
                fully_shard(routed.shared, mesh=device_mesh, reshard_after_forward=free, mp_policy=policy)
            if narrow:  # what is left is the router and its balance bias, gathered as they are
                fully_shard(routed, mesh=device_mesh, reshard_after_forward=free, mp_policy=wide)
        fully_shard(block, mesh=device_mesh, reshard_after_forward=free, mp_policy=policy)
    fully_shard(stage, mesh=device_mesh, reshard_after_forward=False, mp_policy=policy)
    for module in stage.modules():
        if isinstance(module, FSDPModule):  # losses have the global count in them: gradients are summed
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def before_backward(stage: Any, layout: Layout, last: bool) -> None:
    """Whether the next backward of an unpipelined sharded stage reduces its gradients, or keeps them."""
    stage.set_requires_gradient_sync(last or layout.sharding != "zero1")
    stage.set_is_last_backward(last)
    stage.set_reshard_after_backward(last or layout.sharding == "full")


def share_experts(trunk: nn.Module, axis: Axis) -> None:
    """Cut the experts of a model on the meta device, and send rows to them (GShard, Lepikhin et al. 2021)."""
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
    arriving_PH = torch.empty_like(leaving_PH)  # counts go first: no row is dropped and none is made up
    dist.all_to_all_single(arriving_PH, leaving_PH, group=axis.group)
    sent, received = leaving_PH.sum(1).tolist(), arriving_PH.sum(1).tolist()
    there, back = partial(_send, sent, received), partial(_send, received, sent)
    rows_RW = Exchange.apply(x_MW, axis, there, back)  # process by process, by expert in each
    answers_RW = compute(_transposed(rows_RW, arriving_PH), arriving_PH.sum(0))
    return Exchange.apply(_transposed(answers_RW, arriving_PH.t()), axis, back, there)


def _send(sent: list[int], received: list[int], x: Tensor, axis: Axis) -> Tensor:
    rows = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(rows, x.contiguous(), received, sent, group=axis.group)
    return rows


def _transposed(x: Tensor, counts: Tensor) -> Tensor:
    """Rows in groups of a table's sizes, line by line, in the order of its columns."""
    lines, columns = counts.shape
    groups = x.split(counts.flatten().tolist())
    return torch.cat([groups[line * columns + column] for column in range(columns) for line in range(lines)])
