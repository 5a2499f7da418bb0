"""The transformers side of train_gpt.py: prints the median seconds of a step.

python train_gpt_peers.py trainer DATA_DIR STEPS SKIP       the Trainer on nanoGPT's shape and data, fp32
python train_gpt_peers.py eager|compiled bf16|fp32 ROWS LENGTH STEPS [LAYERS WIDTH HEADS]  GPT-2 124M or of the shape
given, bf16 by autocast, fused AdamW, no Trainer around it
"""

import statistics
import sys
import tempfile
import time

import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}


class Clock(TrainerCallback):
    """Wall seconds from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, args, state, control, **kwargs) -> None:
        self.times.append(time.perf_counter())


def trainer_seconds(data: str, steps: int, skip: int) -> float:
    ids = np.fromfile(f"{data}/shakespeare_char/train.bin", np.uint16).astype(np.int64)
    starts = np.random.default_rng(0).integers(0, len(ids) - 64, 12 * steps)
    rows = [{"input_ids": ids[at : at + 64], "labels": ids[at : at + 64]} for at in starts]
    shape = GPT2Config(
        vocab_size=int(ids.max()) + 1,
        n_positions=64,
        n_embd=128,
        n_layer=4,
        n_head=4,
        activation_function="gelu",
        **NO_DROPOUT,
    )
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out,
            max_steps=steps,
            per_device_train_batch_size=12,
            learning_rate=1e-3,
            max_grad_norm=1.0,
            use_cpu=True,
            optim="adamw_torch_fused",
            report_to=[],
            save_strategy="no",
            logging_steps=steps,
            disable_tqdm=True,
        )
        Trainer(GPT2LMHeadModel(shape), arguments, train_dataset=rows, callbacks=[clock]).train()
    return statistics.median(np.diff(clock.times)[skip:].tolist())


def gpt124_seconds(
    kind: str,
    precision: str,
    rows: int,
    length: int,
    steps: int,
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
) -> float:
    torch.manual_seed(0)
    shape = GPT2Config(n_layer=layers, n_embd=width, n_head=heads, **NO_DROPOUT)
    model = GPT2LMHeadModel(shape).train()
    forward = torch.compile(model) if kind == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    times = []
    for _ in range(steps):
        ids = torch.randint(0, 50257, (rows, length))
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = forward(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:])


if __name__ == "__main__":
    if sys.argv[1] == "trainer":
        print(trainer_seconds(sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
    else:
        print(gpt124_seconds(*sys.argv[1:3], *map(int, sys.argv[3:])))
