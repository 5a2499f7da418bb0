"""How fast a model answers here (p50, p95 and p99 of the calls that serving makes), beside the least time that the
hardware leaves it and what others reported; and which runtime is fastest by a measurement of two seconds.

The floor is the larger of two times (Williams et al. 2009): weights and cache over the memory bandwidth, and
products over the peak of the dtype. Embedding rows are negligible and left out; no kernel's start is counted.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...core.backend import Span
from ...core.console import say
from ...core.errors import ThroughlineError
from ...core.files import read_json
from ...core.hardware import Chip, machine
from ...models.config import GPTConfig, ModelConfig
from .source import Loaded

SECONDS_PER_CASE = 1.0  # measured time per line of the table
CHOICE_SECONDS, CHOICE_TOKENS = 2.0, 64  # what a choice between runtimes takes, and how long its text is
MAX_CALLS, MIN_CALLS = 200, 5


def latency_table(loaded: Loaded, seconds: float = SECONDS_PER_CASE) -> list[dict[str, Any]]:
    """Times of `call_of` by backend and case, where known beside this GPU's floor and what NVIDIA reported of a T4."""
    rows = []
    for what, batch, tokens in _cases(loaded):
        times_s = measure(call_of(loaded, tokens, batch, what), seconds)
        row: dict[str, Any] = {"backend": loaded.backend.name, "what": what, "batch": batch, "tokens": tokens}
        row["calls"] = len(times_s)
        row |= {f"p{share}_ms": 1e3 * float(np.percentile(times_s, share)) for share in (50, 95, 99)}
        row["tokens_per_s"] = 1e3 * batch * (1 if what == "decode" else tokens) / row["p50_ms"]
        if loaded.backend.device != "cpu":
            gpu = machine().gpus[int(loaded.backend.device.partition(":")[2] or 0)]
            if gpu.chip is not None:
                sizes = (batch, tokens, loaded.backend.dtype, what == "decode")
                row["floor_ms"] = floor_ms(loaded.config, gpu.chip, *sizes)
        if published := reported(loaded.config, batch, tokens):
            row["t4_tensorrt_fp16_ms"] = published.get("fp16_ms")
        rows.append(row)
    return rows


def _cases(loaded: Loaded) -> list[tuple[str, int, int]]:
    context, limits = loaded.backend.context, loaded.backend.limits
    lengths = sorted({min(length, context - 1, limits.tokens or length) for length in (32, 128)})
    batches = sorted({min(batch, limits.rows or batch) for batch in (1, 8)})
    if loaded.causal is not None:
        reading = [("prefill", 1, tokens) for tokens in lengths]
        return reading + [("decode", batch, lengths[-1]) for batch in batches]
    return [("encode", batch, tokens) for batch in batches for tokens in lengths]


def fastest(candidates: Mapping[str, Callable[[], Loaded]]) -> Loaded:
    """The fastest of these; those that cannot run are left out. Raises what the last one raised when none can."""
    found: dict[str, float] = {}
    best: Loaded | None = None
    failed: Exception | None = None
    for name, opening in candidates.items():
        loaded = None
        try:
            loaded = opening()
            found[name] = float(np.median(measure(call_of(loaded), CHOICE_SECONDS / len(candidates))))
        except Exception as error:  # out of memory, and what a library raises on its own: the others may run
            failed = error
            say(f"{name}: {error.what if isinstance(error, ThroughlineError) else error}")
            continue
        if found[name] == min(found.values()):
            best = loaded  # the other is let go
    if best is None:
        assert failed is not None
        raise failed
    order = sorted(found, key=found.__getitem__)
    say(f"backend: {order[0]} ({', '.join(f'{name} {found[name] * 1e3:.1f} ms' for name in order)})")
    return best


def call_of(
    loaded: Loaded, tokens: int = CHOICE_TOKENS, batch: int = 1, what: str = "decode"
) -> Callable[[], Any]:
    """A call that serving makes, on random ids: a GPT's step behind so many tokens or `prefill`, a BERT's outputs."""
    tokens = min(tokens, loaded.config.sequence_length - 1)
    ids = np.random.default_rng(0).integers(0, loaded.config.vocab_size, (batch, tokens))
    if loaded.encoder is not None:
        ask = np.zeros((batch, 1), np.int64)
        return partial(loaded.encoder.forward, ids, np.zeros_like(ids), np.ones(ids.shape, bool), ask)
    backend = loaded.causal
    assert backend is not None
    cache = backend.new_cache(batch)
    spans = [Span(row, 0, line) for row, line in enumerate(ids)]
    if what == "decode":
        backend.step(spans, cache)
        spans = [Span(row, tokens, line[:1]) for row, line in enumerate(ids)]
    return lambda: backend.step(spans, cache).argmax(1).tolist()  # which waits for a GPU


def measure(call: Callable[[], object], seconds: float) -> list[float]:
    """Wall seconds of single calls, after two that warm up."""
    call(), call()
    times_s: list[float] = []
    end = time.perf_counter() + seconds
    while len(times_s) < MIN_CALLS or (time.perf_counter() < end and len(times_s) < MAX_CALLS):
        start = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - start)
    return times_s


BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "int8": 1.0, "int4": 0.5}
PUBLISHED = Path(__file__).parents[2] / "planner" / "published" / "tensorrt_bert.json"
BERT_SHAPES = {(12, 768): "bert-base", (24, 1024): "bert-large"}


def floor_ms(
    config: ModelConfig, chip: Chip, batch: int, tokens: int, precision: str = "fp16", decode: bool = False
) -> float | None:
    """Milliseconds below which this chip cannot compute it; None for a dtype whose peak is not known. `decode`: each of
    `batch` rows that hold `tokens` gets one more, and the head reads its whole matrix; else so many texts are read.
    """
    peak = chip.tflops.get("fp16" if precision in ("int4", "bf16") else precision)
    if not peak or precision not in BYTES:
        return None
    new = batch if decode else batch * tokens
    head = config.width * config.vocab_size if isinstance(config, GPTConfig) else 0
    matrices: float = config.layers * config.block_matrix_parameters() + config.expert_parameters(active=True)
    if isinstance(config, GPTConfig) and config.experts:  # read where any token chooses them, all alike
        chosen = config.experts * (1 - (1 - config.experts_per_token / config.experts) ** new)
        one = config.expert_layers * config.feed_forward_parameters(config.expert_size)
        matrices += one * (chosen - config.experts_per_token)
    moved = (matrices + head) * BYTES[precision]
    flops = new * config.blocks_flops_per_token(tokens) / 3  # which counts the backward, twice the forward
    if decode:
        flops += 2.0 * head * new
        moved += 2.0 * 2 * config.layers * config.key_value_heads * config.head_size * tokens * batch
    return max(moved / chip.bandwidth_gb_s / 1e6, flops / peak / 1e9)


def reported(config: ModelConfig, batch: int, tokens: int) -> dict[str, Any] | None:
    """The newest row of NVIDIA's TensorRT demo for this encoder on a T4: {tensorrt, fp16_ms, int8_ms}."""
    model = BERT_SHAPES.get((config.layers, config.width))
    rows = [] if isinstance(config, GPTConfig) else read_json(PUBLISHED)["rows"]
    for row in reversed(rows):
        if (row["on"], row["model"], row["length"]) == ("t4", model, tokens) and batch in row["batch"]:
            at = row["batch"].index(batch)
            times = {key: row[key][at] for key in ("fp16_ms", "int8_ms") if row.get(key)}
            return {"tensorrt": row["tensorrt"], **times}
    return None
