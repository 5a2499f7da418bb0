"""Step time of a layout: kernels, collectives and the pipeline put together, with a breakdown that sums exactly.

Everything is arithmetic on numbers or arrays, so one call prices one layout or a hundred thousand.
"""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..models.config import ModelConfig
from . import traffic
from .collectives import all_reduce, all_to_all, gather, hop, ring_sends
from .hardware import Cluster
from .kernels import Kernel, head_kernels, layer_kernels, share_of, table_kernels
from .schedule import given_bubble
from .tables import BUCKET_BYTES, table_at_ends
from .work import NARROW, Layouts, Number, Software, Work, has_experts, layer_parameters


def step_time(work: Work, layouts: Layouts, cluster: Cluster, software: Software) -> dict[str, Number]:
    """Seconds of one optimizer step by part; their sum is the step time."""
    return Step(work, layouts, cluster, software).parts()


def step_seconds(work: Work, layouts: Layouts, cluster: Cluster, software: Software) -> float:
    """The step time of one layout."""
    return float(sum(step_time(work, layouts, cluster, software).values()))


def kernel_times(kernels: Iterable[Kernel], cluster: Cluster, software: Software) -> dict:
    """Seconds by (phase, kind), and of the attention core alone under ("forward", "core")."""
    constants = cluster.constants
    peaks = [peak_flops(cluster, dtype) for dtype in (software.precision.compute, software.precision.narrow)]
    bandwidth, vector = memory_bandwidth(cluster), software.precision.compute in ("fp32", "fp64")
    names = software.attention_speed.items()
    speed = next((speed for name, speed in names if cluster.chip.key.startswith(name)), 1.0)
    large: Number = constants.vector_fraction if vector else 1.0
    cells = itertools.product(("forward", "backward"), ("product", "attention", "memory", "core"))
    times: dict[tuple[str, str], Number] = dict.fromkeys(cells, 0.0)
    for kernel in kernels:
        peak = peaks[1] if kernel.narrow and software.precision.narrow else peaks[0]
        if kernel.kind == "attention":
            fraction, slowed = constants.attention_fraction * speed, 1.0
        else:
            fraction = large * np.where(kernel.one_by_one, constants.expert_fraction, 1.0)
            slowed = 1 + constants.product_inner * peak / 1e12 / np.maximum(kernel.inner, 1)
        busy = kernel.flops * slowed / (peak * fraction)
        time = np.maximum(busy, kernel.bytes / bandwidth) + kernel.launches * constants.launch_s
        times[kernel.phase, kernel.kind] = times[kernel.phase, kernel.kind] + time
        if kernel.core:
            times["forward", "core"] = times["forward", "core"] + time
    return times


def kernel_totals(
    work: Work, layouts: Layouts, cluster: Cluster, software: Software
) -> dict[str, dict[str, float]]:
    """Seconds, FLOPs, bytes and launches of the kernels of one step on the first process of one layout, by kind."""
    step = Step(work, layouts, cluster, software)
    names = ("seconds", "flops", "bytes", "launches")
    totals = {kind: dict.fromkeys(names, 0.0) for kind in ("product", "attention", "memory")}
    counts = float(layouts.layers_on(work.config)[0]), 1.0, float(layouts.pipeline == 1)
    for index, (count, kernels) in enumerate(zip(counts, step.kernels(), strict=True)):
        for kernel in kernels:
            recomputed = layouts.recompute == 2 or (layouts.recompute == 1 and kernel.core)
            again = kernel.phase == "forward" and index == 0 and recomputed
            times = count * step.micro_batches * (2 if again else 1)
            spent = kernel_times([kernel], cluster, software)[kernel.phase, kernel.kind]
            for name, value in zip(names, (spent, kernel.flops, kernel.bytes, kernel.launches), strict=True):
                totals[kernel.kind][name] += float(times * value)
    # casts, gradients added up
    moved = float(layouts.held_parameters(work.config)) * software.pass_bytes * step.micro_batches
    totals["memory"]["bytes"] += moved
    totals["memory"]["seconds"] += moved / memory_bandwidth(cluster)
    return totals


def peak_flops(cluster: Cluster, dtype: str) -> float:
    """FLOP/s of the best large product: the peak, and on tensor cores the share that the chip was seen to reach."""
    chip = cluster.chip
    tflops = chip.tflops.get(dtype) or chip.tflops.get("fp32") or max(chip.tflops.values())
    achieved = (dtype in NARROW and chip.achieved_fp8) or chip.achieved
    return tflops * 1e12 * (1.0 if dtype in ("fp32", "fp64") else achieved)


def memory_bandwidth(cluster: Cluster) -> float:
    """Bytes per second of the chip's memory that element-wise kernels reach."""
    return cluster.chip.bandwidth_gb_s * 1e9 * cluster.constants.memory_fraction


