"""The torch side of layouts.py: our model with its first values, rows, products and loss, spread over two processes by
torch's own parts, so that only the layout differs.

    torchrun --nproc-per-node 2 layouts_peers.py KIND RECIPE [--trace FILE]

ddp2           DistributedDataParallel; in bf16 over 16-bit weights, whose gradients a hook sums in fp32 into those of
               fp32 masters
ddp2-autocast  in bf16: DistributedDataParallel over fp32 weights, products in bf16 by autocast
fsdp2          fully_shard of each block and of the rest; in bf16 with its MixedPrecisionPolicy over fp32 shards
tp2            torch's tensor-parallel plan; in bf16 over 16-bit weights with fp32 masters
tp2-sequence   the same with norms and residuals cut along the row
pp2            torch.distributed.pipelining, 1F1B; in bf16 as tp2, micro-batches added up in fp32

All clip the gradient by its norm over the whole model, move with fused AdamW and read the loss of all rows at
every step. Rank 0 prints a JSON line: losses, and seconds from one loss read to the next.
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import chdir
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from throughline.core.recipe import load_recipe
from throughline.models.init import build
from throughline.models.linear import linear
from throughline.train.build import training_rows, validation_plan
from throughline.train.logs.profile import ACTIVE, SKIPPED, WARMUP
from throughline.train.loss import Words, head_loss_sum
from throughline.train.parallel.mesh import Axis
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import resolve
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity, profile, schedule

# inputs and targets of this process -> its part of the batch's loss
Step = Callable[[Tensor, Tensor], Tensor]
HALF = torch.bfloat16


class WithLoss(nn.Module):
    """Ids and targets (B, S) -> the sum of the losses over `count`: what a wrapper of torch's calls."""

    def __init__(self, model: Any, count: int, words: Words | None = None) -> None:
        super().__init__()
        self.model, self.count, self.words = model, count, words

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        hidden, weight = self.model.hidden(ids), self.model.output.weight
        if isinstance(weight, DTensor):  # columns of the vocabulary: every process needs all hidden states
            mesh, whole = weight.device_mesh, [Replicate()]
            if not isinstance(hidden, DTensor):
                hidden = DTensor.from_local(hidden, mesh, whole, run_check=False)
            hidden = hidden.redistribute(placements=whole).to_local(grad_placements=[Partial()])
            weight = weight.to_local()
        if torch.is_autocast_enabled("cpu"):
            hidden, weight = hidden.to(HALF), weight.to(HALF)
        return head_loss_sum(hidden.flatten(0, 1), weight, None, targets.flatten(), self.words) / self.count


def local(x: Tensor) -> Tensor:
    """What this process holds."""
    return x.to_local() if isinstance(x, DTensor) else x


