"""What a block keeps for backward under tensor parallelism: its share of everything, the gathered rows not at all."""

import pytest

torch = pytest.importorskip("torch")

from throughline.benchmarks.forked import run_ranks, warm  # noqa: E402
from throughline.models.config import GPTConfig  # noqa: E402
from throughline.train.parallel.engine import Engine  # noqa: E402
from throughline.train.parallel.layout import Layout  # noqa: E402
from throughline.train.parallel.mesh import make_mesh, start_group  # noqa: E402

ROWS, LENGTH, WIDTH = 2, 64, 128
CONFIG = GPTConfig(vocab_size=64, sequence_length=LENGTH, layers=1, width=WIDTH, heads=8)


def kept_numbers(layout: Layout) -> int:
    """Numbers that one block saves for backward, each storage once, weights left out."""
    device = torch.device("cpu")
    start_group(device, 60)
    engine = Engine(CONFIG, make_mesh(layout, device, 60), "fp32")
    engine.fill()
    weights = {leaf.parameter.untyped_storage().data_ptr() for leaf in engine.leaves}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes() // 4
        return tensor

    x = torch.randn(ROWS, LENGTH // layout.tensor, WIDTH, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = engine.stages[0].model.blocks["0"](x, None, True)
    assert y.shape == x.shape
    return sum(kept.values())


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_block_keeps_sixteen_widths_over_the_axis(tensor: int) -> None:
    """Korthikanti et al. 2022, section 4.2.2: 34 s b h bytes with two one-byte masks are 16 s b h numbers without dropout.

    Column-cut layers that kept their gathered rows would keep 2 s b h (1 - 1/t) more: 18 and 22 shares instead of 16.
    """
    warm()
    share = ROWS * LENGTH * WIDTH / tensor
    for kept in run_ranks(tensor, lambda: kept_numbers(Layout(tensor=tensor))):
        assert 15.9 * share < kept < 16.5 * share, kept / share
