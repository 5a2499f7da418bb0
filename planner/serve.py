"""Serving: latency, throughput, memory, and how many cards a load needs and costs.

One forward in an engine that fuses everything element-wise into its products (TensorRT). A product of few tiles leaves
processors idle, which costs the time of `tile` tiles on each; low-power cards lower their clock under load by the
square root of the power they lack for their process. A decoder's step also streams every weight and the cache; of
experts those that any of its tokens chose, at random. Five constants, fitted on NVIDIA's published BERT latencies;
docs/planning.md has the error with each GPU left out.
"""

import math
from dataclasses import dataclass
from typing import Any

from ..core.errors import WrongUse
from ..core.hardware import Chip
from ..models.config import BERTConfig, GPTConfig, ModelConfig
from .collectives import link_bandwidth
from .hardware import Cluster
from .kernels import width_of_feed_forward
from .memory import capacity_bytes
from .work import has_experts

BATCHES = tuple(2**power for power in range(11))
MOST_ROWS = 8192  # of a batch
PAGE = 64  # tokens of a page of the cache
PREFILLED = 8192  # tokens of prompts that an engine takes at once
SUM_START_S = 8e-6  # of a sum over the cards of a copy; set
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
    """One batch on `tensor` cards that share a copy: seconds, sequences and tokens a second, bytes on a card."""

    batch: int
    tensor: int
    seconds: float
    first_token_seconds: float
    next_token_seconds: float
    per_second: float
    tokens_per_second: float
    bytes: float


def sustained_share(chip: Chip, constants: ServeConstants) -> float:
    """Share of the peak at the clock that the power budget allows; 1 where power or process are not known."""
    if not chip.watts or not chip.process_nm:
        return 1.0
    available = chip.watts / (chip.tflops.get("fp16") or max(chip.tflops.values()))
    return min(1.0, math.sqrt(available / chip.process_nm / constants.watts_per_tflop_nm))


def mean_keys(config: ModelConfig, tokens: int, seen: int) -> float:
    """Keys that a new position attends to, in the mean layer: of whole rows what a causal mask or a window leaves."""
    if tokens != seen:
        return seen
    causal, pattern = not isinstance(config, BERTConfig), config.attention_pattern
    keys = seen * (0.5 if causal else 1.0)
    if pattern is None:
        return keys
    near = config.windowed_layers / config.block_count
    return near * pattern.keys_per_query(seen, causal) + (1 - near) * keys


def forward_seconds(
    config: ModelConfig,
    cluster: Cluster,
    batch: int,
    tokens: int,
    seen: int,
    precision: str,
    constants: ServeConstants = FITTED,
    tensor: int = 1,
) -> float:
    """Seconds of one pass over `tokens` new positions of each row that attend to `seen`, on `tensor` cards."""
    chip = cluster.chip
    dtype, usual = rates_of(chip, precision)
    share, size = sustained_share(chip, constants), NUMBER.get(dtype, 2)
    peak = chip.tflops[dtype] * 1e12 * share * constants.product_fraction
    half = chip.tflops[usual] * 1e12 * share * constants.attention_fraction
    stream = chip.bandwidth_gb_s * 1e9 * STREAM_FRACTION
    rows, width, ups = batch * tokens, config.width, 2 if config.gated else 1
    heads = config.heads * config.head_size / tensor
    keys = max(config.key_value_heads / tensor, 1) * config.head_size

    def product(inner: float, outer: float, count: int, matrices: float = 1.0) -> float:
        idle = 1 + constants.tile * (chip.processors or 1) * TILE / (count * outer)
        busy = max(2.0 * count * inner * outer / peak * idle, size * matrices * inner * outer / stream)
        return busy + constants.launch_s

    def feed_forward(wide: float, count: int, matrices: float = 1.0) -> float:
        wide = wide / tensor
        return product(width, ups * wide, count, matrices) + product(wide, width, count, matrices)

    attended = mean_keys(config, tokens, seen)
    cached = cache_number(precision, dtype) * 2.0 * batch * seen * keys
    core = max(4.0 * rows * attended * heads / half, cached / stream)
    layer = product(width, heads + 2 * keys, rows) + product(heads, width, rows)
    layer += core + 3 * constants.launch_s
    mixed = has_experts(config)
    layer += (1 - mixed) * feed_forward(config.feed_forward_size, rows) if mixed < 1 else 0.0
    if isinstance(config, GPTConfig) and mixed:
        chosen = config.experts * (1 - (1 - config.experts_per_token / config.experts) ** rows)
        layer += mixed * feed_forward(config.expert_size, rows * config.experts_per_token, chosen)
        shared = config.shared_experts * config.expert_size
        layer += mixed * feed_forward(shared, rows) if shared else 0.0
    if tensor > 1:
        sent = 2 * (tensor - 1) / tensor * 2.0 * rows * width / link_bandwidth(cluster)
        layer += 2 * (SUM_START_S + sent)
    head = 0.0 if isinstance(config, BERTConfig) else product(width, config.vocab_size / tensor, batch)
    return config.layers * layer + head


