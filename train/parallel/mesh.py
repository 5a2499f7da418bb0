"""The processes of a layout as axes with process groups, and the collectives of an axis inside autograd.

Groups are made here rather than by `init_device_mesh`: its groups fall back to the backend's 30 minutes
whatever the time limit of the run, so a stalled process would hold the others that long. On NCCL they are split from
the world's communicator, which is there before the first step: no axis meets for itself within a step's time limit.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed.device_mesh import DeviceMesh

from ...core.errors import WrongUse
from ...planner.layout import Layout

TIMEOUT_SECONDS = 600
START_SECONDS = 600  # until every process has been started and has imported torch
# renamed in torch 2.13; the old names warn there, the new ones are absent before
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
_OPERATIONS = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "wait_tensor")
# what torch.distributed's own tensors call; without them what sends over the tensor axis is not compiled
FIT_A_GRAPH = all(hasattr(torch.ops._c10d_functional, name) for name in _OPERATIONS)


@dataclass(frozen=True)
class Axis:
    """This process's place on an axis, and the group of those that differ from it on that axis only, if any."""

    size: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0,)  # global ranks of the group, in order
    group: dist.ProcessGroup | None = None

    @property
    def group_name(self) -> str:
        """By which collectives of a compiled graph find the group."""
        return "" if self.group is None else self.group.group_name

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduce in place over the axis; nothing to do when alone."""
        if self.group is not None:
            dist.all_reduce(tensor, op, group=self.group)
        return tensor


ALONE = Axis()
Collective = Callable[[Tensor, Axis], Tensor]


@dataclass(frozen=True)
class Mesh:
    """Where this process stands in a layout."""

    layout: Layout
    device: torch.device
    rank: int = 0
    world: Axis = ALONE
    pipeline: Axis = ALONE
    data: Axis = ALONE
    context: Axis = ALONE
    tensor: Axis = ALONE
    gradient: Axis = ALONE  # data x context: everyone whose gradients of the same weights are summed
    replica: Axis = ALONE  # of those, holders of the same shard
    shard: Axis = ALONE  # of those, holders of the other shards of one copy
    expert: Axis = ALONE  # neighbours on the data axis, which share the experts
    # the same three of a process's experts: among those that hold equal ones
    expert_gradient: Axis = ALONE
    expert_replica: Axis = ALONE
    expert_shard: Axis = ALONE
    ends: Axis = ALONE  # first and last pipeline stage of one place, which both hold a tied embedding

    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups that this process is in, each once."""
        groups = [axis.group for axis in vars(self).values() if isinstance(axis, Axis)]
        return list({id(group): group for group in groups if group is not None}.values())

    def sharding_mesh(self, experts: bool = False) -> DeviceMesh | None:
        """The mesh for `fully_shard`, of the experts or all else: (shard,), or (replica, shard) if hybrid."""
        replica, shard = (self.expert_replica, self.expert_shard) if experts else (self.replica, self.shard)
        if shard.group is None:
            return None
        kind = self.device.type
        if replica.group is None:
            return DeviceMesh.from_group(shard.group, kind, mesh_dim_names=("shard",))
        which = self.expert.rank if experts else slice(None)
        both = _ranks(self.layout)[self.pipeline.rank, :, :, which, :, self.tensor.rank]
        ranks = torch.from_numpy(both.reshape(replica.size, shard.size))
        groups = [replica.group, shard.group]
        return DeviceMesh.from_group(groups, kind, mesh=ranks, mesh_dim_names=("replica", "shard"))


