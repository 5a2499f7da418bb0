"""The head with its loss in slices: the numbers of logits and cross-entropy, without the logits."""

import pytest
import torch
from throughline.planner.layout import Layout
from throughline.prove.forked import warm
from throughline.prove.proof import Case, Prover
from throughline.train import head_loss
from throughline.train.head_loss import head_loss_sum
from throughline.train.loss import IGNORED
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

N, W, V = 40, 16, 8229  # an odd vocabulary


def problem(dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((N, W), (V, W), (V,))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[::7] = IGNORED
    return tensors, targets


# float64: noise of sums over 8,192 columns; bf16: one rounding of a logit of size 16 is 0.03, of 40 losses near 20
@pytest.mark.parametrize(
    ("dtype", "loss_bound", "bound"),
    [(torch.float64, 1e-14, 1e-13), (torch.float32, 1e-6, 2e-6), (torch.bfloat16, 1e-3, 1e-2)],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("columns", [1, 64])
def test_slices_equal_whole_logits(
    columns: int,
    biased: bool,
    slices: int,
    smoothing: float,
    dtype: torch.dtype,
    loss_bound: float,
    bound: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loss and gradients, against torch's in float64; a shorter last slice, ignored targets, aligned columns."""
    monkeypatch.setitem(head_loss.COLUMNS, "cpu", columns)
    monkeypatch.setitem(head_loss.SLICE_LOGITS, "cpu", V * -(-N // slices))
    given, targets = problem(dtype)
    given = [x.requires_grad_() for x in given[: 3 if biased else 2]]
    bias = given[2] if biased else None
    loss = head_loss_sum(given[0], given[1], bias, targets, smoothing=smoothing)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    found = torch.autograd.grad(loss * 0.25, given)
    wide = [x.detach().double().requires_grad_() for x in given]
    logits = F.linear(*wide)
    whole = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
    expected = torch.autograd.grad(whole * 0.25, wide)
    assert loss.item() == pytest.approx(whole.item(), rel=loss_bound)
    for ours, theirs in zip(found, expected):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= bound * theirs.norm()
    with torch.no_grad():
        again = head_loss_sum(given[0], given[1], bias, targets, smoothing=smoothing)
        assert again.item() == loss.item()


def test_many_slices_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 slices of one position, all with the same target, whose probability is a third: its gradients of matrix and
    bias are within a rounding of float64's, as those of one slice are. Summed in bf16 they would be off by tenths.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = torch.rand(400, W, generator=generator), torch.zeros(V, W), torch.zeros(V)
    weight[:, 0], bias[3] = 0.1, 8.2
    given = [x.bfloat16().requires_grad_() for x in (hidden, weight, bias)]
    targets = torch.full((400,), 3)
    monkeypatch.setitem(head_loss.SLICE_LOGITS, "cpu", V)
    found = torch.autograd.grad(head_loss_sum(*given, targets), given[1:])
    wide = [x.detach().double().requires_grad_() for x in given]
    whole = F.cross_entropy(F.linear(*wide), targets, reduction="sum")
    for ours, expected in zip(found, torch.autograd.grad(whole, wide[1:])):
        assert (ours[3].double() - expected[3]).norm() <= 5e-3 * expected[3].norm()


def test_no_tensor_holds_the_logits_of_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 positions at most 8 have logits at a time, in forward and backward."""
    monkeypatch.setitem(head_loss.SLICE_LOGITS, "cpu", V * 8)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.shape[-1:] == (V,) and result.shape != (W, V):
                largest = max(largest, result.numel() // V)
            return result

    given, targets = problem(torch.bfloat16)
    given = [x.requires_grad_() for x in given]
    with Watch():
        head_loss_sum(*given, targets).backward()
    assert 0 < largest <= 8


class Products(TorchDispatchMode):
    """The sizes of matrices in products."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.overloadpacket.__name__ in ("mm", "addmm", "_linear_pointwise"):
            self.sizes |= {size for x in args if isinstance(x, torch.Tensor) for size in x.shape}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("slices", [1, 3])
def test_the_products_have_aligned_columns(slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; the parameters and their gradients keep the size of the vocabulary."""
    monkeypatch.setitem(head_loss.COLUMNS, "cpu", 64)
    monkeypatch.setitem(head_loss.SLICE_LOGITS, "cpu", V * -(-N // slices))
    given, targets = problem(torch.float32)
    given = [x.requires_grad_() for x in given]
    with Products() as products:
        head_loss_sum(*given, targets).backward()
    assert max(products.sizes) == 8256 and not products.sizes & {V}
    assert given[1].grad.shape == (V, W) and given[2].grad.shape == (V,)


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_a_cut_vocabulary_is_aligned_on_each_process(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """250 words are 125 for each of two tensor processes, in products 128: ten steps equal one process."""
    warm()
    monkeypatch.setitem(head_loss.COLUMNS, "cpu", 64)
    case = Case("", Layout(tensor=2), family, model={"vocab_size": 250})
    errors = Prover().prove(case)
    assert not errors.beyond("fp64"), errors


def test_no_targets_is_no_loss() -> None:
    given, targets = problem(torch.float32)
    given = [x.requires_grad_() for x in given]
    loss = head_loss_sum(*given, torch.full_like(targets, IGNORED))
    loss.backward()
    assert loss.item() == 0.0
    assert not any(x.grad.any() for x in given)
