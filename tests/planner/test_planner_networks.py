"""Networks as they are: bytes a second of a whole node, shared by the groups that send at once."""

from dataclasses import replace

import pytest
from throughline.core.errors import WrongUse
from throughline.planner.collectives import all_reduce, gather, group_bandwidth, hop
from throughline.planner.hardware import FITTED, Cluster, find_cluster, require_network

LINE = 1e9 * FITTED.network_fraction  # of a GB/s


@pytest.mark.parametrize(
    ("name", "node_gb_s"),
    [
        ("dgx-1-32gb", 50),
        ("dgx-2h", 100),
        ("dgx-a100-80gb", 200),
        ("aws-p4d.24xlarge", 50),
        ("aws-p3.16xlarge", 3.125),
        ("dgx-h100", 400),
    ],
)
def test_a_node_sends_with_all_its_adapters(name: str, node_gb_s: float) -> None:
    """A group with all chips of its nodes has the whole network; beside it, one of many has its chips' part."""
    cluster = find_cluster(name)
    chips = cluster.chips_per_node
    assert group_bandwidth(cluster, 4 * chips, 1) == pytest.approx(node_gb_s * LINE)
    assert group_bandwidth(cluster, 4, chips) == pytest.approx(node_gb_s * LINE / chips)
    assert group_bandwidth(cluster, chips, 1) == pytest.approx(
        cluster.inner_gb_s * 1e9 * FITTED.link_fraction
    )
    assert hop(1e9, chips, cluster) == pytest.approx(1 / node_gb_s / LINE * 1e9 * chips, rel=1e-3)


def test_adapters_need_not_be_said() -> None:
    """They matter to a program that gathers over one of them alone; else nothing does."""
    cluster = find_cluster("dgx-a100-80gb")
    unsaid = replace(cluster, ports_per_node=0)
    assert group_bandwidth(unsaid, 32, 1) == group_bandwidth(cluster, 32, 1)
    assert group_bandwidth(cluster, 32, 1, one_adapter=True) == pytest.approx(25 * LINE)
    few = replace(cluster, ports_per_node=2)
    assert group_bandwidth(few, 32, 1, one_adapter=True) == pytest.approx(100 * LINE)


def test_beyond_a_pod_the_spine_is_thin() -> None:
    cluster = replace(find_cluster("dgx-h100"), nodes_per_pod=4, oversubscription=7.0)
    inside, outside = (group_bandwidth(cluster, ranks, 1) for ranks in (32, 64))
    assert inside == pytest.approx(7 * outside)


def test_a_ring_passes_every_node_and_a_tree_does_not() -> None:
    """Seconds of nothing at all: gathers start slower with every node, sums with every doubling."""
    cluster = find_cluster("dgx-h100")
    rings = [float(gather(0.0, ranks, 1, cluster)) for ranks in (512, 1024)]
    trees = [float(all_reduce(0.0, ranks, 1, cluster)) for ranks in (512, 1024)]
    assert rings[1] - rings[0] == pytest.approx(FITTED.start_s + 64 * FITTED.pass_s)
    assert trees[1] - trees[0] == pytest.approx(FITTED.start_s)


def test_nodes_that_nothing_joins_are_refused() -> None:
    alone = Cluster("x", find_cluster("h100-80gb").chip, "x", 8)
    require_network(alone, 8)
    with pytest.raises(WrongUse, match="16 chips are 2 nodes"):
        require_network(alone, 16)
