"""What the rehearsal on a null GPU (`make rehearse`) cannot see, as checks of seconds in the order of doubt.

Numbers, races between streams, cuDNN, CUDA graphs, NCCL, memory beside the allocator's, speed: `gpu_check.py` runs
them first.

A check takes the device, raises AssertionError where something is wrong and returns the figures it found. `DOUBTS` says
of each what a failure would mean and what to do until it is mended. Only torch and numpy are needed, except where a
check says otherwise by `LeftOut`. On a CPU they show that the checks themselves are right.

Shape letters as in models/attention.py.
"""

import os
import socket
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from gpu_answers import BOUNDS, MODELS, LeftOut, answers, dtypes, error, onnx_runtime
from throughline.core.hardware import find_chip
from throughline.models.attention import Documents, scaled_dot_product
from throughline.models.config import BERTConfig, GPTConfig, ModelConfig, family_of
from throughline.planner.layout import Layout
from throughline.planner.memory import IN_A_STEP, stage_memory
from throughline.planner.work import Layouts, Work, find_software
from throughline.train.engine import Engine
from throughline.train.loss import Words, head_loss_sum
from throughline.train.objective import prepare
from throughline.train.parallel.mesh import ALONE, Axis, Mesh, start_group
from throughline.train.step import LossScaler, Trainer, train_step
from torch import distributed as dist


