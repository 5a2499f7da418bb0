"""Gradient compression trains as well as uncompressed gradients, in far fewer bytes: real processes, bytes
counted where sent.

python benchmarks/prove_compression.py [--quick] [--steps 500]

A small character GPT on tiny Shakespeare, 16 rows a step however many processes share them, AdamW with the
learning rate that is best for uncompressed gradients (of 0.006, 0.01 and 0.02), beta2 0.95, clipping at 1,
the same for every scheme. Base: fp32 gradients by ring all-reduce. The loss is that of a fixed validation set
after the last step. All processes must end with the same weights to the bit. `--quick` takes one seed
instead of three, and 40 steps.
"""

import hashlib
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from common import Claim, claim, finish, parser
from throughline.models.config import GPTConfig
from throughline.models.gpt import GPT
from throughline.models.init import build
from throughline.prove.forked import run_ranks, warm
from throughline.train.loss import cross_entropy_sum
from throughline.train.parallel.compression import Bf16Sum, CommunicationHook, OneBitAdam, PowerSum
from throughline.train.parallel.data import Communicator
from throughline.train.parallel.mesh import Axis

TEXT = Path(__file__).resolve().parents[1] / "recipes" / "samples" / "tinyshakespeare"
ROWS, LENGTH, VALIDATION_ROWS = 16, 64, 256
WARMUP_FRACTION = 0.14  # of the steps: 1-bit Adam's with fp32 gradients
POWER_RANK, POWER_DENSE_STEPS = 4, 10
ADAM = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
LR_WARMUP_STEPS, CLIP_NORM = 25, 1.0
WITHIN = 0.98  # loss ratio: at most 2 % above uncompressed


@dataclass(frozen=True)
class Corpus:
    """Character ids of the training and the validation part."""

    train: torch.Tensor
    validation: torch.Tensor
    vocabulary: int

    @classmethod
    def load(cls) -> "Corpus":
        text = b"".join(file.read_bytes() for file in sorted(TEXT.glob("*.txt")))
        symbols, ids = np.unique(np.frombuffer(text, np.uint8), return_inverse=True)
        tokens, cut = torch.from_numpy(ids.astype(np.int64)), len(ids) * 9 // 10
        return cls(tokens[:cut], tokens[cut:], len(symbols))

    def rows(self, seed: int, step: int) -> torch.Tensor:
        """The rows (ROWS, LENGTH + 1) of a step."""
        generator = torch.Generator().manual_seed(1_000_003 * seed + step)
        starts = torch.randint(len(self.train) - LENGTH - 1, (ROWS, 1), generator=generator)
        return self.train[starts + torch.arange(LENGTH + 1)]

    def validation_rows(self) -> torch.Tensor:
        starts = (
            torch.arange(VALIDATION_ROWS)[:, None] * (len(self.validation) - LENGTH - 1) // VALIDATION_ROWS
        )
        return self.validation[starts + torch.arange(LENGTH + 1)]


@dataclass(frozen=True)
class Outcome:
    """What one process has at the end of a run."""

    loss: float
    bytes_sent: float
    weights: str  # hash


def loss_sum(model: GPT, rows: torch.Tensor) -> torch.Tensor:
    return cross_entropy_sum(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())


def train(scheme: str, seed: int, steps: int, corpus: Corpus) -> Outcome:
    """One process's part of a run."""
    dist.init_process_group("gloo")
    world, rank = dist.get_world_size(), dist.get_rank()
    communicator = Communicator(Axis(world, rank, tuple(range(world)), dist.group.WORLD))
    model = build(
        GPTConfig(vocab_size=corpus.vocabulary, sequence_length=LENGTH, layers=2, width=64, heads=4), seed
    )
    communication_hook, optimizer = make_scheme(scheme, model, communicator, steps)
    share = ROWS // world
    for step in range(steps):
        rows = corpus.rows(seed, step)[rank * share : (rank + 1) * share]
        (loss_sum(model, rows) / (ROWS * LENGTH)).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        communication_hook.sum_gradients(gradients)
        if scheme.endswith("without feedback"):
            communication_hook.rescale(0.0)  # forgets what was lost
        squares = communication_hook.squared_norm(gradients)
        norm = float(torch.nn.utils.get_total_norm(gradients) if squares is None else squares.sqrt())
        if norm > CLIP_NORM:
            torch._foreach_mul_(gradients, CLIP_NORM / norm)
        for group in optimizer.param_groups:
            cosine = 0.55 + 0.45 * math.cos(math.pi * step / steps)  # from 1 to 0.1
            group["lr"] = ADAM["lr"] * cosine * min(1.0, (step + 1) / LR_WARMUP_STEPS)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = float(loss_sum(model, corpus.validation_rows())) / (VALIDATION_ROWS * LENGTH)
    weights = hashlib.sha256(
        b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    )
    return Outcome(loss, communicator.bytes_sent, weights.hexdigest())


