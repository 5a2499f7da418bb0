"""Step time of a layout: kernels, collectives and the pipeline put together, with a breakdown that sums exactly.

Everything is arithmetic on numbers or arrays, so one call prices one layout or a hundred thousand.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..models.config import BERTConfig, ModelConfig
from .collectives import all_reduce, gather, hop, ring_sends
from .constants import FITTED, Constants
from .hardware import Cluster
from .kernels import Kernel, Share, head_kernels, layer_kernels, table_kernels
from .schedule import given_bubble
from .software import Precision, Software
from .tables import BUCKET_BYTES, is_tied
from .traffic import context_sends, data_passes, partial_parameters, passed_bytes, tensor_sends
from .work import Layouts, Work, held_parameters, layers_on, owned_parameters

Number = Any
PARTS = (
    "matrix products",
    "attention",
    "memory-bound kernels",
    "host issue",
    "tensor",
    "context",
    "pipeline sends",
    "bubble",
    "data exposed",
    "offload exposed",
    "optimizer",
    "step overhead",
)


def step_seconds(
    work: Work, layouts: Layouts, cluster: Cluster, software: Software, constants: Constants = FITTED
) -> float:
    """The step time of one layout."""
    return float(sum(step_time(work, layouts, cluster, software, constants).values()))


def kernel_times(
    kernels: Iterable[Kernel], cluster: Cluster, software: Software, constants: Constants
) -> dict:
    """Seconds by (phase, kind), and of the attention core alone under ("forward", "core")."""
    peak, bandwidth = (
        peak_flops(cluster, software),
        cluster.chip.bandwidth_gb_s * 1e9 * constants.memory_fraction,
    )
    vector = software.precision.compute in ("fp32", "fp64")
    large = constants.vector_fraction if vector else 1.0
    times: dict[tuple[str, str], Number] = {
        (phase, kind): 0.0
        for phase in ("forward", "backward")
        for kind in ("product", "attention", "memory", "core")
    }
    for kernel in kernels:
        fraction = constants.attention_fraction if kernel.kind == "attention" else large
        slowed = (
            1.0
            if kernel.kind == "attention"
            else 1 + constants.product_inner * peak / 1e12 / np.maximum(kernel.inner, 1)
        )
        busy = kernel.flops * slowed / (peak * fraction)
        time = np.maximum(busy, kernel.bytes / bandwidth) + kernel.launches * constants.launch_s
        times[kernel.phase, kernel.kind] = times[kernel.phase, kernel.kind] + time
        if kernel.core:
            times["forward", "core"] = times["forward", "core"] + time
    return times


def kernel_totals(
    work: Work, layouts: Layouts, cluster: Cluster, software: Software, constants: Constants = FITTED
) -> dict[str, dict[str, float]]:
    """Seconds, FLOPs, bytes and launches of the kernels of one step on the first process of one layout, by kind."""
    share = Share(layouts.micro_rows, work.length * work.fill, layouts.tensor, layouts.context)
    layers, micro_batches = (
        float(layers_on(work.config, layouts)[0]),
        work.rows / (layouts.data * layouts.micro_rows),
    )
    totals = {
        kind: dict.fromkeys(("seconds", "flops", "bytes", "launches"), 0.0)
        for kind in ("product", "attention", "memory")
    }
    lists = [
        (layers, layer_kernels(work.config, share, software)),
        (1.0, table_kernels(work.config, share, software)),
    ]
    if layouts.pipeline == 1:
        lists.append(
            (1.0, head_kernels(work.config, share, software, share.tokens * targets(work, software)))
        )
    for index, (count, kernels) in enumerate(lists):
        for kernel in kernels:
            again = (
                kernel.phase == "forward"
                and index == 0
                and (layouts.recompute == 2 or (layouts.recompute == 1 and kernel.core))
            )
            times = count * micro_batches * (2 if again else 1)
            spent = kernel_times([kernel], cluster, software, constants)[kernel.phase, kernel.kind]
            for name, value in (
                ("seconds", spent),
                ("flops", kernel.flops),
                ("bytes", kernel.bytes),
                ("launches", kernel.launches),
            ):
                totals[kernel.kind][name] += float(times * value)
    moved = (
        float(held_parameters(work.config, layouts)) * software.pass_bytes * micro_batches
    )  # casts, gradients added up
    totals["memory"]["bytes"] += moved
    totals["memory"]["seconds"] += moved / (cluster.chip.bandwidth_gb_s * 1e9 * constants.memory_fraction)
    return totals


def peak_flops(cluster: Cluster, software: Software) -> float:
    """FLOP/s of the best large product: the peak, and on tensor cores the share that the chip was seen to reach."""
    chip, dtype = cluster.chip, software.precision.compute
    tflops = chip.tflops.get(dtype) or chip.tflops.get("fp32") or max(chip.tflops.values())
    return tflops * 1e12 * (1.0 if dtype in ("fp32", "fp64") else chip.achieved)


def step_time(
    work: Work, layouts: Layouts, cluster: Cluster, software: Software, constants: Constants = FITTED
) -> dict[str, Number]:
    """Seconds of one optimizer step by part (`PARTS`); their sum is the step time."""
    config, full = work.config, layouts.recompute == 2
    share = Share(layouts.micro_rows, work.length * work.fill, layouts.tensor, layouts.context)
    micro_batches = work.rows / (layouts.data * layouts.micro_rows)
    bandwidth = cluster.chip.bandwidth_gb_s * 1e9 * constants.memory_fraction
    lists = (
        layer_kernels(config, share, software),
        table_kernels(config, share, software),
        head_kernels(config, share, software, share.tokens * targets(work, software)),
    )
    layer, table, head = (kernel_times(kernels, cluster, software, constants) for kernels in lists)
    slowest = layers, has_tables, has_head = slowest_process(
        config, layouts, *map(sum_of, (layer, table, head))
    )

    def of(kind: str) -> Number:
        """Seconds of one micro-batch on the slowest process."""
        per_layer = layer["forward", kind] * (1 + full) + layer["backward", kind]
        ends = [times["forward", kind] + times["backward", kind] for times in (table, head)]
        return layers * per_layer + has_tables * ends[0] + has_head * ends[1]

    core = of("attention") + np.where(layouts.recompute == 1, layers * layer["forward", "core"], 0.0)
    one = {
        "matrix products": of("product"),
        "attention": core,
        "memory-bound kernels": of("memory")
        + held_parameters(config, layouts) * software.pass_bytes / bandwidth,
    }
    busy = sum(one.values())
    issue = layers * (2 + full) * constants.issue_s * np.where(layouts.tensor > 1, 1.25, 1.0)
    one["host issue"] = issue if software.drains_queue else np.maximum(issue - busy, 0.0)
    machine = cluster, software, constants
    one["tensor"] = tensor_time(work, layouts, *machine, *slowest)
    one["context"] = np.maximum(
        layers * context_time(work, layouts, *machine) - constants.overlap * core, 0.0
    )
    one["pipeline sends"] = hop_time(work, layouts, *machine)
    spent = sum(one.values())
    per_layer = (spent - has_head * sum_of(head)) / layers
    backward = spent * (1 + full) / (2 + full)
    parts = {name: micro_batches * value for name, value in one.items()}
    parts["tensor"] = parts["tensor"] + partial_time(work, layouts, *machine)
    parts["pipeline sends"] = parts["pipeline sends"] + tied_time(work, layouts, *machine)
    parts["bubble"] = bubble_time(work, layouts, spent, per_layer, sum_of(table), sum_of(head))
    parts["data exposed"] = data_time(work, layouts, *machine, micro_batches, spent, backward)
    parts |= update_times(work, layouts, *machine, backward)
    parts["step overhead"] = STEP_LAYERS * constants.issue_s + 0.0 * micro_batches
    return {name: parts[name] for name in PARTS}


def slowest_process(
    config: ModelConfig, layouts: Layouts, layer: Number, table: Number, head: Number
) -> tuple[Number, Number, Number]:
    """Layers of the process of a pipeline that takes longest for a micro-batch, and whether it has the tables and the
    head, by the seconds of each of them.
    """
    first, *between, last = layers_on(config, layouts)
    middle, alone = max(between, default=0), layouts.pipeline == 1
    starts, ends = first * layer + table, last * layer + head
    at_end = ends > np.maximum(starts, middle * layer)
    at_start = ~at_end & (starts >= middle * layer)
    return np.where(at_end, last, np.where(at_start, first, middle)), at_start | alone, at_end | alone


def bubble_time(
    work: Work, layouts: Layouts, spent: Number, layer: Number, table: Number, head: Number
) -> Number:
    """Seconds that the slowest process waits in a step: m t_max + (sum t - t_max) / v (Narayanan et al. 2021, section
    2.2, for stages that differ) less what it works; for a given split by simulating the lists that run.
    """
    if layouts.given is not None:
        micro_batches, forward = (
            round(work.rows / (layouts.data * layouts.micro_rows)),
            2 + (layouts.recompute == 2),
        )
        return given_bubble(
            layouts.given, float(layer), (float(table), float(head)), micro_batches, 1 / forward
        )
    whole = layer * work.config.layers + head
    return np.where(layouts.pipeline > 1, np.maximum(whole - spent, 0.0) / layouts.turns, 0.0)


def update_times(
    work: Work, layouts: Layouts, cluster: Cluster, software: Software, constants: Constants, backward: Number
) -> dict[str, Number]:
    """Seconds of the optimizer, on the chip or on the host, and what of the way there and back no backward hides."""
    owned, offloaded = owned_parameters(work.config, layouts), np.asarray(layouts.offload) > 0
    numbers = software.precision
    bandwidth = cluster.chip.bandwidth_gb_s * 1e9 * constants.memory_fraction
    updated = owned * software.optimizer_bytes
    moved = owned * (numbers.gradient + numbers.weight) / (cluster.host_gb_s * 1e9)
    exposed = np.maximum(moved - constants.overlap * backward, 0.1 * moved)
    return {
        "optimizer": np.where(offloaded, updated / HOST_UPDATE_BYTES_PER_S, updated / bandwidth),
        "offload exposed": np.where(offloaded, exposed, 0.0),
    }


STEP_LAYERS = 8  # the host's work for one update is that of issuing so many layers
HOST_UPDATE_BYTES_PER_S = 36 / 0.26e-9  # CPU-Adam: 0.26 s for 1e9 parameters [2101.06840, table 4 as quoted]


def sum_of(times: dict) -> Number:
    """Seconds of forward and backward of a list's times."""
    return sum(value for (_, kind), value in times.items() if kind != "core")


