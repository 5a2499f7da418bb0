"""Sliding-window attention against dense attention over long sequences, forward and backward, on this CPU.

python benchmarks/long_attention.py [--quick]

The attention of one layer of GPT-2's width (12 heads of 64), causal, one row, fp32. Both sides call torch's
fused kernel: dense with `is_causal`, which already skips the upper triangle. The claim is the attention core;
the facts give the whole attention module with its projections too, and the memory that each keeps for
backward. `--quick` takes 2 heads of 64, one pair and one thread, at the same lengths.
"""

import math
import sys
import time
from collections.abc import Callable

import torch
from common import Claim, claim, finish, paired, parser
from throughline.models.attention import scaled_dot_product
from throughline.models.attention_patterns import apply_pattern, make_attend
from throughline.models.config import GPTConfig
from throughline.models.gpt import GPT
from throughline.models.init import initialise
from throughline.models.transformer import AttentionPattern

LENGTHS = (1024, 2048, 4096, 8192)
BEYOND = (16384, 32768)  # extrapolated: a pass of dense attention over 32,768 tokens takes minutes of a CPU
HEADS, HEAD_SIZE = 12, 64
QUICK_HEADS = 2
PATTERN = AttentionPattern(window=512)
GOAL_AT_8K = 4.0


def core_seconds(attend: Callable[..., torch.Tensor], length: int, heads: int) -> Callable[[], float]:
    """A measurement: CPU seconds of one forward and backward through `attend`."""
    # queries, keys and values as the model hands them over: views of one product, (B, S, A, 3, D)
    qkv = torch.randn(1, length, heads, 3, HEAD_SIZE, requires_grad=True)

    def measure() -> float:
        start = time.process_time()
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(3))
        torch.autograd.grad(attend(q, k, v, is_causal=True).sum(), qkv)
        return time.process_time() - start

    return measure


def module_seconds(pattern: AttentionPattern | None, length: int, heads: int) -> Callable[[], float]:
    """The same of a whole attention module: projections and core."""
    shape = {
        "vocab_size": 8,
        "sequence_length": length,
        "layers": 1,
        "width": heads * HEAD_SIZE,
        "heads": heads,
    }
    model = GPT(GPTConfig(**shape))
    initialise(model)
    if pattern is not None:
        apply_pattern(model.blocks, pattern, causal=True)
    attention = model.blocks["0"].attention
    x = torch.randn(1, length, heads * HEAD_SIZE)

    def measure() -> float:
        start = time.process_time()
        attention(x, is_causal=True).sum().backward()
        return time.process_time() - start

    return measure


def kept_bytes(attend: Callable[..., torch.Tensor], length: int, heads: int) -> int:
    """Bytes of distinct storages that autograd keeps for the backward of one call, the inputs' own left out."""
    q, k, v = (torch.randn(1, heads, length, HEAD_SIZE, requires_grad=True) for _ in range(3))
    own = {x.untyped_storage().data_ptr() for x in (q, k, v)}
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = attend(q, k, v, is_causal=True)
    del out
    return sum(kept.values())


def extrapolated(claims: list[Claim], length: int) -> float:
    """How many times as fast the core is at `length`, where each side's time goes on growing by the power of the
    length by which it grew between the two longest measured ones.
    """
    shorter, longest = (next(c for c in claims if c.name == f"window-512-core-{n}") for n in LENGTHS[-2:])
    doublings = math.log2(length / LENGTHS[-1])
    sides = [(shorter.ours, longest.ours), (shorter.theirs, longest.theirs)]
    ours, theirs = (long * (long / short) ** doublings for short, long in sides)
    return round(theirs / ours, 2)


def main() -> int:
    chosen = parser(__doc__ or "").parse_args()
    pairs, heads = (1, QUICK_HEADS) if chosen.quick else (5, HEADS)
    if chosen.quick:
        torch.set_num_threads(1)  # two quick benchmarks share the cores; a waiting thread counts as CPU time
    windowed = make_attend(PATTERN, causal=True)
    claims, facts = [], {}
    for length in LENGTHS:
        ours, theirs = core_seconds(windowed, length, heads), core_seconds(scaled_dot_product, length, heads)
        ours(), theirs()  # warm up: the kernel's buffers and the pattern's index tables
        goal = GOAL_AT_8K if length == max(LENGTHS) else None
        claims.append(
            claim(
                f"window-512-core-{length}",
                *paired(ours, theirs, pairs),
                peer="dense causal kernel",
                unit="CPU s",
                better="lower",
                goal=goal,
            )
        )
        ours, theirs = module_seconds(PATTERN, length, heads), module_seconds(None, length, heads)
        ours(), theirs()
        claims.append(
            claim(
                f"window-512-module-{length}",
                *paired(ours, theirs, pairs),
                peer="dense causal attention module",
                unit="CPU s",
                better="lower",
                goal=None,
            )
        )
        sides = {"window": windowed, "dense": scaled_dot_product}
        facts[f"kept_mib_{length}"] = {
            name: round(kept_bytes(attend, length, heads) / 2**20, 1) for name, attend in sides.items()
        }
        inside = min(PATTERN.window, length)
        facts[f"scores_needed_{length}"] = {
            "window": inside * (inside + 1) // 2 + (length - inside) * inside,
            "dense": length * (length + 1) // 2,
        }
    facts["extrapolated"] = {length: extrapolated(claims, length) for length in BEYOND}
    finish("long_attention", claims, facts=facts, threads=torch.get_num_threads())
    return 0


if __name__ == "__main__":
    sys.exit(main())
