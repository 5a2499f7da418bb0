"""Experts on a CPU: rows of zeros, by which a product is of few sizes, change no answer and no gradient; experts with
room for some rows equal a plain loop over tokens.
"""

import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from throughline.models import experts as module  # noqa: E402
from throughline.models.config import GPTConfig  # noqa: E402
from throughline.models.init import build  # noqa: E402
from torch.nn import functional as F  # noqa: E402

CONFIG = GPTConfig(width=96, heads=4, experts=4, expert_width=80, gated=True, bias=False)


def computed(x: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
    """Answers, and the gradients of the tokens and of all matrices."""
    torch.manual_seed(3)
    experts = module.Experts(CONFIG, F.silu).bfloat16()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    own = x.clone().requires_grad_()
    answers = experts(own, counts)
    (answers.float() * torch.linspace(-1, 1, len(x))[:, None]).sum().backward()
    return [answers.detach(), own.grad, *(parameter.grad for parameter in experts.parameters())]


def test_rows_of_zeros_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda x, *rest: sizes.append(len(x)) or linear(x, *rest))
    x, counts = torch.randn(300, CONFIG.width).bfloat16(), torch.tensor([197, 0, 102, 1])
    found = computed(x, counts)
    assert sizes == [256] * 3 + [0] * 3 + [128] * 3 + [1] * 3
    monkeypatch.setattr(module, "ROWS", 10_000)
    for padded, plain in zip(found, computed(x, counts), strict=True):
        torch.testing.assert_close(padded, plain, rtol=2**-7, atol=2**-7 * plain.abs().max().item())


def routed(factor: float, **fields: object) -> module.RoutedFeedForward:
    """In float64, with a router that likes the first expert for tokens of positive numbers."""
    config = replace(CONFIG, expert_capacity_factor=factor, **fields)
    torch.manual_seed(5)
    layer = module.RoutedFeedForward(config, F.silu, None).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.router.weight.data[0] += 0.2
    return layer


def looped(layer: module.RoutedFeedForward, x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Token by token, an expert full or not; and how many it turned away."""
    config, experts = layer.config, layer.experts
    flat = x.flatten(0, 1)
    scores = (flat @ layer.router.weight.t()).softmax(-1)
    room = math.ceil(config.expert_capacity_factor * len(flat) * config.experts_per_token / config.experts)
    wishes = [scores[n].topk(config.experts_per_token).indices.tolist() for n in range(len(flat))]
    weights = {(n, e): scores[n, e] / scores[n, wishes[n]].sum() for n in range(len(flat)) for e in wishes[n]}
    rows, turned_away = [torch.zeros_like(flat[0]) for _ in flat], 0
    for e in range(config.experts):
        queue = sorted((n for n, wished in weights if wished == e), key=lambda n: -weights[n, e].item())
        turned_away += max(len(queue) - room, 0)
        for n in queue[:room]:
            hidden = F.silu(experts.gate[e] @ flat[n]) * (experts.up[e] @ flat[n])
            rows[n] = rows[n] + weights[n, e] * (experts.down[e] @ hidden)
    return torch.stack(rows).view_as(x), turned_away


@pytest.mark.parametrize("factor", [0.01, 0.6, 1.0, 1.3])
def test_an_expert_has_room_for_the_rows_that_weigh_most(factor: float) -> None:
    """Outputs, gradients of tokens and of every weight, and the count of those that were dropped."""
    layer, x = routed(factor), 0.3 + torch.randn(3, 11, CONFIG.width, dtype=torch.float64)
    seen: list[module.Routing] = []
    layer.watch = lambda routing, rows: seen.append(routing) or routing
    found = []
    for compute in (lambda x: layer(x), lambda x: looped(layer, x)[0]):
        own = x.clone().requires_grad_()
        layer.zero_grad()
        answers = compute(own)
        (answers * torch.linspace(-1, 1, answers.numel(), dtype=x.dtype).view_as(x)).sum().backward()
        found.append([answers.detach(), own.grad, *(weight.grad for weight in layer.parameters())])
    for ours, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-10 * plain.abs().max().item())
    turned_away = looped(layer, x)[1]
    assert int(seen[0].dropped_NK.sum()) == turned_away > 0


def test_room_for_all_drops_none_to_the_bit_and_an_evaluation_never_drops() -> None:
    x = torch.randn(3, 11, CONFIG.width, dtype=torch.float64)
    grads, answers = [], []
    for factor in (0.0, float(CONFIG.experts)):
        layer = routed(factor)
        answers.append(layer(x))
        answers[-1].square().sum().backward()
        grads.append([weight.grad for weight in layer.parameters()])
    narrow = routed(0.6)
    assert not torch.equal(narrow(x), answers[0])
    for same in (answers[1], narrow.eval()(x)):
        assert torch.equal(same, answers[0])
    assert all(map(torch.equal, *grads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_16_bit_model_routes_in_fp32(dtype: torch.dtype) -> None:
    """A served model chooses experts as its training did: by fp32 products of its activations and its router."""
    config = replace(CONFIG, layers=2, vocab_size=64, sequence_length=32, balance_bias=True)
    model = build(config, dtype=dtype)
    narrow = {name for name, parameter in model.named_parameters() if parameter.dtype == dtype}
    routers = {name for name, _ in model.named_parameters() if ".router." in name or "balance_bias" in name}
    assert len(routers) == 4
    assert narrow == {name for name, _ in model.named_parameters()} - routers
    assert model(torch.arange(8)[None]).dtype == dtype
    layer, x_NW = model.blocks["1"].mlp, torch.randn(256, config.width).to(dtype)
    expected_NE = (x_NW.float() @ layer.router.weight.t()).softmax(-1)
    torch.testing.assert_close(layer.route(x_NW).scores_NE, expected_NE, rtol=1e-5, atol=1e-6)
