"""What a checkpoint costs a run of two data processes: the pause, and tokens a second while it is written.

python benchmarks/checkpoints.py [--quick] [--directory DIR]. A GPT of GPT-2's width with 4 layers in fp32 (68
million parameters, 815 MB of weights and optimizer state). Windows without a save and windows from the call
of `save` until `latest` names the verified checkpoint take turns in one run. The pause is the longest of both
processes. `--quick` has 2 layers of width 192, rows of 32 tokens, short windows and one pair of them.
"""

import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from common import claim, finish, parser
from throughline.models.config import ModelConfig, preset
from throughline.planner.layout import Layout
from throughline.prove.forked import run_ranks, warm
from throughline.train.checkpoints.checkpoint import CheckpointWriter
from throughline.train.engine import Engine
from throughline.train.objective import StepBatch, prepare
from throughline.train.parallel.ranks import Ranks
from throughline.train.step import LossScaler, Trainer, train_step

LAYOUT = Layout(data=2)
CONFIG = replace(preset("gpt2-124m"), layers=4, sequence_length=128)
QUICK_CONFIG = replace(CONFIG, layers=2, width=192, heads=3, sequence_length=32)
ROWS = 4  # of each process
PAUSE_BOUND_S, THROUGHPUT_BOUND = 0.2, 0.9
QUIET_STEPS, QUICK_QUIET_STEPS = 8, 3  # of a window without a save; one with a save lasts as long as writing


def make_trainer(ranks: Ranks, config: ModelConfig) -> Trainer:
    """The run's model and AdamW on this process."""
    engine = Engine(config, ranks.mesh, "fp32")
    engine.fill()
    group = {"params": [parameter for _, parameter in engine.named_parameters()], "base_lr": 1e-4}
    optimizer = torch.optim.AdamW([group], lr=1e-4, fused=True)
    return Trainer(engine, optimizer, LossScaler(), "fp32", 1.0)


def make_batch(ranks: Ranks, config: ModelConfig) -> StepBatch:
    """Some rows of this process."""
    generator = torch.Generator().manual_seed(ranks.mesh.rank)
    ids = torch.randint(0, config.vocab_size, (ROWS, config.sequence_length), generator=generator).numpy()
    return prepare({"input_ids": ids, "targets": ids}, "gpt", ROWS, ranks.mesh.device, 0.0)


def measure(
    directory: Path, config: ModelConfig, pairs: int, quiet_steps: int
) -> tuple[list[float], list[float], list[float], list[float]]:
    """On one process: pauses, and tokens/s while writing and without, window by window, and the seconds of
    each writing.
    """
    ranks = Ranks.start(LAYOUT, torch.device("cpu"))
    trainer, batch = make_trainer(ranks, config), make_batch(ranks, config)
    writer = CheckpointWriter(
        directory, 1, process=ranks.mesh.rank, processes=LAYOUT.world, token=ranks.token
    )
    tokens = ROWS * LAYOUT.data * config.sequence_length
    pauses, writing, quiet, seconds = [], [], [], []
    for _ in range(3):
        train_step(trainer, batch, 1.0)
    writer.prepare(trainer)
    writer.wait()
    for _ in range(pairs):
        for save in (False, True):
            ranks.wait()
            start, steps = time.perf_counter(), 0
            if save:
                writer.save(trainer)
                pauses.append(ranks.most(int(1e6 * (time.perf_counter() - start))) / 1e6)
            while ranks.most(int(not writer.idle) if save else int(steps < quiet_steps)):
                train_step(trainer, batch, 1.0)
                steps += 1
            spent = time.perf_counter() - start
            (writing if save else quiet).append(steps * tokens / spent)
            if save:
                seconds.append(spent)
                writer.wait()
    ranks.wait()
    writer.close()
    return pauses, writing, quiet, seconds


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--directory", type=Path, help="where to write; by default a temporary directory")
    chosen = options.parse_args()
    warm()
    pairs, quiet_steps = (1, QUICK_QUIET_STEPS) if chosen.quick else (5, QUIET_STEPS)
    config = QUICK_CONFIG if chosen.quick else CONFIG
    with tempfile.TemporaryDirectory(dir=chosen.directory) as directory:
        pauses, writing, quiet, seconds = run_ranks(
            LAYOUT.world, lambda: measure(Path(directory), config, pairs, quiet_steps), 900
        )[0]
    claims = [
        claim(
            "save-pause", pauses, [PAUSE_BOUND_S] * pairs, peer="bound", unit="s", better="lower", goal=1.0
        ),
        claim(
            "save-throughput",
            writing,
            quiet,
            peer="no save",
            unit="tokens/s",
            better="higher",
            goal=THROUGHPUT_BOUND,
        ),
    ]
    print(
        f"{config.parameter_count():,} parameters, {LAYOUT.describe()}; written in {[round(s, 1) for s in seconds]} s"
    )
    finish("checkpoints", claims)


if __name__ == "__main__":
    main()
