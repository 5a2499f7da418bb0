"""What is rehearsed: cards, models, batches, and one step of a trainer with everything that was seen of it."""

import ctypes
import os
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from throughline.models.config import BERTConfig, GPTConfig, ModelConfig, family_of
from throughline.planner.layout import Layout
from throughline.train.engine import Engine
from throughline.train.objective import StepBatch, prepare
from throughline.train.parallel.mesh import Mesh, make_mesh
from throughline.train.step import LossScaler, Trainer, train_step
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CARDS = {70: 0, 75: 1, 80: 2, 90: 3, 100: 4}  # capability -> the device of null/cards.h
SMALL_CARD = 5  # an A100 of 2 GiB
LLAMA: dict[str, Any] = {
    "positions": "rotary",
    "norm": "rmsnorm",
    "activation": "silu",
    "gated": True,
    "bias": False,
}
SHAPES: dict[str, dict[str, Any]] = {  # with the real vocabularies
    "gpt": {"vocab_size": 50257},
    "llama": LLAMA | {"vocab_size": 128256, "kv_heads": 2, "tied": False},
    "bert": {"vocab_size": 30522},
}
SIZE = {"sequence_length": 256, "layers": 2, "width": 256, "heads": 4}


def model(family: str, **changes: Any) -> ModelConfig:
    kind = BERTConfig if family == "bert" else GPTConfig
    return kind(**SIZE | SHAPES[family] | changes)


def card(capability: int) -> torch.device:
    device = torch.device("cuda", CARDS[capability])
    torch.cuda.set_device(device)
    return device


def rows(
    config: ModelConfig, count: int, documents: bool = False, padded: bool = False
) -> dict[str, np.ndarray]:
    """Rows of a batch as a dataset gives them: plain, of four documents each, or the last quarter padding."""
    length, rng = config.sequence_length, np.random.default_rng(0)
    ids = rng.integers(5, config.vocab_size, (count, length))
    batch = {"input_ids": ids, "targets": np.roll(ids, -1, 1)}
    if documents:
        part = length // 4
        batch["document_ids"] = np.tile(np.repeat(np.arange(4, dtype=np.int32), part), (count, 1))
        batch["positions"] = np.tile(np.tile(np.arange(part), 4), (count, 1))
    if isinstance(config, BERTConfig):
        batch["targets"] = np.where(np.arange(length) % 7 == 3, ids, -100)  # 14 % of each row: one shape
        batch["token_types"] = np.zeros_like(ids)
        batch["nsp_targets"] = np.zeros(count, np.int64)
        if documents:
            batch["nsp_targets"] = np.where(np.arange(length) % (length // 4), -100, 0)[None].repeat(count, 0)
        elif padded:
            batch["attention_mask"] = np.tile(np.arange(length) < length * 3 // 4, (count, 1))
    return batch


@dataclass
class Case:
    """A trainer and the batch of its steps on this process."""

    trainer: Trainer
    batch: StepBatch

    def step(self) -> None:
        self.batch.agreed = None
        train_step(self.trainer, self.batch, 1.0)


def make(
    config: ModelConfig,
    precision: str,
    device: torch.device,
    *,
    layout: Layout | None = None,
    rank: int = 0,
    micro: int = 2,
    steps: int = 2,
    unpad: bool = False,
    documents: bool = False,
    padded: bool = False,
    **asked: Any,
) -> Case:
    """The engine of this rank of a layout, whose other processes are pretended, with fused AdamW; a step has `steps`
    micro-batches of `micro` rows.
    """
    layout = layout or Layout()
    if layout.world > 1:
        dist.init_process_group("fake", rank=rank, world_size=layout.world)
    mesh = make_mesh(layout, device) if layout.world > 1 else Mesh(layout, device)
    engine = Engine(config, mesh, precision, **asked)
    values = [value for _, value in engine.named_parameters()]
    optimizer = torch.optim.AdamW([{"params": values, "base_lr": 1e-3}], lr=1e-3, fused=True)
    trainer = Trainer(engine, optimizer, LossScaler.of(precision), precision, 1.0)
    batch = rows(config, micro * steps, documents, padded)
    prepared = prepare(batch, family_of(config), micro, device, 0.15, unpad, context=mesh.context)
    return Case(trainer, prepared)


@dataclass
class Seen(TorchDispatchMode):
    """What a stretch of work asked of torch and of the runtime below."""

    attention: set[str] = field(default_factory=set)  # kernels
    collectives: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)  # bytes of the largest tensor of each call
    waits: Counter[str] = field(default_factory=Counter)  # file:function that made the host wait
    counted: dict[str, int] = field(default_factory=dict)  # by the runtime

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in KERNELS:
            self.attention.add(KERNELS[name])
        if function.namespace in ("c10d", "_c10d_functional"):
            size = max(
                (leaf.nbytes for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)),
                default=0,
            )
            if size > 64:  # counts, losses and norms are not worth a line
                self.collectives[name] += 1
                self.sent[name] += size
        return function(*args, **(kwargs or {}))

    def __enter__(self) -> "Seen":
        self._before = runtime_counts()
        self._caught = warnings.catch_warnings(record=True)
        self._warned = self._caught.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.cuda.set_sync_debug_mode("default")
        self._caught.__exit__(None, None, None)
        said = [w for w in self._warned if "called a synchronizing" in str(w.message)]
        self.waits.update(f"{Path(w.filename).name}:{w.lineno}" for w in said)
        self.counted = {name: now - self._before[name] for name, now in runtime_counts().items()}


KERNELS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cudnn",
    "_flash_attention_forward": "flash by bounds",
    "_efficient_attention_forward": "efficient by bounds",
    "_varlen_attn": "flash by bounds",
    "_safe_softmax": "math",
}


def runtime_counts() -> dict[str, int]:
    """What the null runtime has counted: see `enum count` of null/cudart.c."""
    count = ctypes.CDLL(os.environ["THROUGHLINE_NULL_GPU"]).null_count
    count.restype = ctypes.c_long
    return {name: count(place) for place, name in enumerate(("launches", "waits", "pageable", "graphs"))}
