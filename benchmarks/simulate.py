"""One process of any layout, run without the other processes and without memory: what it holds, computes,
keeps and sends.

The product's own engine builds and runs the stage; underneath, a `fake` process group answers every
collective at once and tensors have shapes and no values. One micro-batch goes forward and backward and the
gradients are finished. A rank of 3,072 takes a second of one core.

What a GPU would do and a CPU does otherwise is put in: the flash-attention kernel (which keeps no scores) and
dropout with masks of one byte. Weights and everything kept are 16-bit, gradients are added up and summed in
fp32, as in any run with `train.precision = "bf16"` or "fp16".

FLOPs are those of matrix products and attention. The scores that a flash kernel computes again in its
backward are not counted, as in no published figure; what `recompute` computes again is.
"""

import gc
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from throughline.models.config import BERTConfig, ModelConfig, family_of
from throughline.planner.layout import Layout
from throughline.planner.traffic import StepShape, Traffic
from throughline.train.engine import Engine
from throughline.train.objective import IGNORED, prepare
from throughline.train.parallel.data import before_backward
from throughline.train.parallel.mesh import Mesh, make_mesh
from throughline.train.stage import Stage
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
DTYPE = torch.float16  # for bf16 too: the kernel that a CPU takes for it is not a GPU's
SMALL_BYTES = 64  # counts, losses and norms: not worth a line
KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "all_gather_single_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_single_": "reduce-scatter",
    "send": "send",
}


@dataclass(frozen=True)
class Simulated:
    """A stage on one process, for one micro-batch. Bytes kept are those between its forward and its backward."""

    stage: int
    layers: int
    parameters: int
    flops: int
    kept_by_layers: int
    kept_by_embeddings: int
    kept_by_head: int  # final norm, logits and loss
    masks_of_layers: int  # of what the layers keep, dropout masks
    traffic: tuple[Traffic, ...]  # of the micro-batch, and of the gradients of a step


class Watch(TorchDispatchMode):
    """Counts FLOPs, collectives and bytes alive of everything that runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.calls: Counter[tuple[str, str]] = Counter()  # (name of the group, kind)
        self.bytes: Counter[tuple[str, str]] = Counter()  # of the largest tensor of each call
        self._alive: dict[int, tuple[StorageWeakRef, int, bool]] = {}

    def add(self, tensor: Tensor, mask: bool = False) -> None:
        """Count the memory of a tensor as long as something refers to it."""
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        if known is None or known[0].expired():
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes(), mask

    def alive(self, masks: bool = False) -> int:
        """Bytes alive now; of dropout masks alone when asked."""
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        return sum(size for _, size, mask in self._alive.values() if mask or not masks)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # comes again with its local parts
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function.namespace == "c10d":
            self._count_collective(function, args)
        self.flops += _flops(function, args, kwargs, result)
        dropped = function is aten.native_dropout.default
        for place, tensor in enumerate(tree_leaves(result)):
            if isinstance(tensor, Tensor):
                self.add(tensor, dropped and place == 1)
        return result

    def _count_collective(self, function: Any, args: tuple[Any, ...]) -> None:
        leaves = tree_leaves(args)
        group = next(
            local
            for local in leaves
            if isinstance(local, torch.ScriptObject) and "ProcessGroup" in str(local._type())
        )
        name = function.overloadpacket.__name__
        size = max(local.nbytes for local in leaves if isinstance(local, Tensor))
        if size > SMALL_BYTES and name != "recv_":
            key = dist.ProcessGroup.unbox(group).group_name, KINDS.get(name, name)
            self.calls[key] += 1
            self.bytes[key] += size


def _flops(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if function is aten._scaled_dot_product_flash_attention.default:
        return 4 * args[0].numel() * args[1].shape[2]
    if function is aten._scaled_dot_product_flash_attention_backward.default:
        # four products; the scores, computed again, would be a fifth
        return 8 * args[1].numel() * args[2].shape[2]
    count = flop_registry.get(function.overloadpacket)
    return 0 if count is None else count(*args, **kwargs, out_val=result)


def _dropout(x: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return torch.native_dropout(x, p, training)[0]  # keeps its mask in one byte a number


class _RMSNorm(torch.autograd.Function):
    """What the fused kernel keeps and gives: its input and a number for each token. On a CPU torch has it in
    six operations.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor, eps: float | None = None) -> Tensor:
    return _RMSNorm.apply(x, weight)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    enable_gqa: bool,
) -> Tensor:
    assert attn_mask is None, "a simulated row is one document without padding"
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal)[0]


@contextmanager
def _as_on_gpu() -> Iterator[None]:
    """The kernels that keep less on a GPU. Not a mode of torch functions: those are off where backward
    recomputes a forward.
    """
    replaced = {"dropout": _dropout, "rms_norm": _rms_norm, "scaled_dot_product_attention": _attention}
    before = {name: getattr(F, name) for name in replaced}
    try:
        for name, function in replaced.items():
            setattr(F, name, function)
        yield
    finally:
        for name, function in before.items():
            setattr(F, name, function)


