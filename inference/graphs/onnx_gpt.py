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
from itertools import product
from typing import Any

import numpy as np
import torch

from ...models.config import GPTConfig
from ...models.experts import SWIGLU_GAIN
from ...models.gpt import GPT
from ...models.rotary import alibi
from ..runtimes.onnx_causal import ONE_PROMPT
from .graph_options import PLAIN, GraphOptions
from .onnx_blocks import HIDDEN_BY_MASK, Blocks
from .onnx_writer import BOOL, CONTRIB, INT32, INT64, Graph


def gpt_graph(model: GPT, options: GraphOptions = PLAIN) -> Graph:
    """The graph of this model."""
    config = model.config
    parts = GPTBlocks(model, config, options)
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
    for layer, kind in product(range(config.layers), ("key", "value")):
        graph.output(f"present.{layer}.{kind}", graph.kind, memory.shape())
    return graph


class GPTBlocks(Blocks):
    """`Blocks` of a GPT."""

    config: GPTConfig

    def project(self, x: str, name: str) -> tuple[str, str, str]:
        return self.latent(x, f"{name}.latent") if self.config.kv_latent else super().project(x, name)

    def feed_forward(self, x: str, name: str) -> str:
        return (self.experts if f"{name}.router.weight" in self.state else super().feed_forward)(x, name)

    def latent(self, x: str, name: str) -> tuple[str, str, str]:
        """The same of latent attention, as `models.layers.Latent` makes them."""
        graph, config = self.graph, self.config
        heads, size, turned, value_size = config.heads, config.head_size, config.rope_width, config.value_size
        small = self.norm(self.linear(x, f"{name}.q_down"), f"{name}.q_norm") if config.q_latent else x
        shared, latent = graph.split(self.linear(x, f"{name}.kv_down"), turned, config.kv_latent)
        up = self.linear(self.norm(latent, f"{name}.kv_norm"), f"{name}.kv_up")
        up = graph.reshape(up, 0, 0, heads, size - turned + value_size)
        own, value = graph.split(up, size - turned, value_size)
        shared = graph.node("Expand", graph.reshape(shared, 0, 0, 1, turned), graph.ints(1, 1, heads, 1))
        key = graph.node("Concat", shared, own, axis=-1)
        value = graph.node("Pad", value, graph.ints(*[0] * 7, size - value_size))
        query = self.heads_of(self.linear(small, f"{name}.q_up"), heads)
        key, value = (self.heads_of(graph.reshape(one, 0, 0, heads * size), heads) for one in (key, value))
        return query, key, value

    def experts(self, x: str, name: str) -> str:
        """What the experts of each token make of it. ONNX Runtime's operator on a CPU computes those alone, standard
        ones all of them, of which those that were not chosen have no share.
        """
        graph, config = self.graph, self.config
        flat = graph.reshape(x, -1, config.width)
        share_NE = self.shares(flat, name)
        at, limit = f"{name}.experts", config.gate_limit
        ends = ("", "_bias") if f"{at}.up_bias" in self.state else ("",)
        gate, up, down = ([self.state[f"{at}.{x}{end}"] for end in ends] for x in ("gate", "up", "down"))
        if self.options.variant == "onnxruntime" and config.activation == "silu" and not graph.half:
            rows = (np.stack(x, 2).reshape(config.experts, -1, *x[0].shape[2:]) for x in zip(gate, up))
            woven = [graph.weight(f"{at}.woven{end}", x) for end, x in zip(ends, rows)]
            last = [graph.weight(f"{at}.down{end}", x) for end, x in zip(ends, down)]
            gain, plus = (SWIGLU_GAIN, 1.0) if limit else (1.0, 0.0)
            how: dict[str, Any] = {"k": config.experts_per_token, "normalize_routing_weights": 1}
            how |= {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": gain}
            how |= {"activation_beta": plus, "domain": CONTRIB} | ({"swiglu_limit": limit} if limit else {})
            logits = graph.node("Log", share_NE)  # which its softmax undoes
            y = graph.node("MoE", flat, logits, *woven, *[""] * (2 - len(ends)), *last, **how)
            y = graph.node("Mul", y, graph.node("ReduceSum", share_NE, graph.ints(-1)))
        else:

            def each(x: str, part: str, matrices: np.ndarray, *biases: np.ndarray) -> str:  # (E, N, F or W)
                x = graph.node("MatMul", x, graph.constant(f"{at}.{part}", matrices.swapaxes(1, 2)))
                added = [graph.constant(f"{at}.{part}_bias", bias[:, None]) for bias in biases]
                return graph.node("Add", x, *added) if added else x

            y = each(self.gated(each(flat, "gate", *gate), each(flat, "up", *up)), "down", *down)
            share_EN1 = graph.node("Unsqueeze", graph.node("Transpose", share_NE), graph.ints(-1))
            y = graph.node("Mul", y, graph.narrow(share_EN1))
            y = graph.node("ReduceSum", y, graph.ints(0), keepdims=0)
        y = graph.node("Reshape", y, graph.node("Shape", x))
        return graph.node("Add", y, self.feed_forward(x, f"{name}.shared")) if config.shared_experts else y

    def shares(self, flat: str, name: str) -> str:
        """The weights (N, E) of the experts' answers in float32, 0 of those that were not chosen."""
        graph, config, state = self.graph, self.config, self.state
        router = graph.weight(f"{name}.router.T", state[f"{name}.router.weight"].T)
        logits = graph.node("MatMul", graph.wide(flat), router)
        if (bias := state.get(f"{name}.router.bias")) is not None:
            logits = graph.node("Add", logits, graph.weight(f"{name}.router.bias", bias))
        scores = graph.node("Softmax" if config.router_scores == "softmax" else "Sigmoid", logits)
        ranked = scores
        if config.balance_bias:
            ranked = graph.node("Add", scores, graph.weight(f"{name}.balance", state[f"{name}.balance_bias"]))
        if config.router_groups > 1:  # far below the others outside of a token's groups
            apart = graph.reshape(ranked, 0, config.router_groups, -1)
            two = graph.node("TopK", apart, graph.ints(2), outputs=2)
            two = graph.node("ReduceSum", two, graph.ints(-1), keepdims=0)  # (N, groups)
            best = graph.node("TopK", two, graph.ints(config.router_groups_per_token), outputs=2)
            far = graph.weight("far", np.array(HIDDEN_BY_MASK, np.float32))
            out = graph.node("Add", graph.node("Sub", two, two), far)
            out = graph.node("ScatterElements", out, f"{best}:1", graph.node("Sub", best, best), axis=-1)
            ranked = graph.node("Add", apart, graph.node("Unsqueeze", out, graph.ints(-1)))
            ranked = graph.reshape(ranked, 0, -1)
        chosen = graph.node("TopK", ranked, graph.ints(config.experts_per_token), outputs=2) + ":1"
        weights = graph.node("GatherElements", scores, chosen, axis=-1)
        if config.router_normalised:
            weights = graph.node("Div", weights, graph.node("ReduceSum", weights, graph.ints(-1)))
        scale = graph.weight(f"{name}.scale", np.array(config.router_scale, np.float32))
        none = graph.node("Sub", scores, scores)
        return graph.node("ScatterElements", none, chosen, graph.node("Mul", weights, scale), axis=-1)


class _Slots:
    """The cache with room for whole rows: new keys and values are written at each row's own length."""

    def __init__(self, parts: GPTBlocks, ids: str) -> None:
        graph, self.parts = parts.graph, parts
        self.past = graph.input("past_length", INT64, ["batch"])
        self.ask = graph.input("logit_positions", INT64, ["batch", "asked"])
        length = graph.length(ids, 1)
        self.total = graph.node("Add", self.past, length)  # (batch): tokens in each row after this call
        start = graph.node("Unsqueeze", self.past, graph.ints(1))
        self.positions = graph.node("Add", start, graph.steps(length))  # (batch, sequence)
        self.ends: tuple[str, ...] = ()  # int32: last place of each row, tokens of the longest
        if parts.grouped:
            graph.metadata[ONE_PROMPT] = "true"
            least = graph.node("Sub", self.total, graph.ints(1))
            most = graph.node("ReduceMax", self.total, keepdims=0)
            self.ends = (graph.node("Cast", least, to=INT32), graph.node("Cast", most, to=INT32))
        plain = parts.options.variant == "tensorrt" or parts.config.attention_sinks
        self._standard = graph.opset >= 24 and not plain
        self._hidden: dict[int, str] = {}  # by window

    def shape(self) -> list[int | str]:
        config = self.parts.config  # TensorRT wants to know the capacity, which is the whole context then
        capacity = config.sequence_length if self.parts.options.variant == "tensorrt" else "capacity"
        return ["batch", config.key_value_heads, capacity, config.head_size]

    def store(self, layer: int, kind: str) -> tuple[str, str]:
        """What a layer remembers, and the name of the same with the new tokens."""
        graph = self.parts.graph
        return graph.input(f"past.{layer}.{kind}", graph.kind, self.shape()), f"present.{layer}.{kind}"

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
        return self.parts.explicit_attention(query, key, value, self._hidden[window], layer)


class _Growing:
    """The cache as optimum and onnxruntime-genai pass it: exactly what was read, padding marked by a mask."""

    ask = ""

    def __init__(self, parts: GPTBlocks, ids: str) -> None:
        graph, self.parts = parts.graph, parts
        mask = graph.input("attention_mask", INT64, ["batch", "past_sequence + sequence"])
        self.positions = graph.input("position_ids", INT64, ["batch", "sequence"])
        total, new = graph.length(mask, 1), graph.length(ids, 1)
        if parts.grouped:  # int32: last place of each row, tokens of the longest
            real = graph.node("ReduceSum", mask, graph.ints(1), keepdims=0)
            last = graph.node("Sub", real, graph.ints(1))
            last = graph.node(
                "Max", last, graph.ints(0)
            )  # ONNX Runtime refuses -1, of a row that is all padding
            self.ends = (graph.node("Cast", last, to=INT32), graph.node("Cast", total, to=INT32))
            return
        past = graph.steps(new), graph.node("Sub", total, new)
        own = graph.node("Add", *past)  # (sequence): place of a token
        places, own = graph.steps(total), graph.node("Unsqueeze", own, graph.ints(1))
        windows = {parts.window(layer) for layer in range(parts.config.layers)}
        self._hidden = {window: _hidden(parts, places, own, window, mask) for window in sorted(windows)}

    def shape(self, name: str = "past_sequence + sequence") -> list[int | str]:
        return ["batch", self.parts.config.key_value_heads, name, self.parts.config.head_size]

    def store(self, layer: int, kind: str) -> tuple[str, str]:
        graph, name = self.parts.graph, f"past_key_values.{layer}.{kind}"
        return graph.input(name, graph.kind, self.shape("past_sequence")), f"present.{layer}.{kind}"

    def extend(self, layer: int, kind: str, new: str) -> str:
        """Everything that a layer remembers with the new tokens (batch, kv heads, past + sequence, head)."""
        store, out = self.store(layer, kind)
        return self.parts.graph.node("Concat", store, new, axis=2, out=out)

    def attend(self, layer: int, query: str, key: str, value: str) -> str:
        return self.parts.explicit_attention(query, key, value, self._hidden[self.parts.window(layer)], layer)


def _hidden(parts: GPTBlocks, places: str, own: str, window: int, mask: str = "") -> str:
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


def _cached(parts: GPTBlocks, memory: _Slots | _Growing, layer: int, query: str, key: str, value: str) -> str:
    """The attention of one layer over its cache."""
    tables = parts.rotary(layer)
    query, key = (parts.rotated(x, memory.positions, tables) for x in (query, key))
    key, value = (memory.extend(layer, kind, x) for kind, x in (("key", key), ("value", value)))
    return memory.attend(layer, query, key, value)


def _grouped(
    parts: GPTBlocks, memory: _Slots | _Growing, layer: int, query: str, key: str, value: str
) -> str:
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
    inputs = [query, key, value, *stores, *memory.ends]
    if config.attention_sinks:
        inputs += ["", "", "", "", parts.weight(f"blocks.{layer}.attention.sinks")]
    return graph.node("GroupQueryAttention", *inputs, more=presents, **how)
