"""Of the checks of `gpu_doubts.py` those of a GPT that answers, and what all of them share."""

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from throughline.models.config import BERTConfig, GPTConfig, ModelConfig
from throughline.models.init import build
from torch import Tensor

# 1000 words: no whole tiles
SHAPE = {"vocab_size": 1000, "sequence_length": 128, "layers": 2, "width": 128, "heads": 4}
LLAMA = {"positions": "rotary", "norm": "rmsnorm", "gated": True, "bias": False, "kv_heads": 2, "tied": False}
MODELS: dict[str, ModelConfig] = {
    "GPT": GPTConfig(**SHAPE),
    "Llama shape": GPTConfig(**SHAPE, **LLAMA, activation="silu"),
    "BERT": BERTConfig(**SHAPE),
}
# relative to the largest value: rounding of 24, 11 and 8 bits in a few dozen products and a sum of them
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


class LeftOut(Exception):
    """Why a check says nothing here."""


def dtypes(device: torch.device) -> list[torch.dtype]:
    """Those that the card's products take, fp32 first."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    return [dtype for dtype in BOUNDS if not (old and dtype == torch.bfloat16)]


def error(found: Tensor, expected: Tensor) -> float:
    """The largest difference, as a part of the largest value."""
    expected = expected.double().cpu()
    return float((found.double().cpu() - expected).abs().max() / expected.abs().max())


def answers(device: torch.device) -> str:
    """Prompts of three lengths and ten tokens behind each, which a card replays as CUDA graphs, answer as on a CPU."""
    from throughline.core.backend import Span
    from throughline.inference.runtimes.torch_backend import TorchCausal

    ids, told = np.random.default_rng(3).integers(0, 1000, (3, 100)), []
    band = replace(MODELS["GPT"], attention_window=32, attention_block=16, layer_pattern="lg")
    for name, config in {"GPT": MODELS["GPT"], "Llama shape": MODELS["Llama shape"], "window": band}.items():
        found = []
        for where, dtype in (
            (torch.device("cpu"), torch.float32),
            *((device, one) for one in dtypes(device)),
        ):
            backend = TorchCausal(build(config, 1).to(where, dtype))
            lengths, cache = (70, 1, 33), backend.new_cache(4)
            prompts = [Span(row, 0, ids[row, :length]) for row, length in enumerate(lengths)]
            logits = [torch.as_tensor(backend.step(prompts, cache))]
            for place in range(10):
                spans = [
                    Span(row, past + place, ids[row, past + place, None]) for row, past in enumerate(lengths)
                ]
                logits.append(torch.as_tensor(backend.step(spans, cache)))
            found.append(torch.cat(logits))
            assert backend.graphs is None or not backend.graphs.failures, "a step could not be captured"
        for dtype, one in zip(dtypes(device), found[1:]):
            worst = error(one, found[0])
            assert worst <= BOUNDS[dtype], (name, dtype, worst)
            told.append(f"{name} {dtype} {worst:.1e}")
    return ", ".join(told)


def onnx_runtime(device: torch.device) -> str:
    """The fp16 graph of a GPT, whose every node has a CUDA kernel, answers as torch does."""
    try:
        import onnxruntime
        from throughline.core.backend import BackendOptions, Span
        from throughline.inference.exports.export import write_graph
        from throughline.inference.graphs.graph_options import GraphOptions
        from throughline.inference.runtimes.backends import run_graph
        from throughline.inference.runtimes.torch_backend import TorchCausal
    except ImportError as missing:
        raise LeftOut(str(missing)) from missing

    if device.type == "cuda" and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        raise LeftOut("this ONNX Runtime was built without CUDA: pip install onnxruntime-gpu")
    config = replace(MODELS["GPT"], vocab_size=1024)
    model, ids = build(config, 1).eval(), np.random.default_rng(3).integers(0, 1000, 64)
    options = BackendOptions("cuda:0" if device.type == "cuda" else "cpu", threads=1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write_graph(model, path, {}, GraphOptions("onnxruntime", "fp16"))
        graph = run_graph(path, config, options)
        answers = [
            torch.as_tensor(b.step([Span(0, 0, ids, 8)], b.new_cache(1))) for b in (graph, TorchCausal(model))
        ]
    found = error(*answers)
    assert found <= 3e-2, found
    return f"{found:.1e}"
