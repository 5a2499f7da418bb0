"""Memory of one process of a layout: named terms in bytes, on the chip and on the host, at each moment of a step.

Formulas on numbers or arrays. States follow Rajbhandari et al. 2020 (section 5), activations Korthikanti et al. 2022
(sections 4 and 5). The peak is the worst moment, not the sum of all terms: logits live at the end of a forward, a
layer's gathered weights while it computes, the update's buffers when activations are gone.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..models.config import ModelConfig
from .kernels import kept_bytes, share_of
from .work import PROCESSOR_RUNTIME_BYTES, Layouts, Number, Precision, Software, Work, layer_parameters

FRAGMENTATION = 0.04  # of the chip's memory that the allocator cannot give out
HEAP_HOLES = 0.3  # on a processor: of activations and logits, held by the kept heap and of no use
KEPT = (
    "weights", "gathered weights", "cast weights", "gradients", "reduced gradients", "gradient residuals", "optimizer",
    "activations", "tables", "pipeline buffers", "checkpoint copy", "heap holes", "runtime",
)  # fmt: skip
MOMENTS = {
    "loss": (*KEPT, "logits"),
    "backward of a layer": (*KEPT, "layer at work"),
    "update": (
        "weights", "gradients", "gradient residuals", "optimizer", "update buffers", "checkpoint copy", "runtime",
    ),
    "evaluation": (
        "weights", "gathered weights", "standing gradients", "gradient residuals", "optimizer", "checkpoint copy",
        "evaluated", "scored model", "runtime",
    ),
    "save": (
        "weights", "standing gradients", "gradient residuals", "optimizer", "checkpoint copy", "last checkpoint",
        "runtime",
    ),
}  # fmt: skip
IN_A_STEP = ("loss", "backward of a layer", "update")


def activation_bytes(work: Work, layouts: Layouts, software: Software) -> dict[str, Number]:
    """Bytes that a layer of a micro-batch keeps, by term: in selective recomputation no scores, in full its input."""
    share = share_of(work, layouts)
    kept = kept_bytes(work.config, share, software)
    full, selective = layouts.recompute == 2, layouts.recompute == 1
    # of a layer its input, the attention's result and this share of the products' results
    if software.saves_products:
        results = kept["query, key, value"] + kept["feed-forward"] + kept["norm outputs"]
        lean = dict.fromkeys(kept, 0.0) | {
            "norm inputs": kept["norm inputs"] / 2,
            "attention output": kept["attention output"],
            "feed-forward": software.saves_products * results,
        }
        kept = {name: np.where(selective, lean[name], value) for name, value in kept.items()}
    kept["scores"] = np.where(selective, 0.0, kept["scores"])
    inputs = software.precision.activation * share.tokens * work.config.width
    inputs = inputs / (layouts.tensor if software.sequence_parallel or software.split_inputs else 1)
    terms = {name: np.where(full, 0.0, value) for name, value in kept.items()}
    return terms | {"layer inputs": np.where(full, inputs, 0.0)}


def micro_batches_in_flight(work: Work, layouts: Layouts, software: Software, behind: Number) -> Number:
    """Micro-batches whose activations a process holds that has so many `behind` it: one for each of them and its own,
    interleaving a little more (Korthikanti et al. 2022, section 4.2.3); all of them where forwards come first (gpipe).
    """
    pipeline, turns, flying = layouts.pipeline, layouts.turns, work.micro_batches(layouts)
    flying = flying if software.forwards_first else np.minimum(behind + 1, flying)
    return flying * np.where((turns > 1) & (behind > 0), 1 + (pipeline - 1) / (pipeline * turns), 1.0)


def evaluation_bytes(work: Work, layouts: Layouts, software: Software) -> Number:
    """Logits of a batch of the validation, their softmax, and what one layer makes of it."""
    config, size = work.config, software.precision.activation
    layer = size * (8 * config.width + (3 if config.gated else 2) * config.feed_forward_size)
    return software.evaluated_tokens * (8.0 * config.vocab_size + layer) / layouts.tensor


def scored_model_bytes(work: Work, layouts: Layouts, software: Software) -> Number:
    """The whole model on the first process, by which tasks are scored inside the run: in the dtype of the products on a
    GPU, of the masters on a processor. A process alone lends its own weights.
    """
    numbers = software.precision
    size = max(numbers.activation, 4) if software.on_host else numbers.activation
    copied = (np.asarray(layouts.world) > 1) | ((np.asarray(layouts.offload) > 0) & (not software.on_host))
    return np.where(copied, software.scores_tasks * float(size) * work.config.parameter_count(), 0.0)


def state_terms(
    config: ModelConfig, layouts: Layouts, numbers: Precision, held: Number, owned: Number
) -> dict[str, Number]:
    """Bytes on the chip of `held` parameters, of which a process updates `owned`: weights, gradients and optimizer."""
    alone, offload = layouts.pipeline == 1, np.asarray(layouts.offload) > 0
    streamed, scattered = (layouts.sharding == 3) & alone, (layouts.sharding >= 2) & alone
    updated = (layouts.shards > 1) & ~streamed & (numbers.master == 0)  # fp32 shards beside the whole weights
    # gathered, or moved by offload, at once: a layer, or the token table
    largest = np.maximum(sum(layer_parameters(config)), config.vocab_size * config.width) / layouts.tensor
    at_once = np.where(layouts.world == 1, np.minimum(held, largest), held)
    kept = np.where(scattered, owned, held) * numbers.gradient
    gradients = np.where(offload, at_once * numbers.activation, kept)
    # One buffer holds them from step to step but for shards, for one process's fp32 and for its offload.
    stands = np.where(layouts.world == 1, (numbers.master > 0) & ~offload, layouts.sharding == 0)
    # the shards of full sharding are the masters
    whole = np.where(streamed, owned * (numbers.master == 0), held)
    number = np.where(offload, numbers.activation, numbers.weight)
    return {
        "weights": whole * number + np.where(updated, owned * numbers.weight, 0.0),
        "cast weights": np.where(offload, 0.0, whole * numbers.cast),
        "gradients": gradients,
        "standing gradients": np.where(stands, gradients, 0.0),
        "gradient residuals": held * numbers.residual * (1 + 1 / layouts.data),
        "optimizer": np.where(offload, 0.0, owned * (numbers.master + numbers.moments)),
    }


def layer_at_work(work: Work, layouts: Layouts, software: Software) -> Number:
    """Bytes that a layer makes anew in its backward: all it keeps, or in selective recomputation its scores."""
    none = dataclasses.replace(layouts, recompute=0)
    kept, number = activation_bytes(work, none, software), software.precision.activation
    again = np.where(layouts.recompute == 2, sum(kept.values()), 0.0)
    again = again + np.where(layouts.recompute == 1, kept["scores"], 0.0)
    if not software.fused_softmax:  # scores, and the gradients that come in and go out of a step
        again = again + 3 * number * kept["scores"] / (2.0 * number + 1)
    return again


def loss_bytes(work: Work, layouts: Layouts, software: Software, tokens: Number) -> Number:
    """Logits of a micro-batch with what the loss makes of them; in slices with fp32 or (compiled) 16-bit gradients."""
    entries = tokens * work.targets(software) * work.config.vocab_size / layouts.tensor
    matrix, most = work.config.vocab_size * work.config.width / layouts.tensor, software.logits_at_once
    # what every further token has kept of its own: the gradient of its logits, or of the matrix
    kept = np.where(entries > most, 4.0 * matrix, software.precision.activation * entries)
    kept = kept * work.config.blocks_ahead
    number = np.maximum(software.loss_bytes, 2 * software.precision.activation)
    if software.on_host or math.isinf(most):
        return kept + number * np.minimum(entries, most) + np.where(entries > most, 4.0 * matrix, 0.0)
    number, part = 3 * software.precision.activation, software.precision.activation * matrix
    slices = entries // most
    last = entries - slices * most
    moments = (
        number * np.minimum(entries, most) + np.maximum(slices - 1, 0) * part,
        number * last + slices * part,
        software.precision.activation * last + (slices + 1) * part,
    )
    return kept + np.where(slices > 0, np.maximum.reduce(np.broadcast_arrays(*moments)), moments[0])


def device_terms(work: Work, layouts: Layouts, software: Software, place: int = 0) -> dict[str, Number]:
    """Bytes on the chip, by term, of the process at this place among those of `layers_on`: 0 the first, -1 the last."""
    config, numbers, alone = work.config, software.precision, layouts.pipeline == 1
    at = place if layouts.split else None
    held, owned = layouts.held_parameters(config, at), layouts.owned_parameters(config, software, at)
    experts, others = layer_parameters(config)
    block = others / layouts.tensor + experts / layouts.expert
    rest = (config.parameter_count() - config.block_count * (experts + others)) / layouts.tensor
    gathered = rest + software.gathered_blocks * block
    behind = layouts.pipeline - 1 - place if place >= 0 else 0
    flying = np.where(alone, 1.0, micro_batches_in_flight(work, layouts, software, behind))
    tokens = share_of(work, layouts).tokens
    hidden = config.width * tokens / (layouts.tensor if software.sequence_parallel else 1)
    activations = sum(activation_bytes(work, layouts, software).values())
    activations = layouts.layers_on(config)[place] * activations * flying
    logits = loss_bytes(work, layouts, software, tokens) + 2 * numbers.activation * hidden
    logits = np.where(alone | (np.asarray(behind) == 0), logits, 0.0)
    streamed, offload = (layouts.sharding == 3) & alone, np.asarray(layouts.offload) > 0
    several = work.micro_batches(layouts) > 1
    copied = numbers.master + numbers.moments + numbers.weight * (numbers.master == 0)
    saved = software.on_host * owned * copied
    return state_terms(config, layouts, numbers, held, owned) | {
        "gathered weights": np.where(streamed, gathered * numbers.sent, 0.0),
        "reduced gradients": np.where(streamed & several, rest * numbers.reduced, 0.0),
        "activations": activations,
        "layer at work": layer_at_work(work, layouts, software),
        "tables": np.where(alone | (place == 0), software.dropout * hidden * flying, 0.0),
        "logits": logits,
        "heap holes": HEAP_HOLES * software.on_host * (activations + logits),
        "pipeline buffers": np.where(alone, 0.0, 2 * numbers.sent * hidden),
        "update buffers": np.where(offload, 0.0, np.minimum(owned, 2**28) * software.update_bytes),
        "checkpoint copy": saved * software.saves_between,
        "evaluated": evaluation_bytes(work, layouts, software),
        "scored model": scored_model_bytes(work, layouts, software) * (place == 0),
        "last checkpoint": saved * (not software.saves_between),
        "runtime": software.runtime_bytes + 0.0 * held,
    }


def peak_bytes(terms: dict[str, Number]) -> Number:
    """The worst moment of a step."""
    moments = [sum(terms[name] for name in names) for names in MOMENTS.values()]
    return np.maximum.reduce(np.broadcast_arrays(*moments))


def needed_bytes(work: Work, layouts: Layouts, software: Software) -> Number:
    """Bytes that the fullest process needs on its chip; where the chip is the host, with what offload puts there."""
    places = range(len(layouts.split)) if layouts.split else (0, -1)
    peaks = [peak_bytes(device_terms(work, layouts, software, place)) for place in places]
    on_host = sum(host_terms(work, layouts, software).values()) if software.on_host else 0.0
    return np.maximum.reduce(np.broadcast_arrays(*peaks)) + on_host


def stage_memory(
    work: Work, layouts: Layouts, software: Software, moments_of: Sequence[str] = tuple(MOMENTS)
) -> list[dict[str, Any]]:
    """Of the first and the last process, or all of a given split: bytes by term, sums at every moment, the worst."""
    found, places = [], {0: "first"} | ({-1: "last"} if layouts.pipeline > 1 else {})
    if layouts.split:
        places = {place: f"process {place}" for place in range(len(layouts.split))}
    for place, stage in places.items():
        terms = {name: float(size) for name, size in device_terms(work, layouts, software, place).items()}
        moments = {moment: sum(terms[name] for name in MOMENTS[moment]) for moment in moments_of}
        peak = max(moments, key=lambda moment: moments[moment])
        found.append({"stage": stage, "terms": terms, "moments": moments, "peak": peak})
    return found


def worst_terms(
    work: Work, layouts: Layouts, software: Software, moments: Sequence[str] = tuple(MOMENTS)
) -> dict[str, int]:
    """Bytes by term of the fullest process of one layout at its worst moment; their sum is what is predicted."""
    stages = stage_memory(work, layouts, software, moments)
    stage = max(stages, key=lambda stage: max(stage["moments"].values()))
    terms = {name: stage["terms"][name] for name in MOMENTS[stage["peak"]]}
    if software.on_host:
        for name, size in host_terms(work, layouts, software).items():
            terms[name] = terms.get(name, 0.0) + float(size)
    return {name: round(size) for name, size in terms.items() if size}


def capacity_bytes(memory_gib: float) -> float:
    """What of a chip's memory can be used."""
    return memory_gib * 2**30 * (1 - FRAGMENTATION)


