"""The ONNX graph of a GPT: one graph for prefill, chunked prefill and decode, each row with its own past.

Inputs: `input_ids` (batch, sequence), `past_length` (batch), `logit_positions` (batch, asked), and per layer i
`past.i.key`, `past.i.value` (batch, kv heads, capacity, head). Outputs: `logits` (batch, asked, vocabulary) after the
asked positions of `input_ids`, and `present.i.key`, `present.i.value`, the caches with the new tokens written at
`past_length`. Binding a past and its present to the same memory makes the write happen in place.

A token attends to the places up to its own: `TensorScatter` writes, and `Attention` with `nonpad_kv_seqlen` =
past_length + sequence aligns the causal triangle at the end of that length, row by row.
"""

from typing import TYPE_CHECKING

import numpy as np

from ..models.config import GPTConfig
from .onnx_blocks import Blocks
from .onnx_writer import FLOAT, INT64, Graph

if TYPE_CHECKING:
    from ..models.gpt import GPT


def gpt_graph(model: "GPT") -> Graph:
    """The graph of this model in float32. Its opset-24 operators are all standard ONNX."""
    config = model.config
    parts = Blocks(model, config)
    graph = parts.graph
    ids = graph.input("input_ids", INT64, ["batch", "sequence"])
    past = graph.input("past_length", INT64, ["batch"])
    ask = graph.input("logit_positions", INT64, ["batch", "asked"])

    length = graph.length(ids, 1)
    total = graph.node("Add", past, length)  # (batch): tokens in each row after this call
    positions = graph.node("Add", graph.node("Unsqueeze", past, graph.ints(1)), graph.steps(length))
    x = graph.node("Gather", parts.weight("token_table.weight"), ids)
    if config.positions == "learned":
        x = graph.node("Add", x, graph.node("Gather", parts.weight("position_table.weight"), positions))
    rotary = _rotary_tables(graph, config) if config.positions == "rotary" else None

    caches: list[str] = []
    for layer in range(config.layers):
        x = parts.block(
            x, layer, norm_first=True, core=_cached(graph, config, layer, past, total, positions, rotary)
        )
        caches += [f"present.{layer}.key", f"present.{layer}.value"]
    asked = parts.norm(graph.take(x, ask), "norm")  # norm and head only where logits are asked for
    table = parts.weight("token_table.weight" if config.tied else "output.weight")
    graph.vocabulary_logits(asked, ask, table, (config.vocab_size, config.width), bias="", out="logits")
    for name in caches:
        graph.output(name, FLOAT, _cache_shape(config))
    return graph


def _cache_shape(config: GPTConfig) -> list[int | str]:
    return ["batch", config.key_value_heads, "capacity", config.head_size]


def _cached(
    graph: Graph,
    config: GPTConfig,
    layer: int,
    past: str,
    total: str,
    positions: str,
    rotary: tuple[str, str] | None,
):
    """The attention of one layer over its cache."""

    def core(query: str, key: str, value: str) -> str:
        if rotary is not None:
            query, key = (graph.node("RotaryEmbedding", x, *rotary, positions) for x in (query, key))
        stores = []
        for name, new in (("key", key), ("value", value)):
            store = graph.input(f"past.{layer}.{name}", FLOAT, _cache_shape(config))
            stores.append(
                graph.node("TensorScatter", store, new, past, out=f"present.{layer}.{name}", axis=-2)
            )
        return graph.node("Attention", query, *stores, "", "", "", total, is_causal=1)

    return core


def _rotary_tables(graph: Graph, config: GPTConfig) -> tuple[str, str]:
    """Cosines and sines (sequence_length, D / 2), computed as models/layers.py does, in float32."""
    steps = np.arange(0, config.head_size, 2, dtype=np.float32) / np.float32(config.head_size)
    frequencies = 1.0 / np.float32(config.rope_theta) ** steps
    angles = np.arange(config.sequence_length, dtype=np.float32)[:, None] * frequencies
    return graph.weight("rotary.cos", np.cos(angles)), graph.weight("rotary.sin", np.sin(angles))
