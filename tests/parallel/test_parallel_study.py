"""Sums of groups of each size: probed side by side, and taken by the planner for groups of that size."""

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from throughline.planner.collectives import all_reduce, gather  # noqa: E402
from throughline.planner.hardware import this_machine  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.train.parallel.rates import group_sizes, probe_all_reduce  # noqa: E402

SUMS = ((2, 1e-4, 2.0), (8, 4e-4, 0.5))  # ranks, seconds to start, GB/s


def test_sizes_of_groups() -> None:
    assert [group_sizes(world) for world in (2, 4, 6, 8, 3)] == [[2], [2, 4], [2, 6], [2, 4, 8], [3]]


def test_four_processes_probe_pairs_and_all() -> None:
    """Every process is in one group of each size; the figures are those of the slowest, the same for all."""
    warm()
    ranks = run_ranks(4, lambda: probe_all_reduce(torch.device("cpu")))
    assert all(found == ranks[0] for found in ranks[1:])
    assert [row["ranks"] for row in ranks[0]] == [2, 4]
    assert all(row["start_s"] > 0 and row["gb_s"] > 0 for row in ranks[0])


def test_a_group_costs_what_was_measured_for_its_size() -> None:
    """Exactly at the sizes measured, between them in between, and by the processes that it spans."""
    cluster = dataclasses.replace(this_machine(8), sums=SUMS)
    size = 1e8
    for ranks, start, speed in SUMS:
        expected = start + 2 * (ranks - 1) / ranks * size / speed / 1e9
        assert float(all_reduce(size, ranks, 1, cluster)) == pytest.approx(expected, rel=1e-12)
    pairs, spread, four = (
        float(gather(size, ranks, stride, cluster)) for ranks, stride in ((2, 1), (2, 4), (4, 1))
    )
    # two neighbours four apart span all eight
    assert spread == pytest.approx(1e-4 + size / 2 / 0.5e9, rel=1e-12)
    assert four == pytest.approx(2.5e-4 + 0.75 * size / 1.25e9, rel=1e-12)
    many = all_reduce(size, np.array([1, 2, 8, 64]), 1, cluster)
    assert many[0] == 0 and many[1] < many[2] < many[3]  # beyond what was measured: the largest group's
    assert pairs < spread
