"""The printed layout is what runs: parameters, collectives and their bytes counted on real processes."""

from collections import Counter
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from throughline.benchmarks.forked import run_ranks, warm  # noqa: E402
from throughline.benchmarks.layout_proof import LENGTH, ROWS, SEED, Case, own_rows  # noqa: E402
from throughline.train.parallel.account import Batch, held, traffic  # noqa: E402
from throughline.train.parallel.engine import Engine  # noqa: E402
from throughline.train.parallel.layout import Layout  # noqa: E402
from throughline.train.parallel.mesh import make_mesh, start_group  # noqa: E402
from throughline.train.parallel.plan import Place  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

KINDS = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "_reduce_scatter_base_": "reduce-scatter", "send": "send"}
KINDS |= {"all_gather_single_": "all-gather", "reduce_scatter_single_": "reduce-scatter"}
SMALL = 64  # bytes: counts, losses and the norm


class Collectives(TorchDispatchMode):
    """Counts collectives by kind: calls and the bytes of the largest tensor of each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        namespace, name = function.name().split("::")
        if namespace == "c10d":
            size = max(tensor.nbytes for tensor in torch.utils._pytree.tree_leaves(args) if isinstance(tensor, torch.Tensor))
            kind = KINDS.get(name.split(".")[0], name)
            if size > SMALL and kind != "recv_":
                self.calls[kind] += 1
                self.bytes[kind] += size
        return function(*args, **(kwargs or {}))


def count(case: Case) -> tuple[int, dict[str, int], dict[str, int], int]:
    device = torch.device("cpu")
    start_group(device, 60)
    mesh = make_mesh(case.layout, device, 60)
    engine = Engine(case.config, mesh, case.precision, SEED)
    engine.fill()
    for step in range(2):  # the second is steady: the first may gather what a later one finds gathered
        batch = own_rows(case, engine, step)
        with Collectives() as seen:
            engine.accumulate(batch, step)
        engine.zero_grad()
    parameters = sum(leaf.value.numel() for leaf in engine.leaves)
    predicted = batch.micro_batches[0].get("predicted", torch.empty(0)).numel()
    return parameters, dict(seen.calls), dict(seen.bytes), predicted


CASES = [
    Case("tensor", Layout(tensor=2)),
    Case("bert tensor", Layout(tensor=2), family="bert", micro_rows=16),
    Case("llama context x tensor", Layout(context=2, tensor=2), model={"gated": True, "kv_heads": 2, "positions": "rotary"}),
    Case("full", Layout(data=2, sharding="full")),
    Case("zero2 odd", Layout(data=3, sharding="zero2"), model={"vocab_size": 257}),
    Case("zero1 hybrid", Layout(data=4, sharding="zero1", replicas=2)),
    Case("pipeline x replicated", Layout(pipeline=2, data=2)),
    Case("v x tensor", Layout(pipeline=2, tensor=2, schedule="zero-bubble-v", stages_per_process=2)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_counted_is_printed(case: Case) -> None:
    warm()
    layout, config = case.layout, case.config
    if layout.data == 3:
        case = Case(**{**case.__dict__, "micro_rows": 1})
    ranks = run_ranks(layout.world, lambda: count(case))
    micro_batches = ROWS // layout.data // case.micro_rows
    for rank, (parameters, calls, sizes, predicted) in enumerate(ranks):
        tensor, data = rank % layout.tensor, rank // (layout.tensor * layout.context) % layout.data
        pipeline = rank // (layout.tensor * layout.context * layout.data)
        shard = 0 if layout.shards == 1 else data % (layout.data // layout.replicas)
        assert parameters == held(config, layout, Place(pipeline, tensor, 0, shard))
        printed_calls: Counter[str] = Counter()
        printed_bytes: Counter[str] = Counter()
        for entry in traffic(config, layout, Batch(micro_batches, case.micro_rows, LENGTH, predicted, case.precision), pipeline):
            printed_calls[entry.kind] += entry.calls
            printed_bytes[entry.kind] += entry.bytes
        if layout.schedule == "zero-bubble-v":  # split backwards gather gradients again: at most one for each row-cut matrix
            split = calls["all-gather"] - printed_calls["all-gather"]
            assert 0 < split <= micro_batches * config.layers
            printed_calls["all-gather"] += split
            printed_bytes["all-gather"] += split * case.micro_rows * LENGTH * config.width * 8
        assert (calls, sizes) == (dict(printed_calls), dict(printed_bytes))


def test_memory_falls_with_every_axis_that_cuts() -> None:
    """The estimate by which a run is refused: more processes on an axis never need more, and each cuts what it is for."""
    from throughline.core.recipe import build_recipe
    from throughline.train.memory import estimate
    from throughline.train.recipe import RULES, Recipe, model_config, resolve

    def terms(**parallel: Any) -> dict[str, int]:
        train = {"steps": 1, "sequence_length": 256, "batch_rows": 16}
        tree = {"data": {"train": "tokens"}, "model": {"preset": "gpt2-124m"}, "train": train, "parallel": parallel}
        recipe = resolve(build_recipe(tree, Recipe, RULES))
        return estimate(model_config(recipe), recipe)

    one = terms()
    assert terms(data=2)["optimizer"] == one["optimizer"]
    assert terms(data=2, sharding="zero1")["optimizer"] == pytest.approx(one["optimizer"] / 2, rel=0.01)
    assert terms(data=2, sharding="zero2")["gradients"] < 0.9 * one["gradients"]
    assert terms(data=4, sharding="full")["weights"] < 0.9 * terms(data=4, sharding="zero2")["weights"]
    assert terms(tensor=2)["weights"] == pytest.approx(one["weights"] / 2, rel=0.01)
    assert terms(tensor=2)["logits"] == one["logits"] / 2
    assert terms(context=2)["activations"] == one["activations"] / 2
    assert terms(pipeline=2)["weights"] < 0.75 * one["weights"]
