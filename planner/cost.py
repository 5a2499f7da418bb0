"""Step time of a layout: kernels, collectives and the pipeline put together, with a breakdown that sums exactly.

Everything is arithmetic on numbers or arrays, so one call prices one layout or a hundred thousand.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from ..models.config import BERTConfig
from .collectives import all_reduce, gather, hop
from .constants import FITTED, Constants
from .hardware import Cluster
from .kernels import Kernel, Share, head_kernels, layer_kernels, table_kernels
from .schedule import given_bubble
from .software import Software
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
    config, numbers = work.config, software.precision
    share = Share(layouts.micro_rows, work.length * work.fill, layouts.tensor, layouts.context)
    micro_batches = work.rows / (layouts.data * layouts.micro_rows)
    layer = kernel_times(layer_kernels(config, share, software), cluster, software, constants)
    head = kernel_times(
        head_kernels(config, share, software, share.tokens * targets(work, software)),
        cluster,
        software,
        constants,
    )
    table = kernel_times(table_kernels(config, share, software), cluster, software, constants)
    full, selective = layouts.recompute == 2, layouts.recompute == 1
    first, *between, last = layers_on(config, layouts)
    middle, alone = max(between, default=0), layouts.pipeline == 1
    slowest_first = first * sum_of(layer) + sum_of(table) >= middle * sum_of(layer)
    slowest_last = last * sum_of(layer) + sum_of(head) > np.maximum(
        first * sum_of(layer) + sum_of(table), middle * sum_of(layer)
    )
    layers = np.where(slowest_last, last, np.where(slowest_first, first, middle))

    def of(kind: str) -> Number:
        """Seconds of one micro-batch on the slowest process."""
        forward, backward = layer["forward", kind], layer["backward", kind]
        per_layer = forward * (1 + full) + backward
        ends = np.where(slowest_last | alone, head["forward", kind] + head["backward", kind], 0.0)
        starts = np.where(
            (slowest_first & ~slowest_last) | alone, table["forward", kind] + table["backward", kind], 0.0
        )
        return layers * per_layer + ends + starts

    parts: dict[str, Number] = dict.fromkeys(PARTS, 0.0 * micro_batches)
    products, core, pointwise = of("product"), of("attention"), of("memory")
    bandwidth = cluster.chip.bandwidth_gb_s * 1e9 * constants.memory_fraction
    pointwise = pointwise + held_parameters(config, layouts) * software.pass_bytes / bandwidth
    core = core + np.where(selective, layers * layer["forward", "core"], 0.0)
    busy = products + core + pointwise
    passes = 2 + full
    issue = layers * passes * constants.issue_s * np.where(layouts.tensor > 1, 1.25, 1.0)
    issue = issue if software.drains_queue else np.maximum(issue - busy, 0.0)
    tensor = tensor_time(work, layouts, cluster, software, constants) * layers * passes / 2
    context = context_time(work, layouts, cluster, software, constants) * layers
    hops = hop_time(work, layouts, cluster, software, constants)
    for name, value in (
        ("matrix products", products),
        ("attention", core),
        ("memory-bound kernels", pointwise),
        ("host issue", issue),
        ("tensor", tensor),
        ("context", context),
        ("pipeline sends", hops),
    ):
        parts[name] = micro_batches * value
    slowest = busy + issue + tensor + context + hops
    per_layer_all = (slowest - np.where(slowest_last | alone, sum_of(head), 0.0)) / layers
    whole = per_layer_all * config.layers + sum_of(head)
    parts["bubble"] = np.where(layouts.pipeline > 1, np.maximum(whole - slowest, 0.0) / layouts.turns, 0.0)
    if layouts.given is not None:
        ends = float(sum_of(table)), float(sum_of(head))
        parts["bubble"] = given_bubble(
            layouts.given, float(per_layer_all), ends, round(micro_batches), 1 / (2 + full)
        )
    backward = slowest * (1 + full) / passes
    parts["data exposed"] = data_time(
        work, layouts, cluster, software, constants, micro_batches, slowest, backward
    )
    owned = owned_parameters(config, layouts)
    offloaded = np.asarray(layouts.offload) > 0
    parts["optimizer"] = np.where(
        offloaded,
        owned * software.optimizer_bytes / HOST_UPDATE_BYTES_PER_S,
        owned * software.optimizer_bytes / bandwidth,
    )
    moved = owned * (numbers.gradient + numbers.weight) / (cluster.host_gb_s * 1e9)
    parts["offload exposed"] = np.where(
        offloaded, np.maximum(moved - constants.overlap * backward, 0.1 * moved), 0.0
    )
    parts["step overhead"] = STEP_LAYERS * constants.issue_s + 0.0 * micro_batches
    return parts


STEP_LAYERS = 8  # the host's work for one update is that of issuing so many layers
HOST_UPDATE_BYTES_PER_S = 36 / 0.26e-9  # CPU-Adam: 0.26 s for 1e9 parameters [2101.06840, table 4 as quoted]


def sum_of(times: dict) -> Number:
    """Seconds of forward and backward of a list's times."""
    return sum(value for (_, kind), value in times.items() if kind != "core")


