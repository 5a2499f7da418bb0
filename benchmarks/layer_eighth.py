"""One tensor shard of a layer of the 481-billion encoder, forward and backward for real in bf16.

python benchmarks/layer_eighth.py [--quick]

MLPerf's open division trained the encoder on 2,048 chips with its matrices cut eight ways. One of the eight parts of
one layer (0.94 billion parameters, a row of 512 tokens) is computed here with the model's own block: an eighth of the
heads and of the feed-forward is a block of that shape, and the table of layouts says that no shard is larger or
smaller. The same block in fp32 says how far bf16 is off, in the output and in the gradient of the input. What is
missing is the sum over the eight parts. `--quick` divides the widths by eight.
"""

import dataclasses
import sys
import time

import torch
from common import claim, finish, parser, peak_memory
from throughline.models.config import BERTConfig, preset
from throughline.models.init import STD
from throughline.models.layers import Block
from throughline.planner.tables import parameter_shapes, tensor_box

PRESET, PARTS, TOKENS = "google-481b", 8, 512
REPORTED_PARAMETERS = 481_815_347_200  # its parameter file, mlcommons/training_results_v1.1
BOUND = 0.03  # of the difference to fp32, in root mean squares: bf16 has 8 bits, and a layer a few sums of thousands


def shard_shapes(config: BERTConfig) -> dict[str, tuple[int, ...]]:
    """Shapes that the first of PARTS tensor-parallel processes holds of the first layer, by the layouts' table."""
    return {
        name.removeprefix("blocks.0."): tuple(tensor_box(name, shape, config, PARTS, 0).size)
        for name, shape in parameter_shapes(config).items()
        if name.startswith("blocks.0.")
    }


def shard_block(config: BERTConfig) -> Block:
    """A block with the shard's shapes, in bf16."""
    part = dataclasses.replace(
        config, heads=config.heads // PARTS, mlp_width=config.mlp_width // PARTS, head_width=config.head_width
    )
    with torch.device("meta"):
        block = Block(part)
    block = block.to(torch.bfloat16).to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0, STD) if parameter.dim() > 1 else parameter.fill_(1.0)
    held = {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
    assert held == shard_shapes(config), "the block is not the shard of the layouts' table"
    return block


def made_input(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(input, gradient of the output), each (1, TOKENS, width) in bf16.

    From another seed than the weights: drawn from the same stream, token i is row i of the query matrix, their product
    is the width, and attention scores of twice the right size make an error of bf16 five times as large.
    """
    generator = torch.Generator().manual_seed(1)
    x, upstream = (torch.randn(1, TOKENS, width, generator=generator).bfloat16() for _ in range(2))
    return x, upstream


def run(
    block: Block, x: torch.Tensor, upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """(output, gradient of the input, seconds forward, seconds backward)."""
    given = x.clone().requires_grad_()
    start = time.perf_counter()
    y = block(given)
    middle = time.perf_counter()
    y.backward(upstream)
    end = time.perf_counter()
    assert given.grad is not None
    return y.detach(), given.grad, middle - start, end - middle


def off(one: torch.Tensor, other: torch.Tensor) -> float:
    """Root mean square of the difference over that of the second."""
    return float((one.float() - other).norm() / other.norm())


def main() -> int:
    options = parser((__doc__ or "").splitlines()[0]).parse_args()
    config = preset(PRESET)
    assert isinstance(config, BERTConfig)
    counted = config.parameter_count()
    if options.quick:
        config = dataclasses.replace(
            config, width=config.width // 8, mlp_width=config.mlp_width // 8, heads=32
        )
    block = shard_block(config)
    parameters = sum(parameter.numel() for parameter in block.parameters())
    x, upstream = made_input(config.width)
    y, gradient, forward, backward = run(block, x, upstream)
    moved = {name: float(p.grad.norm()) for name, p in block.named_parameters() if p.grad is not None}
    assert len(moved) == len(list(block.parameters())) and all(
        0 < norm < float("inf") for norm in moved.values()
    )
    peak = peak_memory()
    block.zero_grad(set_to_none=True)
    wide = block.float().requires_grad_(False)  # its weights' gradients in fp32 would be another 3.8 GB
    branch, exact_gradient, _, _ = run(wide, x.float(), upstream.float())
    # what the layer adds to its input: the residual would hide an error
    errors = {"output": off(y.float() - x.float(), branch - x.float())}
    errors["gradient"] = off(gradient.float() - upstream.float(), exact_gradient - upstream.float())
    print(
        f"{parameters:,} parameters, {TOKENS} tokens: forward {forward:.2f} s, backward {backward:.2f} s, "
        f"at most {peak / 2**30:.2f} GiB; off fp32 by {errors}"
    )
    claims = [
        claim(f"481b-{name}-error", [value], [BOUND], peer="bound", unit="of fp32", better="lower", goal=1.0)
        for name, value in errors.items()
    ]
    details = {
        "parameters": counted,
        "reported_parameters": REPORTED_PARAMETERS,
        "layer_parameters": preset(PRESET).block_parameters(),
        "shard_parameters": parameters,
        "seconds": round(forward + backward, 3),
        "forward_s": round(forward, 3),
        "backward_s": round(backward, 3),
        "tflops": round(6 * parameters * TOKENS / (forward + backward) / 1e12, 4),
        "peak_gib": round(peak / 2**30, 2),
        "errors": errors,
    }
    finish("layer_eighth", claims, kind="proof", details=details)
    return 0 if counted == REPORTED_PARAMETERS and max(errors.values()) <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
