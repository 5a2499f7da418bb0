"""What is to be done in a step: a model and a batch; by which program; and how divided: layouts as numbers or arrays.

What software does is data: the bytes of a number in each role, what is fused, what overlaps. Throughline's own runs use
`throughline`; other programs stand in `software.toml` by their texts and code: switches, not fitted numbers.
"""

import dataclasses
import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, get_args

import numpy as np

from ..core.errors import WrongUse
from ..core.files import shipped_table
from ..core.hardware import read_calibration
from ..models.config import BERTConfig, GPTConfig, ModelConfig
from .layout import Layout, Sharding
from .tables import optimizer_numbers, parameter_shapes

ADAM_BYTES = 36  # read and written for one parameter: gradient, weight, moments and master
# below it the plain form of the loss is as fast, with a third array of logits in backward
LARGE_VOCABULARY = 8192
PROCESSOR_RUNTIME_BYTES = 435 * 2**20  # interpreter and torch, until `study` has measured it
OPTIMIZERS = ("adamw", "lamb", "muon", "adafactor")
# five Newton-Schulz iterations: X X', its square, their product with X; 5 x (4 a^2 b + 2 a^3) FLOPs of an a x b matrix
MUON_FLOPS = 5 * 6


@dataclass(frozen=True)
class Precision:
    """Bytes of a number in each role, and the dtype of the products (a key of a chip's `tflops`)."""

    compute: str = "bf16"
    weight: int = 2
    gradient: int = 4  # as it is accumulated
    master: int = 4  # fp32 copy of a weight beside the optimizer's numbers; 0: the weight is the master
    moments: float = 8
    activation: int = 2
    stream: int = 2  # of the residual stream, norms and softmax: autocast keeps them in fp32
    sent: int = 2  # of an activation or a gathered weight on its way to another process
    reduced: int = 4  # of a gradient on its way
    cast: int = 0  # 16-bit copy of a matrix that autocast makes from an fp32 weight
    residual: int = 0  # of what a compressed gradient lost and sends later
    narrow: str = ""  # of the products of the blocks, when in 8 or 4 bits: then `compute` is that of the rest

    @property
    def state(self) -> float:
        """Bytes for one parameter when nothing is sharded."""
        return self.weight + self.gradient + self.master + self.moments


HALF = Precision()  # 16-bit weights, fp32 gradients, masters and moments: 18 B
AUTOCAST = Precision(weight=4, gradient=4, master=0, stream=4, sent=4, cast=2)  # 16 B, 2 B of cast matrices
FP32 = Precision("fp32", weight=4, gradient=4, master=0, activation=4, stream=4, sent=4, reduced=4)
APEX = Precision("fp16", gradient=2, reduced=2)  # 16-bit gradients: 16 B [1910.02054, section 3.1]
FP64 = replace(
    FP32, compute="fp64", weight=8, gradient=8, moments=16, activation=8, stream=8, sent=8, reduced=8
)


