"""A first recipe for a model, data and a machine: `throughline recipe new`. Arithmetic only; no torch here.

- Batch and learning rate are those of Brown et al. 2020, table 2.1, for the nearest size; a BERT has Devlin et al.'s.
- Length: 20 tokens a parameter (Hoffmann et al. 2022) unless it is given.
- Layout: data parallel; weights, gradients and optimizer states (16 bytes a parameter in mixed precision) are
  shared out ("full") when one device does not hold them, and activations recomputed when a row does not fit beside
  them.
"""

from dataclasses import dataclass

from ..core.errors import WrongUse, did_you_mean
from ..core.hardware import chips
from ..models.config import ModelConfig, family_of
from ..models.presets import preset

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
STATE_BYTES = 16  # a parameter: 16-bit weight and gradient, fp32 master, mean and mean square
USABLE = 0.8  # of a device's memory; the rest is the allocator's, the library's and the collectives'
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
    fit = Fit(1, "replicated", "none") if machine == "cpu" else fitted(config, machine, gpus)
    least = fit.micro_rows * gpus
    rows = max(round(batch / length / least), 1) * least
    total = tokens or 20 * count
    steps = max(round(total / (rows * length)), 20)
    warmup = min(max(round(WARMUP_TOKENS / (rows * length)), 1), steps // 10) if not bert else steps // 100
    source = "Devlin et al. 2019, appendix A.2" if bert else "Brown et al. 2020, table 2.1 (nearest size)"
    precision = "fp32" if machine == "cpu" else "bf16" if "bf16" in chips()[machine].tflops else "fp16"
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


def fitted(config: ModelConfig, machine: str, gpus: int) -> Fit:
    """The largest micro-batch (a power of two, at most 64 rows) that fits, with as little as possible shared out and
    recomputed. Raises WrongUse when not even one row fits, naming how many devices would hold the model.
    """
    memory = chips()[machine].memory_gb * 1e9 * USABLE
    states = config.parameter_count() * STATE_BYTES
    tokens = config.sequence_length
    logits = 6.0 * tokens * config.vocab_size  # 16-bit logits and their fp32 softmax
    # Korthikanti et al. 2022, equation 2 with the attention core's part left out (fused kernels): 34 s b h a layer
    kept, block = config.layers * 34.0 * tokens * config.width, 34.0 * tokens * config.width
    inputs = config.layers * 2.0 * tokens * config.width
    for recompute, row in (("none", kept + logits), ("full", inputs + block + logits)):
        for sharding, share in (("replicated", 1), ("full", gpus)):
            # with full sharding a layer's weights and gradients are gathered while it runs
            gathered = 8.0 * config.block_parameters() if share > 1 else 0.0
            room = memory - states / share - gathered
            if room >= row:
                return Fit(min(1 << (int(room // row).bit_length() - 1), 64), sharding, recompute)
    needed = -(-states // max(int(memory - inputs - block - logits), 1))
    raise WrongUse(
        "the model does not fit",
        where="--gpus",
        why=f"its states take {states / 2**30:,.0f} GiB, {gpus} x {machine} has "
        f"{gpus * memory / 2**30:,.0f} GiB for them",
        fix=f"about {needed:,} of these would hold it with full sharding; or choose a smaller model",
    )
