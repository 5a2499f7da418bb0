"""The ONNX graph of a BERT with its heads.

Inputs: `input_ids`, `attention_mask` (1 = real token) and, when the model has segments, `token_type_ids`, all
int64 (batch, sequence). Outputs: `last_hidden_state` (batch, sequence, width), `cls_embedding` (batch, width), its
first, and `sentence_embedding` (batch, width), pooled as the options say (zeros for a row of padding), and by head:

    pretraining              `mlm_logits` (batch, asked, vocabulary) at the input `logit_positions`
                             (batch, asked), which may ask for nothing; with a next-sentence head
                             `pooler_output` (batch, width) and `nsp_logits` (batch, 2)
    sequence-classification  `logits` (batch, labels)
    token-classification     `logits` (batch, sequence, labels)
    question-answering       `start_logits`, `end_logits` (batch, sequence)

Under optimum's names a pretraining model gives `logits` (batch, sequence, vocabulary) and is asked for nothing.

The mask is expanded to (batch, 1, sequence, sequence): ONNX Runtime's Attention does not broadcast over the
query. For ONNX Runtime the blocks are its fused Attention, SkipLayerNormalization and Gelu, written as such.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ...models.bert import BERT, BERTWithHead, Head
from ...models.config import BERTConfig
from .graph_options import PLAIN, GraphOptions, Pooling
from .onnx_blocks import Blocks
from .onnx_writer import BOOL, CONTRIB, FLOAT, INT32, INT64, Graph, int8_by_output


def bert_graph(model: BERT | BERTWithHead, options: GraphOptions = PLAIN) -> Graph:
    """The graph of this model with its heads."""
    encoder = model.encoder if isinstance(model, BERTWithHead) else model
    config = encoder.config
    parts = Blocks(encoder, config, options)
    graph = parts.graph
    ids = graph.input("input_ids", INT64, ["batch", "sequence"])
    mask = graph.input("attention_mask", INT64, ["batch", "sequence"])
    length = graph.length(ids, 1)
    steps = graph.steps(length)
    x = parts.rows("token_table.weight", ids)
    if config.token_types:
        several = config.token_types > 1
        types = graph.input("token_type_ids", INT64, ["batch", "sequence"]) if several else graph.scalar(0)
        x = graph.node("Add", x, graph.node("Gather", parts.weight("type_table.weight"), types))
    if config.positions == "learned":
        x = graph.node("Add", x, graph.node("Gather", parts.weight("position_table.weight"), steps))
    if config.embedding_norm:
        x = parts.norm(x, "embedding_norm")
    if not config.norm_first:
        x = parts.norm(x, "norm")
    if config.embedding_width:
        x = parts.linear(x, "projection")
    fused = _fusable(parts, config)
    attention = _fused(parts, mask) if fused else _plain(parts, encoder, mask, length, steps)
    for layer in range(config.layers):
        x = parts.block(x, layer, partial(attention, layer=layer))
    if config.norm_first:
        x = parts.norm(x, "norm")
    graph.result(x, "last_hidden_state", ["batch", "sequence", config.width])
    _embeddings(graph, x, mask, config.width, options.pooling or "mean")
    if not isinstance(model, BERTWithHead):
        _pretraining_heads(parts, config, x, ids)
    elif model.output is not None:
        for name, value in model.output.named_parameters():
            parts.state[f"output.{name}"] = value.detach().float().cpu().numpy()
        _fine_tuned_head(parts, config, model.head, x)
    return graph


def _plain(parts: Blocks, model: BERT, mask: str, length: str, steps: str) -> Callable[..., str]:
    graph, config = parts.graph, model.config
    keys = graph.node("Unsqueeze", graph.node("Cast", mask, to=BOOL), graph.ints(1, 2))
    square = graph.node("Concat", graph.length(mask, 0), graph.ints(1), length, length, axis=0)
    allowed = graph.node("Expand", keys, square)  # (batch, 1, sequence, sequence): what a query may look at
    hidden: dict[int, str] = {}  # by window
    for window in sorted({parts.window(layer) for layer in range(config.layers)}):
        seen = allowed
        if window:
            apart = graph.node("Abs", graph.node("Sub", steps, graph.node("Unsqueeze", steps, graph.ints(1))))
            seen = graph.node("And", allowed, graph.node("Less", apart, graph.ints(window)))
        if config.relative_buckets:
            seen = parts.hidden_where_not(seen, _relative_bias(parts, model, steps))
        elif graph.half or graph.opset < 23:
            seen = parts.hidden_where_not(seen)
        hidden[window] = seen
    wide = graph.half and parts.options.variant != "tensorrt"
    softmax: dict[str, Any] = {"softmax_precision": 1} if wide else {}
    places = graph.node("Expand", steps, graph.node("Shape", mask)) if config.positions == "rotary" else ""

    def attention(x: str, name: str, layer: int) -> str:
        tables, unseen = parts.rotary(layer), hidden[parts.window(layer)]

        def core(query: str, key: str, value: str) -> str:
            query, key = (parts.rotated(one, places, tables) for one in (query, key))
            if graph.opset < 23:
                return parts.explicit_attention(query, key, value, unseen)
            return graph.node("Attention", query, key, value, unseen, **softmax)

        return parts.attention(x, name, core)

    return attention


def _fusable(parts: Blocks, config: BERTConfig) -> bool:
    """Whether ONNX Runtime's fused operators express this model's blocks."""
    usual = config.bias and config.positions == "learned" and config.key_value_heads == config.heads
    usual = usual and config.heads * config.head_size == config.width and not parts.options.blocks
    others = config.gated, config.attention_window, config.norm_first, config.relative_buckets
    return parts.fused and usual and not any(others)


def _fused(parts: Blocks, mask: str) -> Callable[..., str]:
    """Attention by ONNX Runtime's fused operator; with int8, QAttention on an input rounded when it runs."""
    graph, heads = parts.graph, parts.config.heads
    mask = graph.node("Cast", mask, to=INT32)

    def attention(x: str, name: str, layer: int) -> str:
        weight, bias = parts.reordered(f"{name}.qkv", heads, 3)
        assert bias is not None
        if parts.options.precision != "int8":
            op, inputs = "Attention", [x, parts.graph.constant(f"{name}.qkv.weight.T", weight.T)]
            inputs += [parts.graph.constant(f"{name}.qkv.bias", bias), mask]
        else:
            small, scale = int8_by_output(weight)
            x = graph.node("DynamicQuantizeLinear", x, outputs=3)
            op, inputs = "QAttention", [x, graph.weight(f"{name}.qkv.int8.T", small)]
            inputs += [graph.weight(f"{name}.qkv.bias", bias), f"{x}:1"]
            inputs += [graph.weight(f"{name}.qkv.scale", scale), mask, f"{x}:2"]
            inputs += [graph.weight(f"{name}.qkv.zero", np.zeros(len(scale), np.int8))]
        return parts.linear(graph.node(op, *inputs, domain=CONTRIB, num_heads=heads), f"{name}.out")

    return attention