def host_terms(
    work: Work, layouts: Layouts, software: Software, owned: Number | None = None
) -> dict[str, Number]:
    """Bytes by term that offload keeps in the host's memory for one process, of the `owned` parameters that it updates
    14 each (Ren et al. 2021, figure 1), and fp32 gradients: of a block, of all for one process with micro-batches.
    """
    numbers, offload, config = software.precision, np.asarray(layouts.offload) > 0, work.config
    owned = np.where(offload, layouts.owned_parameters(config, software) if owned is None else owned, 0.0)
    master = numbers.master or numbers.weight
    summed = (layouts.world == 1) & (work.rows > layouts.data * layouts.micro_rows)
    block = sum(layer_parameters(config))
    unit = max(block, config.parameter_count() - config.block_count * block) / layouts.tensor / layouts.shards
    unit = np.where(offload, unit, 0.0)
    return {
        "master weights": owned * master,
        "optimizer": owned * numbers.moments,
        "transfer buffers": owned * numbers.activation,
        "gradient sums": np.where(summed, owned * master, 0.0),
        "update scratch": np.where(~np.asarray(summed) & (numbers.master > 0), unit * master, 0.0),
    }


def terms_beside_gpu(work: Work, layouts: Layouts, software: Software) -> dict[str, int]:
    """Bytes by term that a process on a GPU takes of the host: offload's, a checkpoint's copy, its own."""
    saved = device_terms(work, layouts, dataclasses.replace(software, on_host=True))
    terms = host_terms(work, layouts, software) | {
        "checkpoint copy": saved["checkpoint copy"] + saved["last checkpoint"],
        "runtime": PROCESSOR_RUNTIME_BYTES,
    }
    return {name: round(float(size)) for name, size in terms.items() if size}
