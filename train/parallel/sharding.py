"""Data parallelism: gradients summed over copies, or everything sharded by torch's `fully_shard`.

Copies sum their gradients in buckets; ZeRO-1, ZeRO-2, full and hybrid sharding are `fully_shard` with what it
frees and when it reduces (Rajbhandari et al. 2020):

| sharding | weights between layers | gradients of micro-batches | optimizer |
|---|---|---|---|
| replicated | whole | whole, summed once a step | whole |
| zero1 | whole during a step | whole, reduce-scattered once a step | sharded |
| zero2 | whole during a step | reduce-scattered each micro-batch | sharded |
| full | gathered for each layer, freed | reduce-scattered each micro-batch | sharded |

With 16-bit products the shards are fp32 masters: weights are gathered in 16 bits, gradients reduced in fp32, so
`full` gathers 2 + 2 bytes a parameter and reduces 4, and zero1 is Megatron's distributed optimizer.

In a pipeline gradients are reduced once a step and weights stay gathered, whatever the sharding (torch's
schedules).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...models.experts import RoutedFeedForward
from ...planner.layout import Layout
from ...planner.tables import bucket_slices
from .mesh import Axis, Mesh


def shard_stage(stage: nn.Module, blocks: Iterable[nn.Module], mesh: Mesh, computed: torch.dtype) -> None:
    """Shard a stage on the meta device, its blocks and the rest of it, over the shard axis; nothing without one.

    Weights are gathered in the dtype of the products, `computed`; gradients are added up in fp32 at least.
    """
    device_mesh = mesh.sharding_mesh()
    if device_mesh is None:
        return
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard  # a second to import

    summed = torch.promote_types(computed, torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=computed, reduce_dtype=summed, cast_forward_inputs=False)
    layout = mesh.layout
    free = layout.sharding == "full" and layout.pipeline == 1
    for block in blocks:
        if mesh.expert.group is not None and isinstance(block.mlp, RoutedFeedForward):
            among = mesh.sharding_mesh(experts=True)
            fully_shard(block.mlp.experts, mesh=among, reshard_after_forward=free, mp_policy=policy)
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
