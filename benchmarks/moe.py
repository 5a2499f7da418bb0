"""Training speed of a model with 8 experts, 2 for a token, against transformers' Mixtral of the same shape, and against
our dense model of as many active parameters; one process, in bf16, on a processor without bf16 products in fp32.

python benchmarks/moe.py [--quick] [--device cpu|cuda]. Mixtral takes part in the faster of its two implementations of
experts (a loop, and torch's grouped products), eager, in bf16 by autocast, with fused AdamW.
"""

import dataclasses
import statistics
import sys
from collections.abc import Callable

import torch
from common import claim, finish, paired, parser
from gpu import loop
from gpu_scale import made_rows, seconds, whole_step
from throughline.core.hardware import machine
from throughline.models.config import GPTConfig

SHAPES = {  # rows and tokens of a step, and the model
    "cpu": (4, 256, {"vocab_size": 4096, "layers": 4, "width": 256, "heads": 4, "mlp_width": 512}),
    "cuda": (8, 2048, {"vocab_size": 32000, "layers": 12, "width": 1024, "heads": 16, "mlp_width": 1792}),
}
LLAMA = {
    "activation": "silu",
    "gated": True,
    "norm": "rmsnorm",
    "bias": False,
    "positions": "rotary",
    "tied": False,
}
IMPLEMENTATIONS = ("eager", "grouped_mm")


def mixtral_step(
    config: GPTConfig, rows: int, length: int, device: torch.device, precision: str, how: str
) -> Callable[[], None]:
    """A step of transformers."""
    import transformers

    shape = transformers.MixtralConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        intermediate_size=config.feed_forward_size,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.heads,
        max_position_embeddings=length,
        num_local_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        use_cache=False,
    )
    shape._experts_implementation = how
    model = transformers.MixtralForCausalLM(shape).train()
    model.to(device)
    ids = torch.from_numpy(made_rows(config, rows, length)["input_ids"]).to(device)
    return loop(model, lambda: model(input_ids=ids, labels=ids).loss, device, precision)


def main() -> int:
    options = parser(__doc__ or "")
    options.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    chosen = options.parse_args()
    device = torch.device(chosen.device)
    rows, length, shape = SHAPES[device.type]
    config = GPTConfig.from_dict(LLAMA | shape | {"sequence_length": length, "experts": 8})
    wide = config.experts_per_token * config.expert_size
    dense = dataclasses.replace(config, experts=0, mlp_width=wide)
    pairs, repeats = (2, 2) if chosen.quick else (5, 10)

    def rate(step: Callable[[], None]) -> float:
        return rows * length / statistics.median(seconds(step, device, repeats))

    on_cpu = device.type == "cpu" and "bf16" not in machine().cpu.dtypes
    batch = rows, length, device, "fp32" if on_cpu else "bf16"
    ours, plain = (whole_step(model, rows, *batch) for model in (config, dense))
    theirs = {how: mixtral_step(config, *batch, how) for how in IMPLEMENTATIONS}
    best = max(theirs, key=lambda how: rate(theirs[how]))
    claims = []
    for name, goal, peer, step in (
        ("experts-vs-mixtral", 2.0, f"transformers' Mixtral, {best}", theirs[best]),
        ("experts-vs-dense", 0.75, "our dense model of as many active parameters", plain),
    ):
        measured = paired(lambda: rate(ours), lambda step=step: rate(step), pairs)
        claims.append(claim(name, *measured, peer=peer, unit="tokens/s", better="higher", goal=goal))
    facts = {"parameters": config.parameter_count(), "active": config.active_parameter_count()}
    facts |= {"dense": dense.parameter_count(), "rows": rows, "length": length, "precision": batch[3]}
    finish("moe", claims, packages=["transformers"], facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
