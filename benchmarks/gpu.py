"""Training speed on one CUDA device: `throughline train` against nanoGPT's train.py, and our training step against
transformers and against a plain script, in bf16 on the same shapes.

python benchmarks/gpu.py [--nanogpt PATH_OF_CHECKOUT] [--quick] [--device cuda]. Needs torch and transformers only.
Without a CUDA device it says so; `--device cpu` rehearses it with small shapes and claims nothing.

`*-vs-transformers` and `*-vs-plain` take turns in this process, each peer in the faster of its eager and its compiled
form; `plain` is a GPT of torch's own layers and a loop of a few lines. `gpt2-124m-vs-nanogpt` runs both commands, each
with its defaults for a GPU (compiled), and reads the times that each writes down for its steps.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import Claim, claim, finish, paired, run, throughline
from gpu_scale import (
    SMALL,
    device_of,
    flops_per_token,
    gpu_parser,
    made_rows,
    peak_flops,
    seconds,
    whole_step,
)
from throughline.models.config import BERTConfig, GPTConfig, family_of, preset
from torch import Tensor, nn
from torch.nn import functional as F
from train_gpt import RECIPE, SAMPLES, step_seconds_nanogpt, step_seconds_ours

SHAPES = {"gpt2-124m": (16, 1024), "bert-base": (64, 128)}  # rows and tokens of a step
GOALS = {"nanogpt": 1.1, "plain": 1.0, "transformers": 1.0}
MICRO_ROWS, MICRO_BATCHES, STEPS, SKIP = 12, 5, 60, 20  # of nanoGPT's defaults for one GPU; STEPS are ours
REHEARSED = {"rows": 2, "length": 64, "steps": 8, "skip": 2}
Config = GPTConfig | BERTConfig
Loss = Callable[[], Tensor]


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x)), approximate="tanh"))


class Plain(nn.Module):
    """GPT-2 of torch's own layers, its vocabulary a multiple of 64; gives the mean loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(-(-config.vocab_size // 64) * 64, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.layers)])
        self.norm = nn.LayerNorm(config.width)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(F.linear(self.norm(x), self.tokens.weight).flatten(0, 1), targets.flatten())


