"""What a layout costs each process: parameters and bytes it holds, collectives of a step with their bytes.

Counted from the same tables that build the model, without building it. Bytes of a collective are those of its
whole result: gathered, before scattering, or reduced; of a point-to-point one, those sent.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...core.console import amount, table
from ...models.config import BERTConfig, ModelConfig, family_of
from ...planner.actions import pipeline_actions
from ...planner.layout import Layout
from ...planner.tables import (
    SIGNS_PER_SCALE,
    SKETCH,
    Coordinates,
    ShardSpec,
    bucket_slices,
    is_decayed,
    is_tied,
    low_rank_pays,
    optimizer_numbers,
    parameter_shapes,
    shard_specs,
    stage_holds,
    tensor_placement,
)
from ..recipe import Recipe

BYTES = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 4,
    "fp16": 4,
}  # of a master, a number of the optimizer, a summed gradient
COMPUTED = {
    "fp64": 8,
    "fp32": 4,
    "tf32": 4,
    "bf16": 2,
    "fp16": 2,
}  # of a weight in the model, an activation, a matrix product


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
    def kept(self) -> int:
        """Bytes of a weight in the model and of an activation between layers."""
        return COMPUTED[self.precision]

    @property
    def summed(self) -> int:
        """Bytes of a gradient that copies of the model sum."""
        return COMPUTED[self.precision] if self.halves else BYTES[self.precision]


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


def places(layout: Layout) -> Iterator[Coordinates]:
    """The processes that hold different parts, in order: pipeline rank, then tensor rank, then shard."""
    for pipeline in range(layout.pipeline):
        for tensor in range(layout.tensor):
            for shard in range(layout.shards):
                yield Coordinates(pipeline, tensor, 0, shard)


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
    computed, kept = whole * COMPUTED[batch.precision], whole * batch.kept
    columns = (1 if config.key_value_heads == config.heads else 2) + (2 if config.gated else 1)
    gathers: Counter[int] = Counter()  # bytes of one call -> calls in a step
    scatters: Counter[int] = Counter()
    sums: Counter[int] = Counter()
    n = batch.micro_batches
    for stage in layout.stages_of(pipeline_rank):
        layers = len(layout.layers_of(stage, config.layers))
        again = batch.recompute == "full"
        gathers[computed] += n * layers * ((3 if again else 2) * columns + 2)
        scatters[computed] += n * layers * (columns + (4 if again else 2))
        if stage == 0:  # the token table: partial sums out, gradients in
            scatters[kept] += n
            gathers[kept] += n
        if stage == layout.stages - 1:
            targets = batch.predicted if isinstance(config, BERTConfig) else whole // config.width
            number = max(batch.kept, 4)
            sums[targets * number] += n  # the largest logit
            sums[2 * targets * number] += n  # the normalisation and the logit of the target
            if isinstance(config, BERTConfig):
                gathers[kept] += n
                sums[batch.predicted * config.width * COMPUTED[batch.precision]] += n
            else:
                gathers[computed] += n
                scatters[computed] += n
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
    number = COMPUTED[batch.precision]
    passes = (2 if batch.recompute == "none" else 3) * (layout.context - 1)  # forwards, and once for backward
    yield Traffic("context", "send", passes * calls, passes * calls * part * number, "keys and values")
    sums = layout.context * calls  # home at last; added up in float32 at least
    yield Traffic("context", "send", sums, sums * part * max(number, 4), "their gradients")


def _pipeline_traffic(
    config: ModelConfig, layout: Layout, batch: StepShape, pipeline_rank: int
) -> Iterator[Traffic]:
    here = layout.stages_of(pipeline_rank)
    size = batch.rows * batch.length // (layout.context * layout.tensor) * config.width * batch.kept
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
    number, wide, n = batch.kept, BYTES[batch.precision], batch.micro_batches
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


def batch_of(recipe: Recipe) -> StepShape:
    """The shape of a resolved recipe's step."""
    train = recipe.train
    micro = train.rows_per_micro_batch
    fraction = recipe.objective.mask_fraction if recipe.objective else 0.0
    predicted = micro * math.ceil(train.sequence_length // recipe.parallel.context * fraction)
    return StepShape(
        train.rows_per_step // (recipe.parallel.data * micro),
        micro,
        train.sequence_length,
        predicted,
        train.precision,
        train.recompute,
        halves=train.offload,
        scheme=recipe.compression.scheme,
        rank=recipe.compression.rank,
    )


def layout_report(recipe: Recipe, config: ModelConfig) -> tuple[dict[str, Any], list[str]]:
    """The layout of a resolved recipe for a script and for a person: what each process holds and sends."""
    layout, batch = recipe.parallel.layout(), batch_of(recipe)
    number = BYTES[recipe.train.precision]
    held_names = ("weights", "gradients", "host" if batch.halves else "optimizer")
    processes = []
    for place in places(layout):
        count = held(config, layout, place)
        whole = held(config, dataclasses.replace(layout, sharding="replicated"), place)
        gradients = whole if layout.sharding in ("replicated", "zero1") or layout.pipeline > 1 else count
        weights = count if layout.sharding == "full" and layout.pipeline == 1 else whole
        sizes = {"weights": weights * batch.kept, "gradients": gradients * batch.summed}
        # with offload: master and gradient beside the optimizer's numbers, on the host
        slots = _optimizer_numbers(recipe.optimizer.name, config, layout, place)
        masters = 0 if number == batch.kept else count  # with offload a gradient lies beside them
        sizes[held_names[-1]] = number * (slots + (2 * count if batch.halves else masters))
        processes.append(dataclasses.asdict(place) | {"parameters": count} | sizes)
    sent = {rank: traffic(config, layout, batch, rank) for rank in range(layout.pipeline)}
    facts: dict[str, Any] = {
        "layout": layout.facts(),
        "family": family_of(config),
        "parameters": config.parameter_count(),
        "processes": processes,
        "placements": dict(placements(config, layout)),
        "traffic": [
            {"pipeline": rank} | dataclasses.asdict(entry)
            for rank, entries in sent.items()
            for entry in entries
        ],
    }
    if layout.pipeline > 1:
        order = pipeline_actions(layout, batch.micro_batches)
        facts["actions"] = [[str(action) for action in rank] for rank in order]
    lines = [f"{layout.product()}: {layout.describe()}", f"{config.parameter_count():,} parameters", ""]
    lines += table(("parameter", "shape", "over tensor", "stage"), _placement_rows(config, layout))
    lines += ["", "held in a step by one process of each place; its copies hold the same"]
    header = ("pipeline", "tensor", "shard", "parameters", *held_names)
    lines += table(
        header,
        [
            [row[name] if name in header[:4] else amount(row[name], "B") for name in header]
            for row in processes
        ],
    )
    lines += [
        "",
        "sent by one process in a step"
        + ("" if batch.scheme == "none" else ", after the warm-up of compression"),
    ]
    rows = [
        (rank, entry.axis, entry.kind, entry.what, entry.calls, amount(entry.bytes, "B"))
        for rank, entries in sent.items()
        for entry in entries
    ]
    lines += table(("pipeline", "axis", "collective", "of", "calls", "bytes"), rows) if rows else ["nothing"]
    if layout.pipeline > 1:
        lines += ["", "order of work: stage, forward or backward (I of inputs, W of weights), micro-batch"]
        lines += [f"{rank}: {shortened(actions)}" for rank, actions in enumerate(facts["actions"])]
    return facts, lines


def _optimizer_numbers(optimizer: str, config: ModelConfig, layout: Layout, place: Coordinates) -> int:
    mine = shard_specs(config, layout, place)
    return sum(optimizer_numbers(optimizer, spec.name, spec.box.size) for spec in mine)


def shortened(words: list[str], most: int = 24) -> str:
    """The first and last of a long list."""
    return " ".join(words if len(words) <= most else [*words[: most // 2], "...", *words[-most // 2 :]])


def placements(config: ModelConfig, layout: Layout) -> Iterator[tuple[str, str]]:
    """Parameter -> how it lies over the tensor axis."""
    for name in parameter_shapes(config):
        yield name, _over_tensor(name, config, layout)


def _over_tensor(name: str, config: ModelConfig, layout: Layout) -> str:
    if layout.tensor == 1:
        return "whole"
    placement = tensor_placement(name, config)
    return f"cut on dim {placement}" if isinstance(placement, int) else f"whole, gradient {placement}"


def _placement_rows(config: ModelConfig, layout: Layout) -> list[tuple[str, str, str, str]]:
    """One row for each parameter, those of the blocks once for all layers."""
    rows = []
    for name, shape in parameter_shapes(config).items():
        if name.startswith("blocks.") and not name.startswith("blocks.0."):
            continue
        if name.startswith("blocks."):
            shown, where = name.replace("blocks.0.", "blocks.*."), "its layer's"
        else:
            stages = [stage for stage in range(layout.stages) if stage_holds(name, stage, config, layout)]
            shown, where = name, ", ".join(map(str, stages))
        rows.append((shown, " x ".join(map(str, shape)), _over_tensor(name, config, layout), where))
    return rows


def per_process(terms: dict[str, int], config: ModelConfig, recipe: Recipe) -> dict[str, int]:
    """The memory terms of one process with everything, scaled to the process of the layout that needs most.

    A pipeline keeps as many micro-batches as its schedule has in flight on the first process: all for gpipe,
    one for each stage for the others (Narayanan et al. 2021, section 2.2).
    """
    layout, batch, whole = recipe.parallel.layout(), batch_of(recipe), config.parameter_count()
    unsharded = dataclasses.replace(layout, sharding="replicated")
    corners = [Coordinates(pipeline) for pipeline in {0, layout.pipeline // 2, layout.pipeline - 1}]
    kept = max(held(config, layout, place) for place in corners)
    gathered = max(held(config, unsharded, place) for place in corners)
    streamed = layout.sharding == "full" and layout.pipeline == 1
    largest = (
        max(config.block_parameters(), whole - config.layers * config.block_parameters()) // layout.tensor
    )
    weights = kept + min(2 * largest, gathered) if streamed else gathered
    if layout.shards > 1 and not streamed:
        weights += kept
    summed = layout.sharding in ("replicated", "zero1") or layout.pipeline > 1
    layers = max(
        sum(len(layout.layers_of(stage, config.layers)) for stage in layout.stages_of(rank))
        for rank in range(layout.pipeline)
    )
    flying = batch.micro_batches if layout.schedule == "gpipe" else min(batch.micro_batches, layout.pipeline)
    spread = layout.tensor * layout.context
    shares = {
        "weights": weights / whole,
        "gradients": (gathered if summed else kept + min(largest, gathered)) / whole,
        **dict.fromkeys(("optimizer", "master weights", "host gradients", "checkpoint copy"), kept / whole),
        "cast weights": gathered / whole,
        "gradient residuals": gathered / whole * (1 + 1 / layout.data),
        "activations": layers * (flying if layout.pipeline > 1 else 1) / config.layers / spread,
        "logits": 1 / spread,
    }
    return {name: math.ceil(size * shares.get(name, 1.0)) for name, size in terms.items()}
