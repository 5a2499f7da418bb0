"""Training on one CUDA device through the command line: python benchmarks/gpu_check.py [--device cuda] [--quick].

Text to tokens; a GPT and a BERT trained, stopped and resumed, evaluated, continued or embedded; then what a
run can be asked for, each a few steps whose first loss is that of a plain fp32 run: 16 bits, fp8 products
where the card has them and torchao is installed (on a CPU their emulation), offload, recomputation,
documents, a window, the Llama shape, compiled blocks, a batch that grows; and `fully_shard` over a process
group of one (NCCL on a GPU). With `--device cpu` this is a rehearsal, which shows that the commands are right
and claims nothing of a GPU. Exit code 1 when a check failed.
"""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import claim, finish, parser

ROOT = Path(__file__).resolve().parents[1]
TEXT = ROOT / "recipes" / "samples" / "tinyshakespeare" / "input.txt"
NEEDED = ("click", "pydantic", "tokenizers", "pyarrow", "rich")
SMALL = {"model.overrides.layers": 2, "model.overrides.width": 64, "train.sequence_length": 64}
FP8 = "fp8 products"
# what a run may be asked for; the largest difference of the first loss from plain fp32, relative: rounding to
# 8 and to 11 bits in a few dozen products; `None` where another model or other rows are trained
VARIANTS: dict[str, tuple[dict[str, object], float | None]] = {
    "bf16": ({"train.precision": "bf16"}, 2e-2),
    "fp16": ({"train.precision": "fp16"}, 5e-3),
    FP8: ({"train.precision": "bf16", "train.matmul": "fp8"}, 2e-2),
    "offload": ({"train.offload": True}, 1e-4),
    "offload in bf16": ({"train.offload": True, "train.precision": "bf16"}, 2e-2),
    "full recomputation": ({"train.recompute": "full"}, 1e-4),
    "selective recomputation": ({"train.recompute": "selective"}, 1e-4),
    "compiled": ({"train.compile": "on"}, 1e-4),
    "offload, compiled blocks": ({"train.offload": True, "train.compile": "on"}, 1e-4),
    "documents kept apart": ({"data.packing": "best_fit"}, None),
    "window": ({"model.overrides.attention_window": 32, "model.overrides.attention_block": 16}, None),
    "llama shape": (
        {
            "model.overrides.positions": "rotary",
            "model.overrides.norm": "rmsnorm",
            "model.overrides.gated": True,
            "model.overrides.kv_heads": 2,
            "model.overrides.tied": False,
        },
        None,
    ),
    "growing batch": (
        {
            "train.batch_ramp.start_rows": 4,
            "train.batch_ramp.step_rows": 4,
            "train.batch_ramp.over_rows": 16,
        },
        None,
    ),
}