@dataclass(frozen=True)
class Software:
    """A training program. `precision` is for 16-bit runs; fp32 and tf32 runs replace it."""

    name: str
    precision: Precision = HALF
    fused_attention: bool = True  # one kernel, no matrix of scores in memory
    fused_softmax: bool = True  # scale, mask, softmax and dropout of the scores in one kernel
    fused_norms: bool = True  # bias, dropout and residual in one kernel
    fused_activation: bool = True  # the activation in one kernel; with fused_norms its bias too
    pass_bytes: int = 10  # read and written for one parameter in each micro-batch: casts, gradients added up
    split_inputs: bool = False  # full recomputation keeps a layer's input divided over the tensor ranks
    gathered_blocks: int = 2  # layers whose weights are whole at once under full sharding
    split_sends: bool = True  # each tensor rank sends its part of what passes between stages
    drains_queue: bool = False  # the host waits in every layer: issuing adds to the kernels' time
    one_ring: bool = False  # gathers between nodes use one adapter
    sequence_parallel: bool = False  # norms, dropout and residual divided by the tensor degree
    layer_sums: int = 4  # of a layer over the tensor axis; 0: what our engine sends (traffic.py)
    overlap_data: bool = True  # gradients are summed during backward
    gradient_share: float = 1.0  # of the bytes of whole gradients, which copies send (compression)
    rows_once: bool = False  # a row for several experts of a node, or of a process, is sent there once
    overlap_experts: bool = False  # the exchange of rows with experts hides behind another micro-batch
    fused_experts: bool = True  # the products of a process' experts are one kernel, casts included
    graphed: str = ""  # what CUDA graphs issue at once: attention (all of a layer but its experts), or step
    routed_bytes: float = 0.0  # read and written besides for a number of a routed row: experts' biases
    overlap_tensor: bool = False  # part of the tensor axis' traffic hides behind products
    every_logit: bool = True  # BERT: logits for all positions, not for the masked ones alone
    loss_bytes: int = 8  # of a logit at the peak of the loss
    logits_at_once: float = math.inf  # entries of the largest slice of logits that the loss makes
    dropout: bool = True
    optimizer_bytes: float = ADAM_BYTES  # read and written for one owned parameter
    orthogonal_flops: float = 0.0  # of an update for one held parameter of the blocks (Muon)
    saves_products: float = 0.0  # kept by selective recomputation; 0: it repeats the attention core alone
    cast_bytes: float = 4.0  # read and written for a number that a product takes in 8 or 4 bits
    ring_speed: float = 1.0  # of attention on the pieces of a ring (context > 1), against whole rows
    attention_speed: dict[str, float] = field(default_factory=dict)  # against the usual, by chips' names
    update_bytes: int = 4  # of a parameter in an update's buffers, a bucket at a time
    forwards_first: bool = False  # a pipeline keeps all micro-batches (gpipe)
    runtime_bytes: float = 0.8e9  # context, kernels, libraries and their workspaces
    on_host: bool = False  # the processor computes: offloaded states and checkpoints are in its memory
    saves_between: bool = False  # checkpoints are written while steps go on: their copy is there all the time
    evaluated_tokens: int = 0  # in a batch of the validation inside the run; 0: there is none
    scores_tasks: bool = (
        False  # inside the run, on the first process, with a copy of the whole model in a layout
    )
    source: str = ""

    def on_processor(self) -> "Software":
        """The same where the host's processor computes: one memory holds everything."""
        runtime = read_calibration().get("runtime_bytes", PROCESSOR_RUNTIME_BYTES)
        return replace(self, on_host=True, runtime_bytes=runtime, logits_at_once=2**26)

    def uncompiled(self) -> "Software":
        """The same without a compiler: every step around a norm or an activation reads and writes for itself."""
        return replace(self, fused_norms=False, fused_activation=False)

    def with_optimizer(self, name: str, config: ModelConfig, averages: bool = False) -> "Software":
        """With another optimizer: its numbers, LAMB's two reads for norms, Muon's iterations over the width. `averages`
        of the weights are a number more, for which these are read again.
        """
        shapes, numbers = parameter_shapes(config).items(), self.precision
        slots = sum(optimizer_numbers(name, parameter, shape) for parameter, shape in shapes)
        slots += averages * config.parameter_count()
        moments = numbers.moments / 2 * slots / config.parameter_count()
        moved = ADAM_BYTES + 2 * (moments - numbers.moments) + 8 * (name == "lamb") + 4 * averages
        flops = float(MUON_FLOPS * config.width * (name == "muon"))
        precision = replace(numbers, moments=moments)
        return replace(self, precision=precision, optimizer_bytes=moved, orthogonal_flops=flops)


NARROW = ("fp8", "mxfp8", "nvfp4")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", *NARROW)
NUMBERS = {"half": HALF, "autocast": AUTOCAST, "apex": APEX}


@cache
def _table() -> dict[str, Software]:
    found = {}
    for name, row in shipped_table(__file__, "software.toml").items():
        row = row | {"precision": replace(NUMBERS[row["precision"]], **row.get("bytes", {}))}
        found[name] = Software(name, **{key: value for key, value in row.items() if key != "bytes"})
    return found


