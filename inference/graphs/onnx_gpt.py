"""The ONNX graph of a GPT: one graph for prefill, chunked prefill and decode, each row with its own past.

Inputs: `input_ids` (batch, sequence), `past_length` (batch), `logit_positions` (batch, asked), and per layer
i `past.i.key`, `past.i.value` (batch, kv heads, capacity, head). Outputs: `logits` (batch, asked, vocabulary)
after the asked positions of `input_ids`, and `present.i.key`, `present.i.value`, the caches with the new
tokens written at `past_length`: in place, where a past and its present are bound to the same memory.

A token attends to the places up to its own: `TensorScatter` writes, and `Attention` with `nonpad_kv_seqlen` aligns the
causal triangle at the end of each row. TensorRT fuses that from an explicit softmax (8 kernels a layer against 9), and
opsets before 24 have neither operator: there the mask is written out and `ScatterElements` writes. For ONNX Runtime
`GroupQueryAttention` does all of it and reads of each row what that row holds, where `Attention` reads the whole
capacity; it takes several prompts in a call only where none has a past (`ONE_PROMPT` in the metadata says so).

Under optimum's names the inputs are `input_ids`, `attention_mask` (batch, past + sequence), `position_ids`
and `past_key_values.i.key`, which grow by concatenation; `logits` are of every position. In a graph for ONNX Runtime
its operator reads and writes them, and a past and its present may be one buffer with room for more.
"""

from functools import partial
from typing import Any

import torch

from ...models.gpt import GPT
from ...models.rotary import alibi
from ..runtimes.onnx_causal import ONE_PROMPT
from .graph_options import PLAIN, GraphOptions
from .onnx_blocks import Blocks
from .onnx_writer import BOOL, CONTRIB, INT32, INT64, Graph


def gpt_graph(model: GPT, options: GraphOptions = PLAIN) -> Graph:
    """The graph of this model."""
    config = model.config
    parts = Blocks(model, config, options)
    graph = parts.graph
    ids = graph.input("input_ids", INT64, ["batch", "sequence"])
    memory: _Slots | _Growing = _Slots(parts, ids) if options.names == "throughline" else _Growing(parts, ids)
    x = parts.rows("token_table.weight", ids)
    if config.scaled_embeddings:
        x = graph.node("Mul", x, graph.number(config.width**0.5))
    if config.positions == "learned":
        table = parts.weight("position_table.weight")
        x = graph.node("Add", x, graph.node("Gather", table, memory.positions))
    if config.embedding_norm:
        x = parts.norm(x, "embedding_norm")
    for layer in range(config.layers):
        core = partial(_grouped if parts.grouped else _cached, parts, memory, layer)
        x = parts.block(x, layer, partial(parts.attention, core=core))
    if memory.ask:
        x = graph.take(x, memory.ask)  # norm and head only where logits are asked for
    table = "token_table.weight" if config.tied else "output.weight"
    parts.vocabulary_logits(parts.norm(x, "norm"), memory.ask or ids, table, "output.bias", out="logits")
    for name in memory.presents:
        graph.output(name, graph.kind, memory.shape())
    return graph


class _Slots:
    """The cache with room for whole rows: new keys and values are written at each row's own length."""

    def __init__(self, parts: Blocks, ids: str) -> None:
        graph, self.parts = parts.graph, parts
        self.past = graph.input("past_length", INT64, ["batch"])
        self.ask = graph.input("logit_positions", INT64, ["batch", "asked"])
        length = graph.length(ids, 1)
        self.total = graph.node("Add", self.past, length)  # (batch): tokens in each row after this call
        start = graph.node("Unsqueeze", self.past, graph.ints(1))
        self.positions = graph.node("Add", start, graph.steps(length))  # (batch, sequence)
        self.presents: list[str] = []
        self.ends: tuple[str, ...] = ()  # int32: last place of each row, tokens of the longest
        if parts.grouped:
            graph.metadata[ONE_PROMPT] = "true"
            least = graph.node("Sub", self.total, graph.ints(1))
            most = graph.node("ReduceMax", self.total, keepdims=0)
            self.ends = (graph.node("Cast", least, to=INT32), graph.node("Cast", most, to=INT32))
        self._standard = graph.opset >= 24 and parts.options.variant != "tensorrt"
        self._hidden: dict[int, str] = {}  # by window

    def shape(self) -> list[int | str]:
        config = self.parts.config  # TensorRT wants to know the capacity, which is the whole context then
        capacity = config.sequence_length if self.parts.options.variant == "tensorrt" else "capacity"
        return ["batch", config.key_value_heads, capacity, config.head_size]

    def store(self, layer: int, kind: str) -> tuple[str, str]:
        """What a layer remembers, and the name of the same with the new tokens."""
        graph, out = self.parts.graph, f"present.{layer}.{kind}"
        self.presents.append(out)
        return graph.input(f"past.{layer}.{kind}", graph.kind, self.shape()), out

    def extend(self, layer: int, kind: str, new: str) -> str:
        """Everything that a layer remembers with the new tokens (batch, kv heads, capacity, head)."""
        graph = self.parts.graph
        store, out = self.store(layer, kind)
        if graph.opset >= 24:
            return graph.node("TensorScatter", store, new, self.past, out=out, axis=-2)
        at = graph.node("Unsqueeze", self.positions, graph.ints(1, 3))  # (batch, 1, sequence, 1)
        at = graph.node("Expand", at, graph.node("Shape", new))
        return graph.node("ScatterElements", store, at, new, out=out, axis=2)

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        """The new tokens over what a layer remembers."""
        graph, window = self.parts.graph, self.parts.window(layer)
        how = self.parts.scores | ({"softmax_precision": 1} if graph.half else {})  # 1: float32
        if self._standard and not window and self.parts.config.positions != "alibi":
            inputs = (query, key, value, "", "", "", self.total)
            return graph.node("Attention", *inputs, is_causal=1, **how)
        if window not in self._hidden:
            places = graph.steps(graph.length("past.0.key", 2))
            last = graph.node("Unsqueeze", self.positions, graph.ints(1, 3))  # (batch, 1, sequence, 1)
            self._hidden[window] = _hidden(self.parts, places, last, window)  # (batch, 1, sequence, capacity)
        if self._standard:
            return graph.node("Attention", query, key, value, self._hidden[window], **how)
        return self.parts.explicit_attention(query, key, value, self._hidden[window])