class Checks:
    """Runs checks by name in one directory, and remembers how each went."""

    def __init__(self, place: Path, device: str, steps: int) -> None:
        self.place, self.device, self.steps = place, device, steps
        self.results: list[tuple[str, float, str]] = []
        self.plain_loss = 0.0

    def check(self, name: str, work: Callable[[], object]) -> None:
        start = time.monotonic()
        try:
            work()
            said = "ok"
        except (AssertionError, RuntimeError, KeyError, ValueError) as error:
            said = f"FAILED: {error}"
        self.results.append((name, time.monotonic() - start, said))
        print(f"{name}: {said.splitlines()[0]} ({self.results[-1][1]:.1f} s)", flush=True)
        if said != "ok":
            print(said, file=sys.stderr)

    def run(self, *words: object) -> str:
        """A command of ours; its output."""
        command = [sys.executable, "-m", "throughline.cli.main", *map(str, words)]
        done = subprocess.run(command, cwd=self.place, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(map(str, words))}: exit code {done.returncode}\n{done.stderr[-3000:]}"
            )
        return done.stdout

    def train(self, recipe: str, directory: str, tokens: str, **settings: object) -> list[float]:
        """Losses of the run's steps."""
        given = SMALL | {
            "data.train": tokens,
            "train.steps": self.steps,
            "train.batch_rows": 16,
            "train.eval_every_steps": 0,
            "train.device": self.device,
            "train.precision": "fp32",
            "train.compile": "off",
            "schedule.kind": "constant",
            "schedule.warmup_steps": 0,
            "optimizer.name": "adamw",
        }
        changes = [
            word for key, value in (given | settings).items() for word in ("--set", f"{key}={_toml(value)}")
        ]
        self.run("train", recipe, "--run-dir", directory, *changes)
        lines = (self.place / directory / "metrics.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]

    def resumed(self, recipe: str, tokens: str, name: str) -> None:
        """A run that ends early and goes on has the losses of one that does not. On CUDA sums are not always in the
        same order: a thousandth.
        """
        whole = self.train(recipe, f"{name}-whole", tokens)
        self.train(recipe, name, tokens, **{"train.steps": self.steps // 2})
        parts = self.train(recipe, name, tokens)
        assert len(parts) == self.steps and whole[-1] < whole[0], (whole, parts)
        assert all(abs(a - b) <= 1e-3 * a for a, b in zip(whole, parts)), (whole, parts)

    def variant(self, name: str) -> None:
        settings, bound = VARIANTS[name]
        if name == FP8 and self.device == "cpu":
            settings = settings | {"train.matmul": "fp8-emulated"}
        losses = self.train("gpt-shakespeare", f"variant-{name.replace(' ', '-')}", "gpt-tokens", **settings)
        assert losses[-1] < losses[0], losses
        assert bound is None or abs(losses[0] / self.plain_loss - 1) <= bound, (losses[0], self.plain_loss)

    def plain(self) -> None:
        self.plain_loss = self.train("gpt-shakespeare", "plain", "gpt-tokens")[0]

    def scored(self, run: str) -> None:
        told = json.loads(
            self.run(
                "eval", run, "--tasks", "blimp_transitive", "--limit", 8, "--device", self.device, "--json"
            )
        )
        assert "blimp_transitive" in json.dumps(told)

    def generated(self) -> None:
        told = self.run("generate", "gpt", "--prompt", "ROMEO:", "--max-tokens", 8, "--device", self.device)
        assert told.strip()

    def embedded(self) -> None:
        (self.place / "lines.txt").write_text("To be, or not to be.\nA horse!\n")
        lines = self.run("embed", "bert", "lines.txt", "--device", self.device).splitlines()
        vectors = [json.loads(line)["embedding"] for line in lines]
        assert len(vectors) == 2 and vectors[0] != vectors[1]

    def grouped(self) -> None:
        """`fully_shard`, the sums of a step and its update over a process group of one are the single engine's."""
        import numpy as np
        from throughline.models.config import GPTConfig
        from throughline.planner.layout import Layout
        from throughline.train.engine import Engine
        from throughline.train.objective import prepare
        from throughline.train.parallel.mesh import Axis, Mesh, start_group
        from throughline.train.precision import LossScaler
        from throughline.train.step import Trainer, train_step
        from torch import distributed as dist

        device = torch.device(self.device)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            os.environ.update(
                RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1])
            )
        start_group(device, 60)
        try:
            one = Axis(1, 0, (0,), dist.group.WORLD)
            config = GPTConfig(vocab_size=256, sequence_length=64, layers=2, width=64, heads=4)
            ids = np.random.default_rng(0).integers(0, 256, (8, 65))
            rows = {"input_ids": ids[:, :-1].copy(), "targets": ids[:, 1:].copy()}
            losses = []
            for mesh in (Mesh(Layout(), device), Mesh(Layout(sharding="full"), device, world=one, shard=one)):
                engine = Engine(config, mesh, "fp32")
                engine.fill()
                values = [value for _, value in engine.named_parameters()]
                optimizer = torch.optim.AdamW([{"params": values, "base_lr": 1e-3}], lr=1e-3, fused=True)
                trainer = Trainer(engine, optimizer, LossScaler(), "fp32", 1.0)
                batch = prepare(rows, "gpt", 4, device, 0.0)
                losses.append([train_step(trainer, batch, 1.0).loss for _ in range(4)])
            assert all(abs(a - b) <= 1e-4 * a for a, b in zip(*losses)), losses
        finally:
            dist.destroy_process_group()


def no_fp8(device: str) -> str:
    """Why fp8 products cannot be checked here; "" where they can."""
    if importlib.util.find_spec("torchao") is None:
        return "torchao is not installed"
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        return "this card has none (compute capability below 8.9)"
    return ""


def _toml(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def main() -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    chosen = options.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing checked (--device cpu rehearses)", file=sys.stderr)
        return 0
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        print(
            f"nothing checked: the command line needs {', '.join(missing)} (pip install -e .)",
            file=sys.stderr,
        )
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        checks = Checks(Path(scratch), chosen.device, 6 if chosen.quick else 40)
        size = ("--vocab-size", 512)
        checks.check(
            "tokens for a GPT",
            lambda: (
                checks.run("data", "tokenizer", TEXT, "--type", "bpe", *size, "--out", "bpe"),
                checks.run("data", "tokenize", TEXT, "--tokenizer", "bpe", "--out", "gpt-tokens"),
            ),
        )
        checks.check(
            "tokens for a BERT",
            lambda: (
                checks.run("data", "tokenizer", TEXT, "--type", "wordpiece", *size, "--out", "pieces"),
                checks.run(
                    "data", "tokenize", TEXT, "--tokenizer", "pieces", "--sentences", "--out", "bert-tokens"
                ),
            ),
        )
        for family in ("gpt", "bert"):
            recipe, tokens = f"{family}-shakespeare", f"{family}-tokens"
            checks.check(
                f"{family}: train, stop, resume", lambda r=recipe, t=tokens, n=family: checks.resumed(r, t, n)
            )
            checks.check(f"{family}: evaluate", lambda n=family: checks.scored(n))
        checks.check("gpt: generate", checks.generated)
        checks.check("bert: embed", checks.embedded)
        checks.check("gpt: plain fp32", checks.plain)
        quick = ("bf16", FP8, "offload in bf16", "compiled", "growing batch")
        for name in quick if chosen.quick else VARIANTS:
            if name == FP8 and (lacking := no_fp8(chosen.device)):
                print(f"gpt: {name}: left out, {lacking}", flush=True)
                continue
            checks.check(f"gpt: {name}", lambda name=name: checks.variant(name))
        checks.check("fully_shard over a group of one", checks.grouped)
        layout = ("--set", "parallel.data=2", "--set", "parallel.tensor=2")
        checks.check(
            "prove, in processes forked on the CPU", lambda: checks.run("prove", "gpt-shakespeare", *layout)
        )
    good = sum(said == "ok" for _, _, said in checks.results)
    made = claim(
        "gpu-check" if chosen.device == "cuda" else "gpu-check-rehearsed-on-cpu",
        [good],
        [len(checks.results)],
        peer="checks",
        unit="checks",
        better="higher",
        goal=1.0,
    )
    rows = [
        {"check": name, "seconds": round(seconds, 2), "result": said}
        for name, seconds, said in checks.results
    ]
    finish("gpu_check", [made], kind="proof", device=chosen.device, rows=rows)
    return int(good < len(rows))


if __name__ == "__main__":
    sys.exit(main())
