"""On a CUDA device the models compute what they compute on the CPU, in every dtype the card has, and a
training step moves them.

Needs torch, numpy and transformers only (make gpu-check runs on a bare machine).
"""

import pytest
import torch
from throughline.models.bert import BERT
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.experts import Experts
from throughline.models.gpt import GPT
from throughline.models.init import initialise
from throughline.train.loss import cross_entropy_sum
from torch.nn import functional as F

pytestmark = pytest.mark.gpu
GPT_SHAPE = GPTConfig(vocab_size=512, sequence_length=128, layers=4, width=128, heads=4)
BERT_SHAPE = BERTConfig(vocab_size=512, sequence_length=128, layers=4, width=128, heads=4)
# one product of 128 terms rounds at 2**-8 (bf16) or 2**-11 (fp16) of its size; four layers add up to a few of
# them
LOGIT_BOUND = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


def ids(rows: int = 4, length: int = 128) -> torch.Tensor:
    return torch.randint(0, 512, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def exact_fp32():
    """TF32 off: fp32 on the card is compared with fp32 on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    yield


@pytest.mark.parametrize("dtype", LOGIT_BOUND, ids=str)
@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_logits_equal_the_cpu(family: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("this card has no bf16")
    model = (GPT(GPT_SHAPE) if family == "gpt" else BERT(BERT_SHAPE)).eval()
    initialise(model, seed=0)

    def logits(device: str) -> torch.Tensor:
        hidden = model.hidden(ids().to(device))
        return (model.head(hidden) if family == "gpt" else model.mlm_head(hidden)).float()

    with torch.no_grad():
        expected = logits("cpu")
        model.to("cuda")
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            found = logits("cuda").cpu()
    assert (found - expected).abs().max() <= LOGIT_BOUND[dtype] * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_learns_a_batch_by_heart(compiled: bool) -> None:
    """Forty fused AdamW steps on one batch, in the card's best dtype: the loss falls to a third."""
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    model = GPT(GPT_SHAPE)
    initialise(model, seed=0)
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    batch = ids(8).to("cuda")

    def loss_of() -> torch.Tensor:
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            logits = model(batch[:, :-1])
        return cross_entropy_sum(logits.flatten(0, 1), batch[:, 1:].flatten()) / batch[:, 1:].numel()

    step_loss = torch.compile(loss_of) if compiled else loss_of
    losses = []
    for _ in range(40):
        loss = step_loss()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3, losses[::10]


def test_documents_apart_equal_separate_rows() -> None:
    """Two documents in one row see only themselves: the same hidden states as each alone (the mask path on
    CUDA).
    """
    model = GPT(GPT_SHAPE).eval()
    initialise(model, seed=0)
    model.to("cuda")
    row = ids(1).to("cuda")
    document_ids = (torch.arange(128, device="cuda") >= 50).long()[None]
    positions = torch.cat((torch.arange(50), torch.arange(78))).to("cuda")[None]
    with torch.no_grad():
        packed = model.hidden(row, positions, document_ids)
        apart = torch.cat((model.hidden(row[:, :50]), model.hidden(row[:, 50:])), 1)
    assert (packed - apart).abs().max() < 1e-4


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [96, 92], ids=["grouped", "by-themselves"])
@pytest.mark.parametrize("counts", [[70, 0, 129, 1], [0, 0, 0, 0]], ids=["uneven", "none"])
def test_grouped_products_equal_a_loop(counts: list[int], size: int, bias: bool) -> None:
    """Answers and every gradient of experts in bf16, one of them without a row, are those of plain products in float32
    on the CPU; 92 numbers of bf16 are no multiple of 16 bytes, which torch's grouped products want.
    """
    config = GPTConfig(width=64, heads=4, experts=4, expert_width=size, gated=True, bias=bias)
    rows = torch.randn(sum(counts), 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        torch.manual_seed(3)
        experts = Experts(config, F.silu)
        for parameter in experts.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
            parameter.data = parameter.data.bfloat16().float()
        experts.to(device, dtype)
        own = rows.to(device, dtype).requires_grad_()
        answers = experts(own, torch.tensor(counts, device=device))
        (answers * torch.linspace(-1, 1, 64, device=device, dtype=dtype)).sum().backward()
        parts = [answers.detach(), own.grad, *(parameter.grad for parameter in experts.parameters())]
        found.append([part.float().cpu() for part in parts])
    for plain, grouped in zip(*found, strict=True):
        bound = 3 * 2**-8 * max(plain.abs().max().item(), 1e-3) if plain.numel() else 0.0
        torch.testing.assert_close(grouped, plain, rtol=0, atol=bound)
