"""Decode rate of a GPT graph on CUDA through the project's runtime, and what binding again costs."""
import statistics, tempfile, time
from pathlib import Path
import numpy as np, torch
from kit import emit, step, need
from throughline.core.backend import BackendOptions, Span
from throughline.inference.exports.export import write_graph
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.runtimes.backends import run_graph
from throughline.inference.runtimes.torch_backend import TorchCausal
from throughline.inference.serving.generation import Job
from throughline.inference.serving.slots import SlotBatch, answer
from throughline.models.config import preset
from throughline.models.init import build
P = "c-decode"
config = preset("gpt2-124m")
net = build(config, 0).eval()
draw = np.random.default_rng(0)
place = Path(tempfile.mkdtemp())
for precision in ("fp16", "fp32"):
    write_graph(net, place / f"{precision}.onnx", {}, GraphOptions("cuda", precision))
net = net.cuda(); truth = TorchCausal(net)
ids = draw.integers(0, config.vocab_size, (4, 80))
for precision in ("fp16", "fp32"):
    with step(P, precision):
        backend = run_graph(place / f"{precision}.onnx", config, BackendOptions("cuda", threads=2), precision)
        a, b = truth.new_cache(4), backend.new_cache(4)
        def both(spans): return torch.as_tensor(truth.step(spans, a)).float().cpu().numpy(), torch.as_tensor(backend.step(spans, b)).float().cpu().numpy()
        errors = {}
        for name, spans in (("prompts", [Span(r, 0, ids[r, :40], 1) for r in range(4)]), ("parts", [Span(r, 40, ids[r, 40:60], 1) for r in range(4)]), ("tokens", [Span(r, 60, ids[r, 60:61], 1) for r in range(4)]), ("tokens again", [Span(r, 61, ids[r, 61:62], 1) for r in range(4)])):
            w, f = both(spans); errors[name] = float(np.abs(w - f).max() / np.abs(w).max())
        emit(P, precision=precision, errors=errors)
        for rows in (1, 16):
            need(8)
            prompts = draw.integers(0, config.vocab_size, (rows, 128))
            batch = SlotBatch(backend, lambda ids: "", rows, prefix_bytes=0)
            taken = []
            for _ in range(3):
                t = time.perf_counter(); sum(1 for _ in answer(batch, [Job(row, 64) for row in prompts])); torch.cuda.synchronize(); taken.append(time.perf_counter() - t)
            emit(P, precision=precision, rows=rows, tokens_per_s=round(rows * 64 / statistics.median(taken)))
