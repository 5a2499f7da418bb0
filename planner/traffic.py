"""The collectives of one step of a layout with their bytes, and the parameters that a process holds.

Counted from the same tables that build the model, without building it. Bytes of a collective are those of its
whole result: gathered, before scattering, or reduced; of a point-to-point one, those sent.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ..models.config import BERTConfig, ModelConfig
from .layout import Layout
from .software import Precision, find_software
from .tables import (
    SIGNS_PER_SCALE,
    SKETCH,
    Coordinates,
    ShardSpec,
    bucket_slices,
    is_decayed,
    is_tied,
    low_rank_pays,
    shard_specs,
)


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

    @property
    def numbers(self) -> Precision:
        """Bytes of a number in each role."""
        return find_software("throughline", self.precision).precision

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


def prepared_places(rows: int, length: int, fraction: float) -> tuple[int, int]:
    """For rows of this length with this fraction of their tokens masked: the step in which places for masked-token
    logits are prepared, a quarter of the most targets, and the places that the most targets get.
    """
    most = max(rows * math.ceil(length * fraction), 1)
    step = -(-most // 4)
    return step, -(-most // step) * step


def held(config: ModelConfig, layout: Layout, place: Coordinates) -> int:
    """Parameters of a process."""
    return sum(spec.box.numel for spec in shard_specs(config, layout, place))


def traffic(config: ModelConfig, layout: Layout, batch: StepShape, pipeline_rank: int) -> list[Traffic]:
    """The collectives of one step (forward, backward, gradients) on the processes of a pipeline rank.

    Left out are the few numbers of losses, counts and the norm, and that a zero-bubble schedule gathers the
    gradients of row-cut matrices again for each backward that it splits.
    """
    found = [
        *_tensor_traffic(config, layout, batch, pipeline_rank),
        *_context_traffic(config, layout, batch, pipeline_rank),
        *_pipeline_traffic(config, layout, batch, pipeline_rank),
        *_data_traffic(config, layout, batch, pipeline_rank),
    ]
    return [entry for entry in found if entry.calls]


def _tensor_traffic(
    config: ModelConfig, layout: Layout, batch: StepShape, pipeline_rank: int
) -> Iterator[Traffic]:
    if layout.tensor == 1:
        return
    whole = batch.rows * batch.length // layout.context * config.width
    size = whole * batch.numbers.activation
    columns = (1 if config.key_value_heads == config.heads else 2) + (2 if config.gated else 1)
    gathers: Counter[int] = Counter()  # bytes of one call -> calls in a step
    scatters: Counter[int] = Counter()
    sums: Counter[int] = Counter()
    n = batch.micro_batches
    for stage in layout.stages_of(pipeline_rank):
        layers = len(layout.layers_of(stage, config.layers))
        again = batch.recompute == "full"
        gathers[size] += n * layers * ((3 if again else 2) * columns + 2)
        scatters[size] += n * layers * (columns + (4 if again else 2))
        if stage == 0:  # the token table: partial sums out, gradients in
            scatters[size] += n
            gathers[size] += n
        if stage == layout.stages - 1:
            targets = batch.predicted if isinstance(config, BERTConfig) else whole // config.width
            number = max(batch.numbers.weight, 4)
            sums[targets * number] += n  # the largest logit
            sums[2 * targets * number] += n  # the normalisation and the logit of the target
            if isinstance(config, BERTConfig):
                gathers[size] += n
                sums[batch.predicted * config.width * batch.numbers.activation] += n
            else:
                gathers[size] += n
                scatters[size] += n
    for kind, counted in (("all-gather", gathers), ("reduce-scatter", scatters), ("all-reduce", sums)):
        yield Traffic(
            "tensor",
            kind,
            sum(counted.values()),
            sum(size * calls for size, calls in counted.items()),
            "rows and loss",
        )
    partial = [
        spec.box.numel * batch.summed
        for spec in shard_specs(config, layout, Coordinates(pipeline_rank))
        if spec.placement == "partial"
    ]
    yield Traffic(
        "tensor",
        "all-reduce",
        len(bucket_slices(partial)),
        sum(partial),
        "gradients of norms, biases and tables",
    )


def _context_traffic(
    config: ModelConfig, layout: Layout, batch: StepShape, pipeline_rank: int
) -> Iterator[Traffic]:
    if layout.context == 1:
        return
    layers = sum(len(layout.layers_of(stage, config.layers)) for stage in layout.stages_of(pipeline_rank))
    heads = max(config.key_value_heads // layout.tensor, 1)
    part = 2 * batch.rows * batch.length // layout.context * heads * config.head_size
    calls = batch.micro_batches * layers
    number = batch.numbers.activation
    passes = (2 if batch.recompute == "none" else 3) * (layout.context - 1)  # forwards, and once for backward
    yield Traffic("context", "send", passes * calls, passes * calls * part * number, "keys and values")
    sums = layout.context * calls  # home at last; added up in float32 at least
    yield Traffic("context", "send", sums, sums * part * max(number, 4), "their gradients")


def _pipeline_traffic(
    config: ModelConfig, layout: Layout, batch: StepShape, pipeline_rank: int
) -> Iterator[Traffic]:
    here = layout.stages_of(pipeline_rank)
    size = batch.rows * batch.length // (layout.context * layout.tensor) * config.width * batch.numbers.sent
    for step, what in ((1, "activations"), (-1, "their gradients")):
        peers = [
            stage + step for stage in here if 0 <= stage + step < layout.stages and stage + step not in here
        ]
        calls = batch.micro_batches * len(peers)
        yield Traffic("pipeline", "send", calls, calls * size, what)
    if (
        layout.pipeline > 1
        and is_tied(config)
        and ({0, layout.stages - 1} & set(here))
        and not {0, layout.stages - 1} <= set(here)
    ):
        spec = next(
            p
            for p in shard_specs(config, layout, Coordinates(pipeline_rank))
            if p.name == "token_table.weight"
        )
        yield Traffic(
            "pipeline", "all-reduce", 1, spec.box.numel * batch.summed, "gradient of the tied table"
        )


def _data_traffic(
    config: ModelConfig, layout: Layout, batch: StepShape, pipeline_rank: int
) -> Iterator[Traffic]:
    number, wide, n = batch.numbers.sent, batch.numbers.reduced, batch.micro_batches
    parts = list(
        shard_specs(config, dataclasses.replace(layout, sharding="replicated"), Coordinates(pipeline_rank))
    )
    if layout.shards == 1:
        if layout.data * layout.context > 1:
            yield from _copies_traffic(parts, layout.data * layout.context, batch)
        return
    blocks: Counter[tuple[int, str]] = (
        Counter()
    )  # (stage, group) -> bytes, rounded up as each parameter is cut
    for spec in parts:
        rows = -(-spec.box.size[0] // layout.shards) * layout.shards
        group = spec.name.split(".")[1] if spec.name.startswith("blocks.") else ""
        blocks[spec.stage, group] += rows * spec.box.numel // spec.box.size[0] * number
    layers = {key: size for key, size in blocks.items() if key[1]}
    rest = {key: size for key, size in blocks.items() if not key[1]}
    streamed = layout.sharding == "full" and layout.pipeline == 1
    gathered = (2 * n, n) if streamed else (1, 1)  # times a block and the rest are gathered in a step
    reduced = n if layout.pipeline == 1 and layout.sharding != "zero1" else 1
    calls = gathered[0] * len(layers) + gathered[1] * len(rest)
    size = gathered[0] * sum(layers.values()) + gathered[1] * sum(rest.values())
    yield Traffic("data", "all-gather", calls, size, "weights")
    yield Traffic(
        "data",
        "reduce-scatter",
        reduced * len(blocks),
        reduced * sum(blocks.values()) // number * wide,
        "gradients",
    )
    if layout.replicas > 1:
        size = reduced * sum(blocks.values()) // number * wide // layout.shards
        yield Traffic("data", "all-reduce", reduced * len(blocks), size, "gradients of the copies")


def _copies_traffic(parts: list[ShardSpec], copies: int, batch: StepShape) -> Iterator[Traffic]:
    """The sum of gradients over copies of the model, whole or by a scheme of `compression` (and `onebit`)."""

    def summed(sizes: list[int], what: str) -> Traffic:
        return Traffic("data", "all-reduce", len(bucket_slices(sizes)), sum(sizes), what)

    if batch.scheme == "none":
        yield summed([spec.box.numel * batch.summed for spec in reversed(parts)], "gradients")
    elif batch.scheme == "powersgd":
        pays = [low_rank_pays(spec.box.size, batch.rank) for spec in parts]
        shapes = [(spec.box.size[0], spec.box.numel // spec.box.size[0]) for spec in parts]
        yield summed(
            [spec.box.numel * batch.summed for spec, thin in zip(parts, pays) if not thin],
            "gradients of vectors",
        )
        for which in (0, 1):
            sizes = [
                shape[which] * batch.rank * max(batch.summed, 4) for shape, thin in zip(shapes, pays) if thin
            ]
            yield summed(sizes, f"factors of {('rows', 'columns')[which]}")
    else:
        signs = batch.scheme == "one-bit-adam"
        if signs:  # in the order of its groups: those that decay come first
            parts = sorted(parts, key=lambda spec: not is_decayed(spec.name, len(spec.shape)))
        sent = [spec.box.numel for spec in parts]
        buckets = [sum(sent[bucket]) for bucket in bucket_slices([numel * batch.summed for numel in sent])]
        unit = SIGNS_PER_SCALE if signs else 1
        padded = [-(-numel // (copies * unit)) * copies * unit for numel in buckets]
        size = sum(numel // 8 + 4 * numel // unit if signs else 2 * numel for numel in padded)
        what = "signs of the momentum" if signs else "gradients in 16 bits"
        yield Traffic("data", "all-to-all", len(buckets), size, what)
        yield Traffic("data", "all-gather", len(buckets), size, what)
        if signs:
            yield Traffic("data", "all-reduce", 1, SKETCH * batch.summed, "sketch of the norm")
