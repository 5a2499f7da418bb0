"""On a CUDA device the torch backends answer what they answer on the CPU: ragged batches, greedy tokens, embeddings.

Needs torch and numpy only (make gpu-check runs on a bare machine).
"""

import copy

import numpy as np
import pytest
import torch
from throughline.inference.generation import Request, generate
from throughline.inference.torch_backend import TorchCausal, TorchEncoder
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.init import build

pytestmark = pytest.mark.gpu
GPT_SHAPE = GPTConfig(vocab_size=512, sequence_length=128, layers=4, width=128, heads=4, tied=False)
BERT_SHAPE = BERTConfig(vocab_size=512, sequence_length=128, layers=4, width=128, heads=4)
BOUND = 1e-4  # fp32 sums in another order, as inference/parity.py explains


@pytest.fixture(autouse=True)
def exact_fp32():
    """TF32 off: fp32 on the card is compared with fp32 on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    yield


def pair(config):
    """The same model twice, with matrices large enough that no arg-max hangs on rounding."""
    model = build(config, 1).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(5.0)
    return model, copy.deepcopy(model).to("cuda")


def test_ragged_batches_and_greedy_tokens_equal_the_cpu() -> None:
    cpu, cuda = (TorchCausal(model) for model in pair(GPT_SHAPE))
    rng = np.random.default_rng(0)
    ids, past = rng.integers(0, 512, (3, 40)), np.array([0, 7, 30])
    ask = np.tile(np.arange(10), (3, 1))
    logits = []
    for backend in (cpu, cuda):
        cache = backend.new_cache(5)
        backend.forward(ids[:, :30], np.zeros(3, np.int64), ask[:, :0], cache, first_row=1)
        logits.append(backend.forward(ids[:, :10], past, ask, cache, first_row=1))
    assert np.abs(logits[0] - logits[1]).max() <= BOUND * np.abs(logits[0]).max()
    requests = [Request(rng.integers(0, 512, length), 64) for length in (1, 20, 64)]
    answers = [
        [p.token.id for _, p in generate(backend, lambda ids: "", requests) if p.token]
        for backend in (cpu, cuda)
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 3 * 64


def test_encoder_outputs_equal_the_cpu() -> None:
    cpu, cuda = (TorchEncoder(model) for model in pair(BERT_SHAPE))
    rng = np.random.default_rng(0)
    ids, types = rng.integers(0, 512, (4, 50)), rng.integers(0, 2, (4, 50))
    mask, ask = np.arange(50) < np.array([[50], [31], [2], [1]]), rng.integers(0, 2, (4, 3))
    expected, found = (backend.forward(ids, types, mask, ask) for backend in (cpu, cuda))
    for name, value in expected.items():
        error = (
            np.abs(value - found[name])[mask] if name == "last_hidden_state" else np.abs(value - found[name])
        )
        assert error.max() <= BOUND * max(1.0, np.abs(value).max()), name
