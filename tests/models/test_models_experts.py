"""Experts on a CPU: rows of zeros, by which a product is of few sizes, change no answer and no gradient."""

import pytest

torch = pytest.importorskip("torch")

from throughline.models import experts as module  # noqa: E402
from throughline.models.config import GPTConfig  # noqa: E402
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
