"""The kernels of a model: one list with FLOPs, bytes and what is kept for backward, for time, memory and profiler.

Every size may be a number or an array over candidate layouts: nothing here branches on them. Sources: GEMM shapes,
Shoeybi et al. 2019 (section 3); bytes kept, Korthikanti et al. 2022 (section 4.1); flash attention, Dao et al. 2022
(backward does five products for the forward's two).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from ..models.config import BERTConfig, GPTConfig, ModelConfig
from .work import Layouts, Number, Software, Work, has_experts

Kind = Literal["product", "attention", "memory"]
Phase = Literal["forward", "backward"]


@dataclass(frozen=True)
class Kernel:
    """One kind of work of one layer and one micro-batch on one process."""

    name: str
    phase: Phase
    kind: Kind
    flops: Number = 0.0
    bytes: Number = 0.0  # through the chip's memory
    inner: Number = 1.0  # summed dim of a product
    launches: float = 1.0
    core: bool = False  # part of the attention core that selective recomputation runs again
    narrow: bool = False  # a product of the blocks, which fp8 and its like are for
    one_by_one: Number = False  # products of several experts, each a kernel


@dataclass(frozen=True)
class Share:
    """What one process computes at once: rows, their length, and the degrees that divide it."""

    rows: Number
    length: Number
    tensor: Number = 1
    context: Number = 1
    expert: Number = 1

    @property
    def tokens(self) -> Number:
        return self.rows * self.length / self.context


def share_of(work: Work, layouts: Layouts) -> Share:
    """A micro-batch of one process."""
    degrees = layouts.tensor, layouts.context, layouts.expert
    return Share(layouts.micro_rows, work.length * work.fill, *degrees)


def linear(
    name: str,
    tokens: Number,
    inner: Number,
    outer: Number,
    size: int,
    count: int = 1,
    narrow: bool = False,
    group: Number = 1,
) -> Iterator[Kernel]:
    """A product forward, and its two backward. A `group` of them, each of so many tokens, is one kernel."""
    flops = 2.0 * tokens * inner * outer * count * group
    moved = float(size) * count * group * (tokens * inner + inner * outer + tokens * outer)
    yield Kernel(name, "forward", "product", flops, moved, inner, count, narrow=narrow)
    yield Kernel(name + " input gradient", "backward", "product", flops, moved, outer, count, narrow=narrow)
    yield Kernel(name + " weight gradient", "backward", "product", flops, moved, tokens, count, narrow=narrow)


def layer_kernels(config: ModelConfig, share: Share, software: Software) -> list[Kernel]:
    """One transformer layer, forward and backward, without recomputation."""
    size, tokens, width = software.precision.activation, share.tokens, config.width
    # of experts that a token chooses among
    routed = has_experts(config) * getattr(config, "experts_per_token", 0) * getattr(config, "expert_size", 0)
    mlp = (width_of_feed_forward(config) - routed) / share.tensor
    fed = 1 + (mlp > 0)  # rows of the model's width: into attention, and a feed-forward that is not routed
    heads, keys = config.heads / share.tensor, np.maximum(config.key_value_heads / share.tensor, 1)
    rows, ups = (heads + 2 * keys) * config.head_size, 2 if config.gated else 1
    values = getattr(config, "value_size", config.head_size)
    return [
        *projections(config, share, rows, size),
        *attention(config, share, software),
        *linear("attention output", tokens, heads * values, width, size, 1, True),
        *feed_forward(config, share, software, ups),
        *pointwise(config, share, software),
        *casts(
            tokens * (fed * width + heads * config.head_size + mlp),
            tokens * (rows + fed * width + ups * mlp),
            software,
        ),
    ]


def projections(config: ModelConfig, share: Share, rows: Number, size: int) -> Iterator[Kernel]:
    """Queries, keys and values, `rows` of a token together: of its input, or of latents, which serve all heads."""
    tokens, own = share.tokens, share.tokens / share.tensor
    latent, query = getattr(config, "kv_latent", 0), getattr(config, "q_latent", 0)
    if not isinstance(config, GPTConfig) or not latent:
        yield from linear("query, key, value", tokens, config.width, rows, size, 1, True)
        return
    turned, heads = config.rope_width, config.heads / share.tensor
    made = heads * (config.head_size - turned + config.value_size)
    if query:
        yield from linear("query down", own, config.width, query, size, 1, True)
    yield from linear("query up", tokens, query or config.width, heads * config.head_size, size, 1, True)
    yield from linear("key and value down", own, config.width, latent + turned, size, 1, True)
    yield from linear("key and value up", tokens, latent, made, size, 1, True)


def width_of_feed_forward(config: ModelConfig) -> float:
    """That a token goes through in the mean layer."""
    if not isinstance(config, GPTConfig) or not config.experts:
        return config.feed_forward_size
    through = (config.experts_per_token + config.shared_experts) * config.expert_size
    return config.feed_forward_size + has_experts(config) * (through - config.feed_forward_size)


def feed_forward(config: ModelConfig, share: Share, software: Software, ups: int) -> Iterator[Kernel]:
    """Of the mean layer, with what experts do besides: the router, and the rows sorted by expert and put back."""
    size, mixed = software.precision.activation, has_experts(config)
    tokens, width = share.tokens, config.width

    def dense(outer: Number, part: float) -> Iterator[Kernel]:
        for kernel in (
            *linear("feed-forward up", tokens, width, outer, size, ups, True),
            *linear("feed-forward down", tokens, outer, width, size, 1, True),
        ):
            yield times(kernel, part) if part < 1 else kernel

    if mixed < 1:
        yield from dense(config.feed_forward_size / share.tensor, 1 - mixed)
    if not isinstance(config, GPTConfig) or not mixed:
        return
    if config.shared_experts:
        yield from dense(config.shared_experts * config.expert_size / share.tensor, mixed)
    here = config.experts / share.expert
    rows = tokens * config.experts_per_token / share.tensor
    # read and written to be sorted, again to be put back; a plain all-to-all leaves them to be sorted by expert again
    sorts = np.where(here > 1, 2.0 - software.rows_once, 1.0)
    moved = (4.0 * size * sorts + software.routed_bytes / 2) * rows * width
    of_experts = (
        *linear("experts up", rows / here, width, config.expert_size, size, ups, True, here),
        *linear("experts down", rows / here, config.expert_size, width, size, 1, True, here),
    )
    one_by_one, number = (here > 1) & (not software.fused_experts), config.expert_size
    cast = replace(software, cast_bytes=software.cast_bytes if software.fused_experts else 4.0)
    for kernel in (
        *(replace(kernel, one_by_one=one_by_one) for kernel in of_experts),
        *casts(rows * (width + number), rows * (width + ups * number), cast),
        *linear("router", tokens / share.tensor, width, config.experts, size),
        Kernel("routing", "forward", "memory", 0, moved, 1, 8),
        Kernel("routing", "backward", "memory", 0, moved, 1, 8),
    ):
        yield times(kernel, mixed)


def times(kernel: Kernel, part: float) -> Kernel:
    """The kernel in this part of the layers."""
    scaled = {name: part * getattr(kernel, name) for name in ("flops", "bytes", "launches")}
    return replace(kernel, **scaled)


def casts(inputs: Number, outputs: Number, software: Software) -> Iterator[Kernel]:
    """What products in 8 or 4 bits read and write around themselves, where no kernel before them writes narrow copies:
    inputs and gradients of outputs in 16 bits, one copy for the product and one turned for the weight's gradient.
    """
    if software.precision.narrow:
        yield Kernel("casts", "forward", "memory", 0, software.cast_bytes * inputs, 1, 4)
        yield Kernel("casts", "backward", "memory", 0, software.cast_bytes * outputs, 1, 4)


def attention(config: ModelConfig, share: Share, software: Software) -> Iterator[Kernel]:
    """The attention core. Fused kernels skip what a causal mask or window leaves out; batched products skip a band's
    outside alone.
    """
    size, heads = software.precision.activation, config.heads / share.tensor
    pattern = config.attention_pattern
    causal = software.fused_attention and not isinstance(config, BERTConfig)
    seen = share.length * (0.5 if causal else 1.0)  # keys of a query: the mean over a row
    if pattern is not None:  # the mean of the layers
        near = config.windowed_layers / config.block_count
        seen = near * pattern.keys_per_query(int(np.max(share.length)), causal) + (1 - near) * seen
    scores = share.tokens * seen * heads
    flops = 4.0 * scores * config.head_size
    inputs = 4.0 * size * share.tokens * heads * config.head_size
    if software.fused_attention:
        flops = flops / np.where(np.asarray(share.context) > 1, software.ring_speed, 1.0)
        yield Kernel("attention", "forward", "attention", flops, inputs, config.head_size, 1, True)
        yield Kernel("attention", "backward", "attention", 2.5 * flops, 2 * inputs, config.head_size)
        return
    moved, stream = inputs + 2.0 * size * scores, software.precision.stream
    yield Kernel("scores and values", "forward", "attention", flops, moved, config.head_size, 2, True)
    yield Kernel("scores and values", "backward", "attention", 2 * flops, 2 * moved, config.head_size, 4)
    # scale, mask, softmax and dropout of a score: one kernel, or each step reads and writes for itself
    forward, backward = ((9, 11) if software.fused_softmax else (21, 19)) if software.dropout else (4, 6)
    steps = 1 if software.fused_softmax else 5
    yield Kernel("softmax", "forward", "memory", 0, forward * scores * stream / 2, 1, steps, True)
    yield Kernel("softmax", "backward", "memory", 0, backward * scores * stream / 2, 1, steps)


def pointwise(config: ModelConfig, share: Share, software: Software) -> Iterator[Kernel]:
    """Norms, residuals and dropout (on whole rows, divided under sequence parallelism), and what is always divided:
    bias, activation, the transposes around attention.

    Bytes of a token and unit of width in two-byte numbers, counted kernel by kernel. Fused: two norms (8), twice bias +
    dropout + residual (14, of which the masks are 2); backward 20 and 14. Apart: a bias 4, dropout 5, residual 6 each.
    """
    scale, tokens, width = software.precision.activation / 2, share.tokens, config.width
    stream = software.precision.stream / 2
    whole = share.tensor if software.sequence_parallel else 1
    ratio = width_of_feed_forward(config) / width * (1.5 if config.gated else 1.0)
    fused, activation = software.fused_norms, software.fused_activation
    bias, dropout = int(config.bias), int(software.dropout)
    kernels = 4 if fused else 4 + 4 * bias + 2 * dropout
    norms = (20 + 2 * dropout, 20 + 10 * dropout + 4 * bias)
    rows, acted = (16, 26), (4, 6)
    if not fused:
        norms = (20 + 10 * dropout + 8 * bias, 32 + 10 * dropout + 4 * bias)
        rows = (16 + 12 * bias, 26 + 8 * bias)
        acted = (4 + 4 * bias, 6 + 4 * bias)
    if not activation:
        acted = (22 + 4 * bias, 30 + 4 * bias)
    for phase, norm, row, act in zip(get_args(Phase), norms, rows, acted, strict=True):
        bytes_ = norm * stream * tokens * width / whole
        yield Kernel("norms, dropout, residual", phase, "memory", 0, bytes_, 1, kernels)
        bytes_ = (row + act * ratio) * scale * tokens * width / share.tensor
        yield Kernel("bias, activation", phase, "memory", 0, bytes_, 1, kernels)


def head_kernels(config: ModelConfig, share: Share, software: Software, targets: Number) -> list[Kernel]:
    """After the last layer: logits and loss of `targets` positions, for further tokens too; BERT's transform."""
    size = software.precision.activation
    entries = targets * config.vocab_size / share.tensor
    kernels = [
        *linear("logits", targets, config.width, config.vocab_size / share.tensor, size),
        Kernel("loss", "forward", "memory", 0, 10.0 * entries, 1, 4),
        Kernel("loss", "backward", "memory", 0, 8.0 * entries, 1, 3),
    ]
    joined = linear("join", share.tokens / share.tensor, 2 * config.width, config.width, size, 1, True)
    kernels += config.blocks_ahead * [*kernels, *joined]
    if isinstance(config, BERTConfig) and config.mlm_transform:
        kernels += linear("masked-token transform", targets, config.width, config.width, size)
    return kernels