class _Growing:
    """The cache as optimum and onnxruntime-genai pass it: exactly what was read, padding marked by a mask."""

    ask = ""

    def __init__(self, parts: Blocks, ids: str) -> None:
        graph, self.parts = parts.graph, parts
        mask = graph.input("attention_mask", INT64, ["batch", "past_sequence + sequence"])
        self.positions = graph.input("position_ids", INT64, ["batch", "sequence"])
        self.presents: list[str] = []
        total, new = graph.length(mask, 1), graph.length(ids, 1)
        if parts.grouped:  # int32: last place of each row, tokens of the longest
            least = graph.node("Sub", graph.node("ReduceSum", mask, graph.ints(1), keepdims=0), graph.ints(1))
            self.ends = (graph.node("Cast", least, to=INT32), graph.node("Cast", total, to=INT32))
            return
        past = graph.steps(new), graph.node("Sub", total, new)
        own = graph.node("Add", *past)  # (sequence): place of a token
        places, own = graph.steps(total), graph.node("Unsqueeze", own, graph.ints(1))
        windows = {parts.window(layer) for layer in range(parts.config.layers)}
        self._hidden = {window: _hidden(parts, places, own, window, mask) for window in sorted(windows)}

    def shape(self, name: str = "past_sequence + sequence") -> list[int | str]:
        return ["batch", self.parts.config.key_value_heads, name, self.parts.config.head_size]

    def store(self, layer: int, kind: str) -> tuple[str, str]:
        graph, out = self.parts.graph, f"present.{layer}.{kind}"
        self.presents.append(out)
        shape = self.shape("past_sequence")
        return graph.input(f"past_key_values.{layer}.{kind}", graph.kind, shape), out

    def extend(self, layer: int, kind: str, new: str) -> str:
        """Everything that a layer remembers with the new tokens (batch, kv heads, past + sequence, head)."""
        store, out = self.store(layer, kind)
        return self.parts.graph.node("Concat", store, new, axis=2, out=out)

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        return self.parts.explicit_attention(query, key, value, self._hidden[self.parts.window(layer)])


def _hidden(parts: Blocks, places: str, own: str, window: int, mask: str = "") -> str:
    """What is added to the scores of tokens at their `own` places: 0 or ALiBi's bias for those before them, of a window
    the nearest, that are real by a `mask` (batch, places).
    """
    graph = parts.graph
    seen = graph.node("LessOrEqual", places, own)
    if window:
        first = graph.node("Sub", own, graph.ints(window - 1))
        seen = graph.node("And", seen, graph.node("GreaterOrEqual", places, first))
    if mask:
        real = graph.node("Unsqueeze", graph.node("Cast", mask, to=BOOL), graph.ints(1, 2))
        seen = graph.node("And", seen, real)
    if parts.config.positions != "alibi":
        return parts.hidden_where_not(seen)
    apart = graph.node("Cast", graph.node("Sub", places, own), to=graph.kind)
    slope_A11 = alibi(parts.config.heads, torch.ones(1, 1, 1, 2).bool(), torch.float32)[0, :, :, 1:]
    bias = graph.node("Mul", apart, graph.constant("alibi.slopes", slope_A11.numpy()))
    return parts.hidden_where_not(seen, bias)  # (batch or 1, A, sequence, places)


def _cached(parts: Blocks, memory: _Slots | _Growing, layer: int, query: str, key: str, value: str) -> str:
    """The attention of one layer over its cache."""
    tables = parts.rotary(layer)
    query, key = (parts.rotated(x, memory.positions, tables) for x in (query, key))
    key, value = (memory.extend(layer, kind, x) for kind, x in (("key", key), ("value", value)))
    return memory.attend(layer, query, key, value)


def _grouped(parts: Blocks, memory: _Slots | _Growing, layer: int, query: str, key: str, value: str) -> str:
    """The same as one operator, which also writes the cache."""
    graph, config = parts.graph, parts.config
    heads, groups = config.heads, config.key_value_heads
    if tables := parts.rotary(layer):
        part: dict[str, Any] = {"rotary_embedding_dim": config.rope_width} if config.rope_width else {}
        part |= {"domain": CONTRIB}
        query = graph.node("RotaryEmbedding", query, memory.positions, *tables, num_heads=heads, **part)
        key = graph.node("RotaryEmbedding", key, memory.positions, *tables, num_heads=groups, **part)
    stores, presents = zip(*(memory.store(layer, kind) for kind in ("key", "value")))
    how = parts.scores | {"num_heads": heads, "kv_num_heads": groups, "domain": CONTRIB}
    how |= {"local_window_size": parts.window(layer)} if parts.window(layer) else {}
    inputs = (query, key, value, *stores, *memory.ends)
    return graph.node("GroupQueryAttention", *inputs, more=presents, **how)