class Masters:
    """The fp32 weights of a module, which the optimizer moves; the module's own become their 16-bit copies."""

    def __init__(self, module: nn.Module) -> None:
        self.values = [nn.Parameter(parameter.detach().clone()) for parameter in module.parameters()]
        self.computed = list(module.to(HALF).parameters())

    def take(self) -> None:
        """Give the masters the gradients of the weights, where nobody has yet."""
        for computed, value in zip(self.computed, self.values):
            if computed.grad is not None:
                value.grad = computed.grad.float()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights, which forget their gradients."""
        for computed in self.computed:
            computed.grad = None
        torch._foreach_copy_([local(x) for x in self.computed], [local(x) for x in self.values])

    def sum_bucket(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """A communication hook of DistributedDataParallel: the sum in fp32, as the gradients of the masters."""
        master = {id(computed): value for computed, value in zip(self.computed, self.values)}
        wide = bucket.buffer().float()
        work = dist.all_reduce(wide, async_op=True)
        assert work is not None

        def arrived(_: Any) -> Tensor:
            parameters = bucket.parameters()
            for parameter, part in zip(parameters, wide.split([p.numel() for p in parameters])):
                master[id(parameter)].grad = part.view_as(parameter)
            return bucket.buffer()

        return work.get_future().then(arrived)


def copies(model: Any, recipe: Recipe, masters: Masters | None, autocast: bool) -> Step:
    # without the hook gradients are averaged over the processes
    whole = recipe.train.rows_per_step * recipe.train.sequence_length
    held = nn.parallel.DistributedDataParallel(
        WithLoss(model, whole if masters else whole // 2), gradient_as_bucket_view=True, static_graph=True
    )
    if masters:
        held.register_comm_hook(None, masters.sum_bucket)

    def run(inputs: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", HALF, enabled=autocast):
            loss = held(inputs, targets)
        loss.backward()
        return loss.detach() if masters else loss.detach() / 2

    return run


def sharded(model: Any, recipe: Recipe, half: bool) -> Step:
    policy = (
        MixedPrecisionPolicy(param_dtype=HALF, reduce_dtype=torch.float32) if half else MixedPrecisionPolicy()
    )
    for block in model.blocks.values():
        fully_shard(block, mp_policy=policy)
    held = fully_shard(
        WithLoss(model, recipe.train.rows_per_step * recipe.train.sequence_length // 2), mp_policy=policy
    )

    def run(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = held(inputs, targets)
        loss.backward()
        return loss.detach() / 2

    return run


def column_product(module: Any, x: DTensor) -> DTensor:
    """What ColwiseParallel computes, by our product."""
    y = linear(x.to_local(grad_placements=[Partial()]), module.weight.to_local(), module.bias.to_local())
    return DTensor.from_local(y, x.device_mesh, [Shard(-1)], run_check=False)


def row_product(module: Any, x: DTensor, *, between: Placement) -> DTensor:
    """What RowwiseParallel computes, by our product; the bias is added to the sum."""
    y = DTensor.from_local(
        linear(x.to_local(), module.weight.to_local()), x.device_mesh, [Partial()], run_check=False
    )
    return y.redistribute(placements=[between]) + module.bias


def cut(model: Any, sequence: bool) -> DeviceMesh:
    """The plan of torch's tutorial; with `sequence` the norms and residuals are cut along the row."""
    mesh = init_device_mesh("cpu", (2,))
    part, whole = Shard(1), Replicate()
    between: Placement = part if sequence else whole
    plan: dict = {
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=between),
    }
    plan |= {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(output_layouts=between)}
    others = (None,) * 3  # mask, causality and rotary table of a block and its attention
    if sequence:
        plan |= {"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()}
        plan |= {
            "attention": PrepareModuleInput(
                input_layouts=(part, *others), desired_input_layouts=(whole, *others)
            )
        }
        plan |= {"mlp": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(whole,))}
    for block in model.blocks.values():
        parallelize_module(block, mesh, plan)
        for module in (block.attention.qkv, block.mlp.up):
            module.forward = partial(column_product, module)
        for module in (block.attention.out, block.mlp.down):
            module.forward = partial(row_product, module, between=between)
    ends: dict = {"token_table": RowwiseParallel(input_layouts=whole, output_layouts=whole)}
    ends |= {"output": ColwiseParallel()}  # its product is in the loss
    if sequence:
        ends |= {"norm": SequenceParallel()}
        ends |= {
            "blocks.0": PrepareModuleInput(
                input_layouts=(whole, *others), desired_input_layouts=(part, *others), use_local_output=True
            )
        }
    parallelize_module(model, mesh, ends)
    return mesh


def tensor_parallel(model: Any, recipe: Recipe, axis: Axis) -> Step:
    words = Words(model.config.vocab_size, axis)
    held = WithLoss(model, recipe.train.rows_per_step * recipe.train.sequence_length, words)

    def run(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = held(inputs, targets)
        loss.backward()
        return loss.detach() / 2  # the same on both

    return run


class Half(nn.Module):
    """The first or the second half of the blocks, with what is before or behind them."""

    def __init__(self, model: Any, rank: int) -> None:
        super().__init__()
        middle = len(model.blocks) // 2
        for layer in list(model.blocks):
            if (int(layer) >= middle) == (rank == 0):
                del model.blocks[layer]
        if rank == 0:
            model.norm, model.output = nn.Identity(), None
        else:
            model.token_table = model.position_table = None
        self.model, self.first = model, rank == 0

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        return self.model.encode(self.model.embed(x, positions) if self.first else x, positions)


def pipeline(held: Half, recipe: Recipe, rank: int) -> Step:
    rows, count = recipe.train.rows_per_step, recipe.train.rows_per_step * recipe.train.sequence_length

    def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
        return head_loss_sum(hidden.flatten(0, 1), held.model.output.weight, None, targets.flatten()) / count

    order = Schedule1F1B(
        PipelineStage(held, rank, 2, torch.device("cpu")),
        rows // recipe.train.rows_per_micro_batch,
        loss_fn=loss_of,
        scale_grads=False,
    )

    def run(inputs: Tensor, targets: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if rank == 0:
            order.step(inputs)
        else:
            order.step(target=targets, losses=losses)
        return torch.stack(losses).detach().sum() if losses else torch.zeros(())

    return run


def total_norm(groups: Sequence[Sequence[Tensor]], over_processes: bool) -> Tensor:
    """The norm of the whole gradient; of what no process holds whole by one more sum."""
    norms = [torch.nn.utils.get_total_norm([p.grad for p in group if p.grad is not None]) for group in groups]
    norm = torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]).norm()
    if over_processes:
        dist.all_reduce(norm.square_())
        norm.sqrt_()
    return norm


