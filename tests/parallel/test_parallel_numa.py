"""Processes of a launch are bound to the memory node that is theirs."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.train.parallel.launch import begin, near_cores, numa_nodes

NODES = [{0, 1, 8, 9}, {2, 3}, {4, 5}, {6, 7}]


def test_nodes_are_read_as_linux_lists_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of their numbers, without memory-only nodes and without cores that this process may not use."""
    for node, cores in (("node0", "0-1,8-9\n"), ("node1", "\n"), ("node10", "6\n"), ("node2", "2,3,7\n")):
        (tmp_path / node).mkdir()
        (tmp_path / node / "cpulist").write_text(cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)), raising=False)
    assert numa_nodes(tmp_path) == [{0, 1, 8}, {2, 3, 7}, {6}]


@pytest.mark.parametrize("processes", range(1, 17))
def test_every_node_is_used_and_none_is_cut(processes: int) -> None:
    bound = [near_cores(NODES, rank, processes) for rank in range(processes)]
    assert set().union(*bound) == set(range(10))
    for cores in bound:
        assert all(node <= cores or not node & cores for node in NODES)
    sizes = [bound.count(cores) for cores in bound]
    assert max(sizes) - min(sizes) <= 1
    assert near_cores(NODES[:1], 0, processes) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds processes to cores")
def test_a_process_is_bound_before_it_begins() -> None:
    mine = os.sched_getaffinity(0)
    one = {min(mine)}
    code = "import os; print(sorted(os.sched_getaffinity(0)))"
    for cores, expected in ((one, one), (None, mine)):
        done = subprocess.run(
            [sys.executable, "-c", code], preexec_fn=partial(begin, cores), capture_output=True, text=True
        )
        assert done.stdout.strip() == str(sorted(expected))


def test_doctor_shows_nodes_and_the_networks_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 0 and "NCCL_SOCKET_IFNAME=eth7" in done.output and "NUMA" in done.output
