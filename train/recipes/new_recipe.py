"""A first recipe for a model, data and a machine: `throughline recipe new`. Arithmetic only; no torch here.

- Batch and learning rate are those of Brown et al. 2020, table 2.1, for the nearest size; a BERT has Devlin et al.'s.
- Length: 20 tokens a parameter (Hoffmann et al. 2022) unless it is given.
- Layout: data parallel, with as little as possible recomputed and shared out ("full"), as the planner's memory of the
  run allows (`predict.predicted_memory`, which also refuses a run that does not fit).
"""

import bisect
from dataclasses import dataclass

from ...core.errors import WrongUse, did_you_mean
from ...core.hardware import chips
from ...core.recipe import build_recipe
from ...models.config import family_of
from ...models.presets import preset
from ...planner.memory import capacity_bytes
from .predict import predicted_memory
from .recipe import Recipe, resolve

# parameters -> (tokens in a batch, learning rate): Brown et al. 2020, table 2.1
GPT3 = {
    125e6: (0.5e6, 6e-4),
    350e6: (0.5e6, 3e-4),
    760e6: (0.5e6, 2.5e-4),
    1.3e9: (1e6, 2e-4),
    2.7e9: (1e6, 1.6e-4),
    6.7e9: (2e6, 1.2e-4),
    13e9: (2e6, 1e-4),
    175e9: (3.2e6, 0.6e-4),
}
WARMUP_TOKENS = 375e6  # Brown et al. 2020, appendix B


@dataclass(frozen=True)
class Fit:
    """How a model lies on the devices: rows computed at once, what is shared out, what is recomputed."""

    micro_rows: int
    sharding: str
    recompute: str


def new_recipe(
    model: str, data: str, machine: str = "cpu", gpus: int = 1, tokens: float | None = None
) -> str:
    """The text of a recipe. `machine` is a name in core/chips.toml or "cpu"; `tokens` is the length of the run.

    Raises WrongUse for an unknown model or machine, and for a model that the machine does not hold.
    """
    config = preset(model)
    if machine != "cpu" and machine not in chips():
        fix = did_you_mean(machine, chips(), f"one of cpu, {', '.join(chips())}", limit=3)
        raise WrongUse(f"unknown machine {machine!r}", where="--machine", fix=fix)
    count, length = config.parameter_count(), config.sequence_length
    bert = family_of(config) == "bert"
    batch, rate = GPT3[min(GPT3, key=lambda size: abs(size - count))] if not bert else (256 * 512, 1e-4)
    precision = "fp32" if machine == "cpu" else "bf16" if "bf16" in chips()[machine].tflops else "fp16"
    fit = Fit(1, "replicated", "none") if machine == "cpu" else fitted(model, machine, gpus, precision)
    least = fit.micro_rows * gpus
    rows = max(round(batch / length / least), 1) * least
    total = tokens or 20 * count
    steps = max(round(total / (rows * length)), 20)
    warmup = min(max(round(WARMUP_TOKENS / (rows * length)), 1), steps // 10) if not bert else steps // 100
    source = "Devlin et al. 2019, appendix A.2" if bert else "Brown et al. 2020, table 2.1 (nearest size)"
    where = f"{gpus} x {chips()[machine].name}" if machine != "cpu" else "a CPU"
    return f"""\
# {model} ({count / 1e6:,.0f} M parameters) on {where}: {total / 1e9:,.3g} G tokens. Knob: train.steps
# Batch and learning rate: {source}. Rows at once and layout: memory arithmetic of `throughline recipe new`.
version = 1

[data]
train = "{data}"
validation_fraction = 0.001

[model]
preset = "{model}"

[train]
steps = {steps}
sequence_length = {length}
batch_rows = {rows}
micro_batch_rows = {fit.micro_rows}
precision = "{precision}"
recompute = "{fit.recompute}"
eval_every_steps = {max(steps // 20, 1)}
eval_rows = {min(rows, 256)}

[optimizer]
learning_rate = {rate:g}
beta2 = {0.999 if bert else 0.95}
weight_decay = {0.01 if bert else 0.1}

[schedule]
kind = "{"linear" if bert else "cosine"}"
warmup_steps = {warmup}
final_fraction = {0.0 if bert else 0.1}

[parallel]
data = {gpus}
sharding = "{fit.sharding}"

[checkpoint]
save_every_steps = {max(steps // 20, 1)}
"""


def fitted(model: str, machine: str, gpus: int, precision: str) -> Fit:
    """The largest micro-batch (a power of two, at most 64 rows) that fits, with as little as possible shared out and
    recomputed. Raises WrongUse when not even one row fits, naming how many devices would hold the model.
    """
    room = capacity_bytes(chips()[machine].memory_gib)
    for recompute in ("none", "full"):
        for sharding in ("replicated", "full")[:gpus]:
            for rows in (64, 32, 16, 8, 4, 2, 1):
                if needed(model, precision, gpus, Fit(rows, sharding, recompute)) <= room:
                    return Fit(rows, sharding, recompute)
    least = Fit(1, "full", "full")
    counts = range(2, 1 << 16)
    enough = bisect.bisect_left(counts, True, key=lambda n: needed(model, precision, n, least) <= room)
    size = needed(model, precision, gpus, least) / 2**30
    why = f"one row takes {size:,.0f} GiB on each of {gpus} x {machine}, which has {room / 2**30:,.0f} GiB for it"
    fix = "choose a smaller model: a row of it fits on no number of these"
    if enough < len(counts):
        fix = f"about {counts[enough]:,} of these would hold it with full sharding; or choose a smaller model"
    raise WrongUse("the model does not fit", where="--gpus", why=why, fix=fix)


def needed(model: str, precision: str, gpus: int, fit: Fit) -> int:
    """Bytes that the planner predicts for the fullest device of a run with this layout."""
    train = {
        "steps": 20,
        "sequence_length": preset(model).sequence_length,
        "batch_rows": fit.micro_rows * gpus,
        "micro_batch_rows": fit.micro_rows,
        "precision": precision,
        "recompute": fit.recompute,
    }
    parallel = {"data": gpus, "sharding": fit.sharding if gpus > 1 else "replicated"}
    tree = {"data": {"train": "tokens"}, "model": {"preset": model}, "train": train, "parallel": parallel}
    recipe = resolve(build_recipe(tree, Recipe))
    return sum(predicted_memory(preset(model), recipe, "cuda").values())