def measure(kind: str, recipe: Recipe, trace: Path | None = None) -> tuple[list[float], list[float]]:
    """Losses of a resolved recipe's steps, and seconds from one loss read to the next, in the group of two processes
    that this one is in. With `trace` as many steps as `train --profile` takes, written there by rank 0.
    """
    rank, train, layout = dist.get_rank(), recipe.train, kind.partition("-")[0]
    plan = validation_plan(recipe, torch.device("cpu"))
    half = train.precision == "bf16"
    in_half = half and layout != "fsdp2" and not kind.endswith("autocast")  # 16-bit weights with masters
    model: Any = build(plan.config, train.seed)
    if layout == "tp2":
        cut(model, kind.endswith("sequence"))
    held: Any = Half(model, rank) if layout == "pp2" else model
    masters = Masters(held) if in_half else None
    if layout == "ddp2":
        run = copies(model, recipe, masters, half and masters is None)
    elif layout == "fsdp2":
        run = sharded(model, recipe, half)
    elif layout == "tp2":
        run = tensor_parallel(model, recipe, Axis(2, rank, (0, 1), dist.group.WORLD))
    else:
        for parameter in held.parameters() if masters else ():
            parameter.grad_dtype = torch.float32
        run = pipeline(held, recipe, rank)
    values = masters.values if masters else list(held.parameters())
    groups = [
        [p for p in values if isinstance(p, DTensor)],
        [p for p in values if not isinstance(p, DTensor)],
    ]
    groups = [group for group in groups if group]  # no operator takes both kinds at once
    section = recipe.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": group} for group in groups],
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        eps=section.epsilon,
        weight_decay=section.weight_decay,
        fused=True,
    )
    rows, whole = training_rows(plan), train.rows_per_step
    own, first = (whole // 2, rank * whole // 2) if layout in ("ddp2", "fsdp2") else (whole, 0)
    times, losses = [], []

    def step(number: int) -> None:
        batch = rows.batch(number * whole + first, own)
        loss = run(torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["targets"])).float()
        if masters and layout != "ddp2":
            masters.take()
        norm = total_norm(groups, layout == "pp2")
        for group in groups:
            torch.nn.utils.clip_grads_with_norm_(group, train.clip_norm, norm)
        optimizer.step()
        if masters:
            masters.publish()
        optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(loss)
        losses.append(float(loss))
        times.append(time.perf_counter())

    if trace is None:
        for number in range(train.steps):
            step(number)
    else:
        phases = schedule(wait=SKIPPED, warmup=WARMUP, active=ACTIVE, repeat=1)
        with profile(activities=[ProfilerActivity.CPU], schedule=phases) as watched:
            for number in range(SKIPPED + WARMUP + ACTIVE):
                step(number)
                watched.step()
        if rank == 0:
            watched.export_chrome_trace(str(trace))
    return losses, [b - a for a, b in pairwise(times)]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("kind")
    options.add_argument("recipe", type=Path)
    options.add_argument("--trace", type=Path)
    chosen = options.parse_args()
    given = load_recipe(chosen.recipe, Recipe)
    with chdir(chosen.recipe.parent):
        recipe = resolve(given)
    dist.init_process_group("gloo")
    losses, seconds = measure(chosen.kind, recipe, chosen.trace)
    if int(os.environ["RANK"]) == 0:
        print(json.dumps({"losses": losses, "step_s": seconds}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
