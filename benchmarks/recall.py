"""What a sliding window costs in quality: a copy task inside and beyond the window.

python benchmarks/recall.py [--quick]

Two-layer GPTs of the same shape learn to repeat a string of random symbols that they read DISTANCE tokens before. With
a window of 64 in each of two layers a position reaches at most 126 tokens back, so a copy from 48 tokens back can be
learned and one from 192 cannot, while dense attention learns both. Reported by its authors for sparse attention:
quality like dense attention's at a tenth of the cost; the limit shown here is what the pattern's reach means.
"""

import sys
import time

import torch
from common import claim, finish, parser
from throughline.models.config import GPTConfig
from throughline.models.init import build

SYMBOLS, LENGTH, STRING, WINDOW = 32, 256, 16, 64
DISTANCES = (48, 192)
ROWS, STEPS, LEARNING_RATE = 16, 600, 3e-3


def rows(distance: int, generator: torch.Generator, count: int) -> torch.Tensor:
    """Random symbols (count, LENGTH) whose last STRING tokens repeat those `distance` tokens before."""
    made = torch.randint(SYMBOLS, (count, LENGTH), generator=generator)
    made[:, -STRING:] = made[:, -STRING - distance : LENGTH - distance]
    return made


def accuracy(window: int, distance: int, steps: int) -> float:
    """Share of the copied symbols that a trained model predicts first, on rows never seen."""
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=SYMBOLS,
        sequence_length=LENGTH,
        layers=2,
        width=64,
        heads=4,
        attention_window=window,
        attention_block=64,
    )
    model = build(config, seed=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(7)
    for step in range(steps):
        batch = rows(distance, generator, ROWS)
        logits = model.head(model.hidden(batch[:, :-1])[:, -STRING:])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, -STRING:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / 50)
        optimizer.step()
    with torch.inference_mode():
        batch = rows(distance, torch.Generator().manual_seed(99), 128)
        guess = model.head(model.hidden(batch[:, :-1])[:, -STRING:]).argmax(-1)
    return (guess == batch[:, -STRING:]).float().mean().item()


def main() -> int:
    options = parser((__doc__ or "").splitlines()[0]).parse_args()
    begun = time.monotonic()
    steps = STEPS // 5 if options.quick else STEPS
    claims = []
    for distance in DISTANCES:
        dense, windowed = accuracy(0, distance, steps), accuracy(WINDOW, distance, steps)
        name = f"copy-from-{distance}-window-{WINDOW}"
        claims.append(
            claim(
                name, [windowed], [dense], peer="dense attention", unit="accuracy", better="higher", goal=None
            )
        )
    finish(
        "recall", claims, kind="proof", details={"steps": steps, "seconds": round(time.monotonic() - begun)}
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
