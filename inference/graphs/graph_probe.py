"""Looking into a written graph: errors layer by layer, the first node that is not finite, what was fused."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

from ...core.errors import Refused
from ...models.config import GPTConfig, ModelConfig
from ...models.transformer import TransformerConfig
from ..runtimes.onnx_session import WIDE_SUMS
from .graph_options import GraphOptions
from .onnx_blocks import grouped
from .parity import Tally

PROBE, OPTIMISED, WEIGHTS = "probe.onnx", "optimised.onnx", "optimised.onnx.data"
TYPES = {"tensor(float16)": np.float16, "tensor(float)": np.float32, "tensor(int64)": np.int64}
ROWS, TOKENS, REAL = 2, 16, 9  # what is looked at: two rows, a BERT's second of 9 real tokens


@contextmanager
def opened(graph: Path, outputs: Sequence[str]) -> Iterator[tuple[Any, Counter[str]]]:
    """A session on the CPU that also returns these tensors of the graph, and how often each operator stands in what
    ONNX Runtime made of it. Its files stand beside the graph for a while, so that both read the same external weights.
    """
    model = onnx.load(str(graph), load_external_data=False)
    named = {output.name for output in model.graph.output}
    model.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name) for name in outputs if name not in named
    )
    path, optimised = graph.with_name(PROBE), graph.with_name(OPTIMISED)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(optimised)
    options.add_session_config_entry(*WIDE_SUMS)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", WEIGHTS)
    try:
        onnx.save_model(model, str(path))
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        nodes = onnx.load(str(optimised), load_external_data=False).graph.node
        yield session, Counter(f"{node.domain}.{node.op_type}".lstrip(".") for node in nodes)
    finally:
        for file in (path, optimised, graph.with_name(WEIGHTS)):
            file.unlink(missing_ok=True)


def _feeds(session: Any, config: ModelConfig) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Inputs for a batch of two rows, and which of its tokens are real."""
    length = min(TOKENS, config.sequence_length)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, (ROWS, length))
    second = TOKENS if isinstance(config, GPTConfig) else REAL
    real = np.arange(length) < np.array([[TOKENS], [second]])
    places = np.tile(np.arange(length), (ROWS, 1))
    values = {"input_ids": ids, "attention_mask": real.astype(np.int64), "token_type_ids": np.zeros_like(ids)}
    values |= {"logit_positions": places, "position_ids": places, "past_length": np.zeros(ROWS, np.int64)}
    feeds = {}
    for given in session.get_inputs():
        capacity = 0 if given.name.startswith("past_key") else config.sequence_length
        shape = (ROWS, config.key_value_heads, capacity, config.head_size)
        feeds[given.name] = values.get(given.name, np.zeros(shape, TYPES[given.type]))
    return feeds, real


def probe(model: nn.Module, graph: Path, config: ModelConfig) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Largest and mean error of what each block returns, against the torch module, and ONNX Runtime's operators."""
    names = [f"hidden.{layer}" for layer in range(config.layers)]
    with opened(graph, names) as (session, operators):
        feeds, real = _feeds(session, config)
        theirs = session.run(names, feeds)
    found: list[torch.Tensor] = []
    body: Any = getattr(model, "encoder", model)
    ids = torch.from_numpy(feeds["input_ids"])
    with ExitStack() as hooks, torch.inference_mode():
        for block in body.blocks.values():
            hooks.enter_context(block.register_forward_hook(lambda *given: found.append(given[-1])))
        if isinstance(config, GPTConfig):
            body.hidden(ids)
        else:
            types = torch.zeros_like(ids) if config.token_types else None
            body.hidden(ids, types, torch.from_numpy(real))
    rows = []
    for layer, (ours, other) in enumerate(zip(found, theirs)):
        tally = Tally(logits=False)
        tally.add(ours.float().cpu().numpy()[real], other[real].astype(np.float32))
        rows.append({"layer": layer, **tally.errors()})
    return rows, operators


def first_bad_node(graph: Path, config: ModelConfig) -> str:
    """The first node of the graph whose output is not finite, in a sentence; "" when all are."""
    model = onnx.load(str(graph), load_external_data=False)
    nodes = {name: node for node in model.graph.node for name in node.output}
    with opened(graph, list(nodes)) as (session, _):
        values = session.run(list(nodes), _feeds(session, config)[0])
    for (name, node), value in zip(nodes.items(), values):
        if value.dtype.kind == "f" and not np.isfinite(value).all():
            bad = value[~np.isfinite(value)][0]
            return f"the first of them is {bad} in the output {name} of node {node.name} ({node.op_type})"
    return ""


def check_fusion(
    found: Mapping[str, int], config: TransformerConfig, options: GraphOptions
) -> dict[str, Any]:
    """How many of each fused operator ONNX Runtime's optimised graph holds, beside how many there should be (of an
    opset without Attention, or for TensorRT, none). Raises Refused when one is missing.
    """
    layers, expected = config.layers, {}
    if found["com.microsoft.Attention"] or found["com.microsoft.QAttention"]:
        kind = "QAttention" if options.precision == "int8" else "Attention"
        sums = 0 if options.half else 2 * layers  # in fp16 graphs norms stand apart from sums
        expected = {f"com.microsoft.{kind}": layers, "com.microsoft.SkipLayerNormalization": sums}
    elif grouped(config, options):
        expected = {"com.microsoft.GroupQueryAttention": layers}
    elif options.opset >= 23 and options.variant != "tensorrt" and options.names == "throughline":
        plain = isinstance(config, GPTConfig) and (options.opset < 24 or config.attention_sinks)
        expected = {} if plain else {"Attention": layers}
    if options.variant == "onnxruntime" and options.precision == "int8":
        least = (3 if "com.microsoft.QAttention" in expected else 4) * layers
        expected["com.microsoft.DynamicQuantizeMatMul"] = least
    if options.blocks:
        expected["com.microsoft.MatMulNBits"] = 4 * layers
    for name, count in expected.items():
        if found[name] < count:
            why = f"its optimised graph has {found[name]} x {name}, there should be {count}"
            fix = "install the onnxruntime that constraints.txt names"
            raise Refused("ONNX Runtime does not run this graph fused", why=why, fix=fix)
    return {name: {"found": found[name], "expected": count} for name, count in expected.items()}
