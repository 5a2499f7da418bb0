"""BERT-Base on one text of 128 tokens: NVIDIA reported 2.2 ms on a T4 (TensorRT 5.1, August 2019).

    python benchmarks/t4_bert.py

Takes the GPU when there is one and measures the torch and ONNX Runtime backends in fp16 on it (random weights:
latency does not depend on them); prints what was reported, what was measured or that there is no GPU here, and the
floor that the hardware leaves. The last line is one JSON object.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from common import machine_facts, versions
from throughline.core.artifact import Input
from throughline.core.backend import BackendOptions
from throughline.core.errors import ThroughlineError
from throughline.core.hardware import chips, machine
from throughline.inference.backends import onnx_backend, torch_backend
from throughline.inference.choice import measure
from throughline.inference.export import write_graph
from throughline.inference.graph_options import GraphOptions
from throughline.inference.loaded import Loaded
from throughline.inference.roofline import floor_ms, reported
from throughline.models.init import build
from throughline.models.presets import preset

REPORTED_MS, TOKENS = 2.2, 128
SECONDS = 3.0


def median_ms(loaded: Loaded) -> float:
    """Wall milliseconds of one text, its ids brought and its embedding fetched."""
    encoder = loaded.encoder
    assert encoder is not None
    ids = np.random.default_rng(0).integers(0, encoder.vocab_size, (1, TOKENS))
    rest = (np.zeros_like(ids), np.ones(ids.shape, bool), np.zeros((1, 0), np.int64))
    return float(np.median(measure(lambda: encoder.forward(ids, *rest), SECONDS))) * 1e3


def measured() -> dict[str, float]:
    """Milliseconds by backend on the first GPU."""
    config, nowhere = preset("bert-base"), Input("", "model", "")
    model = build(config, 0).eval()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        graph = Path(folder) / "model.onnx"
        write_graph(model, graph, {}, GraphOptions(precision="fp16"))
        for runtime in ("onnxruntime", "tensorrt"):
            try:
                how = BackendOptions("cuda", runtime=runtime)
                found[f"{runtime} fp16"] = median_ms(onnx_backend(graph, config, None, nowhere, how, "fp16"))
            except ThroughlineError as error:
                print(f"{runtime}: {error.what}")
    found["torch fp16"] = median_ms(torch_backend(model.half().cuda(), None, nowhere))
    return found


def main() -> None:
    config = preset("bert-base")
    t4 = chips()["t4"]
    floors = {precision: floor_ms(config, t4, 1, TOKENS, precision) for precision in ("fp16", "int8")}
    later = reported(config, 1, TOKENS)
    print(f"reported   {REPORTED_MS} ms on a T4, TensorRT 5.1, fp16 (2019-08)")
    if later is not None:
        print(
            f"           {later['fp16_ms']} ms fp16, {later['int8_ms']} ms int8, TensorRT {later['tensorrt']}"
        )
    found: dict[str, float] = {}
    if torch.cuda.is_available():
        found = measured()
        gpu = machine().gpus[0]
        for name, value in found.items():
            print(f"measured   {value:.2f} ms, {name}, {gpu.name}")
        if gpu.chip is not None:
            print(f"floor      {floor_ms(config, gpu.chip, 1, TOKENS, 'fp16'):.2f} ms fp16, {gpu.name}")
    else:
        print("measured   no GPU here")
    print(f"floor      {floors['fp16']:.2f} ms fp16, {floors['int8']:.2f} ms int8, T4")
    line = {"benchmark": "t4_bert", "reported_ms": REPORTED_MS, "later": later, "floor_ms": floors}
    line |= {"measured_ms": found, "machine": machine_facts(), "versions": versions(["onnxruntime"])}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