def _relative_bias(parts: Blocks, model: BERT, steps: str) -> str:
    """The bias (1, heads, sequence, sequence), looked up by distance in a table made by the model itself."""
    longest = parts.config.sequence_length
    assert model.relative_bias is not None
    with torch.no_grad():
        square = model.relative_bias(torch.arange(longest))[0].float().cpu().numpy()  # (A, S, S): query, key
    # by key - query, from 1 - S to S - 1
    by_distance = np.concatenate((square[:, 1:, 0][:, ::-1], square[:, 0, :]), axis=1)
    graph = parts.graph
    table = parts.graph.constant("relative_bias.by_distance", by_distance)
    offset = graph.node("Sub", steps, graph.node("Unsqueeze", steps, graph.ints(1)))
    index = graph.node("Add", offset, graph.scalar(longest - 1))
    return graph.node("Unsqueeze", graph.node("Gather", table, index, axis=1), graph.ints(0))


def _embeddings(graph: Graph, hidden: str, mask: str, width: int, pooling: Pooling) -> None:
    """The vectors of each row: its first token's, and the mean over its real tokens or the first one's, of length 1 if
    asked. A row without a real token (a server's warm-up sends some) has zeros, not 0/0.
    """
    wide = graph.wide(hidden)
    real = graph.node("Cast", mask, to=FLOAT)
    count = graph.node("ReduceSum", real, graph.ints(1), keepdims=1)  # (batch, 1)
    some = graph.node("Cast", count, to=BOOL)
    zero = graph.weight("no_embedding", np.array(0, np.float32))
    first = graph.node("Gather", wide, graph.scalar(0), axis=1)
    graph.node("Where", some, first, zero, out="cls_embedding")
    graph.output("cls_embedding", FLOAT, ["batch", width])
    vector = first
    if not pooling.startswith("cls"):
        real = graph.node("Unsqueeze", real, graph.ints(-1))  # (batch, sequence, 1)
        total = graph.node("ReduceSum", graph.node("Mul", wide, real), graph.ints(1), keepdims=0)
        vector = graph.node("Div", total, count)
    if pooling.endswith("normalised"):
        vector = graph.node("LpNormalization", vector, axis=-1, p=2)
    graph.node("Where", some, vector, zero, out="sentence_embedding")
    graph.output("sentence_embedding", FLOAT, ["batch", width])


