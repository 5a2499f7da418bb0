"""How long collectives take: a start-up time and a bandwidth, with the ranks where they stand.

Ranks lie tensor innermost, then context, data, pipeline, and fill nodes in that order. A group inside a node runs at
the chips' links. One that crosses nodes runs at what its ranks of one node have together: data parallelism beside
tensor 8 has an eighth of the node's network, alone all of it (Narayanan et al. 2021, section 3). Bytes are those of the
whole result.
"""

import functools

import numpy as np

from .hardware import Cluster
from .work import Number


def group_bandwidth(cluster: Cluster, ranks: Number, stride: Number, one_adapter: bool = False) -> Number:
    """Bytes per second that a ring of `ranks` processes reaches, neighbours `stride` ranks apart.

    All groups of an axis send at once, so one that crosses nodes has the part of a node's network (with `one_adapter`
    of one adapter) that its ranks are of the node's chips. Measured sums are of as many neighbours as the group spans.
    """
    if cluster.sums:
        return 1e9 * measured_sum(cluster, ranks * stride, 2)
    inner, chips, span = link_bandwidth(cluster), cluster.chips_per_node, stride * ranks
    in_node = np.clip(chips // np.maximum(stride, 1), 1, ranks)
    if one_adapter:
        in_node = np.minimum(in_node, chips / (cluster.ports_per_node or chips))
    outer = np.minimum(inner, node_bandwidth(cluster, span) * in_node / chips)
    return np.where(span > chips, outer, inner)


def link_bandwidth(cluster: Cluster) -> float:
    """Bytes per second that collectives reach between the chips of a node."""
    return cluster.inner_gb_s * 1e9 * cluster.constants.link_fraction


def node_bandwidth(cluster: Cluster, span: Number) -> Number:
    """Bytes per second of a node to others, by so many neighbouring ranks; of its links where it has no network."""
    line = (cluster.node_network_gb_s or cluster.inner_gb_s * cluster.chips_per_node) * 1e9
    pod = (cluster.nodes_per_pod or np.inf) * cluster.chips_per_node
    return line * cluster.constants.network_fraction / np.where(span > pod, cluster.oversubscription, 1.0)


def measured_sum(cluster: Cluster, ranks: Number, column: int) -> Number:
    """A column of the cluster's measured sums at this size of a group, between two measured ones by its logarithm."""
    sizes, values = ([row[index] for row in cluster.sums] for index in (0, column))
    return np.interp(np.log2(np.maximum(ranks, 1)), np.log2(sizes), values)


def start_time(ranks: Number, cluster: Cluster, rounds: int = 1) -> Number:
    """Seconds before the first byte: measured, or by a tree's depth, for gathers (rounds 1) by the ring's nodes too."""
    if cluster.sums:
        return measured_sum(cluster, ranks, 1)
    nodes = np.maximum(ranks / cluster.chips_per_node - 1, 0) if rounds == 1 else 0.0
    constants = cluster.constants
    return constants.start_s * (1 + np.log2(np.maximum(ranks, 1))) + constants.pass_s * nodes


def gather(
    size: Number,
    ranks: Number,
    stride: Number,
    cluster: Cluster,
    calls: Number = 1,
    rounds: int = 1,
    one_adapter: bool = False,
) -> Number:
    """Seconds of `calls` all-gathers or reduce-scatters over `ranks` with `size` bytes in all; of one rank none."""
    bandwidth = group_bandwidth(cluster, ranks, stride, one_adapter)
    sent = rounds * (ranks - 1) / ranks * size / bandwidth  # what a ring sends
    return np.where(ranks > 1, calls * start_time(ranks, cluster, rounds) + sent, 0.0)


all_reduce = functools.partial(gather, rounds=2)  # seconds of sums: each goes round the ring twice


def all_to_all(
    size: Number, ranks: Number, stride: Number, cluster: Cluster, calls: Number, copies: int = 0
) -> Number:
    """Seconds of `calls` exchanges in which each rank sends an equal part of `size` bytes, of all calls, to each: what
    leaves a node by the chip's part of its network, meanwhile the rest by the links inside. `copies`: of rows that go
    to so many ranks at random, those that share a node, or a rank, are sent there once (0: each is sent).
    """
    chips, inner = cluster.chips_per_node, link_bandwidth(cluster)
    near = np.clip(chips // np.maximum(stride, 1), 1, ranks)
    outer = node_bandwidth(cluster, ranks * stride) / chips
    far, close = (ranks - near) / ranks * size, (near - 1) / ranks * size
    if copies:
        far, close = far * sent_once(ranks / near, copies), close * sent_once(ranks, copies)
    sent = np.maximum(far / outer, close / inner)
    return np.where(ranks > 1, calls * start_time(ranks, cluster, 2) + sent, 0.0)


def sent_once(places: Number, copies: int) -> Number:
    """Of rows that go to `copies` of so many places at random: the different places, as a share of the copies."""
    return places * (1 - (1 - 1 / np.maximum(places, 1)) ** copies) / copies


def ring_sends(size: Number, ranks: Number, stride: Number, cluster: Cluster, calls: Number) -> Number:
    """Seconds of `calls` sends to the next of a ring of `ranks`, all of them at once, with `size` bytes in all."""
    bandwidth = group_bandwidth(cluster, ranks, stride)
    return np.where(ranks > 1, calls * cluster.constants.start_s + size / bandwidth, 0.0)


def hop(size: Number, stride: Number, cluster: Cluster) -> Number:
    """Seconds of one send to the next pipeline stage, `stride` ranks away: every chip of a node sends its part."""
    inner = link_bandwidth(cluster)
    outer = node_bandwidth(cluster, 2 * stride) / cluster.chips_per_node
    return cluster.constants.start_s + size / np.where(stride >= cluster.chips_per_node, outer, inner)
