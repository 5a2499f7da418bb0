"""What is to be done in a step and how it is divided: a model and a batch, and layouts as numbers or as arrays."""

import dataclasses
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from ..models.config import GPTConfig, ModelConfig
from .layout import Layout, Sharding
from .software import Software

Number = Any  # of one layout, or an array over many
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True)
class Work:
    """A model and a batch: what is to be done in one step, in any layout."""

    config: ModelConfig
    rows: int
    length: int
    predicted: float = 1.0  # share of positions with logits
    fill: float = 1.0  # share of a row's positions that are computed (packed or unpadded rows)

    @property
    def tokens(self) -> int:
        return self.rows * self.length


@dataclass(frozen=True)
class Layouts:
    """One layout, or equally long arrays of them. Sharding and recompute are indices into their names."""

    tensor: Number = 1
    pipeline: Number = 1
    data: Number = 1
    context: Number = 1
    micro_rows: Number = 1
    turns: Number = 1  # stages on each process (interleaving)
    sharding: Number = 0
    recompute: Number = 0
    offload: Number = 0
    expert: Number = 1  # processes of a stage that share the experts among themselves
    replicas: Number = 1  # hybrid sharding: groups of data processes that each hold a whole copy
    given: Layout | None = None  # of a recipe that says which layers each stage has; None: an even split

    @property
    def split(self) -> tuple[int, ...]:
        """Layers of each process of a pipeline whose split is given, else ()."""
        layout = self.given
        if layout is None:
            return ()
        stages = map(layout.stages_of, range(layout.pipeline))
        return tuple(sum(layout.layers_per_stage[stage] for stage in held) for held in stages)

    @property
    def world(self) -> Number:
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def shards(self) -> Number:
        """Processes that share a copy of the model; those of a context group share it too."""
        return np.where(np.asarray(self.sharding) > 0, self.data * self.context / self.replicas, 1)

    def take(self, index: Any) -> "Layouts":
        """The layouts at these places."""
        return Layouts(**{axis: np.asarray(getattr(self, axis))[index] for axis in AXES})


AXES = tuple(field.name for field in dataclasses.fields(Layouts) if field.name not in ("replicas", "given"))


def layouts_of(layout: Layout, micro_rows: int, recompute: str, offload: bool) -> Layouts:
    """A recipe's layout as the planner takes it; one that says which layers each stage has by its own schedule."""
    return Layouts(
        *(layout.tensor, layout.pipeline, layout.data, layout.context),
        micro_rows,
        layout.stages_per_process,
        SHARDINGS.index(layout.sharding),
        RECOMPUTES.index(recompute),
        int(offload),
        layout.expert,
        1 if layout.sharding == "replicated" else layout.replicas,
        layout if layout.pipeline > 1 and layout.layers_per_stage else None,
    )


def micro_batches(work: Work, layouts: Layouts) -> Number:
    """Of one process in a step."""
    return work.rows / (layouts.data * layouts.micro_rows)


def layers_on(config: ModelConfig, layouts: Layouts) -> list[Number]:
    """Layers of the first and of the last process of the pipeline, where what is left over goes to the first stages;
    of all its processes where a recipe says how the layers are split.
    """
    if layouts.split:
        return list(layouts.split)
    stages = layouts.pipeline * layouts.turns
    base, extra = config.layers // stages, config.layers % stages
    first = layouts.turns * base + np.minimum(-(-extra // layouts.pipeline), layouts.turns)
    last = layouts.turns * base + extra // layouts.pipeline
    return [first, last]


def has_experts(config: ModelConfig) -> float:
    """Share of the layers whose feed-forward is of experts."""
    return config.expert_layers / config.layers if isinstance(config, GPTConfig) else 0.0


def layer_parameters(config: ModelConfig) -> tuple[float, float]:
    """Of the mean layer: the parameters of its experts that a token chooses among, and all others."""
    experts = 0.0
    if isinstance(config, GPTConfig) and config.experts:
        each = config.feed_forward_parameters(config.expert_size)
        experts = has_experts(config) * config.experts * each
    return experts, config.block_parameters() + config.expert_parameters() / config.layers - experts


def copies_of_experts(layouts: Layouts, software: Software) -> Number:
    """Processes of a stage that sum the gradients of the same experts, or shard them. Other programs count tensor ranks
    among them; those of our engine hold what they route their part of a row through.
    """
    tensor = layouts.tensor if software.layer_sums else 1
    return np.maximum(layouts.data * layouts.context * tensor / layouts.expert, 1)


def owned_parameters(
    config: ModelConfig, layouts: Layouts, software: Software, place: int | None = None
) -> Number:
    """Parameters whose optimizer numbers one process holds: its stage's, over tensor and the sharding."""
    held, shards = held_parameters(config, layouts, place), layouts.shards
    if not (experts := layer_parameters(config)[0]):
        return held / shards
    experts = layers_on(config, layouts)[place or 0] * experts / layouts.expert
    copies = np.minimum(shards, copies_of_experts(layouts, software) / layouts.replicas)
    return (held - experts) / shards + experts / np.where(shards > 1, copies, 1)


def held_parameters(config: ModelConfig, layouts: Layouts, place: int | None = None) -> Number:
    """Parameters of the fullest process before sharding: its layers, and a token table at either end. With `place`
    those of one process, where a recipe says how the layers are split.
    """
    experts, others = layer_parameters(config)
    rest = config.parameter_count() - config.layers * (experts + others)
    ends = np.where(
        layouts.pipeline > 1, np.minimum(rest, config.vocab_size * config.width + rest % config.width), rest
    )
    first, last = layers_on(config, layouts)[0], len(layouts.split) - 1
    block = others / layouts.tensor + experts / layouts.expert
    if layouts.split:
        edges = [(ends / layouts.tensor if rank in (0, last) else 0.0) for rank in range(last + 1)]
        held = [layers * block + edge for layers, edge in zip(layouts.split, edges, strict=True)]
        return max(held) if place is None else held[place]
    return first * block + ends / layouts.tensor
