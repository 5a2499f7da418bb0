"""A layout as data: which box (start and size on every dim) of which parameter every process holds.

Tensor parallelism is a table from parameter names to dims; data sharding cuts what is left on dim 0 (as `fully_shard`
does); the pipeline decides by layer. Building, initial values, checkpoints and `--show-layout` read the same boxes.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from ..models.config import BERTConfig, GPTConfig, ModelConfig
from .layout import Layout

# of gradients summed at once: large enough for bandwidth, small enough to be packed meanwhile
BUCKET_BYTES = 25 * 2**20
# one fp32 scale to so many signs: 1.6 % more bytes, and a block is rarely wider than a layer
SIGNS_PER_SCALE = 2048
# numbers in the sketch of a gradient: its norm is known within sqrt(1 / (2 x 1024)) = 2.2 % (one standard deviation)
SKETCH = 1024

# How a parameter lies over the tensor axis: cut on a dim; or whole on every process, with a gradient that is partial
# (each process saw its part of the sequence, or used it for its own heads) or complete (each computed the same).
Placement = Literal[0, 1, "partial", "same"]

TENSOR_TABLE: tuple[tuple[str, Placement], ...] = (
    ("token_table.weight", 0),
    ("output.*", 0),
    ("mlm_bias", 0),
    ("relative_bias.table.weight", 1),
    ("blocks.*.attention.qkv.*", 0),
    ("blocks.*.attention.q.*", 0),
    ("blocks.*.attention.kv.*", 0),
    ("blocks.*.attention.latent.*_up.weight", 0),
    ("blocks.*.attention.sinks", 0),
    ("blocks.*.attention.out.weight", 1),
    ("blocks.*.mlp.up.*", 0),
    ("blocks.*.mlp.gate.*", 0),
    ("blocks.*.mlp.down.weight", 1),
    # experts are whole: each process routes its part of the row through them
    ("blocks.*.mlp.shared.up.*", 0),
    ("blocks.*.mlp.shared.gate.*", 0),
    ("blocks.*.mlp.shared.down.weight", 1),
    ("mlm_transform.*", "same"),  # the heads of BERT work on selected positions, the same on every process
    ("mlm_norm.*", "same"),
    ("pooler.*", "same"),
    ("nsp.*", "same"),
    ("*", "partial"),  # norms, position and type tables, latents, biases added after a reduce-scatter
)


def tensor_placement(name: str, config: ModelConfig) -> Placement:
    """One key head for all queries serves all processes, with its norm; a norm over all heads is cut with them."""
    if config.key_value_heads == 1 and (".attention.kv." in name or ".k_norm." in name):
        return "partial"
    if ("_norm.weight" in name and ".attention." in name) and getattr(config, "qk_norm", "") == "whole":
        return 0
    return next(placement for pattern, placement in TENSOR_TABLE if fnmatchcase(name, pattern))


FIRST_STAGE = ("position_table.", "type_table.", "relative_bias.", "embedding_norm.", "projection.")


@dataclass(frozen=True)
class Box:
    """A part of a tensor: first index and size on every dim."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        return cls((0,) * len(shape), tuple(shape))

    def slices(self) -> tuple[slice, ...]:
        """The index that takes this part out of the whole tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    def cut(self, dim: int, start: int, size: int) -> "Box":
        """The part of this box from `start`, relative to the box, on one dim."""
        starts, sizes = list(self.start), list(self.size)
        starts[dim] += start
        sizes[dim] = size
        return Box(tuple(starts), tuple(sizes))

    @property
    def numel(self) -> int:
        return math.prod(self.size)


def even_part(length: int, parts: int, index: int) -> tuple[int, int]:
    """(start, size) of part `index` when `length` is cut as evenly as possible."""
    base, extra = divmod(length, parts)
    return index * base + min(index, extra), base + (index < extra)


def sharded_part(length: int, parts: int, index: int) -> tuple[int, int]:
    """(start, size) of part `index` as `fully_shard` cuts dim 0: equal rounded-up parts, the last short or empty."""
    size = -(-length // parts)
    start = min(index * size, length)
    return start, min(size, length - start)


def tensor_box(name: str, shape: tuple[int, ...], config: ModelConfig, parts: int, index: int) -> Box:
    """The part of a parameter that tensor rank `index` holds."""
    box, placement = Box.whole(shape), tensor_placement(name, config)
    if parts == 1 or isinstance(placement, str):
        return box
    return box.cut(placement, *even_part(shape[placement], parts, index))


@dataclass(frozen=True)
class ShardSpec:
    """What one process holds of one parameter; a token table on two stages is two specs of one name."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    box: Box
    stage: int
    placement: Placement
    primary: bool  # of all that hold this box, the copy that counts in the norm and goes into a checkpoint


@dataclass(frozen=True)
class Coordinates:
    """The ranks of a process, on the two halves of the gradient axis too."""

    pipeline: int = 0
    tensor: int = 0
    replica: int = 0
    shard: int = 0


