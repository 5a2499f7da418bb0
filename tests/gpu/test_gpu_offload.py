"""Offload on a CUDA device: the numbers of the plain optimizer, memory under a cap that it could not meet,
and a fast host update.

Needs torch and numpy only (make gpu-check runs on a bare machine).
"""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from throughline.models.config import GPTConfig, preset
from throughline.models.gpt import GPT
from throughline.models.init import initialise
from throughline.planner.memory import host_terms
from throughline.planner.work import Layouts, Work, find_software
from throughline.train.loss import cross_entropy_sum
from throughline.train.optimizers.offload import IN_FLIGHT_BYTES, HostOffload
from throughline.train.stage import WholeParameters
from torch import nn

pytestmark = pytest.mark.gpu
SHAPE = GPTConfig(vocab_size=512, sequence_length=128, layers=4, width=128, heads=4)
CAP_BYTES = 32 * 2**30


@pytest.fixture(autouse=True)
def exact_fp32() -> Iterator[None]:
    """TF32 off, and the card's memory given back."""
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.cuda.empty_cache()


def offloaded(model: nn.Module, micro_batches: int = 1) -> HostOffload:
    return HostOffload(model, micro_batches, WholeParameters.of(model).parts)


def masters(offload: HostOffload) -> list[tuple[str, nn.Parameter]]:
    offload.wait()
    return [(side.name, side.master) for side in offload.sides]


def loss_of(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1])
    return cross_entropy_sum(logits.flatten(0, 1), ids[:, 1:].flatten()) / ids[:, 1:].numel()


def batch(step: int, rows: int = 8, length: int = 128, vocabulary: int = 512) -> torch.Tensor:
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(step)).cuda()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_equals_the_plain_optimizer(micro_batches: int) -> None:
    """fp32, ten clipped AdamW steps: gradients of the first exactly, then losses, norms and weights as near
    as Adam lets them.

    Host and card round differently, and Adam turns the rounding of a gradient near 0 into a part of a step.
    """
    models = [GPT(SHAPE), GPT(SHAPE)]
    for model in models:
        initialise(model, seed=0)
        model.cuda()
    plain, moved = models
    offload = offloaded(moved, micro_batches)
    expected = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    optimizer = torch.optim.AdamW([p for _, p in masters(offload)], lr=1e-3, fused=True)
    for step in range(10):
        losses = []
        for model in models:
            parts = [
                loss_of(model, batch(100 * step + micro)) / micro_batches for micro in range(micro_batches)
            ]
            for part in parts:
                part.backward()
            losses.append(sum(float(part) for part in parts))
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)
        norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        expected.step()
        expected.zero_grad()
        found = float(offload.gradient_norm())
        assert found == pytest.approx(norm, rel=1e-5 if step == 0 else 1e-2)
        offload.step(optimizer, min(1.0, 0.5 / found))
    offload.wait()
    torch.cuda.synchronize()
    # a fifth of what ten steps of 1e-3 can move
    assert max(float((a - b).abs().max()) for a, b in zip(plain.parameters(), moved.parameters())) < 2e-3
    offload.wait()


def test_weights_are_the_rounded_masters() -> None:
    """bf16 on the card: after steps in flight the weights are exactly the masters rounded, and the loss has
    fallen.
    """
    model = GPT(SHAPE)
    initialise(model, seed=0)
    model.to("cuda", torch.bfloat16)
    offload = offloaded(model)
    optimizer = torch.optim.AdamW([p for _, p in masters(offload)], lr=3e-3, fused=True)
    losses = []
    for _ in range(40):
        loss = loss_of(model, batch(0))
        loss.backward()
        offload.step(optimizer)
        losses.append(loss.item())
    offload.wait()
    torch.cuda.synchronize()
    for parameter, (_, master) in zip(model.parameters(), masters(offload)):
        assert torch.equal(parameter.cpu(), master.to(torch.bfloat16))
    assert losses[-1] < losses[0] / 3, losses[::10]
    offload.wait()


def fitting_preset() -> tuple[str, GPTConfig]:
    """gpt3-6.7b where the host has room for its states, else the largest that fits. Plain AdamW takes 16
    bytes a parameter.
    """
    facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) * 1024
    for name in ("gpt3-6.7b", "gpt3-2.7b", "gpt3-1.3b"):
        config = preset(name)
        terms = host_terms(Work(config, 1, 2048), Layouts(offload=1), find_software("throughline", "bf16"))
        if sum(terms.values()) * 1.15 < free:
            return name, config
    pytest.skip(f"{free / 2**30:.0f} GiB of host memory are too little for any of the models")


def test_trains_under_a_cap_of_device_memory() -> None:
    """One row of 2,048 tokens: 6.7B parameters inside 32 GiB; weights as predicted, and the peak within what
    may be in flight.
    """
    name, config = fitting_preset()
    free, total = torch.cuda.mem_get_info()
    if free < CAP_BYTES:
        pytest.skip(f"the card has {free / 2**30:.0f} GiB free")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction(CAP_BYTES / total)
    try:
        with torch.device("meta"):
            model = GPT(config)
        model = model.to(torch.bfloat16).to_empty(device="cuda")
        with torch.no_grad():
            for parameter in (
                model.parameters()
            ):  # drawn on the card: initial values on the host take minutes at this size
                parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
        predicted = 2 * config.parameter_count()
        assert torch.cuda.memory_allocated() == pytest.approx(predicted, rel=0.01)
        offload = offloaded(model)
        optimizer = torch.optim.AdamW([p for _, p in masters(offload)], lr=1e-4, fused=True)
        losses, ids = [], batch(0, 1, 2049, config.vocab_size)
        for _ in range(3):
            loss = loss_of(model, ids)
            loss.backward()
            offload.step(optimizer)
            losses.append(loss.item())
        offload.wait()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        # per token and layer 8 W + 2 F bf16 numbers, and the logits in bf16 and fp32 with their gradients
        tokens, per_token = 2048, 8 * config.width + 2 * config.feed_forward_size
        activations = 2 * tokens * config.layers * per_token + 12 * tokens * config.vocab_size
        largest = 2 * config.vocab_size * config.width
        print(
            f"{name}: peak {peak / 2**30:.2f} GiB, predicted {(predicted + activations) / 2**30:.2f} GiB "
            "and gradients in flight"
        )
        assert peak < CAP_BYTES
        assert peak < predicted + 1.25 * activations + IN_FLIGHT_BYTES + 2 * largest
        assert losses[-1] < losses[0]
        offload.wait()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_host_adam_reaches_the_copy_bandwidth() -> None:
    """The update moves 28 bytes a parameter (reads four numbers, writes three): >= 70 % of the bytes per
    second of a copy.
    """
    numel = 256 * 2**20
    parameter = torch.nn.Parameter(torch.zeros(numel))
    parameter.grad = torch.full((numel,), 1e-3)
    optimizer = torch.optim.AdamW([parameter], lr=1e-3, fused=True)
    source, target = torch.ones(numel), torch.zeros(numel)

    def rate(nbytes: int, work) -> float:
        work()
        seconds = []
        for _ in range(5):
            start = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - start)
        return nbytes / statistics.median(seconds)

    adam, copy = rate(28 * numel, optimizer.step), rate(8 * numel, lambda: target.copy_(source))
    print(f"host Adam {adam / 1e9:.0f} GB/s, copy {copy / 1e9:.0f} GB/s")
    assert adam >= 0.7 * copy