def simulate(config: ModelConfig, layout: Layout, batch: StepShape, pipeline_rank: int) -> list[Simulated]:
    """The stages of a pipeline rank, on its first process. The context axis must be 1 (its masks are
    explicit).

    Takes the place of this process's group: not to be called where one is in use.
    """
    assert not dist.is_initialized() and layout.context == 1
    assert batch.numbers.weight == DTYPE.itemsize and not batch.halves and batch.micro_batches == 1
    if layout.shards == 1:
        return _simulate_rank(config, layout, batch, pipeline_rank)
    # gathered weights come and go with the activations: those are counted where weights stay
    plain = _simulate_rank(config, replace(layout, sharding="replicated", replicas=1), batch, pipeline_rank)
    sharded = _simulate_rank(config, layout, batch, pipeline_rank)
    return [
        replace(kept, parameters=one.parameters, traffic=one.traffic) for kept, one in zip(plain, sharded)
    ]


def _simulate_rank(
    config: ModelConfig, layout: Layout, batch: StepShape, pipeline_rank: int
) -> list[Simulated]:
    dist.init_process_group("fake", rank=pipeline_rank * layout.data * layout.tensor, world_size=layout.world)
    try:
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        mesh = make_mesh(layout, torch.device("cpu"))
        engine = Engine(config, mesh, "fp16", recomputing=batch.recompute, memory=fake)
        with fake:
            return [_simulate_stage(engine, stage, batch) for stage in engine.stages]
    finally:
        dist.destroy_process_group()


def _simulate_stage(engine: Engine, stage: Stage, batch: StepShape) -> Simulated:
    mesh, layout, config = engine.mesh, engine.layout, engine.config
    watch, family = Watch(), family_of(config)
    held = [local for local in engine.local_shards if local.spec.stage == stage.index]
    rows = prepare(
        _rows(config, batch),
        family,
        batch.rows,
        mesh.device,
        batch.predicted / (batch.rows * batch.length),
    )
    stage.load(rows.micro_batches, torch.ones(len(rows.counts), dtype=DTYPE), 1.0)
    x = torch.empty(stage.activation_shape(batch.rows, batch.length), dtype=DTYPE, requires_grad=True)
    for tensor in (x, *(local.computed for local in held), *stage.micro_batches[0].values()):
        watch.add(tensor)
    marks = _mark_blocks(stage, watch)
    if engine.sharded:
        before_backward(stage, layout, last=True)
    with watch, _as_on_gpu():
        start = watch.alive()
        y = stage(x)
        gc.collect()
        end = watch.alive()
        y.backward(None if stage.is_last else torch.empty_like(y))
        here = layout.stages_of(mesh.pipeline.rank)
        if stage.index == here[-1]:
            engine.finish_gradients()
    sent = []
    if not stage.is_last and stage.index + 1 not in here:
        sent.append(Traffic("pipeline", "send", 1, y.nbytes, "activations"))
    if not stage.is_first and stage.index - 1 not in here:
        sent.append(Traffic("pipeline", "send", 1, x.nbytes, "their gradients"))
    (before, masks_before), (after, masks_after) = marks
    return Simulated(
        stage.index,
        len(stage.model.blocks),
        sum(local.value.numel() for local in held),
        watch.flops,
        kept_by_layers=after - before,
        kept_by_embeddings=before - start,
        kept_by_head=end - after,
        masks_of_layers=masks_after - masks_before,
        traffic=(*_traffic(mesh, watch), *sent),
    )


def _rows(config: ModelConfig, batch: StepShape) -> dict[str, np.ndarray]:
    """Rows of one document each, with as many targets as the batch predicts."""
    ids = np.zeros((batch.rows, batch.length), np.int64)
    if not isinstance(config, BERTConfig):
        return {"input_ids": ids, "targets": ids}
    targets = np.full(ids.size, IGNORED)
    targets[: batch.predicted] = 0
    pairs = {"nsp_targets": np.zeros(batch.rows, np.int64)} if config.nsp else {}
    return {"input_ids": ids, "targets": targets.reshape(ids.shape), **pairs}


def _mark_blocks(stage: Stage, watch: Watch) -> list[tuple[int, int]]:
    """Bytes alive, and masks among them, before the first and after the last block; filled in as the forward
    runs.
    """
    marks: list[tuple[int, int]] = []

    def mark(*_: Any) -> None:
        gc.collect()
        marks.append((watch.alive(), watch.alive(masks=True)))

    blocks = list(stage.model.blocks.values())
    blocks[0].register_forward_pre_hook(mark)
    blocks[-1].register_forward_hook(mark)
    return marks


def _traffic(mesh: Mesh, watch: Watch) -> Iterator[Traffic]:
    axes = {
        "tensor": mesh.tensor,
        "pipeline": mesh.ends,
        "data": mesh.gradient,
        "replica": mesh.replica,
        "shard": mesh.shard,
    }
    names: dict[str, str] = {
        axis.group.group_name: name for name, axis in reversed(axes.items()) if axis.group is not None
    }
    for (group, kind), calls in watch.calls.items():
        axis = names.get(group, group)
        yield Traffic(
            "data" if axis in ("replica", "shard") else axis, kind, calls, watch.bytes[group, kind], ""
        )