@functools.lru_cache(maxsize=8)
def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every parameter, in the order of the module's own (a test compares). Not to be changed."""
    width, bert = config.width, config if isinstance(config, BERTConfig) else None
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, outer: int, inner: int = width, bias: bool = config.bias) -> None:
        shapes[f"{name}.weight"] = (outer, inner)
        if bias:
            shapes[f"{name}.bias"] = (outer,)

    def norm(name: str, size: int = width) -> None:
        shapes[f"{name}.weight"] = (size,)
        if config.bias and config.norm == "layernorm":
            shapes[f"{name}.bias"] = (size,)

    table = bert.table_width if bert else width
    if bert and bert.decoder_bias:
        shapes["mlm_bias"] = (config.vocab_size,)
    shapes["token_table.weight"] = (config.vocab_size, table)
    if config.positions == "learned":
        shapes["position_table.weight"] = (config.sequence_length + config.position_offset, table)
    if bert and bert.token_types:
        shapes["type_table.weight"] = (bert.token_types, table)
    if config.embedding_norm:
        norm("embedding_norm")
    if bert and bert.embedding_width:
        linear("projection", width, table)
    if bert and bert.relative_buckets:
        shapes["relative_bias.table.weight"] = (bert.relative_buckets, config.heads)
    heads, keys = config.heads * config.head_size, config.key_value_heads * config.head_size
    gpt, wide = config if isinstance(config, GPTConfig) else None, config.feed_forward_size
    qkv, out, mlp = (config.has_bias(part) for part in ("qkv", "out", "mlp"))
    around = gpt is not None and gpt.norm_place == "around"
    for layer in range(config.block_count):
        block = f"blocks.{layer}"
        if layer or not (bert and config.embedding_norm):
            norm(f"{block}.attention_norm")
        if gpt and gpt.attention_sinks:
            shapes[f"{block}.attention.sinks"] = (gpt.heads,)
        if gpt and gpt.kv_latent:
            shapes |= _latent_shapes(gpt, f"{block}.attention.latent")
        elif heads == keys:
            linear(f"{block}.attention.qkv", 3 * heads, bias=qkv)
        else:
            linear(f"{block}.attention.q", heads, bias=qkv)
            linear(f"{block}.attention.kv", 2 * keys, bias=qkv)
        if gpt and gpt.qk_norm != "none":
            whole = gpt.qk_norm == "whole"
            norm(f"{block}.attention.q_norm", heads if whole else config.head_size)
            norm(f"{block}.attention.k_norm", keys if whole else config.head_size)
        linear(f"{block}.attention.out", width, config.heads * config.value_size, bias=out)
        if around:
            norm(f"{block}.attention_after_norm")
        if not gpt or gpt.residual != "shared":
            norm(f"{block}.mlp_norm")
        if gpt and gpt.has_experts(layer):
            shapes |= _expert_shapes(gpt, f"{block}.mlp")
        else:
            linear(f"{block}.mlp.up", wide, bias=mlp)
            if config.gated:
                linear(f"{block}.mlp.gate", wide, bias=mlp)
            linear(f"{block}.mlp.down", width, wide, bias=mlp)
        if around:
            norm(f"{block}.mlp_after_norm")
        if layer >= config.layers:
            for name in ("token_norm", "hidden_norm", "norm"):
                norm(f"{block}.{name}")
            linear(f"{block}.join", width, 2 * width, bias=False)
    norm("norm", table)
    if bert and bert.mlm_transform:
        linear("mlm_transform", table)
        norm("mlm_norm", table)
    if bert and bert.nsp:
        linear("pooler", width)
        linear("nsp", 2)
    if gpt and not gpt.tied:
        linear("output", config.vocab_size, bias=gpt.output_bias)
    return shapes


def _latent_shapes(config: GPTConfig, at: str) -> dict[str, tuple[int, ...]]:
    """Of queries, keys and values made of latents (`models/layers.py`)."""
    width, q_latent, kv_latent, turned = config.width, config.q_latent, config.kv_latent, config.rope_width
    made = config.heads * (config.head_size - turned + config.value_size)
    down = {f"{at}.q_down.weight": (q_latent, width), f"{at}.q_norm.weight": (q_latent,)} if q_latent else {}
    return {
        **down,
        f"{at}.q_up.weight": (config.heads * config.head_size, q_latent or width),
        f"{at}.kv_down.weight": (turned + kv_latent, width),
        f"{at}.kv_norm.weight": (kv_latent,),
        f"{at}.kv_up.weight": (made, kv_latent),
    }


def _expert_shapes(config: GPTConfig, at: str) -> dict[str, tuple[int, ...]]:
    """Of a feed-forward of experts (`models/experts.py`)."""
    width, experts, size = config.width, config.experts, config.expert_size
    names = ("up", "gate") if config.gated else ("up",)
    biased, shared = config.has_bias("mlp"), config.shared_experts * size
    shapes: dict[str, tuple[int, ...]] = {f"{at}.balance_bias": (experts,)} if config.balance_bias else {}
    shapes[f"{at}.router.weight"] = (experts, width)
    if biased:
        shapes[f"{at}.router.bias"] = (experts,)
    shapes |= {f"{at}.experts.{name}": (experts, size, width) for name in names}
    shapes[f"{at}.experts.down"] = (experts, width, size)
    if biased:
        shapes |= {f"{at}.experts.{name}_bias": (experts, size) for name in names}
        shapes[f"{at}.experts.down_bias"] = (experts, width)
    for name in (*names, "down") if shared else ():
        outer, inner = (width, shared) if name == "down" else (shared, width)
        shapes[f"{at}.shared.{name}.weight"] = (outer, inner)
        if biased:
            shapes[f"{at}.shared.{name}.bias"] = (outer,)
    return shapes


