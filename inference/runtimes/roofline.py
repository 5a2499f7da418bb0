"""The least time that hardware leaves a forward, and what others reported for it, beside what is measured.

The floor is the larger of two times (Williams et al. 2009): weights and cache over the memory bandwidth, and
products over the peak of the dtype. Embedding rows are negligible and left out; no kernel's start is counted.
"""

from pathlib import Path
from typing import Any

from ...core.files import read_json
from ...core.hardware import Chip
from ...models.config import GPTConfig, ModelConfig

BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
PUBLISHED = Path(__file__).parents[2] / "planner" / "published" / "tensorrt_bert.json"
BERT_SHAPES = {(12, 768): "bert-base", (24, 1024): "bert-large"}


def floor_ms(
    config: ModelConfig, chip: Chip, batch: int, tokens: int, precision: str = "fp16", decode: bool = False
) -> float | None:
    """Milliseconds below which this chip cannot compute it; None for a dtype whose peak is not known.

    Without `decode` `batch` texts of `tokens` are read; with it each of `batch` rows that hold `tokens` gets
    one more, and the head reads its whole matrix.
    """
    peak = chip.tflops.get("fp16" if precision in ("int4", "bf16") else precision)
    if not peak or precision not in BYTES:
        return None
    new = batch if decode else batch * tokens
    head = config.width * config.vocab_size if isinstance(config, GPTConfig) else 0
    moved = (_matrices(config, new) + head) * BYTES[precision]
    flops = new * config.blocks_flops_per_token(tokens) / 3  # which counts the backward, twice the forward
    if decode:
        flops += 2.0 * head * new
        moved += 2.0 * 2 * config.layers * config.key_value_heads * config.head_size * tokens * batch
    return max(moved / chip.bandwidth_gb_s / 1e6, flops / peak / 1e9)


def _matrices(config: ModelConfig, tokens: int) -> float:
    """Parameters of the blocks' matrices that so many tokens read: of experts those that one of them chooses, when all
    are chosen alike.
    """
    read = config.layers * config.block_matrix_parameters() + config.expert_parameters(active=True)
    if not isinstance(config, GPTConfig) or config.experts <= config.experts_per_token:
        return read
    experts, each = config.experts, config.experts_per_token
    chosen = experts * (1 - (1 - each / experts) ** tokens)
    idle = config.parameter_count() - config.active_parameter_count()
    return read + idle * (chosen - each) / (experts - each)


def reported(config: ModelConfig, batch: int, tokens: int, on: str = "t4") -> dict[str, Any] | None:
    """The newest row of NVIDIA's TensorRT demo for this encoder on this chip: {tensorrt, fp16_ms, int8_ms}."""
    model = BERT_SHAPES.get((config.layers, config.width))
    rows = [] if isinstance(config, GPTConfig) else read_json(PUBLISHED)["rows"]
    found = None
    for row in rows:
        if (row["on"], row["model"], row["length"]) == (on, model, tokens) and batch in row["batch"]:
            at = row["batch"].index(batch)
            found = {"tensorrt": row["tensorrt"]}
            found |= {key: row[key][at] for key in ("fp16_ms", "int8_ms") if row.get(key)}
    return found
