"""How long collectives take: a start-up time and a bandwidth, with the ranks where they stand.

Ranks lie tensor innermost, then context, data, pipeline, and fill nodes in that order. A group that stays in a
node runs at the chips' own links. One that crosses nodes runs at what its ranks of one node have together:
data parallelism beside tensor 8 has one adapter to a rank, data parallelism alone has all of them
(Narayanan et al. 2021, section 3). Bytes are those of the whole result.
"""

from typing import Any

import numpy as np

from .constants import Constants
from .hardware import Cluster

Number = Any


def group_bandwidth(cluster: Cluster, constants: Constants, ranks: Number, stride: Number) -> Number:
    """Bytes per second that a ring of `ranks` processes reaches, neighbours `stride` ranks apart.

    Where sums were measured, those of a group of as many neighbours as this one spans: such groups share the links.
    """
    if cluster.sums:
        return 1e9 * measured_sum(cluster, ranks * stride, 2)
    inner = cluster.inner_gb_s * 1e9 * constants.link_fraction
    in_node = np.clip(cluster.chips_per_node // np.maximum(stride, 1), 1, ranks)
    outer = (
        cluster.network_gb_s * 1e9 * constants.network_fraction * np.minimum(in_node, cluster.ports_per_node)
    )
    if not cluster.network_gb_s:  # one machine: ranks beyond it have no way to each other but the same links
        return inner + 0.0 * in_node
    return np.where(stride * ranks > cluster.chips_per_node, np.minimum(inner, outer), inner)


def measured_sum(cluster: Cluster, ranks: Number, column: int) -> Number:
    """A column of the cluster's measured sums at this size of a group, between two measured ones by its logarithm."""
    sizes, values = ([row[index] for row in cluster.sums] for index in (0, column))
    return np.interp(np.log2(np.maximum(ranks, 1)), np.log2(sizes), values)


def start_time(ranks: Number, cluster: Cluster, constants: Constants) -> Number:
    """Seconds before the first byte of a collective: as measured, or growing with the tree's depth."""
    if cluster.sums:
        return measured_sum(cluster, ranks, 1)
    return constants.start_s * (1 + np.log2(np.maximum(ranks, 1)))


def gather(
    size: Number,
    ranks: Number,
    stride: Number,
    cluster: Cluster,
    constants: Constants,
    calls: Number = 1,
    rounds: int = 1,
) -> Number:
    """Seconds of all-gathers or reduce-scatters over `ranks`, `calls` of them with `size` bytes in all. A ring sends
    (n - 1) / n of the bytes a round; one rank sends nothing.
    """
    bandwidth = group_bandwidth(cluster, constants, ranks, stride)
    sent = rounds * (ranks - 1) / ranks * size / bandwidth
    return np.where(ranks > 1, calls * start_time(ranks, cluster, constants) + sent, 0.0)


def all_reduce(
    size: Number, ranks: Number, stride: Number, cluster: Cluster, constants: Constants, calls: Number = 1
) -> Number:
    """Seconds of sums over `ranks`: each goes round the ring twice."""
    return gather(size, ranks, stride, cluster, constants, calls, rounds=2)


def ring_sends(
    size: Number, ranks: Number, stride: Number, cluster: Cluster, constants: Constants, calls: Number
) -> Number:
    """Seconds of `calls` sends to the next of a ring of `ranks`, all of them at once, with `size` bytes in all."""
    bandwidth = group_bandwidth(cluster, constants, ranks, stride)
    return np.where(ranks > 1, calls * constants.start_s + size / bandwidth, 0.0)


def hop(size: Number, stride: Number, cluster: Cluster, constants: Constants) -> Number:
    """Seconds of one send to the next pipeline stage, `stride` ranks away."""
    inner = cluster.inner_gb_s * 1e9 * constants.link_fraction
    outer = (cluster.network_gb_s or cluster.inner_gb_s) * 1e9 * constants.network_fraction
    return constants.start_s + size / np.where(stride >= cluster.chips_per_node, outer, inner)
