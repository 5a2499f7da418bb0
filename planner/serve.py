"""Serving: latency, throughput, memory, and how many cards a load needs and costs.

A second, smaller kernel list: one forward in an engine that fuses everything element-wise into its products (TensorRT).
A product of few tiles leaves processors idle, which costs the time of `tile` tiles on each; low-power cards lower their
clock under load by the square root of the power they lack for their process. A decoder's step also streams every weight
and the cache. Five constants, fitted on NVIDIA's published BERT latencies; docs/planning.md has the error with each GPU
left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import WrongUse
from ..core.hardware import Chip
from ..models.config import BERTConfig, ModelConfig
from .hardware import Cluster
from .memory import capacity_bytes

TILE = 128 * 128  # results of one tile of a product
STREAM_FRACTION = 0.8  # of the memory bandwidth when weights and cache are only read
RUNTIME_BYTES = 0.6e9
UTILISATION = 0.7  # of a card's throughput that a steady load may ask for; the rest absorbs its peaks
NUMBER = {"int8": 1, "fp8": 1, "fp16": 2, "bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class ServeConstants:
    """Fitted by `benchmarks/planner_fit.py --serve`."""

    product_fraction: float = 0.575  # of the sustained peak, by large products
    attention_fraction: float = 0.255  # of the 16-bit sustained peak, by the attention core
    watts_per_tflop_nm: float = 0.183  # power of a 16-bit TFLOP/s at full clock, for each nm of the process
    tile: float = 0.277  # tiles' time lost on every processor by each product
    launch_s: float = 1.8e-6  # of one kernel inside an engine


FITTED = ServeConstants()


@dataclass(frozen=True)
class Service:
    """One batch size of one length: seconds of a batch, sequences a second, bytes on the card."""

    batch: int
    length: int
    new_tokens: int
    seconds: float
    first_token_seconds: float
    per_second: float
    bytes: float


def sustained_share(chip: Chip, constants: ServeConstants) -> float:
    """Share of the peak at the clock that the power budget allows; 1 where power or process are not known."""
    if not chip.watts or not chip.process_nm:
        return 1.0
    available = chip.watts / (chip.tflops.get("fp16") or max(chip.tflops.values()))
    return min(1.0, math.sqrt(available / chip.process_nm / constants.watts_per_tflop_nm))


def forward_seconds(
    config: ModelConfig,
    chip: Chip,
    batch: int,
    tokens: int,
    seen: int,
    precision: str,
    constants: ServeConstants = FITTED,
) -> float:
    """Seconds of one pass over `tokens` new positions of each row that attend to `seen`."""
    usual = "fp16" if "fp16" in chip.tflops else max(chip.tflops, key=lambda name: chip.tflops[name])
    dtype = precision if precision in chip.tflops else usual
    share, size = sustained_share(chip, constants), NUMBER.get(dtype, 2)
    peak = chip.tflops[dtype] * 1e12 * share * constants.product_fraction
    half = (chip.tflops.get("fp16") or chip.tflops[dtype]) * 1e12 * share * constants.attention_fraction
    stream = chip.bandwidth_gb_s * 1e9 * STREAM_FRACTION
    rows, width, wide = batch * tokens, config.width, config.feed_forward_size
    heads, keys = config.heads * config.head_size, config.key_value_heads * config.head_size
    up = (2 if config.gated else 1) * wide
    shapes = [(width, heads + 2 * keys), (heads, width), (width, up), (wide, width)]

    def product(inner: int, outer: int, count: int) -> float:
        idle = 1 + constants.tile * (chip.processors or 1) * TILE / (count * outer)
        busy = max(2.0 * count * inner * outer / peak * idle, size * inner * outer / stream)
        return busy + constants.launch_s

    causal = 0.5 if not isinstance(config, BERTConfig) and tokens == seen else 1.0
    core = max(4.0 * causal * rows * seen * heads / half, 2.0 * 2 * batch * seen * keys / stream)
    layer = sum(product(inner, outer, rows) for inner, outer in shapes) + core + 3 * constants.launch_s
    head = 0.0 if isinstance(config, BERTConfig) else product(width, config.vocab_size, batch)
    return config.layers * layer + head


def cache_bytes(config: ModelConfig, batch: int, length: int) -> float:
    """Keys and values of a decoder in 16 bits; an encoder has none."""
    if isinstance(config, BERTConfig):
        return 0.0
    return 2.0 * 2 * config.layers * config.key_value_heads * config.head_size * batch * length


def serve(
    config: ModelConfig, chip: Chip, batch: int, length: int, new_tokens: int, precision: str
) -> Service:
    """A batch of rows of `length`, and for a decoder `new_tokens` more of each."""
    first = forward_seconds(config, chip, batch, length, length, precision)
    one_more = forward_seconds(config, chip, batch, 1, length + new_tokens // 2, precision)
    rest = max(new_tokens - 1, 0) * one_more
    size = NUMBER[precision] if precision in chip.tflops else 2
    held = config.parameter_count() * size + cache_bytes(config, batch, length + new_tokens)
    held += 2.0 * batch * length * (2 * config.width + config.feed_forward_size) + RUNTIME_BYTES
    return Service(batch, length, new_tokens, first + rest, first, batch / (first + rest), held)


def plan_service(
    config: ModelConfig,
    cluster: Cluster,
    length: int,
    new_tokens: int,
    precision: str,
    p99_ms: float,
    qps: float,
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
) -> dict[str, Any]:
    """Every batch that fits, the best one within `p99_ms`, and cards and cost for `qps`.

    A request waits at most for the batch before its own, so the 99th percentile is taken as two batches.
    Raises WrongUse when the model does not fit or no batch is fast enough.
    """
    chip = cluster.chip
    rows = [serve(config, chip, batch, length, new_tokens, precision) for batch in batches]
    rows = [row for row in rows if row.bytes <= capacity_bytes(chip.memory_gib)]
    if not rows:
        need = serve(config, chip, 1, length, new_tokens, precision).bytes
        raise WrongUse(
            f"{need / 2**30:,.1f} GiB do not fit on {chip.name}",
            where="--on",
            fix="a larger card, or --precision int8",
        )
    fast = [row for row in rows if not p99_ms or (2 if row.batch > 1 else 1) * row.seconds * 1e3 <= p99_ms]
    if not fast:
        raise WrongUse(
            f"one row takes {rows[0].seconds * 1e3:,.2f} ms on {chip.name}",
            where="--p99",
            fix="a longer limit or a faster card",
        )
    best = max(fast, key=lambda row: row.per_second)
    cards = max(1, math.ceil(qps / (best.per_second * UTILISATION))) if qps else 1
    price = cluster.price_per_chip_hour
    a_second = qps or best.per_second * UTILISATION
    return {
        "chip": chip.key,
        "precision": precision,
        "rows": [vars(row) for row in rows],
        "best": vars(best),
        "cards": cards,
        "cost_per_million": price * cards / 3600 / a_second * 1e6 if price else None,
        "currency": cluster.currency,
        "priced": cluster.priced,
    }