def rates_of(chip: Chip, precision: str) -> tuple[str, str]:
    """The dtype of the products and that of attention: 16 bits where the chip has them."""
    fastest = max(chip.tflops, key=chip.tflops.__getitem__)
    usual = next((name for name in ("fp16", "bf16") if name in chip.tflops), fastest)
    return (precision if precision in chip.tflops else usual), usual


def cache_number(precision: str, dtype: str) -> int:
    """Bytes of a number of the cache: one where the engine computes in fp8, else two (four in fp32)."""
    return 1 if dtype == precision == "fp8" else max(NUMBER.get(dtype, 2), 2)


def cache_bytes(config: ModelConfig, batch: int, length: int, number: int = 2) -> float:
    """Keys and values of a decoder in whole pages of PAGE tokens; an encoder has none."""
    if isinstance(config, BERTConfig):
        return 0.0
    paged = -(-length // PAGE) * PAGE
    return 2.0 * number * config.layers * config.key_value_heads * config.head_size * batch * paged


def serve(
    config: ModelConfig,
    cluster: Cluster,
    batch: int,
    length: int,
    new_tokens: int,
    precision: str,
    tensor: int = 1,
) -> Service:
    """A batch of rows of `length`, and for a decoder `new_tokens` more of each."""
    how = precision, FITTED, tensor
    first, one_more = forward_seconds(config, cluster, batch, length, length, *how), 0.0
    if new_tokens > 1:
        one_more = forward_seconds(config, cluster, batch, 1, length + new_tokens // 2, *how)
    whole = first + max(new_tokens - 1, 0) * one_more
    dtype, _ = rates_of(cluster.chip, precision)
    spread = max(tensor / config.key_value_heads, 1)  # a key's head that several cards need is on all of them
    cache = cache_bytes(config, batch, length + new_tokens, cache_number(precision, dtype)) / tensor * spread
    at_once = batch * length if isinstance(config, BERTConfig) else min(batch * length, PREFILLED)
    held = config.parameter_count() * NUMBER.get(dtype, 2) / tensor + cache + RUNTIME_BYTES
    held += 2.0 * at_once * (2 * config.width + width_of_feed_forward(config) / tensor)
    rate = batch / whole
    tokens = rate * (new_tokens or length)
    return Service(batch, tensor, whole, first, one_more, rate, tokens, held)


def largest_service(
    config: ModelConfig, cluster: Cluster, length: int, new_tokens: int, precision: str, tensor: int
) -> Service | None:
    """The largest batch that fits, up to MOST_ROWS: what an engine works with under full load."""
    room, batch, best = capacity_bytes(cluster.chip.memory_gib), 0, None
    for step in (MOST_ROWS >> times for times in range(MOST_ROWS.bit_length())):
        tried = serve(config, cluster, batch + step, length, new_tokens, precision, tensor)
        if tried.bytes <= room and batch + step <= MOST_ROWS:
            batch, best = batch + step, tried
    return best


def plan_service(
    config: ModelConfig,
    cluster: Cluster,
    length: int | None = None,
    new_tokens: int = 0,
    precision: str | None = None,
    tensor: int | None = None,
    p99_ms: float = 0.0,
    qps: float = 0.0,
) -> dict[str, Any]:
    """Batches that fit, up to the largest, on as many cards a copy as serve most for each card; the best one within
    `p99_ms` (two batches: a request waits at most for the one before its own); copies, cards and cost for `qps`.
    Raises WrongUse on what the model or the card cannot do, when the model does not fit or no batch is fast enough.
    """
    chip = cluster.chip
    config = config.in_use() if isinstance(config, GPTConfig) else config
    precision = precision or rates_of(chip, "fp16")[0]
    length = length or min(128, config.sequence_length)
    _check_service(config, chip, length, new_tokens, precision)
    degrees = [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= cluster.chips_per_node and config.heads % n == 0]
    if tensor is not None and tensor not in degrees:
        text = f"{config.heads} heads on {tensor} of a node's {cluster.chips_per_node} cards"
        raise WrongUse(text, where="--tensor", fix=f"one of {', '.join(map(str, degrees))}")
    rows: list[Service] = []
    for degree in [tensor] if tensor else degrees:
        shape = length, new_tokens, precision, degree
        need = serve(config, cluster, 1, *shape).bytes
        if largest := largest_service(config, cluster, *shape):
            rows += [serve(config, cluster, batch, *shape) for batch in BATCHES if batch < largest.batch]
            rows += [largest]
    if not rows:
        what = f"{need / 2**30:,.1f} GiB on each of {tensor or degrees[-1]} do not fit on {chip.name}"
        raise WrongUse(what, where="--on", fix="a larger card, more of them (--tensor), or --precision int8")
    fast = [row for row in rows if not p99_ms or (2 if row.batch > 1 else 1) * row.seconds * 1e3 <= p99_ms]
    if not fast:
        what = f"one row takes {min(row.seconds for row in rows) * 1e3:,.2f} ms on {chip.name}"
        raise WrongUse(what, where="--p99", fix="a longer limit, a faster card or more of them (--tensor)")
    best = max(fast, key=lambda row: row.per_second / row.tensor)
    rows = [row for row in rows if row.tensor == best.tensor]
    copies = max(1, math.ceil(qps / (best.per_second * UTILISATION))) if qps else 1
    cards, price = copies * best.tensor, cluster.price_per_chip_hour
    a_second = qps or best.per_second * UTILISATION
    million = price * cards / 3600 / a_second * 1e6 if price else None
    return {
        "chip": chip.key,
        "cluster": cluster.name,
        "precision": precision,
        "length": length,
        "new_tokens": new_tokens,
        "rows": [vars(row) for row in rows],
        "best": vars(best),
        "qps": qps,
        "copies": copies,
        "cards": cards,
        "cost_per_million": million,
        "cost_per_million_tokens": million / (new_tokens or length) if million else None,
        "currency": cluster.currency,
        "priced": cluster.priced,
    }


def _check_service(config: ModelConfig, chip: Chip, length: int, new_tokens: int, precision: str) -> None:
    if precision not in chip.tflops:
        able = ", ".join(name for name in NUMBER if name in chip.tflops)
        raise WrongUse(f"{chip.name} has no rate in {precision}", where="--precision", fix=f"one of {able}")
    if getattr(config, "kv_latent", 0):
        raise WrongUse("latent attention has no price in an engine", where="kv_latent", fix="another model")
    if new_tokens and isinstance(config, BERTConfig):
        raise WrongUse("a BERT generates no tokens", where="--new-tokens", fix="leave it out")
    if length + new_tokens > config.sequence_length:
        most = f"{config.sequence_length:,}"
        what = f"{length + new_tokens:,} tokens of a request, and the model has {most} positions"
        raise WrongUse(what, where="--length and --new-tokens", fix=f"at most {most} with the new ones")