def kernels(device: torch.device) -> str:
    """A product in each dtype equals the CPU's."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        built = [int(name.split("_")[1]) for name in torch.cuda.get_arch_list() if name.startswith("sm_")]
        assert 10 * major + minor >= min(built), f"this torch has kernels for {torch.cuda.get_arch_list()}"
    draw = torch.Generator().manual_seed(0)
    a, b = (torch.randn(300, 300, generator=draw) for _ in range(2))
    errors = {
        dtype: error(a.to(device, dtype) @ b.to(device, dtype), a.double() @ b.double())
        for dtype in dtypes(device)
    }
    assert all(errors[dtype] <= BOUNDS[dtype] for dtype in errors), errors
    return f"errors {errors}"


def attention(device: torch.device) -> str:
    """Forward and backward of dense, grouped and packed attention equal plain products in 64 bits."""
    worst: dict[str, float] = {}
    bounds = torch.tensor([0, 50, 64, 128, 200, 256], dtype=torch.int32)
    for dtype in dtypes(device):
        kinds = {"dense": (4, None), "grouped": (2, None), "documents": (4, bounds), "both": (2, bounds)}
        for name, (groups, mask) in kinds.items():
            draw = torch.Generator().manual_seed(1)
            q, k, v, grad = (
                torch.randn(2, heads, 128, 64, generator=draw) for heads in (4, groups, groups, 4)
            )
            results = []
            for where, kind in ((device, dtype), (torch.device("cpu"), torch.float64)):
                given = [x.to(dtype).to(where, kind, copy=True).requires_grad_() for x in (q, k, v)]
                documents = None if mask is None else Documents(mask.to(where), 78)
                if kind == torch.float64:  # the reference: a dense mask, repeated heads
                    dense = torch.ones(128, 128, dtype=torch.bool).tril()
                    dense = dense if documents is None else documents.mask(2, 128, True)
                    keys, values = (x.repeat_interleave(4 // groups, 1) for x in given[1:])
                    scores = (given[0] @ keys.mT / 8).masked_fill(~dense, -torch.inf)
                    out = scores.softmax(-1) @ values
                else:
                    out = scaled_dot_product(*given, mask=documents, is_causal=True)
                out.backward(grad.to(dtype).to(where, kind))
                results.append([out.detach(), *(x.grad for x in given)])
            worst[f"{name} {dtype}"] = found = max(map(error, *results))
            assert found <= BOUNDS[dtype], (name, dtype, found)
    return f"worst {max(worst.values()):.1e}, {max(worst, key=worst.__getitem__)}"


def loss_of_words(device: torch.device) -> str:
    """Head and loss of 50,257 words in whole tiles and two slices, and both gradients, equal plain ones."""
    draw, words, tiles = torch.Generator().manual_seed(2), 50257, 50304
    hidden, weight = torch.randn(3000, 64, generator=draw), 0.1 * torch.randn(tiles, 64, generator=draw)
    weight[words:] = 0
    targets = torch.randint(0, words, (3000,), generator=draw)
    targets[::7] = -100
    told = []
    for dtype in dtypes(device):
        here = [x.to(device, dtype, copy=True).requires_grad_() for x in (hidden, weight)]
        total = head_loss_sum(here[0], here[1], None, targets.to(device), Words(words, ALONE))
        total.backward()
        there = [x.detach().to("cpu", torch.float32, copy=True).requires_grad_() for x in here]
        plain = torch.nn.functional.cross_entropy(there[0] @ there[1][:words].T, targets, reduction="sum")
        plain.backward()
        worst = max(
            error(total.detach(), plain.detach()), *(error(a.grad, b.grad) for a, b in zip(here, there))
        )
        assert worst <= BOUNDS[dtype], (dtype, worst)
        told.append(f"{worst:.1e} in {dtype}")
    return ", ".join(told)


def make_trainer(
    config: ModelConfig, precision: str, device: torch.device, mesh: Mesh | None = None, **asked: object
) -> Trainer:
    engine = Engine(config, mesh or Mesh(Layout(), device), precision, **asked)  # type: ignore[arg-type]
    engine.fill()
    values = [value for _, value in engine.named_parameters()]
    optimizer = torch.optim.AdamW([{"params": values, "base_lr": 1e-3}], lr=1e-3, fused=True)
    return Trainer(engine, optimizer, LossScaler.of(precision), precision, 1.0)


def rows_of(config: ModelConfig, seed: int = 0, count: int = 8) -> dict[str, np.ndarray]:
    """Rows with two documents each; a BERT's padded."""
    draw, length = np.random.default_rng(seed), config.sequence_length
    ids = draw.integers(5, config.vocab_size, (count, length))
    rows = {"input_ids": ids, "targets": np.roll(ids, -1, 1)}
    if isinstance(config, BERTConfig):
        rows["targets"] = np.where(draw.random(ids.shape) < 0.15, ids, -100)
        rows |= {"token_types": np.zeros_like(ids), "nsp_targets": draw.integers(0, 2, count)}
        rows["attention_mask"] = np.arange(length) < draw.integers(length // 2, length, (count, 1))
    else:
        first = np.tile(np.arange(length) < length // 3, (count, 1))
        rows["document_ids"] = np.where(first, 0, 1).astype(np.int32)
        rows["positions"] = np.where(first, np.arange(length), np.arange(length) - length // 3)
    return rows


def losses(trainer: Trainer, steps: int, rows: int = 8) -> list[float]:
    config, device = trainer.engine.config, trainer.engine.device
    found: list[float] = []
    for step in range(steps):
        batch = rows_of(config, step % 2, rows)
        while (
            result := train_step(trainer, prepare(batch, family_of(config), rows // 2, device), 1.0)
        ).skipped:  # fp16's scale finds its place
            assert trainer.skipped < 20
        found.append(result.loss)
    return found


def apart(found: list[float], expected: list[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


def steps(device: torch.device) -> str:
    """Six steps of each model, in each precision, are those of a CPU in fp32."""
    told = []
    for name, config in MODELS.items():
        expected = losses(make_trainer(config, "fp32", torch.device("cpu")), 6)
        for precision, bound in (("fp32", 1e-3), ("fp16", 1e-2), ("bf16", 3e-2)):
            if precision != "bf16" or torch.bfloat16 in dtypes(device):
                found = apart(losses(make_trainer(config, precision, device), 6), expected)
                assert found <= bound, (name, precision, found)
                told.append(f"{name} {precision} {found:.1e}")
    return ", ".join(told)


def compiled(device: torch.device) -> str:
    """Compiled steps are those of eager ones, without a graph break."""
    from torch._dynamo.utils import counters

    precision, told = ("bf16" if torch.bfloat16 in dtypes(device) else "fp16"), []
    few = None if device.type == "cuda" else 1  # a CPU compiles for minutes
    for name, config in list(MODELS.items())[:few]:
        counters.clear()
        found, plain = (
            losses(make_trainer(config, precision, device, compiling=how), 4) for how in ("on", "off")
        )
        assert apart(found, plain) <= 1e-2, (name, found, plain)
        assert not counters["graph_break"], counters["graph_break"]
        told.append(f"{name} {apart(found, plain):.1e}")
    return ", ".join(told)


def streams(device: torch.device) -> str:
    """Forty steps with states on the host, whose copies run beside the computation, are the plain ones."""
    config = replace(MODELS["GPT"], layers=4)
    found, plain = (losses(make_trainer(config, "fp32", device, offload=way), 40) for way in (2, 0))
    assert apart(found, plain) <= 1e-2, list(zip(found, plain))
    return f"{apart(found, plain):.1e}"


@contextmanager
def group_of_one(device: torch.device) -> Iterator[Axis]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    start_group(device, 60)
    try:
        yield Axis(1, 0, (0,), dist.group.WORLD)
    finally:
        dist.destroy_process_group()


def nccl(device: torch.device) -> str:
    """`fully_shard`, the sums of a step and its update over a process group of one are the plain engine's."""
    config = MODELS["GPT"]
    with group_of_one(device) as one:
        sharded = Mesh(Layout(sharding="full"), device, world=one, shard=one)
        found, plain = (losses(make_trainer(config, "fp32", device, mesh), 4) for mesh in (sharded, None))
    assert apart(found, plain) <= 1e-3, (found, plain)
    return f"{apart(found, plain):.1e}"


def waits(device: torch.device) -> str:
    """The host waits at most once in a step."""
    if device.type == "cpu":
        raise LeftOut("a CPU waits for nothing else")
    trainer = make_trainer(MODELS["GPT"], "fp32", device)
    losses(trainer, 1)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses(trainer, 1)
    torch.cuda.set_sync_debug_mode("default")
    places = [
        f"{Path(w.filename).name}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)
    ]
    assert len(places) <= 1, places
    return str(places)


def memory(device: torch.device) -> str:
    """GPT-2 124M: the peak is what the planner says, and what the driver holds beside the allocator."""
    if device.type == "cpu":
        raise LeftOut("a CPU's memory is checked by tests/train/test_train_memory.py")
    config = GPTConfig(vocab_size=50257, sequence_length=1024, layers=12, width=768, heads=12)
    precision = "bf16" if torch.bfloat16 in dtypes(device) else "fp16"
    torch.cuda.reset_peak_memory_stats()
    trainer = make_trainer(config, precision, device, compiling="on")
    losses(trainer, 2, rows=8)
    peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    free, total = torch.cuda.mem_get_info()
    software = replace(find_software("throughline", precision), saves_between=False, evaluated_tokens=0)
    (stage,) = stage_memory(
        Work(config, 8, 1024), Layouts.of(Layout(), 4, "none", False), software, IN_A_STEP
    )
    planned = max(stage["moments"].values()) - stage["terms"]["runtime"]
    beside = total - free - held  # other programs on the card are in it
    told = f"planned {planned / peak - 1:+.1%} of {peak / 2**20:.0f} MiB; beside the allocator {beside / 2**20:.0f} MiB"
    assert abs(planned / peak - 1) <= 0.1, told
    return f"{told}, planned {stage['terms']['runtime'] / 2**20:.0f}"


def speed(device: torch.device) -> str:
    """The best large product reaches half of the card's peak; a launch and a copy from the host take what they do."""
    if device.type == "cpu":
        raise LeftOut("speed is a card's")
    kind = torch.bfloat16 if torch.bfloat16 in dtypes(device) else torch.float16
    a, small = torch.randn(8192, 8192, dtype=kind, device=device), torch.zeros(1, device=device)
    host = torch.empty(2**28, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device=device)

    def seconds(work: Callable[[], object], times: int) -> float:
        found = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(times):
                work()
            torch.cuda.synchronize()
            found.append((time.perf_counter() - start) / times)
        return statistics.median(found)

    rate = 2 * 8192**3 / seconds(lambda: a @ a, 10) / 1e12
    launch = seconds(lambda: small.add_(1), 1000)
    copy = 2**28 / seconds(lambda: there.copy_(host, non_blocking=True), 3)
    card = torch.cuda.get_device_properties(device)
    chip = find_chip(card.name, card.total_memory)
    peak = chip.tflops.get("bf16" if kind == torch.bfloat16 else "fp16", 0.0) if chip else 0.0
    told = f"{rate:.0f} of {peak:.0f} TFLOP/s, {launch * 1e6:.1f} us a launch, {copy / 1e9:.1f} GB/s from the host"
    assert rate >= 0.5 * peak, told
    return told


NUMBERS = "the numbers of a run on this card are not to be trusted"
# in the order of doubt; what a failure would mean
DOUBTS: dict[str, tuple[Callable[[torch.device], str], str]] = {
    "kernels of this torch": (
        kernels,
        "products are wrong, or none for this card (V100: the CUDA 12.6 build)",
    ),
    "attention": (
        attention,
        f"{NUMBERS}: a kernel that models/attention_cuda.py takes, or torch's own choice, which "
        "torch.backends.cuda.enable_cudnn_sdp(False) and its like change",
    ),
    "head and loss": (loss_of_words, f"{NUMBERS}: train/loss.py with rows of zeros below the words"),
    "steps of each model": (steps, f"{NUMBERS}: train/engine.py, the masters or the scale of that precision"),
    "compiled steps": (
        compiled,
        'Inductor computes otherwise here: train.compile = "off" until it is mended',
    ),
    "copies beside the computation": (
        streams,
        "a race between streams in train/optimizers/offload.py: no train.offload until it is mended",
    ),
    "answers of a GPT": (
        answers,
        "generate and serve give wrong text: attention_cuda.attend_cache, or the graphs of runtimes/packed.py",
    ),
    "NCCL": (
        nccl,
        "process groups or fully_shard fail here: only one process; send the output of NCCL_DEBUG=INFO",
    ),
    "waits of the host": (waits, "each wait drains the card: slower, and right"),
    "memory": (memory, "plans do not hold on this card: planner/hardware.py"),
    "ONNX Runtime": (
        onnx_runtime,
        "its CUDA provider computes otherwise or does not start: serve with --backend torch",
    ),
    "speed": (speed, "the card is throttled, shared, or not the one that core/chips.toml takes it for"),
}