def targets(work: Work, software: Software) -> float:
    """Share of positions that get logits."""
    return 1.0 if software.every_logit or not isinstance(work.config, BERTConfig) else work.predicted


def tensor_time(
    work: Work, layouts: Layouts, cluster: Cluster, software: Software, constants: Constants
) -> Number:
    """Seconds of one layer's traffic over the tensor axis, forward and backward: two sums each way
    (Shoeybi et al. 2019, section 3), or as many gathers and scatters twice over.
    """
    size = (
        layouts.micro_rows
        * work.length
        * work.fill
        / layouts.context
        * work.config.width
        * software.precision.activation
    )
    once = all_reduce(size, layouts.tensor, 1, cluster, constants)
    if software.sequence_parallel:
        once = 2 * gather(size, layouts.tensor, 1, cluster, constants)
    return 4 * once * (1 - constants.overlap * software.overlap_tensor)


def context_time(
    work: Work, layouts: Layouts, cluster: Cluster, software: Software, constants: Constants
) -> Number:
    """Seconds of one layer's traffic over the context axis: keys and values gathered, their gradients back."""
    config = work.config
    keys = np.maximum(config.key_value_heads / layouts.tensor, 1) * config.head_size
    size = 2.0 * layouts.micro_rows * work.length * work.fill * keys * software.precision.activation
    again = 1 + (layouts.recompute > 0)
    return (1 + again) * gather(size, layouts.context, layouts.tensor, cluster, constants)


def hop_time(
    work: Work, layouts: Layouts, cluster: Cluster, software: Software, constants: Constants
) -> Number:
    """Seconds of a micro-batch's sends between stages, one forward and one backward for each turn."""
    size = layouts.micro_rows * work.length * work.fill / layouts.context
    size = size / (layouts.tensor if software.split_sends else 1)
    size = size * work.config.width * software.precision.sent
    stride = layouts.tensor * layouts.context * layouts.data
    sends = 2 * layouts.turns * hop(size, stride, cluster, constants)
    return np.where(layouts.pipeline > 1, sends, 0.0)


def data_time(
    work: Work,
    layouts: Layouts,
    cluster: Cluster,
    software: Software,
    constants: Constants,
    micro_batches: Number,
    slowest: Number,
    backward: Number,
) -> Number:
    """Exposed seconds of gradients and sharded weights over the data axis.

    Copies: one sum. ZeRO-1: gradients out, weights back, the same volume at two bytes. ZeRO-2 without a pipeline
    scatters after every micro-batch; full sharding gathers every weight twice more for each.
    """
    ranks, stride = layouts.data * layouts.context, layouts.tensor
    if software.one_ring:
        cluster = dataclasses.replace(cluster, ports_per_node=1)
    held, numbers = held_parameters(work.config, layouts), software.precision
    out = gather(held * numbers.reduced, ranks, stride, cluster, constants)
    back = gather(held * numbers.sent, ranks, stride, cluster, constants)
    alone = layouts.pipeline == 1
    each = np.where(alone & (layouts.sharding >= 2), micro_batches, 1)
    summed = np.where(
        layouts.sharding == 0,
        all_reduce(held * numbers.reduced, ranks, stride, cluster, constants),
        each * out,
    )
    hidden = constants.overlap * backward * each if software.overlap_data else 0.0
    behind = constants.overlap * (slowest - backward) if software.overlap_data else 0.0
    exposed = np.maximum(summed - hidden, 0.0) + np.where(
        layouts.sharding > 0, np.maximum(back - behind, 0.0), 0.0
    )
    streamed = micro_batches * (2 * back + out)
    total = micro_batches * slowest
    full = np.maximum(
        streamed - constants.overlap * total, (1 - constants.overlap) * np.minimum(streamed, total)
    )
    return np.where(alone & (layouts.sharding == 3), full, exposed)