def stage_holds(name: str, stage: int, config: ModelConfig, layout: Layout) -> bool:
    """Whether a pipeline stage holds the parameter of this name."""
    first, last = stage == 0, stage == layout.stages - 1
    if name.startswith("blocks."):
        layer = int(name.split(".")[1])
        return last if layer >= config.layers else layer in layout.layers_of(stage, config.layers)
    if name == "token_table.weight":
        return first or (last and table_at_ends(config))
    if name.startswith("norm."):  # on the embeddings of a post-norm BERT
        return first if isinstance(config, BERTConfig) and not config.norm_first else last
    return first if name.startswith(FIRST_STAGE) else last


def table_at_ends(config: ModelConfig) -> bool:
    """Whether a pipeline's last stage has the token table, as the output matrix or to read further tokens."""
    return config.tied or config.predict_ahead > 0 if isinstance(config, GPTConfig) else True


def shard_specs(config: ModelConfig, layout: Layout, place: Coordinates) -> Iterator[ShardSpec]:
    """What a process holds, stage by stage in the order of the model's parameters."""
    shapes = parameter_shapes(config)
    for stage in layout.stages_of(place.pipeline):
        for name, shape in shapes.items():
            if stage_holds(name, stage, config, layout):
                yield make_shard_spec(name, shape, config, stage, layout, place)


def make_shard_spec(
    name: str,
    shape: tuple[int, ...],
    config: ModelConfig,
    stage: int,
    layout: Layout,
    place: Coordinates,
    rows: int = 0,
) -> ShardSpec:
    """What a process holds of one parameter on a stage; `rows` where what is sharded has more, of nothing."""
    placement = tensor_placement(name, config)
    box = tensor_box(name, shape, config, layout.tensor, place.tensor)
    replica, shards, shard = place.replica, layout.shards, place.shard
    if layout.expert > 1 and is_of_experts(name):
        # on the expert axis, between data and context, and among the copies
        data, context = divmod(shard if shards > 1 else replica, layout.context)
        expert, index = data % layout.expert, data // layout.expert * layout.context + context
        replica, shard = (replica, index) if shards > 1 else (index, 0)
        box, shards = box.cut(0, *even_part(shape[0], layout.expert, expert)), shards // layout.expert
    if shards > 1:
        held = box.size[0]
        start, size = sharded_part(max(rows, held), shards, shard)
        box = box.cut(0, min(start, held), max(min(size, held - start), 0))
    primary = replica == 0 and (placement in (0, 1) or place.tensor == 0)
    if name == "token_table.weight" and stage > 0:
        primary = False  # the copy on the last stage
    return ShardSpec(name, shape, box, stage, placement, primary)


def is_trained(name: str) -> bool:
    """Whether a gradient moves a parameter; the balance bias follows the load of the experts."""
    return not name.endswith(".balance_bias")


def is_of_experts(name: str) -> bool:
    """Whether a parameter is cut over the expert axis."""
    return ".mlp.experts." in name


def is_decayed(name: str, dims: int) -> bool:
    """Whether weight decay is for a parameter: for matrices that are no tables, nor stacked biases of experts."""
    return dims > 1 and "table" not in name and not name.endswith("bias")


def is_hidden_matrix(name: str, dims: int) -> bool:
    """Whether Muon moves a parameter when it is the optimizer: a matrix of a layer."""
    return is_decayed(name, dims) and name.startswith("blocks.")


def optimizer_numbers(optimizer: str, name: str, size: Sequence[int]) -> int:
    """Numbers of state that an optimizer keeps for a part of this size of a parameter."""
    whole = math.prod(size)
    if optimizer == "muon" and is_hidden_matrix(name, len(size)):
        return whole  # the momentum
    if optimizer == "adafactor":
        return sum(size) if len(size) > 1 else whole  # a mean square for each row and column
    return 2 * whole  # mean and mean square


def low_rank_pays(shape: Sequence[int], rank: int) -> bool:
    """Whether a gradient, as a matrix of its first dim and the rest, is larger than its two factors (PowerSGD)."""
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows + columns) * rank < rows * columns


def bucket_slices(sizes: Sequence[int], limit: int = BUCKET_BYTES) -> list[slice]:
    """Consecutive tensors of these bytes in buckets of at most `limit`, unless one alone is larger."""
    slices, start, filled = [], 0, 0
    for index, size in enumerate(sizes):
        if index > start and filled + size > limit:
            slices.append(slice(start, index))
            start, filled = index, 0
        filled += size
    return [*slices, slice(start, len(sizes))] if sizes else []
