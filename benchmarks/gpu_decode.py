"""Answers on one CUDA device against transformers, in bf16: tokens a second of GPT-2 124M, alone and in a batch of 16,
and milliseconds of BERT-base over a text of 128 tokens.

python benchmarks/gpu_decode.py [--quick] [--device cuda]. Needs torch and transformers only. Without a CUDA device it
says so; `--device cpu` rehearses it with small shapes and claims nothing.

Ours is what serving runs: the batch of slots, which replays a step as a CUDA graph, chooses and books tokens and
streams their text. The peer is `generate` in the faster of two forms: its growing cache, and its static cache, whose
step it compiles with CUDA graphs. BERT's peer is eager or compiled with CUDA graphs, whichever is faster. Both sides
give numbers on the host.
"""

import statistics
import sys
from collections.abc import Callable

import numpy as np
import torch
from common import Claim, claim, finish, paired
from gpu_scale import SMALL, device_of, gpu_parser, seconds
from throughline.inference.runtimes.torch_backend import TorchCausal, TorchEncoder
from throughline.inference.serving.generation import Job
from throughline.inference.serving.slots import SlotBatch, answer
from throughline.models.config import BERTConfig, GPTConfig, preset
from throughline.models.init import build

CONTEXT, ANSWER, ROWS = 128, 128, (1, 16)
BERT_TOKENS = 128
Call = Callable[[], object]


def our_answers(config: GPTConfig, prompts: np.ndarray, device: torch.device) -> Call:
    backend = TorchCausal(build(config, 0).to(device, torch.bfloat16))
    batch = SlotBatch(backend, lambda ids: "", len(prompts), prefix_bytes=0)
    return lambda: sum(1 for _ in answer(batch, [Job(row, ANSWER) for row in prompts]))


def their_answers(config: GPTConfig, prompts: np.ndarray, device: torch.device) -> dict[str, Call]:
    import transformers

    sizes = {"n_embd": config.width, "n_layer": config.layers, "n_head": config.heads}
    none = {"bos_token_id": None, "eos_token_id": None, "n_positions": config.sequence_length}
    shape = transformers.GPT2Config(vocab_size=config.vocab_size, **sizes, **none)
    model = transformers.GPT2LMHeadModel(shape).to(device, torch.bfloat16).eval()
    ids = torch.from_numpy(prompts).to(device)
    how = {"max_new_tokens": ANSWER, "min_new_tokens": ANSWER, "do_sample": False, "pad_token_id": 0}
    how |= {"attention_mask": torch.ones_like(ids)}
    forms = {"growing cache": how, "static cache": how | {"cache_implementation": "static"}}
    return {name: lambda words=words: model.generate(ids, **words).cpu() for name, words in forms.items()}


def our_texts(config: BERTConfig, ids: np.ndarray, device: torch.device) -> Call:
    encoder = TorchEncoder(build(config, 0).to(device, torch.bfloat16))
    rest = np.zeros_like(ids), np.ones(ids.shape, bool), np.zeros((1, 0), np.int64)
    return lambda: encoder.forward(ids, *rest)


def their_texts(config: BERTConfig, ids: np.ndarray, device: torch.device) -> dict[str, Call]:
    import transformers

    sizes = {"hidden_size": config.width, "num_hidden_layers": config.layers, "vocab_size": config.vocab_size}
    sizes |= {"num_attention_heads": config.heads, "intermediate_size": config.feed_forward_size}
    model = transformers.BertModel(transformers.BertConfig(**sizes)).to(device, torch.bfloat16).eval()

    def read(forward: Callable[..., object]) -> object:
        with torch.inference_mode():
            return forward(torch.from_numpy(ids).to(device)).last_hidden_state.float().cpu().numpy()  # type: ignore[attr-defined]

    compiled = torch.compile(model, mode="reduce-overhead")
    return {"eager": lambda: read(model), "compiled, CUDA graphs": lambda: read(compiled)}


def compare(
    name: str,
    ours: Call,
    forms: dict[str, Call],
    device: torch.device,
    pairs: int,
    calls: int,
    tokens: int,
) -> Claim:
    """In turn, the peer's faster form; `tokens` of a call, 0 for a claim in milliseconds."""

    def measure(call: Call) -> float:
        taken = statistics.median(seconds(call, device, calls))
        return tokens / taken if tokens else 1e3 * taken

    tried = {form: measure(call) for form, call in forms.items()}
    best = (max if tokens else min)(tried, key=lambda form: tried[form])
    print(f"{name}: transformers {tried}", file=sys.stderr, flush=True)
    found = paired(lambda: measure(ours), lambda: measure(forms[best]), pairs)
    unit, better = ("tokens/s", "higher") if tokens else ("ms", "lower")
    made = claim(name, *found, peer=f"transformers, {best}", unit=unit, better=better, goal=1.0)
    print(made, file=sys.stderr, flush=True)
    return made


def main() -> int:
    chosen = gpu_parser(__doc__ or "").parse_args()
    if (device := device_of(chosen.device)) is None:
        return 0
    small = SMALL | {"layers": 2, "sequence_length": CONTEXT + ANSWER} if chosen.device == "cpu" else {}
    pairs = 1 if chosen.device == "cpu" else 3 if chosen.quick else 5
    draw, claims = np.random.default_rng(0), []
    gpt, bert = preset("gpt2-124m", **small), preset("bert-base", **small)
    assert isinstance(gpt, GPTConfig) and isinstance(bert, BERTConfig)
    for rows in ROWS:
        prompts = draw.integers(0, gpt.vocab_size, (rows, CONTEXT))
        sides = our_answers(gpt, prompts, device), their_answers(gpt, prompts, device)
        claims.append(compare(f"gpt2-124m-answers-{rows}", *sides, device, pairs, 1, rows * ANSWER))
    ids = draw.integers(0, bert.vocab_size, (1, BERT_TOKENS))
    sides = our_texts(bert, ids, device), their_texts(bert, ids, device)
    claims.append(compare("bert-base-text", *sides, device, pairs, 100 if device.type == "cuda" else 3, 0))
    if device.type == "cpu":
        print(f"rehearsed on the CPU, which claims nothing: {', '.join(one.name for one in claims)}")
        claims = []
    finish("gpu_decode", claims, packages=["transformers"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
