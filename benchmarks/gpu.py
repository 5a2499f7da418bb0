"""Training speed on one CUDA device: our GPT and BERT against transformers, bf16, same shapes, eager and
compiled.

python benchmarks/gpu.py [--quick] [--device cuda]. Needs torch and transformers only. Without a CUDA device
it says so.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from common import claim, finish, parser
from throughline.core import hardware
from throughline.models.bert import BERT
from throughline.models.gpt import GPT
from throughline.models.init import initialise
from throughline.models.presets import preset
from throughline.train.loss import cross_entropy_sum

ROWS = {"gpt2-124m": (16, 1024), "bert-base": (64, 128)}


def our_step(name: str, device: str, compiled: bool) -> Callable[[], None]:
    """One optimizer step of ours on fixed data."""
    rows, length = ROWS[name]
    config = preset(name)
    model = GPT(config) if name.startswith("gpt") else BERT(config)
    initialise(model, seed=0)
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config.vocab_size, (rows, length), device=device)

    def loss() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            hidden = model.hidden(ids)
            logits = model.head(hidden) if name.startswith("gpt") else model.mlm_head(hidden[:, ::7])
        targets = ids if name.startswith("gpt") else ids[:, ::7]
        return cross_entropy_sum(logits.flatten(0, 1), targets.flatten()) / targets.numel()

    return stepper(torch.compile(loss) if compiled else loss, optimizer)


def their_step(name: str, device: str, compiled: bool) -> Callable[[], None]:
    """The same step of transformers."""
    import transformers

    rows, length = ROWS[name]
    config = preset(name)
    if name.startswith("gpt"):
        none = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)  # as ours: no dropout
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**none))
    else:
        none = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        model = transformers.BertForMaskedLM(transformers.BertConfig(**none))
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, config.vocab_size, (rows, length), device=device)
    labels = (
        ids
        if name.startswith("gpt")
        else torch.where(torch.arange(length, device=device) % 7 == 0, ids, -100)
    )
    forward = torch.compile(model) if compiled else model

    def loss() -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16):
            return forward(input_ids=ids, labels=labels).loss

    return stepper(loss, optimizer)


def stepper(loss: Callable[[], torch.Tensor], optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def tokens_per_second(step: Callable[[], None], tokens: int, device: str, repeats: int) -> float:
    """Median over `repeats` timed steps, the device waited for."""
    sync = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(repeats):
        sync()
        start = time.perf_counter()
        step()
        sync()
        times.append(time.perf_counter() - start)
    return tokens / statistics.median(times)


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    chosen = options.parse_args()
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing measured", file=sys.stderr)
        return 0
    repeats, pairs = (5, 3) if chosen.quick else (20, 5)
    claims, facts = [], {}
    for name, (rows, length) in ROWS.items():
        tokens = rows * length
        steps = {
            (who, compiled): make(name, chosen.device, compiled)
            for who, make in (("ours", our_step), ("theirs", their_step))
            for compiled in (False, True)
        }
        for step in steps.values():  # compile and warm up
            tokens_per_second(step, tokens, chosen.device, 3)
        rates: dict = {key: [] for key in steps}
        for _ in range(pairs):
            for key, step in steps.items():
                rates[key].append(tokens_per_second(step, tokens, chosen.device, repeats))
        best = {
            who: max((rates[who, c] for c in (False, True)), key=statistics.median)
            for who in ("ours", "theirs")
        }
        peer = "transformers, the better of eager and compiled"
        title = f"{name}-train-vs-transformers"
        claims.append(
            claim(title, best["ours"], best["theirs"], peer=peer, unit="tokens/s", better="higher", goal=1.0)
        )
        gpu = hardware.machine().gpus[0] if hardware.machine().gpus else None
        if gpu and gpu.chip:
            flops = preset(name).flops_per_token(length) * statistics.median(best["ours"])
            facts[f"{name}_mfu"] = round(flops / (gpu.chip.tflops["bf16"] * 1e12), 3)
    finish("gpu", claims, packages=["transformers"], facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