def sum_of(times: dict) -> Number:
    """Seconds of forward and backward of a list's times."""
    return sum(value for (_, kind), value in times.items() if kind != "core")


STEP_LAYERS = 8  # the host's work for one update is that of issuing so many layers
HOST_UPDATE_BYTES_PER_S = 36 / 0.26e-9  # CPU-Adam: 0.26 s for 1e9 parameters [2101.06840, table 4 as quoted]


@dataclass(frozen=True)
class Step:
    """One optimizer step of layouts on a machine, with what the price of each of its parts depends on."""

    work: Work
    layouts: Layouts
    cluster: Cluster
    software: Software

    @property
    def config(self) -> ModelConfig:
        return self.work.config

    @property
    def micro_batches(self) -> Number:
        return self.work.micro_batches(self.layouts)

    @property
    def tokens(self) -> Number:
        """Of a micro-batch on one process."""
        return share_of(self.work, self.layouts).tokens

    @property
    def stride(self) -> Number:
        """Ranks from a pipeline stage to the next."""
        return self.layouts.tensor * self.layouts.context * self.layouts.data

    @property
    def summed_number(self) -> Number:
        """Bytes of a gradient that copies sum: with offload those of a weight."""
        numbers = self.software.precision
        return np.where(np.asarray(self.layouts.offload) > 0, numbers.weight, numbers.reduced)

    def kernels(self) -> tuple[list[Kernel], list[Kernel], list[Kernel]]:
        """Of one micro-batch and process: those of a layer, of the tables and of the head."""
        share, software = share_of(self.work, self.layouts), self.software
        return (
            layer_kernels(self.config, share, software),
            table_kernels(self.config, share, software),
            head_kernels(self.config, share, software, share.tokens * self.work.targets(software)),
        )

    def times(self) -> tuple[dict, dict, dict]:
        """Of the three lists of `kernels`."""
        layer, table, head = (kernel_times(each, self.cluster, self.software) for each in self.kernels())
        return layer, table, head

    def parts(self) -> dict[str, Number]:
        """Seconds by part."""
        layouts, software, constants = self.layouts, self.software, self.cluster.constants
        full, selective, count = layouts.recompute == 2, layouts.recompute == 1, self.micro_batches
        saved = software.saves_products  # else selective recomputation repeats the attention core alone
        repeated = {"product": (1 - saved) * (saved > 0), "memory": 1.0 * (saved > 0), "attention": 0.0}
        layer, table, head = self.times()
        of_parts = sum_of(layer), sum_of(table), sum_of(head)
        slowest = layers, has_tables, has_head = slowest_process(self.config, layouts, *of_parts)

        def of(kind: str) -> Number:
            """Seconds of one micro-batch on the slowest process."""
            passes = 1 + full + repeated[kind] * selective
            per_layer = layer["forward", kind] * passes + layer["backward", kind]
            ends = [times["forward", kind] + times["backward", kind] for times in (table, head)]
            return layers * per_layer + has_tables * ends[0] + has_head * ends[1]

        core = of("attention") + (selective & (saved == 0)) * layers * layer["forward", "core"]
        streamed = (layouts.sharding == 3) & (layouts.pipeline == 1)
        held = layouts.held_parameters(self.config)
        passed = np.where(streamed, held / layouts.shards, held) * software.pass_bytes
        one = {
            "matrix products": of("product"),
            "attention": core,
            "memory-bound kernels": of("memory") + passed / memory_bandwidth(self.cluster),
        }
        busy = sum(one.values())
        issue, expert = layers * (2 + full) * self.issue_time(), self.expert_time(layers, busy)
        one["host issue"] = issue if software.drains_queue else np.maximum(issue - busy - expert, 0.0)
        one["tensor"] = self.tensor_time(*slowest)
        one["context"] = np.maximum(layers * self.context_time() - constants.overlap * core, 0.0)
        one["expert"] = expert
        one["pipeline sends"] = self.hop_time()
        spent = sum(one.values())
        per_layer = (spent - has_head * of_parts[2] - has_tables * of_parts[1]) / np.maximum(layers, 1)
        backward = spent * (1 + full) / (2 + full)
        parts = {name: count * value for name, value in one.items()}
        parts["tensor"] = parts["tensor"] + self.partial_time()
        parts["pipeline sends"] = parts["pipeline sends"] + self.tied_time()
        parts["bubble"] = self.bubble_time(spent, per_layer, *of_parts[1:])
        parts["data exposed"] = self.data_time(spent, backward)
        parts |= self.update_times(backward)
        parts["step overhead"] = STEP_LAYERS * constants.issue_s + 0.0 * count
        return parts

    def bubble_time(self, spent: Number, layer: Number, table: Number, head: Number) -> Number:
        """Seconds that the slowest process waits in a step (Narayanan et al. 2021, section 2.2, but uneven stages)."""
        layouts = self.layouts
        if layouts.given is not None:  # by simulating the lists that run
            forward = 1 / (2 + (layouts.recompute == 2))
            head = head + layer * self.config.blocks_ahead
            ends, count = (float(table), float(head)), round(self.micro_batches)
            return given_bubble(layouts.given, float(layer), ends, count, forward)
        first = np.where(layouts.turns == 1, table, 0.0)  # some percent of the bubble when interleaved
        whole = layer * self.config.block_count + first + head
        return np.where(layouts.pipeline > 1, np.maximum(whole - spent, 0.0) / layouts.turns, 0.0)

    def update_times(self, backward: Number) -> dict[str, Number]:
        """Seconds of the optimizer, on the chip or the host, and what of the way there and back no backward hides."""
        owned = self.layouts.owned_parameters(self.config, self.software)
        numbers = self.software.precision
        offloaded = np.asarray(self.layouts.offload) > 0
        updated, bandwidth = owned * self.software.optimizer_bytes, memory_bandwidth(self.cluster)
        moved = owned * (numbers.gradient + numbers.weight) / (self.cluster.host_gb_s * 1e9)
        exposed = np.maximum(moved - self.cluster.constants.overlap * backward, 0.1 * moved)
        layers = self.layouts.layers_on(self.config)[0]
        # every holder of a part of a matrix computes Muon's iterations on the whole
        matrices = self.config.block_matrix_parameters()
        matrices = matrices + layer_parameters(self.config)[0] / self.layouts.expert
        iterated = layers * matrices * self.software.orthogonal_flops
        once = np.where(offloaded, updated / HOST_UPDATE_BYTES_PER_S, updated / bandwidth)
        return {
            "offload exposed": np.where(offloaded, exposed, 0.0),
            "optimizer": once + iterated / peak_flops(self.cluster, numbers.compute),
        }

    def tensor_time(self, layers: Number, tables: Number, head: Number) -> Number:
        """Seconds of a micro-batch's traffic over the tensor axis on a process with these layers."""
        aimed, again = self.tokens * self.work.targets(self.software), 1.0 * (self.layouts.recompute == 2)
        if self.software.saves_products:  # half of the gathers are for products that are repeated
            again = again + 0.5 * (self.layouts.recompute == 1)
        ahead = self.config.blocks_ahead
        ends = 1 * tables + ahead * head, (1 + ahead) * head, 1 * again
        seconds: Number = 0.0
        for kind, calls, size in traffic.tensor_sends(
            self.config, self.software, self.tokens, aimed, layers, *ends
        ):
            price = all_reduce if kind == "all-reduce" else gather
            seconds = seconds + price(size, self.layouts.tensor, 1, self.cluster, calls)
        return seconds * (1 - self.cluster.constants.overlap * self.software.overlap_tensor)

    def partial_time(self) -> Number:
        """Seconds of the gradients that our engine sums over the tensor axis once a step, beside the tables."""
        layouts = self.layouts
        if self.software.layer_sums:
            return 0.0 * layouts.tensor
        layer, first, last = traffic.partial_parameters(self.config)
        layer = layer + layer_parameters(self.config)[0] / layouts.expert
        count = layouts.layers_on(self.config)[0] * layer + first + last * (layouts.pipeline == 1)
        return all_reduce(count * self.summed_number, layouts.tensor, 1, self.cluster)

    def context_time(self) -> Number:
        """Seconds of the mean layer's and a micro-batch's keys and values over the context axis."""
        degrees, again = (self.layouts.tensor, self.layouts.context), 1 * (self.layouts.recompute > 0)
        found: Any = traffic.context_sends(self.config, self.software.precision, self.tokens, *degrees, again)
        calls, sizes = ({kind: sum(one[i] for one in sent) for kind, sent in found.items()} for i in (2, 3))
        axis, near = (*degrees[::-1], self.cluster), self.config.windowed_layers / self.config.block_count
        ring = ring_sends(sizes["g"], *axis, calls["g"])
        return ring if not near else ring * (1 - near) + near * gather(sizes["l"], *axis, calls["l"])

    def issue_time(self) -> Number:
        """Seconds of the host to issue the mean layer forward, less what graphs issue at once."""
        software, one_by_one = self.software, not self.software.fused_experts
        experts = has_experts(self.config) * one_by_one * self.cluster.constants.expert_issue_s
        layer = self.cluster.constants.issue_s * np.where(self.layouts.tensor > 1, 1.25, 1.0)
        return (layer * (not software.graphed) + experts) * (software.graphed != "step")

    def expert_time(self, layers: Number, busy: Number) -> Number:
        """Exposed seconds of a micro-batch's exchange of rows with the processes of their experts."""
        layouts, again = self.layouts, 1 * (self.layouts.recompute == 2)
        numbers, tensor = self.software.precision, layouts.tensor
        calls, size = traffic.expert_sends(self.config, numbers, self.tokens, tensor, again)
        # other programs count the tensor ranks among those that share the experts
        stride = 1 if self.software.layer_sums else tensor * layouts.context
        copies = getattr(self.config, "experts_per_token", 0) * self.software.rows_once
        seconds = layers * all_to_all(size, layouts.expert, stride, self.cluster, calls, copies)
        hidden = self.cluster.constants.expert_overlap * self.software.overlap_experts * busy
        return np.maximum(seconds - hidden, 0.0)

    def hop_time(self) -> Number:
        """Seconds of a micro-batch's sends between stages, one forward and one backward for each turn."""
        layouts = self.layouts
        size = traffic.passed_bytes(self.config, self.software, self.tokens, layouts.tensor)
        seconds = hop(size, self.stride, self.cluster)
        return np.where(layouts.pipeline > 1, 2 * layouts.turns * seconds, 0.0)

    def tied_time(self) -> Number:
        """Seconds of the sum of a token table's gradients over the two ends of a pipeline."""
        config, layouts = self.config, self.layouts
        table = table_at_ends(config) * config.vocab_size * config.width / layouts.tensor / layouts.shards
        ends, apart = np.where(layouts.pipeline > 1, 2, 1), self.stride * (layouts.pipeline - 1)
        return all_reduce(table * self.summed_number, ends, apart, self.cluster)

    def data_time(self, spent: Number, backward: Number) -> Number:
        """Exposed seconds of gradients, behind the backwards that they follow, and of weights, behind a forward."""
        config, layouts, software = self.config, self.layouts, self.software
        count, numbers, shards = self.micro_batches, software.precision, layouts.shards
        machine, alone, overlap = self.cluster, software.one_ring, self.cluster.constants.overlap
        experts, others = layer_parameters(config)
        layers = layouts.layers_on(config)[0]
        of_experts, in_layers = layers * experts / layouts.expert, layers * others / layouts.tensor
        held = layouts.held_parameters(config) - of_experts
        per_layer, per_rest, sums = traffic.data_passes(layouts.sharding, layouts.pipeline, count)
        weights = (per_layer * in_layers + per_rest * (held - in_layers)) * numbers.sent
        number = np.where(shards > 1, numbers.reduced, self.summed_number * software.gradient_share)
        gradients = sums * held * number
        buckets = np.ceil(gradients / BUCKET_BYTES) if software.overlap_data else 1
        calls = sums * (layers + 1)
        near = shards, layouts.tensor
        apart = layouts.data * layouts.context / shards, layouts.tensor * shards
        back = gather(weights, *near, machine, per_layer * layers + per_rest, one_adapter=alone)
        summed = gather(gradients, *near, machine, calls, one_adapter=alone)
        sharded = shards > 1
        reduced = np.where(sharded, calls, buckets)
        summed = summed + all_reduce(gradients / shards, *apart, machine, reduced, one_adapter=alone)
        if experts:  # their copies are fewer
            moved = sums * of_experts * number
            axis = layouts.copies_of_experts(software), layouts.expert, machine
            sent = gather(moved, *axis, calls), all_reduce(moved, *axis, buckets)
            summed = summed + np.where(sharded, *sent)
            back = back + gather(per_layer * of_experts * numbers.sent, *axis, per_layer * layers) * sharded
        hides = overlap * software.overlap_data
        unhidden = np.maximum(summed - hides * backward * sums, 0.0)
        unhidden = unhidden + np.maximum(back - hides * (spent - backward), 0.0)
        streamed, total = back + summed, count * spent
        # every weight is gathered for each micro-batch: all behind the whole step
        full = np.maximum(streamed - overlap * total, (1 - overlap) * np.minimum(streamed, total))
        return np.where((layouts.pipeline == 1) & (layouts.sharding == 3), full, unhidden)


def slowest_process(
    config: ModelConfig, layouts: Layouts, layer: Number, table: Number, head: Number
) -> tuple[Number, Number, Number]:
    """Layers of a pipeline's slowest process, and whether it has the tables and the head, by the seconds of each."""
    first, *between, last = layouts.layers_on(config)
    middle, alone = max(between, default=0), layouts.pipeline == 1
    starts, ends = first * layer + table, last * layer + head
    at_end = ends > np.maximum(starts, middle * layer)
    at_start = ~at_end & (starts >= middle * layer)
    return np.where(at_end, last, np.where(at_start, first, middle)), at_start | alone, at_end | alone