def targets(work: Work, software: Software) -> float:
    """Share of positions that get logits."""
    return 1.0 if software.every_logit or not isinstance(work.config, BERTConfig) else work.predicted


def tensor_time(
    work: Work,
    layouts: Layouts,
    cluster: Cluster,
    software: Software,
    constants: Constants,
    layers: Number,
    tables: Number,
    head: Number,
) -> Number:
    """Seconds of a micro-batch's traffic over the tensor axis on a process with these layers."""
    tokens = layouts.micro_rows * work.length * work.fill / layouts.context
    aimed, again = tokens * targets(work, software), layouts.recompute == 2
    seconds: Number = 0.0
    for kind, calls, size in tensor_sends(
        work.config, software, tokens, aimed, layers, 1 * tables, 1 * head, 1 * again
    ):
        price = all_reduce if kind == "all-reduce" else gather
        seconds = seconds + price(size, layouts.tensor, 1, cluster, constants, calls)
    return seconds * (1 - constants.overlap * software.overlap_tensor)


def partial_time(
    work: Work, layouts: Layouts, cluster: Cluster, software: Software, constants: Constants
) -> Number:
    """Seconds of the gradients that our engine sums over the tensor axis once a step, on a process with the tables."""
    if software.layer_sums:
        return 0.0 * layouts.tensor
    layer, first, last = partial_parameters(work.config)
    count = layers_on(work.config, layouts)[0] * layer + first + last * (layouts.pipeline == 1)
    return all_reduce(
        count * summed_number(layouts, software.precision), layouts.tensor, 1, cluster, constants
    )


