"""The work of large models on one CUDA device: MFU of whole models, and one process's kernels of layouts for
thousands.

python benchmarks/gpu_scale.py [--quick] [--device cuda]. Needs torch and numpy only. Without a CUDA device it
says so; `--device cpu` rehearses it with small shapes and claims nothing.

Whole models: the 1.3B GPT at 2,048 tokens and BERT-Large at 512, by the training step of `throughline train`
(bf16, compiled loss, fused AdamW). MFU is the model's FLOPs (models/config.py) over the card's dense bf16
peak (core/chips.toml).

Layouts: a process of 8.3B on 512, of 530B on 2,240 and of 1T on 3,072 (tensor 8 each; of a pipeline the one
in its middle), by the engine that trains them: one micro-batch forward and backward with 16-bit weights. A
`fake` process group answers every collective at once, so what is timed is the kernels of that process; the
FLOPs are those of benchmarks/prove_scale.py.
"""

import statistics
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from throughline.benchmarks.common import Claim, claim, finish, parser
from throughline.benchmarks.prove_scale import RECIPES, Scale, flops
from throughline.core import hardware
from throughline.models.config import BERTConfig, GPTConfig, family_of, preset
from throughline.planner.layout import Layout
from throughline.train.engine import Engine
from throughline.train.objective import IGNORED, StepBatch, prepare
from throughline.train.parallel.mesh import Mesh, make_mesh
from throughline.train.step import LossScaler, Trainer, train_step

GOAL_MFU = 0.5
MASKED = 0.15
# claim -> preset, rows of a step, rows of a micro-batch, tokens of a row
WHOLE = {"gpt-1.3b-mfu": ("gpt3-1.3b", 16, 8, 2048), "bert-large-mfu": ("bert-large", 128, 64, 512)}
SMALL = {"width": 64, "heads": 8, "vocab_size": 512, "sequence_length": 64}  # the rehearsal's
PRECISION = torch.bfloat16


def made_rows(config: GPTConfig | BERTConfig, rows: int, length: int) -> dict[str, np.ndarray]:
    """Rows of one document each; a BERT predicts 15 % of its tokens."""
    ids = np.random.default_rng(0).integers(5, config.vocab_size, (rows, length))
    if not isinstance(config, BERTConfig):
        return {"input_ids": ids, "targets": np.roll(ids, -1, axis=1)}
    targets = np.full(ids.shape, IGNORED)
    targets[:, : round(MASKED * length)] = ids[:, : round(MASKED * length)]
    pairs = {"nsp_targets": np.zeros(rows, np.int64)} if config.nsp else {}
    return {"input_ids": ids, "targets": targets, **pairs}


