"""The collectives of one step of a layout with their bytes, counted from the tables that build the model.

Bytes of a collective are those of its whole result: gathered, before scattering, or reduced; of a point-to-point one,
those sent. What a micro-batch sends is said for numbers and for arrays of layouts, so that the time model prices what
is printed and what sockets carry.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..models.config import BERTConfig, GPTConfig, ModelConfig
from . import tables
from .layout import Layout
from .tables import Coordinates, ShardSpec, bucket_slices, is_of_experts, is_trained, shard_specs
from .work import SHARDINGS, Number, Precision, Software, find_software, has_experts


@dataclass(frozen=True)
class StepShape:
    """The shape of a step on one process."""

    micro_batches: int
    rows: int  # in a micro-batch
    length: int  # of a row, whole
    predicted: int  # positions with masked-token logits in a micro-batch, as prepared
    precision: str
    recompute: str = "none"
    halves: bool = False  # copies sum their gradients in the dtype of the weights, as with offload
    scheme: str = "none"  # of compressed gradients, once their warm-up is over
    rank: int = 4  # of PowerSGD's factors
    averages: bool = False  # of the weights, beside the optimizer's moments

    @property
    def software(self) -> Software:
        return find_software("throughline", self.precision)

    @property
    def numbers(self) -> Precision:
        return self.software.precision

    @property
    def summed(self) -> int:
        """Bytes of a gradient that copies of the model sum."""
        return self.numbers.weight if self.halves else self.numbers.reduced


@dataclass(frozen=True)
class Traffic:
    """One kind of collective in a step: how many, and the bytes of all."""

    axis: str
    kind: str
    calls: int
    bytes: int
    what: str


def held(config: ModelConfig, layout: Layout, place: Coordinates) -> int:
    """Parameters of a process."""
    return sum(spec.box.numel for spec in shard_specs(config, layout, place))


def traffic(config: ModelConfig, layout: Layout, batch: StepShape, pipeline_rank: int) -> list[Traffic]:
    """The collectives of one step on the processes of a pipeline rank; without the few numbers of losses and the norm,
    and what a zero-bubble schedule gathers again for each backward that it splits.
    """
    axes = _tensor_traffic, _row_traffic, _pipeline_traffic, _data_traffic
    found = itertools.chain.from_iterable(axis(config, layout, batch, pipeline_rank) for axis in axes)
    return [entry for entry in found if entry.calls]


def tensor_sends(
    config: ModelConfig,
    software: Software,
    tokens: Number,
    targets: Number,
    layers: Number,
    table: Number,
    head: Number,
    again: Number,
) -> list[tuple[str, Number, Number]]:
    """Kind, calls and bytes of all over the tensor axis in one micro-batch of a process with so many `layers`, with the
    tables and the head or without (1 or 0). `again` is 1 where the layers are recomputed in full.

    Matrices cut by columns that have one input gather it and scatter its gradient; one cut by rows scatters its result
    and gathers the gradient of it: eight a layer (Shoeybi et al. 2019, section 3, whose sums are `layer_sums`), and as
    many again of a forward that is repeated. Else the two inputs are gathered once more for the gradients of weights
    (Korthikanti et al. 2022, section 4.2.2), behind products; other programs' are not counted.
    """
    numbers, bert = software.precision, isinstance(config, BERTConfig)
    hidden = tokens * config.width * numbers.activation
    if software.layer_sums:
        calls = layers * software.layer_sums * (2 + again) / 2
        kinds = ("all-gather", "reduce-scatter") if software.sequence_parallel else ("all-reduce",)
        return [(kind, calls, calls * hidden) for kind in kinds]
    gathers = 6 * layers + table + head
    scatters = layers * (4 + 2 * again) + table + head * (not bert)
    gathered, scattered = gathers * config.width, scatters * config.width
    if isinstance(config, GPTConfig) and config.kv_latent:
        # in the place of an input of the width: that of `q_up`, the latent, the part of a key that is turned
        parts = (config.q_latent or config.width) + config.kv_latent - config.width
        gathers, scatters = gathers + layers * (3 + again), scatters + layers * 2
        gathered = gathered + layers * (2 * parts + (1 + again) * config.rope_width)
        scattered = scattered + layers * (parts + config.rope_width)
    # of the loss: the largest logit, the normalisation and the logit of the target; of BERT also the rows it selects
    sums = 3 * targets * max(numbers.weight, 4) + bert * targets * config.width * numbers.activation
    return [
        ("all-gather", gathers, gathered * tokens * numbers.activation),
        ("reduce-scatter", scatters, scattered * tokens * numbers.activation),
        ("all-reduce", head * (2 + bert), head * sums),
    ]


def context_sends(
    config: ModelConfig, numbers: Precision, tokens: Number, tensor: Number, context: Number, again: Number
) -> dict[str, list[tuple[str, str, Number, Number]]]:
    """What goes over the context axis, its kind, calls and bytes, in a layer that sees all (`g`: round the ring) and in
    one with a window (`l`), of a micro-batch; `again`: with recomputation.
    """
    part = 2 * tokens * np.maximum(config.key_value_heads // tensor, 1) * config.head_size
    passes, size = (2 + again) * (context - 1), part * numbers.activation  # forwards, and once for backward
    sums = part * max(numbers.activation, 4)  # home at last; added up in float32 at least
    there, back = "keys and values", "their gradients"
    return {
        "g": [(there, "send", passes, passes * size), (back, "send", context, context * sums)],
        "l": [
            (there, "all-gather", 1 + again, (1 + again) * context * size),
            (back, "reduce-scatter", 1, context * size),
        ],
    }


def passed_bytes(config: ModelConfig, software: Software, tokens: Number, tensor: Number) -> Number:
    """Of the activations of a micro-batch, or their gradients, on their way to another stage."""
    return tokens / (tensor if software.split_sends else 1) * config.width * software.precision.sent


def data_passes(sharding: Number, pipeline: Number, micro_batches: Number) -> tuple[Number, Number, Number]:
    """How often a step gathers a layer's weights, gathers the others, and scatters gradients: sharded weights for every
    pass of a micro-batch, from zero2 on the gradients of each; a pipeline keeps both whole for the step.
    """
    alone = np.asarray(pipeline) == 1
    streamed, scattered = alone & (np.asarray(sharding) == 3), alone & (np.asarray(sharding) >= 2)
    times = np.where(streamed, micro_batches, 1)
    return np.where(streamed, 2 * times, 1), times, np.where(scattered, micro_batches, 1)


@functools.lru_cache(maxsize=32)
def partial_parameters(config: ModelConfig) -> tuple[int, int, int]:
    """Parameters whose gradients the tensor axis sums: of a layer without experts, of the first and the last stage."""

    def partial(stage: int) -> list[ShardSpec]:
        specs = shard_specs(config, Layout(tensor=2, pipeline=2), Coordinates(stage))
        return [spec for spec in specs if spec.placement == "partial" and not is_of_experts(spec.name)]

    first, last = partial(0), partial(1)
    layer = sum(spec.box.numel for spec in first if spec.name.startswith("blocks.0."))
    rest = [sum(spec.box.numel for spec in specs if "blocks." not in spec.name) for specs in (first, last)]
    return layer, rest[0], rest[1]


def _tensor_traffic(config: ModelConfig, layout: Layout, batch: StepShape, rank: int) -> Iterator[Traffic]:
    if layout.tensor == 1:
        return
    stages, n = layout.stages_of(rank), batch.micro_batches
    last, ahead = layout.stages - 1 in stages, config.blocks_ahead
    layers = sum(len(layout.layers_of(stage, config.layers)) for stage in stages) + ahead * last
    tokens = batch.rows * batch.length // layout.context
    targets = batch.predicted if isinstance(config, BERTConfig) else tokens
    ends = int(0 in stages) + ahead * last, (1 + ahead) * last
    again = int(batch.recompute == "full")
    for kind, calls, size in tensor_sends(config, batch.software, tokens, targets, layers, *ends, again):
        yield Traffic("tensor", kind, n * calls, n * size, "rows and loss")
    partial = [
        spec.box.numel * batch.summed
        for spec in shard_specs(config, layout, Coordinates(rank))
        if spec.placement == "partial" and is_trained(spec.name)
    ]
    calls = len(bucket_slices(partial))
    yield Traffic("tensor", "all-reduce", calls, sum(partial), "gradients of norms, biases and tables")


def expert_sends(
    config: ModelConfig, numbers: Precision, tokens: Number, tensor: Number, again: Number
) -> tuple[Number, Number]:
    """Calls and bytes of the exchanges of rows with their experts' processes, in one mean layer and micro-batch."""
    # there and back, as often in backward and in a repeated forward, by each tensor rank for its part of the sequence
    calls, copies = has_experts(config) * (4 + 2 * again), getattr(config, "experts_per_token", 0)
    return calls, calls * tokens / tensor * copies * config.width * numbers.sent


