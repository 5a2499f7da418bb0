"""In 16 bits no copy of a weight is kept for backward: what is saved of a matrix is the weight itself, or a gathered
one that `fully_shard` has freed.
"""

import pytest

torch = pytest.importorskip("torch")

from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.prove.proof import SEED, Case, own_rows  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.parallel.mesh import make_mesh, start_group  # noqa: E402

LAYOUTS = [
    Layout(data=2),
    Layout(tensor=2),
    Layout(data=2, sharding="full"),
    Layout(pipeline=2),
    Layout(pipeline=2, schedule="zero-bubble-v", stages_per_process=2),
]


def weight_copies(case: Case) -> tuple[int, int]:
    """(tensors of the shape of a matrix of a block that were saved, those of them that take memory of their own
    once the forward has ended), with two micro-batches in flight.
    """
    device = torch.device("cpu")
    start_group(device, 60)
    engine = Engine(case.config, make_mesh(case.layout, device, 60), case.precision, SEED)
    engine.fill()
    stage = engine.stages[0]
    batch = own_rows(case, engine, 0)
    blocks = [module for block in stage.model.blocks.values() for module in block.modules()]
    shapes = {tuple(module.weight.shape) for module in blocks if getattr(module, "weight", None) is not None}
    shapes = {shape for shape in shapes if len(shape) == 2}
    shapes |= {shape[::-1] for shape in shapes}
    own = {
        local.parameter.untyped_storage().data_ptr()
        for local in engine.local_shards
        if case.layout.shards == 1
    }
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) in shapes:
            saved.append(tensor)
        return tensor

    stage.load(batch.micro_batches[:2], torch.ones(len(batch.counts)), 1.0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        rows, length = batch.micro_batches[0]["input_ids"].shape
        shape = stage.activation_shape(rows, length)
        # of the stage before, where there is one
        x = torch.randn(shape, dtype=engine.dtype, requires_grad=True)
        results = [stage(x) for _ in range(2)]
    assert all(result.isfinite().all() for result in results)
    storages = [tensor.untyped_storage() for tensor in saved]
    return len(saved), sum(storage.nbytes() > 0 and storage.data_ptr() not in own for storage in storages)


@pytest.mark.parametrize("layout", LAYOUTS, ids=[layout.describe().replace(" ", "-") for layout in LAYOUTS])
def test_no_copy_of_a_weight_is_kept(layout: Layout) -> None:
    warm()
    # a width that no number of tokens equals, so that no activation has the shape of a weight
    case = Case("copies", layout, precision="bf16", model={"width": 80, "heads": 4})
    for count, copies in run_ranks(2, lambda: weight_copies(case)):
        assert count >= 4 * case.config.layers // case.layout.stages
        assert copies == 0