def _pretraining_heads(parts: Blocks, config: BERTConfig, hidden: str, ids: str) -> None:
    graph, features, ask = parts.graph, hidden, ids
    plain = parts.options.names == "throughline"
    if plain:
        ask = graph.input("logit_positions", INT64, ["batch", "asked"])
        features = graph.take(hidden, ask)
    features = _features(parts, features)
    out = "mlm_logits" if plain else "logits"
    parts.vocabulary_logits(features, ask, "token_table.weight", "mlm_bias", out)
    if config.nsp:
        pooled = _pooled(parts, config, hidden)
        graph.result(pooled, "pooler_output", ["batch", config.width])
        graph.result(parts.linear(pooled, "nsp"), "nsp_logits", ["batch", 2])


def _features(parts: Blocks, x: str) -> str:
    """What the masked-LM decoder reads; a ModernBERT's heads of labels too."""
    if "mlm_transform.weight" not in parts.state:
        return x
    return parts.norm(parts.activation(parts.linear(x, "mlm_transform")), "mlm_norm")


def _pooled(parts: Blocks, config: BERTConfig, hidden: str) -> str:
    first = parts.graph.node("Gather", hidden, parts.graph.scalar(0), axis=1)
    if config.pooler == "features":
        return _features(parts, first)
    x = parts.linear(first, "pooler")
    if config.pooler == "gelu":
        return parts.activation(x)
    return parts.graph.node(config.pooler.capitalize(), x)  # Tanh, Relu


def _fine_tuned_head(parts: Blocks, config: BERTConfig, head: Head, hidden: str) -> None:
    graph, labels = parts.graph, len(head.labels)
    if head.kind == "sequence-classification":
        pooled = _pooled(parts, config, hidden)
        graph.result(parts.linear(pooled, "output"), "logits", ["batch", labels])
        return
    features = _features(parts, hidden) if config.pooler == "features" else hidden
    of_tokens = parts.linear(features, "output")
    if head.kind == "token-classification":
        graph.result(of_tokens, "logits", ["batch", "sequence", labels])
        return
    for i, name in enumerate(("start_logits", "end_logits")):
        part = graph.node("Gather", of_tokens, graph.scalar(i), axis=2)
        graph.result(part, name, ["batch", "sequence"])