def make_scheme(
    scheme: str, model: GPT, communicator: Communicator, steps: int
) -> tuple[CommunicationHook, torch.optim.Optimizer]:
    """What sums gradients, and the optimizer."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for name, p in named if p.dim() > 1 and "table" not in name]},
        {"params": [p for name, p in named if p.dim() < 2 or "table" in name], "weight_decay": 0.0},
    ]
    if scheme == "1-bit Adam":
        adam = OneBitAdam(
            groups, communicator=communicator, warmup_steps=int(WARMUP_FRACTION * steps), **ADAM
        )
        return adam, adam
    sums: dict[str, Callable[[], CommunicationHook]] = {
        "fp32": lambda: CommunicationHook(communicator),
        "bf16": lambda: Bf16Sum(communicator),
        "PowerSGD": lambda: PowerSum(communicator, POWER_RANK, POWER_DENSE_STEPS),
        "PowerSGD without feedback": lambda: PowerSum(communicator, POWER_RANK, POWER_DENSE_STEPS),
    }
    return sums[scheme](), torch.optim.AdamW(groups, **ADAM)


def run(scheme: str, world: int, seed: int, steps: int, corpus: Corpus) -> Outcome:
    """One run over `world` processes; all must agree."""
    start = time.perf_counter()
    outcomes = run_ranks(world, lambda: train(scheme, seed, steps, corpus), timeout_s=3600)
    assert len({outcome.weights for outcome in outcomes}) == 1, (
        f"{scheme}: the processes ended with different weights"
    )
    sent = statistics.mean(outcome.bytes_sent for outcome in outcomes)
    print(
        f"{scheme}, {world} processes, seed {seed}: loss {outcomes[0].loss:.4f}, {sent / 2**20:.2f} MiB sent by each, "
        f"{time.perf_counter() - start:.0f} s",
        file=sys.stderr,
        flush=True,
    )
    return Outcome(outcomes[0].loss, sent, outcomes[0].weights)


def compare(
    name: str, ours: list[Outcome], theirs: list[Outcome], peer: str, goals: dict[str, float | None]
) -> list[Claim]:
    """Loss and bytes of a scheme against another's."""
    made = []
    for what, goal in goals.items():
        unit, pick = ("nats", lambda o: o.loss) if what == "loss" else ("B", lambda o: o.bytes_sent)
        made.append(
            claim(
                f"{name}-{what}",
                [pick(o) for o in ours],
                [pick(o) for o in theirs],
                peer=peer,
                unit=unit,
                better="lower",
                goal=goal,
            )
        )
    return made


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--steps", type=int, default=500, help="optimizer steps of each run")
    chosen = options.parse_args()
    warm()
    corpus, seeds = Corpus.load(), range(1 if chosen.quick else 3)
    chosen.steps = min(chosen.steps, 40) if chosen.quick else chosen.steps

    def runs(scheme: str, world: int) -> list[Outcome]:
        return [run(scheme, world, seed, chosen.steps, corpus) for seed in seeds]

    claims = []
    for world in (2, 8):
        base, ours = runs("fp32", world), runs("1-bit Adam", world)
        name = f"1-bit-adam-{world}-ranks"
        claims += compare(name, ours, base, "fp32 ring all-reduce", {"bytes": 5.0, "loss": WITHIN})
        fp16 = [Outcome(o.loss, o.bytes_sent / 2, "") for o in base]
        claims += compare(f"{name}-fp16", ours, fp16, "fp16 ring all-reduce (half of fp32)", {"bytes": None})
        if world == 2:
            claims += compare(
                "bf16", runs("bf16", 2), base, "fp32 ring all-reduce", {"bytes": 2.0, "loss": WITHIN}
            )
        power, without = runs("PowerSGD", world), runs("PowerSGD without feedback", world)
        name = f"powersgd-{world}-ranks"
        claims += compare(
            f"{name}-feedback", power, without, "PowerSGD without error feedback", {"loss": 1.0}
        )
        claims += compare(name, power, base, "fp32 ring all-reduce", {"bytes": None, "loss": None})
    settings = {
        "steps": chosen.steps,
        "warmup_fraction": WARMUP_FRACTION,
        "seeds": len(seeds),
        "power_rank": POWER_RANK,
    } | ADAM
    finish("prove_compression", claims, kind="proof", settings=settings)
    return 0 if chosen.quick or all(c.met is not False for c in claims) else 1


if __name__ == "__main__":
    sys.exit(main())
