"""The head with its loss in slices: the numbers of logits and cross-entropy, without the logits."""

import pytest
import torch
from throughline.models.config import GPTConfig
from throughline.models.init import empty_model
from throughline.planner.layout import Layout
from throughline.prove.forked import warm
from throughline.prove.proof import Case, Prover, reference
from throughline.train import loss as losses
from throughline.train.loss import IGNORED, Words, gpt_sums, head_loss_sum, pad_vocabulary
from throughline.train.parallel.mesh import ALONE
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
@pytest.mark.parametrize("columns", [V, 8256])
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
    """Loss and gradients, against torch's in float64; a shorter last slice, ignored targets, rows of zeros below the
    words, which get no gradient."""
    monkeypatch.setitem(losses.SLICE_LOGITS, "cpu", V * -(-N // slices))
    given, targets = problem(dtype)
    given = [given[0], *(torch.cat((x, x.new_zeros(columns - V, *x.shape[1:]))) for x in given[1:])]
    given = [x.requires_grad_() for x in given[: 3 if biased else 2]]
    bias, words = given[2] if biased else None, Words(V, ALONE)
    loss = head_loss_sum(given[0], given[1], bias, targets, words, smoothing)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    found = torch.autograd.grad(loss * 0.25, given)
    wide = [x.detach().double().requires_grad_() for x in given]
    logits = F.linear(*wide)[:, :V]
    whole = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum", label_smoothing=smoothing)
    expected = torch.autograd.grad(whole * 0.25, wide)
    assert loss.item() == pytest.approx(whole.item(), rel=loss_bound)
    for ours, theirs in zip(found, expected):
        assert ours.dtype == dtype
        assert (ours.double() - theirs).norm() <= bound * theirs.norm()
    with torch.no_grad():
        again = head_loss_sum(given[0], given[1], bias, targets, words, smoothing)
        assert again.item() == loss.item()


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("slices", [1, 3])
def test_a_z_loss_is_the_square_of_the_log_sum_exp(
    slices: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sums and their common gradient, against torch's in float64 (noise of sums over 8,192 columns); a small
    vocabulary goes the same way.
    """
    monkeypatch.setitem(losses.SLICE_LOGITS, "cpu", V * -(-N // slices))
    given, targets = problem(torch.float64)
    for count in (V, 50):
        some = [given[0], *(x[:count] for x in given[1:])]
        some, here = (
            [x.detach().requires_grad_() for x in some],
            targets.where(targets == IGNORED, targets % count),
        )
        sums = head_loss_sum(*some, here, softcap=softcap, z_loss=0.02)
        logits = F.linear(*some)
        logits = torch.tanh(logits / softcap) * softcap if softcap else logits
        squares = 0.02 * (logits.logsumexp(-1).square() * (here != IGNORED)).sum()
        whole = torch.stack((F.cross_entropy(logits, here, ignore_index=IGNORED, reduction="sum"), squares))
        assert torch.allclose(sums, whole, rtol=1e-13)
        for ours, theirs in zip(*(torch.autograd.grad(x.sum() * 0.25, some) for x in (sums, whole))):
            assert (ours - theirs).norm() <= 1e-12 * theirs.norm()


def test_many_slices_are_added_up_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 slices of one position, all with the same target, whose probability is a third: its gradients of matrix and
    bias are within a rounding of float64's, as those of one slice are. Summed in bf16 they would be off by tenths.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = torch.rand(400, W, generator=generator), torch.zeros(V, W), torch.zeros(V)
    weight[:, 0], bias[3] = 0.1, 8.2
    given = [x.bfloat16().requires_grad_() for x in (hidden, weight, bias)]
    targets = torch.full((400,), 3)
    monkeypatch.setitem(losses.SLICE_LOGITS, "cpu", V)
    found = torch.autograd.grad(head_loss_sum(*given, targets), given[1:])
    wide = [x.detach().double().requires_grad_() for x in given]
    whole = F.cross_entropy(F.linear(*wide), targets, reduction="sum")
    for ours, expected in zip(found, torch.autograd.grad(whole, wide[1:])):
        assert (ours[3].double() - expected[3]).norm() <= 5e-3 * expected[3].norm()


def test_no_tensor_holds_the_logits_of_all_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 positions at most 8 have logits at a time, in forward and backward."""
    monkeypatch.setitem(losses.SLICE_LOGITS, "cpu", V * 8)
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


@pytest.mark.parametrize("slices", [1, 3])
def test_head_and_loss_are_one_graph(slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """50,257 words in rows of 64, as on a GPU: traced whole, without a break, and computed alike."""
    monkeypatch.setitem(losses.COLUMNS, "cpu", 64)
    monkeypatch.setitem(losses.SLICE_LOGITS, "cpu", 50304 * -(-N // slices))
    config = GPTConfig(vocab_size=50257, sequence_length=N, layers=1, width=W, heads=1)
    model = empty_model(config, "meta")
    pad_vocabulary(model, torch.device("cpu"))
    assert len(model.output_weight()) == 50304
    values = torch.randn(50304, W, generator=torch.Generator().manual_seed(0))
    values[50257:] = 0
    weight = model.token_table.weight = torch.nn.Parameter(values)
    hidden, batch = torch.randn(1, N, W), {"targets": torch.arange(N).view(1, N)}
    compiled = torch.compile(gpt_sums, backend="eager", fullgraph=True)
    found = []
    for sums in (gpt_sums, compiled):
        loss = sums(model, hidden, batch, ALONE)
        found.append((loss.item(), torch.autograd.grad(loss, weight)[0]))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])
    assert found[0][1][:50257].any() and not found[0][1][50257:].any()


LAYOUTS = [Layout(), Layout(tensor=2), Layout(data=2, sharding="full"), Layout(pipeline=2)]


CASES = [(layout, family, "fp64") for layout in LAYOUTS for family in ("gpt", "bert")]
CASES += [(Layout(), family, precision) for family, precision in (("gpt", "bf16"), ("bert", "fp16"))]


@pytest.mark.parametrize(("layout", "family", "precision"), CASES)
def test_rows_below_the_words_change_nothing(
    layout: Layout, family: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """250 words, 125 for each of two tensor processes, in matrices of 256 and 128 rows, sharded too: ten steps equal
    one process without such rows, whose boxes together are the published shape.
    """
    warm()
    case = Case("", layout, family, precision, model={"vocab_size": 250})
    prover = Prover()
    prover.references[case.key()] = reference(case)
    monkeypatch.setitem(losses.COLUMNS, "cpu", 64)
    errors = prover.prove(case)
    # in 16 bits products of more rows round other partial sums
    assert not errors.beyond(case.bounds.replace("copies", "cuts")), errors


def test_no_targets_is_no_loss() -> None:
    given, targets = problem(torch.float32)
    given = [x.requires_grad_() for x in given]
    loss = head_loss_sum(*given, torch.full_like(targets, IGNORED))
    loss.backward()
    assert loss.item() == 0.0
    assert not any(x.grad.any() for x in given)
