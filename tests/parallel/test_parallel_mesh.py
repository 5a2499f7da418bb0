"""The groups of a layout: on NCCL every process asks the world's communicator for the same splits in the same order."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from throughline.core.errors import WrongUse
from throughline.planner.layout import Layout
from throughline.train.parallel import launch, ranks
from throughline.train.parallel.mesh import ALONE, Mesh, make_mesh, own_device

LAYOUTS = (
    Layout(data=3),
    Layout(pipeline=3, tensor=2, context=2),
    Layout(data=4, sharding="full", replicas=2, tensor=2),
    Layout(pipeline=2, data=4, context=2, tensor=2, sharding="zero1"),
)


def split_mesh(
    layout: Layout, rank: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[Mesh, list[list[list[int]]]]:
    """The mesh of a process on NCCL, and what it asks for."""
    asked: list[list[list[int]]] = []
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: layout.world)
    monkeypatch.setattr(
        dist, "split_group", lambda split_ranks, timeout: asked.append(split_ranks) or object()
    )
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=object()))
    return make_mesh(layout, torch.device("cpu")), asked


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
def test_all_processes_split_alike(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours on an axis differ from a process on that axis alone; a split where a process waited for others that
    ask for another one would never end.
    """
    shards = layout.data // layout.replicas if layout.sharding != "replicated" else 1
    shape = (layout.pipeline, layout.data, layout.context, layout.tensor)
    first: list[list[list[int]]] | None = None
    for rank in range(layout.world):
        mesh, asked = split_mesh(layout, rank, monkeypatch)
        first = asked if first is None else first
        assert asked == first
        here = np.unravel_index(rank, shape)
        for dim, axis in enumerate((mesh.pipeline, mesh.data, mesh.context, mesh.tensor)):
            line = [
                np.ravel_multi_index((*here[:dim], i, *here[dim + 1 :]), shape) for i in range(shape[dim])
            ]
            assert (
                axis.ranks == tuple(line)
                and axis.rank == here[dim]
                and (axis.group is None) == (len(line) == 1)
            )
        assert mesh.shard.size == shards * (layout.context if layout.shards > 1 else 1)
        assert mesh.shard.size * mesh.replica.size == mesh.gradient.size == layout.data * layout.context
        inside = layout.pipeline > 1 and 0 < here[0] < layout.pipeline - 1
        assert mesh.ends.size == (1 if layout.pipeline == 1 or inside else 2) and (
            mesh.ends is ALONE or not inside
        )


@pytest.mark.parametrize(
    ("given", "gpus", "index"),
    [
        ({"LOCAL_RANK": "3"}, 4, 3),  # srun's usual prologue
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}, 4, 3),
        ({"LOCAL_RANK": "3"}, 1, 0),  # srun --gpus-per-task=1 shows each its own
        ({"LOCAL_RANK": "0"}, 4, 0),
        ({}, 4, None),
    ],
)
def test_a_process_takes_the_gpu_of_its_local_rank(
    given: dict[str, str], gpus: int, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without LOCAL_WORLD_SIZE too: else all processes of a machine would take the first GPU."""
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    assert own_device(torch.device("cuda")).index == index
    assert taken == ([] if index is None else [index])
    assert own_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("given", [{"LOCAL_RANK": "5"}, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "6"}])
def test_more_processes_than_gpus_are_refused(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    with pytest.raises(WrongUse, match="6 processes on this machine, and 4 GPUs"):
        own_device(torch.device("cuda"))


def test_a_process_of_another_launcher_is_not_bound_to_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that starts processes from a worker thread would end them with that thread."""
    bound: list[bool] = []
    monkeypatch.setattr(launch, "end_with_parent", lambda: bound.append(True))
    monkeypatch.setattr(ranks, "start_group", lambda *_: None)
    monkeypatch.setattr(ranks, "make_mesh", lambda *_: Mesh(Layout(), torch.device("cpu")))
    ranks.Ranks.start(Layout(data=2), torch.device("cpu"))
    assert not bound
    launch.begin(None)
    assert bound