def start_group(device: torch.device, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
    """Join the processes that the launcher started (its environment says which one this is)."""
    if not dist.is_initialized():
        backend, bound = "gloo", None
        if device.type == "cuda":
            backend, bound = "nccl", torch.device("cuda", device.index or 0)
            torch.cuda.set_device(bound)
        store, rank, world = next(dist.rendezvous("env://", timeout=timedelta(seconds=START_SECONDS)))
        if store.add("started", 1) == world:
            store.set("all started", "")
        store.wait(["all started"], timedelta(seconds=START_SECONDS))
        own = {"rank": rank, "world_size": world, "timeout": timedelta(seconds=timeout_seconds)}
        dist.init_process_group(backend, store=store, device_id=bound, **own)


def running_processes() -> tuple[int, int]:
    """(rank, world) as the launcher's environment says; (0, 1) without one."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def started_again() -> bool:
    """Whether the launcher, or torchrun, starts the processes again after one was lost."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def own_device(device: torch.device) -> torch.device:
    """The GPU of this process among those on its machine; a CPU is shared. Raises WrongUse for too few GPUs.

    The launcher says which in LOCAL_RANK; srun's usual prologue sets it without LOCAL_WORLD_SIZE. Where srun shows each
    process one GPU alone, that one is the first.
    """
    if device.type != "cuda":
        return device
    local, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if "LOCAL_WORLD_SIZE" not in os.environ and gpus == 1:
        local = 0
    if max(local + 1, processes_here()) > gpus:
        what = f"{max(local + 1, processes_here())} processes on this machine, and {gpus} GPUs"
        raise WrongUse(what, where="parallel", fix='fewer processes a machine, or train.device = "cpu"')
    if "LOCAL_RANK" not in os.environ:
        return device
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def processes_here() -> int:
    """Processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def _ranks(layout: Layout) -> np.ndarray:
    """Global ranks by (pipeline, replica, shard, expert, context, tensor): those that talk most are neighbours."""
    data = layout.data // layout.expert
    replicas = data if layout.sharding == "replicated" else layout.replicas
    shape = (layout.pipeline, replicas, data // replicas, layout.expert, layout.context, layout.tensor)
    return np.arange(layout.world).reshape(shape)


def make_mesh(layout: Layout, device: torch.device, timeout_seconds: float = TIMEOUT_SECONDS) -> Mesh:
    """The mesh of a layout over all processes of the default group, each group with the time limit. Collective."""
    if layout.world == 1:
        return Mesh(layout, device)
    assert dist.get_world_size() == layout.world, (dist.get_world_size(), layout.product())
    cube, rank = _ranks(layout), dist.get_rank()
    limit = timedelta(seconds=timeout_seconds)
    sharded = layout.sharding != "replicated"
    dims = {
        "pipeline": (0,),
        "data": (1, 2, 3),
        "context": (4,),
        "tensor": (5,),
        "gradient": (1, 2, 3, 4),
        "replica": (1,) if sharded else (1, 2, 3, 4),
        "shard": (2, 3, 4) if sharded else (),
        "expert": (3,),
        "expert_gradient": (1, 2, 4),
        "expert_replica": (1,) if sharded else (1, 2, 4),
        "expert_shard": (2, 4) if sharded else (),
    }
    parts = {}  # of each axis its lines, of which each process is on one
    for name, free in dims.items():
        line = math.prod(cube.shape[dim] for dim in free)
        parts[name] = np.moveaxis(cube, free, range(-len(free), 0)).reshape(-1, line)
    if layout.pipeline > 1:
        parts["ends"] = np.stack((cube[0], cube[-1]), -1).reshape(-1, 2)
    made: dict[str, Axis] = {}
    axes = {}
    for name, ranks in parts.items():
        # `fully_shard` wants a group also for experts that nobody else holds
        lone = sharded and layout.expert > 1 and name == "expert_shard" and ranks.shape[1] == 1
        if (key := str((ranks.tolist(), lone))) not in made:  # two axes with the same members are one group
            made[key] = _axis(ranks.tolist(), rank, limit, lone)
        axes[name] = made[key]
    world = Axis(layout.world, rank, tuple(range(layout.world)), dist.group.WORLD)
    return Mesh(layout, device, rank, world, **axes)


def _axis(parts: list[list[int]], rank: int, limit: timedelta, lone: bool = False) -> Axis:
    """The axis whose lines are these ranks, one line of which may be this process's; of one process without a group,
    unless `lone`. Every process makes the same axes in the same order, so none waits in a circle.
    """
    mine = next((ranks for ranks in parts if rank in ranks), [])
    group = None
    if len(parts[0]) == 1 and not lone:
        return Axis(ranks=(rank,))
    if len(parts) == 1 and len(mine) == dist.get_world_size():
        group = dist.group.WORLD
    elif dist.get_backend() == "nccl":
        group = dist.split_group(split_ranks=parts, timeout=limit)
    elif mine:  # gloo has nothing to split; members alone take part
        group = dist.new_group(mine, timeout=limit, use_local_synchronization=True)
    return Axis(len(mine), mine.index(rank), tuple(mine), group) if mine else ALONE


# The collectives below are started early and waited for late. While a block is compiled they are torch's functional
# ones, which a graph may hold: the same transfers, with the wait as an operation of its own. Eagerly they are those of
# `torch.distributed`, which cost less to start.


class Gathering:
    """An all-gather of the parts of every row, (B, P, ...) -> (B, S, ...), in flight."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        self.shape = (axis.size, *x.shape)
        self.work: dist.Work | None = None
        if is_compiling():
            gather = torch.ops._c10d_functional.all_gather_into_tensor
            self.parts = gather(x.reshape(-1), axis.size, axis.group_name)
        else:
            self.parts = x.new_empty(axis.size * x.numel())
            self.work = _all_gather(self.parts, x.reshape(-1), group=axis.group, async_op=True)

    def wait(self) -> Tensor:
        """The whole rows, the parts in order; a copy unless B is 1."""
        return _waited(self.parts, self.work).view(self.shape).movedim(0, 1).flatten(1, 2)


class Scattering:
    """A reduce-scatter of rows, (B, S, ...) -> (B, P, ...), in flight."""

    def __init__(self, x: Tensor, axis: Axis) -> None:
        # alive until the sum is there
        self.parts = x.unflatten(1, (axis.size, -1)).movedim(1, 0).contiguous()
        self.shape = self.parts.shape[1:]
        self.work: dist.Work | None = None
        if is_compiling():
            scatter = torch.ops._c10d_functional.reduce_scatter_tensor
            self.out = scatter(self.parts.view(-1), "sum", axis.size, axis.group_name)
        else:
            self.out = x.new_empty(self.shape.numel())
            self.work = _reduce_scatter(self.out, self.parts.view(-1), group=axis.group, async_op=True)

    def wait(self) -> Tensor:
        return _waited(self.out, self.work).view(self.shape)


def _waited(x: Tensor, work: dist.Work | None) -> Tensor:
    if work is None:
        return torch.ops._c10d_functional.wait_tensor(x)
    work.wait()
    return x


def reduced(x: Tensor, axis: Axis, how: str = "sum") -> Tensor:
    """The sum ("max", "min") over the axis, in a tensor of its own."""
    if is_compiling():
        return _waited(torch.ops._c10d_functional.all_reduce(x, how, axis.group_name), None)
    return axis.all_reduce(x.contiguous().clone(), getattr(dist.ReduceOp, how.upper()))


class Exchange(torch.autograd.Function):
    """What `there` makes of a tensor over an axis, and `back` of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis, there: Collective, back: Collective) -> Tensor:
        ctx.axis, ctx.back = axis, back
        return there(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, ctx.axis), None, None, None
