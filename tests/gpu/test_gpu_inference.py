"""On a CUDA device the torch backends answer what they answer on the CPU: ragged batches, greedy tokens,
embeddings.

Needs torch and numpy only (make gpu-check runs on a bare machine).
"""

import copy
from itertools import product

import numpy as np
import pytest
import torch
from throughline.core.backend import BackendOptions, Span, on_host
from throughline.inference.runtimes.sampling import GREEDY, Sampling
from throughline.inference.runtimes.torch_backend import TorchCausal, TorchEncoder
from throughline.inference.serving.generation import Job
from throughline.inference.serving.slots import SlotBatch, answer
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.init import build

pytestmark = pytest.mark.gpu
GPT_SHAPE = GPTConfig(vocab_size=512, sequence_length=128, layers=4, width=128, heads=4, tied=False)
BERT_SHAPE = BERTConfig(vocab_size=512, sequence_length=128, layers=4, width=128, heads=4)
BOUND = 1e-4  # fp32 sums in another order, as inference/graphs/parity.py explains


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
    logits = []
    for backend in (cpu, cuda):
        cache = backend.new_cache(5)
        backend.step([Span(1 + row, 0, line[:30], 0) for row, line in enumerate(ids)], cache)
        spans = [Span(1 + row, int(past[row]), line[:10], 10) for row, line in enumerate(ids)]
        logits.append(on_host(backend.step(spans, cache)))
    assert np.abs(logits[0] - logits[1]).max() <= BOUND * np.abs(logits[0]).max()
    requests = [Job(rng.integers(0, 512, length), 64) for length in (1, 20, 64)]
    answers = [
        [p.token.id for _, _, p in answer(SlotBatch(backend, lambda ids: "", 8), requests) if p.token]
        for backend in (cpu, cuda)
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 3 * 64


def test_encoder_outputs_equal_the_cpu() -> None:
    cpu, cuda = (TorchEncoder(model) for model in pair(BERT_SHAPE))
    rng = np.random.default_rng(0)
    ids, types = rng.integers(0, 512, (4, 50)), rng.integers(0, 2, (4, 50))
    mask, ask = np.arange(50) < np.array([[50], [31], [2], [1]]), rng.integers(0, 2, (4, 3))
    cuda.forward(ids[:2], types[:2], mask[:2], ask[:2])  # another shape
    expected, *calls = (backend.forward(ids, types, mask, ask) for backend in (cpu, cuda, cuda, cuda))
    assert [call is None for call in cuda._calls.values()] == [True, False]  # the third was a replay
    for found, (name, value) in product(calls, expected.items()):
        error = (
            np.abs(value - found[name])[mask] if name == "last_hidden_state" else np.abs(value - found[name])
        )
        assert error.max() <= BOUND * max(1.0, np.abs(value).max()), name


def test_graphs_outlive_the_scratch_memory_of_other_programs() -> None:
    """Somebody frees where cuBLAS works, as torch.compile's CUDA graphs do, and the driver gets it back."""
    backend = TorchCausal(pair(GPT_SHAPE)[1])
    cache, ids = backend.new_cache(1), np.arange(20)
    backend.step([Span(0, 0, ids, 1)], cache)
    found = []
    for _ in range(3):
        found.append(backend.step([Span(0, 20, ids[:1], 1)], cache).cpu())
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    assert torch.equal(found[0], found[2])


def test_steps_prefixes_and_draws_equal_the_cpu() -> None:
    """Prompts in parts beside single tokens, a row saved and loaded, and sampled answers with every filter: where
    logits are computed changes nothing.
    """
    backends = [TorchCausal(model) for model in pair(GPT_SHAPE)]
    rng = np.random.default_rng(1)
    long, short = rng.integers(0, 512, 100), rng.integers(0, 512, 9)
    logits = []
    for backend in backends:
        cache = backend.new_cache(4)
        backend.step([Span(0, 0, long[:60], 0), Span(2, 0, short[:8], 0)], cache)
        saved = backend.save_row(cache, 0, 60)
        backend.load_row(cache, 3, saved, 60)
        spans = [Span(3, 60, long[60:], 1), Span(2, 8, short[8:], 1), Span(0, 60, long[60:61], 1)]
        found = torch.as_tensor(backend.step(spans, cache))
        assert found.device.type == backend.device.partition(":")[0] and found.shape == (3, 512)
        logits.append(found.cpu().numpy())
    assert np.abs(logits[0] - logits[1]).max() <= BOUND * np.abs(logits[0]).max()
    settings = [
        Sampling(seed=1, top_k=20),
        Sampling(seed=2, top_p=0.9, min_p=0.01),
        Sampling(seed=3, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias=((5, 2.0),)),
        GREEDY,
    ]
    requests = [Job(long[:30], 20, setting, logprobs=3, prompt_logprobs=1) for setting in settings]
    answers = []
    for backend in backends:
        batch = SlotBatch(backend, lambda ids: "", 4, prefix_bytes=0)
        pieces = [(number, piece) for number, _, piece in answer(batch, requests)]
        answers.append([(number, piece.token.id) for number, piece in pieces if piece.token])
        assert all(len(piece.token.top) == 3 for _, piece in pieces if piece.token)
    assert answers[0] == answers[1]


def test_half_precision_stays_near_single() -> None:
    model, _ = pair(GPT_SHAPE)
    single = TorchCausal(copy.deepcopy(model).to("cuda"))
    half = TorchCausal(model.half().to("cuda"))
    assert half.dtype == "fp16" and half.token_bytes * 2 == single.token_bytes
    ids = np.random.default_rng(2).integers(0, 512, 64)
    ours, theirs = (b.step([Span(0, 0, ids, 64)], b.new_cache(1)).cpu() for b in (half, single))
    # fp16 rounds at 5e-4; four layers of sums of 128 stay within a few per cent of the scale
    assert (ours - theirs).abs().max() <= 3e-2 * theirs.abs().max()


def test_onnx_runtime_on_cuda_equals_the_cpu(tmp_path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this ONNX Runtime was built without CUDA")
    from throughline.inference.exports.export import write_graph
    from throughline.inference.runtimes.backends import run_graph

    model, _ = pair(GPT_SHAPE)
    write_graph(model, tmp_path / "model.onnx", {})
    ids = np.random.default_rng(3).integers(0, 512, 64)
    logits = []
    for device in ("cpu", "cuda:0"):
        backend = run_graph(tmp_path / "model.onnx", GPT_SHAPE, BackendOptions(device, threads=1))
        cache = backend.new_cache(2)
        backend.step([Span(0, 0, ids[:40], 0), Span(1, 0, ids[:7], 0)], cache)
        found = backend.step([Span(0, 40, ids[40:], 3), Span(1, 7, ids[7:8], 1)], cache)
        logits.append(torch.as_tensor(found).cpu().numpy())
    assert np.abs(logits[0] - logits[1]).max() <= BOUND * np.abs(logits[0]).max()
