"""`throughline doctor` measures every process and names the one that holds the others up."""

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.train.parallel import rates as module  # noqa: E402
from throughline.train.parallel.ranks import Ranks  # noqa: E402
from throughline.train.parallel.rates import Rates, measure, slowest  # noqa: E402

SLOWED = 30  # times: no busy neighbour slows one of three processes as much in the best of several trials


def rank_rates() -> tuple[list[Rates], str]:
    module.PRODUCTS["cpu"], module.COPIED["cpu"], module.SUMMED["cpu"] = ((256,) * 3,), 1 << 20, 1 << 16
    with Ranks.start(Layout(data=3), torch.device("cpu"), 60) as ranks:
        if ranks.mesh.rank == 1:
            product = torch.Tensor.__matmul__
            torch.Tensor.__matmul__ = lambda a, b: [product(a, b) for _ in range(SLOWED)]
        found = measure(torch.device("cpu"), ranks.mesh.world)
    return found, slowest(found)


def test_the_slowed_process_is_named() -> None:
    warm()
    for found, slow in run_ranks(3, rank_rates):
        assert [each.rank for each in found] == [0, 1, 2]
        assert all(each.product > 0 and each.copy > 0 and (each.all_reduce or 0) > 0 for each in found)
        assert slow.startswith("process 1 is the slowest: product at "), (slow, found)


def test_who_is_the_slowest() -> None:
    even = [Rates(rank, 100.0 + rank, 50.0, 9.0) for rank in range(4)]
    assert slowest(even) == ""
    assert slowest(even[:1]) == ""
    assert (
        slowest([*even, Rates(4, 100.0, 20.0, 9.0)]) == "process 4 is the slowest: copy at 40 % of the median"
    )
    two = [Rates(0, 60.0, 50.0, 9.0), Rates(1, 100.0, 50.0, 9.0)]
    assert slowest(two) == "process 0 is the slowest: product at 60 % of the median"


@pytest.mark.slow
def test_doctor_under_launch() -> None:
    command = [
        sys.executable,
        "-m",
        "throughline.cli.main",
        "launch",
        "--nproc",
        "2",
        "--",
        "doctor",
        "--json",
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["rank"] for each in found["rates"]] == [0, 1]
    assert all(each["all_reduce"] > 0 for each in found["rates"])
