"""What the software of a run does, as data: the bytes of a number in each role, what is fused, what overlaps.

A plan of a run that Throughline trains uses `throughline`; the published tables were made by other programs, whose
properties are stated here from their texts and code. These are switches, not fitted numbers.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cache

from ..core.errors import WrongUse
from ..models.config import ModelConfig
from .hardware import read_calibration, shipped_table
from .tables import optimizer_numbers, parameter_shapes

ADAM_BYTES = 36  # read and written for one parameter: gradient, weight, moments and master


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
AUTOCAST = Precision(
    weight=4, gradient=4, master=0, stream=4, sent=4, cast=2
)  # 16 B, and 2 B of cast matrices
FP32 = Precision("fp32", weight=4, gradient=4, master=0, activation=4, stream=4, sent=4, reduced=4)
APEX = Precision("fp16", gradient=2, reduced=2)  # 16-bit gradients: 16 B [1910.02054, section 3.1]
FP64 = Precision(
    "fp64", weight=8, gradient=8, master=0, moments=16, activation=8, stream=8, sent=8, reduced=8
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
    source: str = ""


# below it the plain form of the loss is as fast, with a third array of logits in backward
LARGE_VOCABULARY = 8192
PROCESSOR_RUNTIME_BYTES = 435 * 2**20  # interpreter and torch, until `study` has measured it


def on_processor(software: Software) -> Software:
    """The same program where the host's processor computes: one memory holds everything."""
    runtime = read_calibration().get("runtime_bytes", PROCESSOR_RUNTIME_BYTES)
    return replace(software, on_host=True, runtime_bytes=runtime, logits_at_once=2**26)


NARROW = ("fp8", "mxfp8", "nvfp4")
PRECISIONS = ("fp32", "tf32", "fp16", "bf16", *NARROW)
NUMBERS = {"half": HALF, "autocast": AUTOCAST, "apex": APEX}
OPTIMIZERS = ("adamw", "lamb", "muon", "adafactor")
# five Newton-Schulz iterations: X X', its square, their product with X; 5 x (4 a^2 b + 2 a^3) FLOPs of an a x b matrix
MUON_FLOPS = 5 * 6


def with_optimizer(software: Software, name: str, config: ModelConfig) -> Software:
    """The program with another optimizer: the numbers that it keeps, each read and written once, LAMB's two more
    reads for its norms, Muon's matrix iterations (of a parameter times the smaller side, here the width).
    """
    shapes, numbers = parameter_shapes(config).items(), software.precision
    slots = sum(optimizer_numbers(name, parameter, shape) for parameter, shape in shapes)
    moments = numbers.moments / 2 * slots / config.parameter_count()
    moved = ADAM_BYTES + 2 * (moments - numbers.moments) + 8 * (name == "lamb")
    flops = MUON_FLOPS * config.width if name == "muon" else 0.0
    precision = replace(numbers, moments=moments)
    return replace(software, precision=precision, optimizer_bytes=moved, orthogonal_flops=float(flops))


@cache
def _table() -> dict[str, Software]:
    found = {}
    for name, shipped in shipped_table("software.toml").items():
        row = dict(shipped)
        precision = replace(NUMBERS[row.pop("precision")], **row.pop("bytes", {}))
        found[name] = Software(name, precision, **row)
    return found


def find_software(name: str, compute: str = "") -> Software:
    """The program of that name, with its numbers in another dtype: fp32 and tf32 keep everything in 4 bytes,
    fp64 in 8; fp8 and narrower ones are for the products of the blocks, the rest is in bf16. Raises WrongUse for an
    unknown name.
    """
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