def _row_traffic(config: ModelConfig, layout: Layout, batch: StepShape, rank: int) -> Iterator[Traffic]:
    """Of the layers of a process over the context axis and with the processes of their experts."""
    stages, tokens = layout.stages_of(rank), batch.rows * batch.length // layout.context
    layers = [layer for stage in stages for layer in layout.layers_of(stage, config.layers)]
    layers += range(config.layers, config.block_count) if layout.stages - 1 in stages else ()
    if layout.context > 1:
        degrees, again = (layout.tensor, layout.context), int(batch.recompute != "none")
        near = sum(config.kind_of(layer) == "l" for layer in layers)
        for kind, found in context_sends(config, batch.numbers, tokens, *degrees, again).items():
            times = batch.micro_batches * (near if kind == "l" else len(layers) - near)
            for what, how, calls, size in found:
                yield Traffic("context", how, times * int(calls), times * int(size), what)
    if layout.expert > 1:
        times, again = batch.micro_batches * len(layers), int(batch.recompute == "full")
        calls, size = expert_sends(config, batch.numbers, tokens, layout.tensor, again)
        yield Traffic("expert", "all-to-all", round(times * calls), round(times * size), "rows of experts")


def _pipeline_traffic(config: ModelConfig, layout: Layout, batch: StepShape, rank: int) -> Iterator[Traffic]:
    here = layout.stages_of(rank)
    size = passed_bytes(config, batch.software, batch.rows * batch.length // layout.context, layout.tensor)
    for step, what in ((1, "activations"), (-1, "their gradients")):
        peers = {stage + step for stage in here} & set(range(layout.stages)) - set(here)
        calls = batch.micro_batches * len(peers)
        yield Traffic("pipeline", "send", calls, calls * int(size), what)
    ends = {0, layout.stages - 1}
    if layout.pipeline > 1 and tables.table_at_ends(config) and len(ends & set(here)) == 1:
        specs = shard_specs(config, layout, Coordinates(rank))
        table = next(spec.box.numel for spec in specs if spec.name == "token_table.weight")
        yield Traffic("pipeline", "all-reduce", 1, table * batch.summed, "gradient of the token table")


def gathered_apart(name: str) -> str:
    """The part of a layer with experts that a 16-bit run gathers by itself, "" for the rest of a layer: the router and
    its balance bias are gathered in fp32 (`shard_stage`).
    """
    if ".mlp.router." in name or name.endswith(".balance_bias"):
        return "router"
    return next((part for part in ("experts", "shared") if f".mlp.{part}." in name), "")


def _data_traffic(config: ModelConfig, layout: Layout, batch: StepShape, rank: int) -> Iterator[Traffic]:
    number, wide = batch.numbers.sent, batch.numbers.reduced
    whole = dataclasses.replace(layout, sharding="replicated")
    parts = list(shard_specs(config, whole, Coordinates(rank)))
    # experts that processes share have fewer copies, and shards of their own
    holders = {spec.name: layout.expert if is_of_experts(spec.name) else 1 for spec in parts}
    if layout.shards == 1:
        for fewer in sorted({*holders.values()}):
            trained = [spec for spec in parts if holders[spec.name] == fewer and is_trained(spec.name)]
            if (copies := layout.data * layout.context // fewer) > 1:
                yield from _copies_traffic(trained, copies, batch)
        return
    # (stage, layer, part of the layer, shards) -> bytes, rounded up as each parameter is cut
    gathered: Counter[tuple[int, str, str, int]] = Counter()
    reduced: Counter[tuple[int, str, str, int]] = Counter()
    for spec in parts:
        shards = layout.shards // holders[spec.name]
        numbers = -(-spec.box.size[0] // shards) * shards * spec.box.numel // spec.box.size[0]
        layer = spec.name.split(".")[1] if spec.name.startswith("blocks.") else ""
        unit = gathered_apart(spec.name) if number != wide else ""
        group = spec.stage, layer, unit, shards
        gathered[group] += numbers * (wide if unit == "router" else number)
        reduced[group] += numbers * wide * is_trained(spec.name)
    per_layer, per_rest, passes = map(
        int, data_passes(SHARDINGS.index(layout.sharding), layout.pipeline, batch.micro_batches)
    )
    times = {group: per_layer if group[1] else per_rest for group in gathered if group[3] > 1}
    size = sum(count * gathered[group] for group, count in times.items())
    yield Traffic("data", "all-gather", sum(times.values()), size, "weights")
    size = passes * sum(reduced[group] for group in times)
    yield Traffic("data", "reduce-scatter", passes * len(times), size, "gradients")
    if layout.replicas > 1:
        size = passes * sum(size // shards for (*_, shards), size in reduced.items())
        yield Traffic("data", "all-reduce", passes * len(reduced), size, "gradients of the copies")


def with_compression(software: Software, config: ModelConfig, scheme: str, rank: int) -> Software:
    """The program with gradients that a scheme compresses, warmed up: copies send less and keep what is not sent."""
    assert scheme != "none", "nothing is kept then"
    numbers, parts = software.precision, list(shard_specs(config, Layout(data=2), Coordinates()))
    sent = []
    for name in (scheme, "none"):
        batch = StepShape(1, 1, 1, 0, numbers.compute, scheme=name, rank=rank)
        traffic = _copies_traffic(parts, 2, batch)  # an exchange and a gather are one sum
        sent.append(sum(entry.bytes for entry in traffic if entry.kind != "all-to-all"))
    kept = replace(numbers, residual=numbers.gradient)  # both are read and written once more
    moved = software.optimizer_bytes + 4 * numbers.gradient
    return replace(software, precision=kept, gradient_share=sent[0] / sent[1], optimizer_bytes=moved)


def _copies_traffic(parts: list[ShardSpec], copies: int, batch: StepShape) -> Iterator[Traffic]:
    """The sum of gradients over copies of the model, whole or by a scheme of `compression` (and `onebit`)."""

    def summed(sizes: list[int], what: str) -> Traffic:
        return Traffic("data", "all-reduce", len(bucket_slices(sizes)), sum(sizes), what)

    if batch.scheme == "none":
        yield summed([spec.box.numel * batch.summed for spec in reversed(parts)], "gradients")
    elif batch.scheme == "powersgd":
        pays = [tables.low_rank_pays(spec.box.size, batch.rank) for spec in parts]
        shapes = [(spec.box.size[0], spec.box.numel // spec.box.size[0]) for spec in parts]
        whole = [spec.box.numel * batch.summed for spec, pay in zip(parts, pays) if not pay]
        yield summed(whole, "gradients of vectors")
        for which, what in enumerate(("factors of rows", "factors of columns")):
            thin = [shape[which] * batch.rank for shape, pay in zip(shapes, pays) if pay]
            yield summed([numel * max(batch.summed, 4) for numel in thin], what)
    else:
        signs = batch.scheme == "one-bit-adam"
        if signs:  # in the order of its groups: those that decay come first
            parts = sorted(parts, key=lambda spec: not tables.is_decayed(spec.name, len(spec.shape)))
        sent = [spec.box.numel for spec in parts]
        buckets = [sum(sent[bucket]) for bucket in bucket_slices([numel * batch.summed for numel in sent])]
        unit = tables.SIGNS_PER_SCALE if signs else 1
        padded = [-(-numel // (copies * unit)) * copies * unit for numel in buckets]
        size = sum(numel // 8 + 4 * numel // unit if signs else 2 * numel for numel in padded)
        what = "signs of the momentum" if signs else "gradients in 16 bits"
        yield Traffic("data", "all-to-all", len(buckets), size, what)
        yield Traffic("data", "all-gather", len(buckets), size, what)
        if signs:
            yield Traffic("data", "all-reduce", 1, tables.SKETCH * batch.summed, "sketch of the norm")
