"""BERT-Base on one text of 128 tokens: NVIDIA reported 2.2 ms on a T4 (TensorRT 5.1, August 2019).

    python benchmarks/t4_bert.py [--seconds 3]

With a GPU the torch and ONNX Runtime backends are measured on it in fp16, without one on the CPU in fp32 and int8
(random weights: latency does not depend on them). TensorRT-RTX, where it is installed, compiles the graphs for a
T4's compute capability on the CPU; its engines are counted, not run. Beside that stand what was reported and the
floor that the hardware leaves. The last line is one JSON object.
"""

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine_facts, parser, versions
from throughline.core.artifact import Input
from throughline.core.backend import BackendOptions
from throughline.core.errors import ThroughlineError
from throughline.core.hardware import chips, machine
from throughline.inference.exports.export import write_graph
from throughline.inference.exports.export_engine import Profile, build_engine, engine_facts, kernels_of_log
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.runtimes.backends import run_graph
from throughline.inference.runtimes.bench import floor_ms, measure, reported
from throughline.inference.runtimes.source import Loaded
from throughline.inference.runtimes.tensorrt_backend import load_library
from throughline.inference.runtimes.torch_backend import run_module
from throughline.models.config import preset
from throughline.models.init import build

REPORTED_MS, TOKENS, CAPABILITY = 2.2, 128, "7.5"
NOWHERE = Input("", "model", "")
PROFILE = Profile((1, 1, 8), (1, TOKENS, 512))


def median_ms(loaded: Loaded, seconds: float) -> float:
    """Wall milliseconds of one text, its ids brought and its embedding fetched."""
    encoder = loaded.encoder
    assert encoder is not None
    ids = np.random.default_rng(0).integers(0, encoder.vocab_size, (1, TOKENS))
    rest = (np.zeros_like(ids), np.ones(ids.shape, bool), np.zeros((1, 0), np.int64))
    return float(np.median(measure(lambda: encoder.forward(ids, *rest), seconds))) * 1e3


def measured(model: Any, seconds: float) -> dict[str, float]:
    """Milliseconds by backend and precision: on the first GPU, or on the CPU."""
    gpu = torch.cuda.is_available()
    forms = [("onnxruntime", "portable", "fp16"), ("tensorrt", "portable", "fp16")]
    if not gpu:
        forms = [("onnxruntime", "onnxruntime", precision) for precision in ("fp32", "int8")]
    found = {}
    for runtime, variant, precision in forms:
        with tempfile.TemporaryDirectory() as folder:
            graph = Path(folder) / "model.onnx"
            write_graph(model, graph, {}, GraphOptions(variant, precision))  # type: ignore[arg-type]
            how = BackendOptions("cuda" if gpu else "cpu", runtime=runtime)
            try:
                loaded = Loaded(model.config, None, NOWHERE, run_graph(graph, model.config, how, precision))
                found[f"{runtime} {precision}"] = median_ms(loaded, seconds)
            except ThroughlineError as error:
                print(f"{runtime}: {error.what}")
    plain = run_module(model.half().cuda() if gpu else model, None, NOWHERE)
    found["torch fp16" if gpu else "torch fp32"] = median_ms(plain, seconds)
    return found


def compiled(model: Any) -> dict[str, dict[str, Any]]:
    """What TensorRT-RTX makes of the graphs for a T4's compute capability, by precision."""
    if importlib.util.find_spec("tensorrt_rtx") is None:
        print("compiled   nothing: TensorRT-RTX is not installed")
        return {}
    library, ranges = load_library("tensorrt_rtx"), dict.fromkeys(dict(model.named_modules()), 4.0)
    found = {}
    for precision in ("fp16", "int8"):
        with tempfile.TemporaryDirectory() as folder:
            graph = Path(folder) / "model.onnx"
            write_graph(model, graph, {}, GraphOptions("tensorrt", precision, ranges=ranges))  # type: ignore[arg-type]
            engine, messages = build_engine(library, graph, model.config, [PROFILE], CAPABILITY)
        facts = engine_facts(kernels_of_log(messages), model.config, precision)
        found[precision] = {**facts, "bytes": len(engine), "version": library.__version__}
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=3.0, help="of measurement for each backend")
    seconds = options.parse_args().seconds
    config, t4 = preset("bert-base"), chips()["t4"]
    floors = {precision: floor_ms(config, t4, 1, TOKENS, precision) for precision in ("fp16", "int8")}
    later = reported(config, 1, TOKENS)
    print(f"reported   {REPORTED_MS} ms on a T4, TensorRT 5.1, fp16 (2019-08)")
    if later is not None:
        print(
            f"           {later['fp16_ms']} ms fp16, {later['int8_ms']} ms int8, TensorRT {later['tensorrt']}"
        )
    model = build(config, 0).eval()
    engines = compiled(model)
    for precision, facts in engines.items():
        counts = "{kernels_per_layer:g} kernels a layer, {fused_attention} attention blocks fused"
        print(f"compiled   {counts.format(**facts)}, {precision}, by TensorRT-RTX for a T4, not run")
    here = machine()
    gpu = here.gpus[0] if torch.cuda.is_available() else None
    name = gpu.name if gpu else f"{here.cpu.name}, {here.cpu.cores} cores (no GPU here)"
    found = measured(model, seconds)
    for form, value in found.items():
        print(f"measured   {value:.2f} ms, {form}, {name}")
    if gpu and gpu.chip is not None:
        print(f"floor      {floor_ms(config, gpu.chip, 1, TOKENS, 'fp16'):.2f} ms fp16, {gpu.name}")
    print(f"floor      {floors['fp16']:.2f} ms fp16, {floors['int8']:.2f} ms int8, T4")
    line = {"benchmark": "t4_bert", "reported_ms": REPORTED_MS, "later": later, "floor_ms": floors}
    line |= {"measured_ms": found, "best_ms": min(found.values()), "measured_on": name, "compiled": engines}
    line |= {"machine": machine_facts(), "versions": versions(["onnxruntime"])}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