def context_time(
    work: Work, layouts: Layouts, cluster: Cluster, software: Software, constants: Constants
) -> Number:
    """Seconds of one layer's and micro-batch's sends round the ring of the context axis."""
    tokens = layouts.micro_rows * work.length * work.fill / layouts.context
    again = 1 * (layouts.recompute > 0)
    sent = context_sends(work.config, software.precision, tokens, layouts.tensor, layouts.context, again)
    calls, size = sum(calls for _, calls, _ in sent), sum(size for *_, size in sent)
    return ring_sends(size, layouts.context, layouts.tensor, cluster, constants, calls)


def hop_time(
    work: Work, layouts: Layouts, cluster: Cluster, software: Software, constants: Constants
) -> Number:
    """Seconds of a micro-batch's sends between stages, one forward and one backward for each turn."""
    tokens = layouts.micro_rows * work.length * work.fill / layouts.context
    size = passed_bytes(work.config, software, tokens, layouts.tensor)
    stride = layouts.tensor * layouts.context * layouts.data
    return np.where(layouts.pipeline > 1, 2 * layouts.turns * hop(size, stride, cluster, constants), 0.0)


def summed_number(layouts: Layouts, numbers: Precision) -> Number:
    """Bytes of a gradient that copies sum: with offload those of a weight."""
    return np.where(np.asarray(layouts.offload) > 0, numbers.weight, numbers.reduced)