def loop(model: nn.Module, loss: Loss, device: torch.device, precision: str = "bf16") -> Callable[[], None]:
    """A step as a script would have it: bf16 by autocast, or fp32; clipping, fused AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            value = loss()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def plain_step(
    config: Config, rows: dict[str, np.ndarray], device: torch.device, compiled: bool
) -> Callable[[], None]:
    """One step of the plain script."""
    assert isinstance(config, GPTConfig)
    model = Plain(config).to(device).train()
    forward = torch.compile(model) if compiled else model
    ids, targets = (torch.from_numpy(rows[name]).to(device) for name in ("input_ids", "targets"))
    return loop(model, lambda: forward(ids, targets), device)


def transformers_step(
    config: Config, rows: dict[str, np.ndarray], device: torch.device, compiled: bool
) -> Callable[[], None]:
    """One step of transformers, without dropout, as ours."""
    import transformers

    sizes = {"vocab_size": config.vocab_size}
    inputs = {"input_ids": rows["input_ids"]}
    if isinstance(config, GPTConfig):
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes |= {"n_embd": config.width, "n_layer": config.layers, "n_head": config.heads}
        sizes |= {"n_positions": config.sequence_length}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False, **sizes, **none))
        inputs["labels"] = rows["input_ids"]
    else:
        none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        sizes |= {"hidden_size": config.width, "num_hidden_layers": config.layers}
        sizes |= {"num_attention_heads": config.heads, "intermediate_size": config.feed_forward_size}
        model = transformers.BertForPreTraining(transformers.BertConfig(**sizes, **none))
        inputs |= {"labels": rows["targets"], "next_sentence_label": rows["nsp_targets"]}
    model.to(device).train()
    forward = torch.compile(model) if compiled else model
    tensors = {name: torch.from_numpy(value).to(device) for name, value in inputs.items()}
    return loop(model, lambda: forward(**tensors).loss, device)


PEERS = {"transformers": transformers_step, "plain": plain_step}


def shape_of(name: str, device: torch.device) -> tuple[Config, int, int]:
    """The model without dropout, and the rows and tokens of a step; small ones for a rehearsal."""
    if device.type == "cpu":
        small = SMALL | {"layers": 2, "dropout": 0.0}
        return preset(name, **small), REHEARSED["rows"], REHEARSED["length"]
    rows, length = SHAPES[name]
    return preset(name, dropout=0.0), rows, length


def compare(name: str, device: torch.device, pairs: int, repeats: int) -> tuple[list[Claim], float]:
    """Claims of a model against its peers, and the tokens a second of ours."""
    config, rows, length = shape_of(name, device)
    tokens, batch = rows * length, made_rows(config, rows, length)
    ours, claims, best = whole_step(config, rows, rows, length, device), [], 0.0

    def rate(step: Callable[[], None]) -> float:
        return tokens / statistics.median(seconds(step, device, repeats))

    for peer, make in PEERS.items():
        if peer == "plain" and family_of(config) != "gpt":
            continue
        forms = {form: make(config, batch, device, form == "compiled") for form in ("eager", "compiled")}
        rates = {form: rate(step) for form, step in forms.items()}
        form = max(rates, key=lambda form: rates[form])
        measured = paired(lambda: rate(ours), lambda step=forms[form]: rate(step), pairs)
        best = max(best, statistics.median(measured[0]))
        how = {"peer": f"{peer}, {form}", "unit": "tokens/s", "better": "higher", "goal": GOALS[peer]}
        claims.append(claim(f"{name}-train-vs-{peer}", *measured, **how))
        print(claims[-1], file=sys.stderr, flush=True)
    return claims, best


def nanogpt_claim(checkout: Path, device: torch.device, pairs: int) -> Claim:
    """GPT-2 124M on Shakespeare in GPT-2's tokens, both by their commands."""
    cpu = device.type == "cpu"
    rows, length = (REHEARSED["rows"], REHEARSED["length"]) if cpu else (MICRO_ROWS, 1024)
    steps, skip = (REHEARSED["steps"], REHEARSED["skip"]) if cpu else (STEPS, SKIP)
    config, *_ = shape_of("gpt2-124m", device)
    tokens, count = rows * MICRO_BATCHES * length, iter(range(100))
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        text = SAMPLES / "tinyshakespeare" / "input.txt"
        throughline("data", "tokenizer", SAMPLES / "gpt2-bpe", "--type", "import", "--out", "tok", cwd=place)
        throughline(
            "data",
            "tokenize",
            text,
            "--documents",
            "block",
            "--tokenizer",
            "tok",
            "--out",
            "tokens",
            cwd=place,
        )
        command = ("data", "export", "tokens", "--to", "nanogpt", "--val-fraction", 0.1, "--out", "data/gpt2")
        throughline(*command, cwd=place)
        for file in ("train.py", "model.py", "configurator.py"):
            (place / file).write_bytes((checkout / file).read_bytes())
        given = {
            "model.preset": "gpt2-124m",
            "model.overrides.layers": config.layers,
            "model.overrides.width": config.width,
            "model.overrides.heads": config.heads,
            "model.overrides.dropout": 0.0,
            "data.train": "tokens",
            "data.validation_fraction": 0,
            "train.sequence_length": length,
            "train.batch_rows": rows * MICRO_BATCHES,
            "train.micro_batch_rows": rows,
            "train.steps": steps,
            "train.precision": "bf16",
            "train.compile": "off" if cpu else "auto",
            "train.device": device.type,
            "optimizer.name": "adamw",
            "schedule.warmup_steps": 1,
            "schedule.decay_steps": min(steps - 1, 20),
            "log.every_steps": 1,
        }
        changed = [word for item in given.items() for word in ("--set", "=".join(map(str, item)))]
        theirs = {
            "dataset": "gpt2",
            "device": device.type,
            "dtype": "bfloat16",
            "compile": not cpu,
            "batch_size": rows,
            "block_size": length,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "n_layer": config.layers,
            "n_embd": config.width,
            "n_head": config.heads,
            "bias": True,
            "max_iters": steps,
            "eval_interval": 10 * steps,
            "eval_iters": 1,
            "log_interval": 1,
        }

        def ours() -> float:
            name = f"ours-{next(count)}"
            throughline("train", RECIPE, *changed, "--run-dir", name, cwd=place)
            return tokens / step_seconds_ours(place / name, skip)

        def nanogpt() -> float:
            words = [f"--{name}={value}" for name, value in theirs.items()]
            return tokens / step_seconds_nanogpt(run([sys.executable, "train.py", *words], place), skip)

        how = {"peer": "nanoGPT train.py, compiled", "unit": "tokens/s", "better": "higher"}
        return claim("gpt2-124m-vs-nanogpt", *paired(ours, nanogpt, pairs), goal=GOALS["nanogpt"], **how)


def main() -> int:
    options = gpu_parser(__doc__ or "")
    options.add_argument("--nanogpt", type=Path, default=os.environ.get("NANOGPT") or None)
    chosen = options.parse_args()
    if (device := device_of(chosen.device)) is None:
        return 0
    pairs, repeats = (1, 3) if chosen.quick or device.type == "cpu" else (5, 20)
    claims, facts, peak = [], {}, peak_flops(device)
    for name in SHAPES:
        made, rate = compare(name, device, pairs, repeats)
        claims += made
        if peak is not None:
            config, _, length = shape_of(name, device)
            facts[f"{name}_mfu"] = round(flops_per_token(config, length) * rate / peak, 3)
    if chosen.nanogpt is None:
        print("gpt2-124m-vs-nanogpt: left out, it needs --nanogpt PATH_OF_CHECKOUT", file=sys.stderr)
    else:
        claims.append(nanogpt_claim(Path(chosen.nanogpt), device, min(pairs, 3)))
    if device.type == "cpu":
        print(f"rehearsed on the CPU, which claims nothing: {', '.join(one.name for one in claims)}")
        claims = []
    finish("gpu", claims, packages=["transformers"], facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
