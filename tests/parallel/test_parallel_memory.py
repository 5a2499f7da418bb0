"""What tensor parallelism keeps and makes: each process its share of a block's activations and of the
vocabulary.
"""

import pytest

torch = pytest.importorskip("torch")

from throughline.models.config import GPTConfig  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.prove.proof import LENGTH as ROW_LENGTH  # noqa: E402
from throughline.prove.proof import Case, own_rows  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.parallel.mesh import make_mesh, start_group  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

ROWS, LENGTH, WIDTH = 2, 64, 128
CONFIG = GPTConfig(vocab_size=64, sequence_length=LENGTH, layers=1, width=WIDTH, heads=8)


def kept_numbers(layout: Layout) -> int:
    """Numbers that one block saves for backward, each storage once, weights left out."""
    device = torch.device("cpu")
    start_group(device, 60)
    engine = Engine(CONFIG, make_mesh(layout, device, 60), "fp32")
    engine.fill()
    weights = {local.parameter.untyped_storage().data_ptr() for local in engine.local_shards}
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
    """Korthikanti et al. 2022, section 4.2.2: 34 s b h bytes with two one-byte masks are 16 s b h numbers
    without dropout.

    Column-cut layers that kept their gathered rows would keep 2 s b h (1 - 1/t) more: 18 and 22 shares
    instead of 16.
    """
    warm()
    share = ROWS * LENGTH * WIDTH / tensor
    for kept in run_ranks(tensor, lambda: kept_numbers(Layout(tensor=tensor))):
        assert 15.9 * share < kept < 16.5 * share, kept / share


class Shapes(TorchDispatchMode):
    """The largest dim of every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
                self.largest = max(self.largest, *tensor.shape)
        return result


def largest_dim(case: Case) -> int:
    """In a whole step of this rank: forward, backward, gradients summed."""
    device = torch.device("cpu")
    start_group(device, 60)
    engine = Engine(case.config, make_mesh(case.layout, device, 60), case.precision)
    engine.fill()
    batch = own_rows(case, engine, 0)
    with Shapes() as seen:
        engine.accumulate(batch, 0)
    assert engine.local_shards[0].value.grad.shape[0] == case.config.vocab_size // case.layout.tensor
    return seen.largest


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_no_process_makes_anything_of_the_whole_vocabulary(family: str) -> None:
    """Neither logits nor a gradient of the token table: the largest dim of a matrix is half of the
    vocabulary.
    """
    warm()
    vocabulary = 2048
    assert vocabulary // 2 > 16 * ROW_LENGTH  # of which a tensor's other dims are at most
    case = Case("vocabulary", Layout(tensor=2), family=family, model={"vocab_size": vocabulary, "layers": 1})
    assert run_ranks(2, lambda: largest_dim(case)) == [vocabulary // 2] * 2