def table_kernels(config: ModelConfig, share: Share, software: Software) -> list[Kernel]:
    """The token and position tables: rows read, and their gradients added up."""
    moved = 2.0 * software.precision.activation * share.tokens * config.width
    return [
        Kernel("tables", "forward", "memory", 0, 2 * moved, 1, 3),
        Kernel("tables", "backward", "memory", 0, 3 * moved, 1, 3),
    ]


def kept_bytes(config: ModelConfig, share: Share, software: Software) -> dict[str, Number]:
    """Bytes that one layer keeps for backward, by term (Korthikanti et al. 2022, equations 1, 2): with two-byte numbers
    and the GPT-2 shape they add up to S B W (34 + 5 A S / W), 34 without scores.
    """
    size, tokens, width = software.precision.activation, share.tokens, config.width
    whole = share.tensor if software.sequence_parallel else 1
    # our graphs keep what was gathered for products
    rows_stay = not software.layer_sums and not software.on_host
    heads, keys = config.heads / share.tensor, np.maximum(config.key_value_heads / share.tensor, 1)
    # rows in the order of their experts, and their answers
    routed = has_experts(config) * getattr(config, "experts_per_token", 0)
    mlp = width_of_feed_forward(config) * (3.0 if config.gated else 2.0) + 2 * routed * width
    # before and after their norms
    latents = 2 * (getattr(config, "kv_latent", 0) + getattr(config, "q_latent", 0)) / share.tensor
    terms = {
        "norm inputs": 2.0 * software.precision.stream * tokens * width / whole,
        "norm outputs": 2.0 * size * tokens * width / (1 if rows_stay else whole),
        "query, key, value": size * tokens * ((heads + 2 * keys) * config.head_size + latents),
        "attention output": 1.0 * size * tokens * heads * config.head_size,
        "feed-forward": size * tokens / share.tensor * mlp,
        "scores": 0.0 * tokens,
        "dropout masks": (2.0 if software.dropout else 0.0) * tokens * width / whole,
    }
    if not software.fused_attention and config.attention_pattern is None:
        scores = share.rows * config.heads / share.tensor * share.length * share.length / share.context
        terms["scores"] = (2.0 * size + 1 if software.dropout else 1.0 * size) * scores
    return terms
