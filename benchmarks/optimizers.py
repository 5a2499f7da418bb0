"""One update of all parameters of a BERT: LAMB and Adafactor against torch's fused AdamW, in turn.

LAMB moves 40 bytes a parameter in fp32 and fused AdamW 28 (`train/optimizers/lamb.py` counts them), so it cannot be as
fast where memory decides. How near each is to the machine's memory bandwidth is printed: bandwidth is what
torch's own `a += b` over arrays larger than every cache moves (12 bytes an element).
"""

import time
from collections.abc import Callable

import torch
from throughline.benchmarks.common import claim, finish, paired, parser
from throughline.core.console import table
from throughline.core.recipe import build_recipe
from throughline.models.config import preset
from throughline.models.init import build
from throughline.train.optimizers.build import build_optimizer
from throughline.train.recipes.recipe import Recipe

# fp32 bytes read and written per parameter: Adafactor reads the gradient twice and rewrites it, then norms of both,
# then gradient and weight are read and the weight is written
MOVED = {"adamw": 28, "lamb": 40, "adafactor": 44}
GOALS = {"lamb": 1 / 3, "adafactor": None}


def make(name: str, shape: str, layers: int) -> Callable[[], float]:
    """A function that does one step of the optimizer and returns its seconds."""
    model = build(preset(shape, layers=layers), device="cuda" if torch.cuda.is_available() else "cpu")
    recipe = build_recipe(
        {"train": {"steps": 1, "sequence_length": 128, "batch_rows": 1}, "optimizer": {"name": name}}, Recipe
    )
    optimizer = build_optimizer(model, recipe)
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]

    def step() -> float:
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.grad = gradient  # LAMB and Adafactor overwrite it; random numbers stay random numbers
        _wait()
        start = time.perf_counter()
        optimizer.step()
        _wait()
        return time.perf_counter() - start

    step()  # makes the state
    return step


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def bandwidth() -> float:
    """Bytes per second of `a += b`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    a, b = torch.ones(1 << 25, device=device), torch.ones(1 << 25, device=device)
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        a += b
        _wait()
        best = min(best, time.perf_counter() - start)
    return 12 * a.numel() / best


def main() -> None:
    args = parser(__doc__ or "").parse_args()
    shape, layers, pairs = ("bert-base", 2, 3) if args.quick else ("bert-base", 12, 9)
    parameters = preset(shape, layers=layers).parameter_count()
    rate, claims, rows, details = bandwidth(), [], [], {}
    for name, goal in GOALS.items():
        ours, theirs = paired(make(name, shape, layers), make("adamw", shape, layers), pairs)
        claims.append(
            claim(f"{name}-step", ours, theirs, peer="torch fused AdamW", unit="s", better="lower", goal=goal)
        )
        for what, seconds in ((name, min(ours)), ("adamw", min(theirs))):
            share = MOVED[what] * parameters / seconds / rate
            rows.append((what, f"{MOVED[what]}", f"{share * rate / 1e9:.1f}", f"{share:.0%}"))
            details[what] = {"bytes_per_parameter": MOVED[what], "share_of_bandwidth": round(share, 3)}
    print("\n".join(table(("optimizer", "bytes/parameter", "GB/s", "of the bandwidth"), rows)))
    facts = {"parameters": parameters, "threads": torch.get_num_threads()}
    finish("optimizers", claims, details=details, bandwidth_gb_s=round(rate / 1e9, 1), **facts)


if __name__ == "__main__":
    main()
