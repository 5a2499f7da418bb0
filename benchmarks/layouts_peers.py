"""The plain torch side of layouts.py, each layout as torch's tutorials write it; rank 0 prints the median
seconds of a step.

torchrun --nproc-per-node 2 layouts_peers.py ddp2|fsdp2|tp2|tp2-sequence|pp2 ROWS LENGTH STEPS SKIP
"""

import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, LAYERS = 50257, 768, 12, 4
MICRO_BATCHES = 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2, self.mlp = (
            nn.LayerNorm(WIDTH),
            Attention(),
            nn.LayerNorm(WIDTH),
            FeedForward(),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(length, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tensor_parallel(model: nn.Sequential, sequence: bool) -> nn.Sequential:
    """As torch's tutorial; with `sequence` the norms and residuals are cut along the row."""
    mesh = init_device_mesh("cpu", (2,))
    cut, whole = Shard(1), Replicate()
    between = cut if sequence else whole
    plan: dict = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    plan |= {"attention.out": RowwiseParallel(output_layouts=between)}
    plan |= {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=between)}
    if sequence:
        gather = {"input_layouts": (cut,), "desired_input_layouts": (whole,)}
        plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        plan |= {"attention": PrepareModuleInput(**gather), "mlp": PrepareModuleInput(**gather)}
    for block in list(model)[1:-1]:
        parallelize_module(block, mesh, plan)
    ends: dict = {"0.tokens": RowwiseParallel(input_layouts=whole, output_layouts=whole)}
    if sequence:
        ends |= {f"{LAYERS + 1}.norm": SequenceParallel()}
        ends |= {
            "1": PrepareModuleInput(
                input_layouts=(whole,), desired_input_layouts=(cut,), use_local_output=True
            )
        }
    ends |= {
        f"{LAYERS + 1}.output": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        )
    }
    parallelize_module(model, mesh, ends)
    return model


def main() -> None:
    layout, (rows, length, steps, skip) = sys.argv[1], map(int, sys.argv[2:6])
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    model = nn.Sequential(Embedding(length), *(Block() for _ in range(LAYERS)), Head())
    ids = torch.randint(0, VOCABULARY, (rows, length + 1))
    if layout in ("ddp2", "fsdp2"):  # each process has half of the rows
        ids = ids[rank * rows // 2 : (rank + 1) * rows // 2]
    inputs, targets = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    held: nn.Module = model
    if layout == "ddp2":
        held = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    elif layout == "fsdp2":
        for part in model:
            fully_shard(part)
        held = fully_shard(model)
    elif layout.startswith("tp2"):
        held = tensor_parallel(model, layout.endswith("sequence"))
    elif layout == "pp2":
        held = nn.Sequential(*(list(model)[:3] if rank == 0 else list(model)[3:]))
    cut = [parameter for parameter in held.parameters() if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in held.parameters() if not isinstance(parameter, DTensor)]
    groups = [{"params": group} for group in (cut, whole) if group]  # no operator takes both kinds at once
    optimizer = torch.optim.AdamW(groups, lr=3e-4, fused=True)
    forward_backward = (
        pipeline(held, rank, inputs, targets) if layout == "pp2" else plain(held, layout, inputs, targets)
    )
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        loss = forward_backward()
        norms = [
            torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
            for group in (cut, whole)
            if group
        ]
        norm = torch.stack(
            [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        ).norm()
        for group in (cut, whole):
            torch.nn.utils.clip_grads_with_norm_(group, 1.0, norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        float(loss)
        dist.barrier()
        times.append(time.perf_counter() - start)
    if rank == 0:
        print(statistics.median(times[skip:]))
    dist.destroy_process_group()


def plain(model: nn.Module, layout: str, inputs: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        if not layout.startswith("tp2"):
            loss = loss_of(model(inputs), targets)
            loss.backward()
            return loss.detach()
        with loss_parallel():
            loss = loss_of(model(inputs), targets)
            loss.backward()
        return loss.detach().full_tensor()

    return run


def pipeline(part: nn.Module, rank: int, inputs: Tensor, targets: Tensor) -> Callable[[], Tensor]:
    schedule = Schedule1F1B(PipelineStage(part, rank, 2, torch.device("cpu")), MICRO_BATCHES, loss_fn=loss_of)

    def run() -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        return torch.stack(losses).detach().mean() if losses else torch.zeros(())

    return run


if __name__ == "__main__":
    main()
