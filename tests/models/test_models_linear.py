"""The product with a weight is torch's own to rounding, forward and backward, and goes to oneDNN only where
that is meant.
"""

import pytest
import torch
from throughline.models import linear as module
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.init import build
from throughline.models.linear import Linear, linear
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.skipif(
    not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="this torch is built without oneDNN"
)


@pytest.fixture
def through_onednn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Every processor counts as one on which oneDNN is faster; the shapes of what it was given."""
    asked: list[tuple[int, ...]] = []
    real = module._onednn

    def watched(x, weight, bias):
        asked.append((*x.shape, weight.shape[0]))
        return real(x, weight, bias)

    monkeypatch.setattr(module, "onednn_is_faster", lambda: True)
    monkeypatch.setattr(module, "_onednn", watched)
    return asked


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("compiled", [False, True])
def test_values_and_gradients_are_those_of_torch(through_onednn, bias: bool, compiled: bool) -> None:
    torch.manual_seed(0)
    ours, theirs = Linear(96, 160, bias=bias), nn.Linear(96, 160, bias=bias)
    theirs.load_state_dict(ours.state_dict())
    if compiled:
        pytest.importorskip("torch._inductor")
    call = torch.compile(ours, backend="aot_eager") if compiled else ours
    x = torch.randn(5, 64, 2, 96).transpose(1, 2)[..., :96]  # not contiguous
    ours_x, theirs_x = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = torch.randn(5, 2, 64, 160)
    (call(ours_x) * weights).sum().backward()
    (theirs(theirs_x) * weights).sum().backward()
    assert len(through_onednn) == 3  # forward, and the gradients of the input and of the weight
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_x.grad, theirs_x.grad, rtol=1e-5, atol=1e-5)
    for mine, reference in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, reference.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("family", "products"), [(GPTConfig, 5), (BERTConfig, 6)])
def test_every_product_of_a_model_that_is_made(through_onednn, monkeypatch, family, products: int) -> None:
    """Four of a block, BERT's transform and the head; on other processors the layers are torch's own."""
    config = family(vocab_size=512, sequence_length=64, layers=1, width=128, heads=4)
    ids = torch.zeros(4, 64, dtype=torch.long)
    build(config)(ids)
    assert len(through_onednn) == products
    monkeypatch.setattr(module, "onednn_is_faster", lambda: False)
    layers = [layer for layer in build(config).modules() if isinstance(layer, nn.Linear)]
    assert layers and {type(layer) for layer in layers} == {nn.Linear}


def test_no_rows_are_no_product(through_onednn) -> None:
    """An expert that no token chose, also where evaluation asks for one kernel whatever the size."""
    with module.one_kernel():
        assert linear(torch.empty(0, 96), torch.ones(160, 96)).shape == (0, 160)
        assert linear(torch.ones(1, 96), torch.ones(160, 96)).shape == (1, 160)
    assert through_onednn == [(1, 96, 160)]


def test_a_product_of_real_size_is_in_one_graph() -> None:
    """Whichever library takes it: what decides is no reason to break a graph. `fullgraph` raises at a break."""
    pytest.importorskip("torch._inductor")
    layer, x = Linear(128, 256), torch.randn(128, 128)
    assert x.numel() * 256 >= module.LEAST_PRODUCTS
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer(x), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)


def test_only_gradients_that_are_wanted_are_computed(through_onednn) -> None:
    layer, x = Linear(128, 256), torch.randn(128, 128)
    layer(x).sum().backward()
    assert len(through_onednn) == 2  # the input wants none
    with torch.no_grad():
        layer(x)
    assert len(through_onednn) == 3


def test_everything_else_goes_to_torch(through_onednn) -> None:
    """Other dtypes, autocast, tensors that are not plain, products too small to matter."""
    wide, x = torch.randn(256, 128), torch.randn(128, 128)
    assert torch.equal(linear(x.double(), wide.double()), F.linear(x.double(), wide.double()))
    assert torch.equal(linear(x.bfloat16(), wide.bfloat16()), F.linear(x.bfloat16(), wide.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, wide).dtype == torch.bfloat16
    assert linear(x.to("meta"), wide.to("meta")).shape == (128, 256)
    linear(x[:2], wide)
    assert not through_onednn
    linear(x, wide)
    assert through_onednn == [(128, 128, 256)]


def test_a_processor_on_which_mkl_is_fast_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "onednn_is_faster", lambda: False)
    wide, x = torch.randn(256, 128), torch.randn(128, 128)
    assert torch.equal(linear(x, wide), F.linear(x, wide))


@pytest.mark.parametrize(
    ("vendor", "family", "wide"),
    [
        ("AuthenticAMD", 26, True),
        ("AuthenticAMD", 25, False),
        ("GenuineIntel", 6, False),
        ("GenuineIntel", 30, False),
    ],
)
def test_onednn_is_for_amd_from_zen_5_on(vendor: str, family: int, wide: bool) -> None:
    """Zen 4 (family 25) knows AVX-512 too, and gains nothing by it."""
    facts = f"processor\t: 0\nvendor_id\t: {vendor}\ncpu family\t: {family}\nmodel\t\t: 17\n"
    assert module._multiplies_512_bits(facts) is wide