def draw(parameters: list[torch.Tensor]) -> None:
    """Weights that a step can be timed with, drawn on the device."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)


def whole_step(
    config: GPTConfig | BERTConfig,
    rows: int,
    micro_rows: int,
    length: int,
    device: torch.device,
    precision: str = "bf16",
) -> Callable[[], None]:
    """A training step on fixed rows."""
    family = family_of(config)
    mesh, compiling = Mesh(Layout(), device), "on" if device.type == "cuda" else "off"
    engine = Engine(config, mesh, precision, compiling=compiling)
    draw([local.value for local in engine.local_shards])
    engine.publish()
    optimizer = torch.optim.AdamW(
        [{"params": [value for _, value in engine.named_parameters()], "base_lr": 1e-4}], lr=1e-4, fused=True
    )
    trainer = Trainer(engine, optimizer, LossScaler.of(precision), precision, 1.0)
    batch = prepare(made_rows(config, rows, length), family, micro_rows, device, MASKED)
    return lambda: check(train_step(trainer, batch, 1.0).skipped)


def check(skipped: bool) -> None:
    if skipped:
        raise SystemExit("a step was skipped: its loss or a gradient was not finite")


def stage_work(scale: Scale, pipeline_rank: int, device: torch.device) -> tuple[Callable[[], None], int]:
    """(a micro-batch forward and backward through the stage of a pipeline rank, layers of the stage). Needs
    the fake group.
    """
    batch = scale.batch("none")
    engine = Engine(scale.config, make_mesh(scale.layout, device), "bf16")
    (stage,) = engine.stages
    draw([local.value for local in engine.local_shards])
    engine.publish()
    rows: StepBatch = prepare(
        made_rows(scale.config, batch.rows, batch.length),
        family_of(scale.config),
        batch.rows,
        device,
        MASKED,
    )
    ones = torch.ones(len(rows.counts), device=device, dtype=PRECISION)
    x = torch.randn(
        stage.activation_shape(batch.rows, batch.length), device=device, dtype=PRECISION, requires_grad=True
    )

    def work() -> None:
        stage.load(rows.micro_batches, ones, 1e-4)
        y = stage(x)
        y.backward(None if stage.is_last else torch.ones_like(y))
        engine.discard()
        x.grad = None

    return work, len(stage.model.blocks)


def gpu_parser(about: str) -> ArgumentParser:
    """With the device of a benchmark of GPUs, which a CPU rehearses."""
    options = parser(about)
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    return options


def device_of(name: str) -> torch.device | None:
    """None, which is said, where there is no such device."""
    if name == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing measured", file=sys.stderr)
        return None
    return torch.device(name)


def seconds(work: Callable[[], None], device: torch.device, repeats: int) -> list[float]:
    """Of each repetition after three to warm up, the device waited for."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    found = []
    for _ in range(repeats + 3):
        wait()
        start = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - start)
    return found[3:]


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of the card in bf16, None when core/chips.toml does not know it."""
    gpus = hardware.machine().gpus if device.type == "cuda" else []
    return gpus[0].chip.tflops["bf16"] * 1e12 if gpus and gpus[0].chip else None


def flops_per_token(config: GPTConfig | BERTConfig, length: int) -> float:
    """Of a step on `made_rows`."""
    share = {"predicted": round(MASKED * length) / length} if isinstance(config, BERTConfig) else {}
    return config.flops_per_token(length, **share)


def measure_whole(device: torch.device, repeats: int) -> tuple[list[Claim], dict[str, float]]:
    """The claims of whole models, and tokens a second."""
    claims, facts, peak = [], {}, peak_flops(device)
    for name, (shape, rows, micro_rows, length) in WHOLE.items():
        if device.type == "cpu":
            rows, micro_rows, length = 4, 2, 64
        config = preset(shape, **(SMALL | {"layers": 2} if device.type == "cpu" else {}))
        times = seconds(whole_step(config, rows, micro_rows, length, device), device, repeats)
        tokens = rows * length
        facts[name.replace("mfu", "tokens-per-s")] = round(tokens / statistics.median(times))
        if peak is not None:
            model_flops = flops_per_token(config, length) * tokens
            mfu = [model_flops / taken / peak for taken in times]
            claims.append(
                claim(
                    name,
                    mfu,
                    [GOAL_MFU] * len(mfu),
                    peer="half the peak",
                    unit="MFU",
                    better="higher",
                    goal=1.0,
                )
            )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return claims, facts


def rehearsed(scale: Scale) -> Scale:
    """The same layout of a small model, on two short rows."""
    layout = scale.layout
    shape = SMALL | {"width": 8 * layout.tensor, "heads": layout.tensor, "layers": max(layout.pipeline, 2)}
    small = replace(scale.config, **shape, kv_heads=0, head_width=0, mlp_width=0)
    changed = {"micro_batch_rows": 2, "sequence_length": 64}
    recipe = scale.recipe.model_copy(update={"train": scale.recipe.train.model_copy(update=changed)})
    return replace(scale, config=small, recipe=recipe)


def measure_stages(device: torch.device, repeats: int) -> list[dict[str, object]]:
    """A line for each layout: seconds, TFLOP/s and share of the peak of one process's kernels."""
    lines, peak = [], peak_flops(device)
    for scale in map(Scale.of, RECIPES):
        if isinstance(scale.config, BERTConfig):
            continue
        scale = rehearsed(scale) if device.type == "cpu" else scale
        rank = scale.layout.pipeline // 2
        dist.init_process_group(
            "fake", rank=rank * scale.layout.data * scale.layout.tensor, world_size=scale.layout.world
        )
        try:
            work, layers = stage_work(scale, rank, device)
            taken = statistics.median(seconds(work, device, repeats))
        finally:
            dist.destroy_process_group()
        done = flops(scale, rank, layers, "none", scale.batch("none").predicted)
        line = {"model": scale.name, "stage": rank, "layers": layers, "tokens": scale.rows * scale.length}
        line |= {"seconds": round(taken, 5), "tflops": round(done / taken / 1e12, 2)}
        lines.append(line | ({} if peak is None else {"of_peak": round(done / taken / peak, 3)}))
        print(lines[-1], file=sys.stderr, flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return lines


def main() -> int:
    chosen = gpu_parser(__doc__ or "").parse_args()
    if (device := device_of(chosen.device)) is None:
        return 0
    repeats = 3 if chosen.quick else 10
    claims, facts = measure_whole(device, repeats)
    finish("gpu_scale", claims, facts=facts, details={"stages": measure_stages(device, repeats)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
