"""Memory of one process of a layout: named terms in bytes, on the chip and on the host, at each moment of a step.

Like the times these are formulas on numbers or arrays. States follow Rajbhandari et al. 2020 (section 5), activations
Korthikanti et al. 2022 (sections 4 and 5). The peak is the worst moment, not the sum of all terms: logits live at the
end of a forward, the gathered weights of a layer while it computes, the update's buffers when activations are gone.
"""

from typing import Any

import numpy as np

from .cost import Layouts, Work, held_parameters, layers_on, targets
from .kernels import Share, kept_bytes
from .software import Software

Number = Any
RUNTIME_BYTES = 0.8e9  # context, kernels, libraries and their workspaces on a GPU
FRAGMENTATION = 0.04  # of the chip's memory that the allocator cannot give out
STATES = ("weights", "gradients", "optimizer")
KEPT = (
    "weights",
    "gathered weights",
    "cast weights",
    "gradients",
    "optimizer",
    "activations",
    "tables",
    "pipeline buffers",
)
MOMENTS = {
    "loss": (*KEPT, "logits"),
    "backward of a layer": (*KEPT, "layer at work"),
    "update": ("weights", "gradients", "optimizer", "update buffers"),
}  # fmt: skip


def activation_bytes(work: Work, layouts: Layouts, software: Software) -> dict[str, Number]:
    """Bytes kept by one layer of one micro-batch, by term, after recomputation has been decided.

    Selective keeps all but the attention core (scores); full keeps the layer's input, which sequence parallelism
    divides.
    """
    share = Share(layouts.micro_rows, work.length * work.fill, layouts.tensor, layouts.context)
    kept = kept_bytes(work.config, share, software)
    full, selective = layouts.recompute == 2, layouts.recompute == 1
    kept["scores"] = np.where(selective, 0.0, kept["scores"])
    inputs = software.precision.activation * share.tokens * work.config.width
    inputs = inputs / (layouts.tensor if software.sequence_parallel or software.split_inputs else 1)
    terms = {name: np.where(full, 0.0, value) for name, value in kept.items()}
    return terms | {"layer inputs": np.where(full, inputs, 0.0)}


def micro_batches_in_flight(work: Work, layouts: Layouts) -> Number:
    """Micro-batches whose activations the first process holds: one for each stage, interleaving a little more
    (Korthikanti et al. 2022, section 4.2.3).
    """
    pipeline, turns = layouts.pipeline, layouts.turns
    flying = np.minimum(pipeline, work.rows / (layouts.data * layouts.micro_rows))
    return flying * np.where(turns > 1, 1 + (pipeline - 1) / (pipeline * turns), 1.0)


def device_terms(work: Work, layouts: Layouts, software: Software, stage: str = "first") -> dict[str, Number]:
    """Bytes on the chip, by term, of the first or the last process of a pipeline (with one stage they are the same)."""
    config, numbers = work.config, software.precision
    held, ranks = held_parameters(config, layouts), layouts.data * layouts.context
    first_layers, last_layers = layers_on(config, layouts)
    layers = first_layers if stage == "first" else last_layers
    alone, sharding = layouts.pipeline == 1, layouts.sharding
    streamed, offload = (sharding == 3) & alone, np.asarray(layouts.offload) > 0
    states, gradients = np.where(sharding >= 1, ranks, 1), np.where((sharding >= 2) & alone, ranks, 1)
    block = np.maximum(config.block_parameters(), config.vocab_size * config.width) / layouts.tensor
    master = numbers.master + numbers.moments
    flying = micro_batches_in_flight(work, layouts) if stage == "first" else np.minimum(1.0, layouts.pipeline)
    flying = np.where(alone, 1.0, flying)
    per_layer = sum(activation_bytes(work, layouts, software).values())
    none = Layouts(layouts.tensor, context=layouts.context, micro_rows=layouts.micro_rows)
    at_work = np.where(layouts.recompute == 2, sum(activation_bytes(work, none, software).values()), 0.0)
    scores = activation_bytes(work, none, software)["scores"]
    at_work = at_work + np.where(layouts.recompute == 1, scores, 0.0)
    if not software.fused_softmax:  # scores, and the gradients that come in and go out of a step
        at_work = at_work + 3 * numbers.activation * scores / (2.0 * numbers.activation + 1)
    share = Share(layouts.micro_rows, work.length * work.fill, layouts.tensor, layouts.context)
    tokens, whole = share.tokens, layouts.tensor if software.sequence_parallel else 1
    has_head = alone if stage == "first" else np.ones_like(alone)
    logits = software.loss_bytes * tokens * targets(work, software) * config.vocab_size / layouts.tensor
    width = config.width * tokens
    return {
        "weights": held
        * np.where(offload, numbers.activation, numbers.weight)
        / np.where(streamed, ranks, 1),
        "gathered weights": np.where(streamed, software.gathered_blocks * block * numbers.sent, 0.0),
        "cast weights": np.where(offload, 0.0, held * numbers.cast / np.where(streamed, ranks, 1)),
        "gradients": np.where(
            offload, np.minimum(held, block) * numbers.activation, held * numbers.gradient / gradients
        ),
        "optimizer": np.where(offload, 0.0, held * master / states),
        "activations": layers * per_layer * flying,
        "layer at work": at_work,
        "tables": np.where(
            alone | (stage == "first"), (1.0 if software.dropout else 0.0) * width * flying / whole, 0.0
        ),
        "logits": np.where(has_head, logits + 2 * numbers.activation * width / whole, 0.0),
        "pipeline buffers": np.where(alone, 0.0, 2 * numbers.sent * width / whole),
        "update buffers": np.where(offload, 0.0, np.minimum(held / states, 2**28) * 4.0),
    }


def peak_bytes(terms: dict[str, Number]) -> Number:
    """The worst moment of a step, without the runtime."""
    moments = [sum(terms[name] for name in names) for names in MOMENTS.values()]
    return np.maximum.reduce(np.broadcast_arrays(*moments))


def needed_bytes(work: Work, layouts: Layouts, software: Software) -> Number:
    """Bytes that the fullest process needs on its chip, runtime included."""
    stages = [peak_bytes(device_terms(work, layouts, software, stage)) for stage in ("first", "last")]
    return np.maximum(*stages) + RUNTIME_BYTES


def capacity_bytes(memory_gb: float) -> float:
    """What of a chip's memory (in GB, sold as GiB) can be used."""
    return memory_gb * 2**30 * (1 - FRAGMENTATION)


def host_bytes(work: Work, layouts: Layouts, software: Software) -> Number:
    """Bytes that offload keeps in the host's memory for one process: masters, moments and 16-bit gradients."""
    numbers = software.precision
    held = held_parameters(work.config, layouts) / np.where(
        layouts.sharding > 0, layouts.data * layouts.context, 1
    )
    kept = (numbers.master or numbers.weight) + numbers.moments + 2
    return np.where(np.asarray(layouts.offload) > 0, held * kept, 0.0)