def find_software(name: str, compute: str = "") -> Software:
    """The program of that name, in another dtype; below 16 bits that of the blocks' products alone. Raises WrongUse."""
    if name not in _table():
        raise WrongUse(f"no software {name!r}", where="--software", fix="one of " + ", ".join(_table()))
    software = _table()[name]
    if compute in ("fp32", "tf32"):
        return replace(software, precision=replace(FP32, compute=compute), pass_bytes=12)
    if compute == "fp64":
        return replace(software, precision=FP64)
    if compute in NARROW:
        return replace(software, precision=replace(software.precision, compute="bf16", narrow=compute))
    return replace(software, precision=replace(software.precision, compute=compute)) if compute else software


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

    def targets(self, software: Software) -> float:
        """Share of positions that get logits."""
        return 1.0 if software.every_logit or not isinstance(self.config, BERTConfig) else self.predicted

    def micro_batches(self, layouts: "Layouts") -> Number:
        """Of one process in a step."""
        return self.rows / (layouts.data * layouts.micro_rows)


def prepared_places(rows: int, length: int, fraction: float) -> tuple[int, int]:
    """The step in which places for masked-token logits are prepared, a quarter of the most targets, and their most."""
    most = max(rows * math.ceil(length * fraction), 1)
    step = -(-most // 4)
    return step, -(-most // step) * step


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

    @classmethod
    def of(cls, layout: Layout, micro_rows: int, recompute: str, offload: bool) -> "Layouts":
        """A recipe's layout; one that says which layers each stage has by its own schedule."""
        return cls(
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

    def layers_on(self, config: ModelConfig) -> list[Number]:
        """Of a pipeline's first and last process (the first stages take what is left over), in a given split of all;
        with the blocks of further tokens.
        """
        ahead = config.blocks_ahead
        if (given := self.given) is not None:
            last = (given.stages - 1 in given.stages_of(rank) for rank in range(given.pipeline))
            return [layers + ahead * here for layers, here in zip(self.split, last)]
        base, extra = divmod(config.layers, self.pipeline * self.turns)
        first = self.turns * base + np.minimum(-(-extra // self.pipeline), self.turns)
        return [first + ahead * (self.pipeline == 1), self.turns * base + extra // self.pipeline + ahead]

    def copies_of_experts(self, software: Software) -> Number:
        """Processes of a stage that sum or shard the same experts; in other programs tensor ranks are among them."""
        tensor = self.tensor if software.layer_sums else 1
        return np.maximum(self.data * self.context * tensor / self.expert, 1)

    def owned_parameters(self, config: ModelConfig, software: Software, place: int | None = None) -> Number:
        """Those whose optimizer numbers one process holds: its stage's, over tensor and the sharding."""
        held, shards = self.held_parameters(config, place), self.shards
        if not (experts := layer_parameters(config)[0]):
            return held / shards
        experts = self.layers_on(config)[place or 0] * experts / self.expert
        copies = np.minimum(shards, self.copies_of_experts(software) / self.replicas)
        return (held - experts) / shards + experts / np.where(shards > 1, copies, 1)

    def held_parameters(self, config: ModelConfig, place: int | None = None) -> Number:
        """Of the fullest process before sharding, a token table at either end; in a given split of that at `place`."""
        experts, others = layer_parameters(config)
        rest = config.parameter_count() - config.block_count * (experts + others)
        table = config.vocab_size * config.width + rest % config.width
        table = rest if config.blocks_ahead else table  # then the last has both tables
        ends = np.where(self.pipeline > 1, np.minimum(rest, table), rest) / self.tensor
        block = others / self.tensor + experts / self.expert
        if not self.split:
            return np.maximum(*self.layers_on(config)) * block + ends
        held = [layers * block for layers in self.layers_on(config)]
        held[0], held[-1] = held[0] + ends, held[-1] + ends
        return max(held) if place is None else held[place]


AXES = tuple(field.name for field in dataclasses.fields(Layouts) if field.name not in ("replicas", "given"))


def has_experts(config: ModelConfig) -> float:
    """Share of the layers whose feed-forward is of experts."""
    return config.expert_layers / config.block_count if isinstance(config, GPTConfig) else 0.0


def layer_parameters(config: ModelConfig) -> tuple[float, float]:
    """Of the mean layer: the parameters of its experts that a token chooses among, and all others."""
    experts = 0.0
    if isinstance(config, GPTConfig) and config.experts:
        each = config.feed_forward_parameters(config.expert_size)
        experts = has_experts(config) * config.experts * each
    return experts, config.block_parameters() + config.expert_parameters() / config.block_count - experts
