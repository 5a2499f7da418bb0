"""Where ONNX Runtime's CUDA provider puts the nodes of our graphs: it decides before it starts the card, and on the
null GPU it goes no further. What it leaves to the CPU is fetched from the card and sent back at every step.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from throughline.inference.graphs.graph_options import GraphOptions
from throughline.inference.graphs.onnx_bert import bert_graph
from throughline.inference.graphs.onnx_gpt import gpt_graph
from throughline.models.config import BERTConfig, GPTConfig
from throughline.models.init import build

SIZE = {"vocab_size": 512, "sequence_length": 128, "layers": 2, "width": 128, "heads": 4}
# what may stay on the CPU: a few numbers about shapes, which ONNX Runtime reckons there on purpose
SHAPES = ("Add", "Cast", "Concat", "Gather", "Mul", "Range", "ReduceMax", "Shape", "Slice", "Squeeze", "Sub")
PLACE = """
import sys, onnxruntime
options = onnxruntime.SessionOptions()
options.log_severity_level = 0
onnxruntime.InferenceSession(sys.argv[1], options, providers=[("CUDAExecutionProvider", {"use_tf32": "0"})])
"""


def left_to_the_cpu(graph: Path) -> Counter[str]:
    """Kinds of the nodes that the CPU would compute, beside those about shapes, as the session's log has them."""
    nvidia = Path(torch.__file__).parents[1] / "nvidia"
    folders = (os.environ["LD_LIBRARY_PATH"], *map(str, sorted(nvidia.glob("*/lib"))))
    words = [sys.executable, "-c", PLACE, str(graph)]
    # one card: to the provider the first is a V100
    alone = os.environ | {"LD_LIBRARY_PATH": ":".join(folders), "NULL_GPU_CARD": "2"}
    said = subprocess.run(words, capture_output=True, text=True, env=alone).stderr
    where = "VerifyEachNodeIsAssignedToAnEp]"
    lines = [line.partition(where)[2].strip() for line in said.splitlines() if where in line]
    provider, found = "", {"CPUExecutionProvider": Counter(), "CUDAExecutionProvider": Counter()}
    for line in lines:
        if header := re.match(r"Node\(s\) placed on \[(\w+)\]", line):
            provider = header[1]
        elif (node := re.match(r"(\w+) \((.*)\)", line)) and (node[1] not in SHAPES or "blocks." in node[2]):
            found[provider][node[1]] += 1
    assert sum(found["CUDAExecutionProvider"].values()) > 10, said[-2000:]
    return found["CPUExecutionProvider"]


@pytest.mark.parametrize(
    ("family", "precision"),
    [
        *(("gpt", kind) for kind in ("fp32", "fp16", "int8", "int4")),
        ("bert", "fp32"),
        ("bert", "fp16"),
        ("bert", "int8"),
    ],
)
def test_a_cards_graph_leaves_no_work_to_the_cpu(family, precision, tmp_path):
    pytest.importorskip("onnxruntime.capi.onnxruntime_pybind11_state")
    config, write = (GPTConfig, gpt_graph) if family == "gpt" else (BERTConfig, bert_graph)
    model = build(config(**SIZE)).eval()
    options = GraphOptions("cuda", precision, ranges={name: 4.0 for name, _ in model.named_modules()})
    write(model, options).save(tmp_path / "model.onnx", {})
    left = left_to_the_cpu(tmp_path / "model.onnx")
    assert not left, f"the CPU would compute {dict(left)}"