def tied_time(
    work: Work, layouts: Layouts, cluster: Cluster, software: Software, constants: Constants
) -> Number:
    """Seconds of the sum of a tied table's gradients over the two ends of a pipeline."""
    table = (
        is_tied(work.config) * work.config.vocab_size * work.config.width / layouts.tensor / layouts.shards
    )
    stride = layouts.tensor * layouts.context * layouts.data
    ends = np.where(layouts.pipeline > 1, 2, 1)
    return all_reduce(
        table * summed_number(layouts, software.precision),
        ends,
        stride * (layouts.pipeline - 1),
        cluster,
        constants,
    )


def data_time(
    work: Work,
    layouts: Layouts,
    cluster: Cluster,
    software: Software,
    constants: Constants,
    micro_batches: Number,
    spent: Number,
    backward: Number,
) -> Number:
    """Exposed seconds of gradients and sharded weights over the data axis.

    Gradients hide behind the backwards after which they are summed, gathered weights behind a forward; where every
    weight is gathered for each micro-batch, all of it behind the whole step.
    """
    if software.one_ring:
        cluster = dataclasses.replace(cluster, ports_per_node=1)
    config, numbers, shards = work.config, software.precision, layouts.shards
    held, layers = held_parameters(config, layouts), layers_on(config, layouts)[0]
    in_layers = layers * config.block_parameters() / layouts.tensor
    per_layer, per_rest, sums = data_passes(layouts.sharding, layouts.pipeline, micro_batches)
    weights = (per_layer * in_layers + per_rest * (held - in_layers)) * numbers.sent
    gradients = sums * held * np.where(shards > 1, numbers.reduced, summed_number(layouts, numbers))
    buckets = np.ceil(gradients / BUCKET_BYTES) if software.overlap_data else 1
    near, apart = (shards, layouts.tensor), (layouts.data * layouts.context / shards, layouts.tensor * shards)
    machine = cluster, constants
    back = gather(weights, *near, *machine, per_layer * layers + per_rest)
    summed = gather(gradients, *near, *machine, sums * (layers + 1))
    summed = summed + all_reduce(
        gradients / shards, *apart, *machine, np.where(shards > 1, sums * (layers + 1), buckets)
    )
    hides = constants.overlap * software.overlap_data
    exposed = np.maximum(summed - hides * backward * sums, 0.0) + np.maximum(
        back - hides * (spent - backward), 0.0
    )
    streamed, total = back + summed, micro_batches * spent
    full = np.maximum(
        streamed - constants.overlap * total, (1 - constants.overlap) * np.minimum(streamed, total)
    )
    return np.where((layouts.pipeline == 1) & (layouts.sharding == 3), full, exposed)
