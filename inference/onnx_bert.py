"""The ONNX graph of a BERT with its heads.

Inputs: `input_ids`, `attention_mask` (1 = real token) and, when the model has segments, `token_type_ids`, all int64
(batch, sequence); `logit_positions` (batch, asked), which may ask for nothing. Outputs: `last_hidden_state` (batch,
sequence, width), `mlm_logits` (batch, asked, vocabulary), `sentence_embedding` (batch, width), the mean over real tokens,
and with a next-sentence head `pooler_output` (batch, width) and `nsp_logits` (batch, 2).

The mask is expanded to (batch, 1, sequence, sequence): ONNX Runtime's Attention does not broadcast over the query.
"""

from typing import TYPE_CHECKING

import numpy as np

from ..models.config import BERTConfig
from .onnx_blocks import Blocks
from .onnx_writer import BOOL, FLOAT, INT64, Graph

if TYPE_CHECKING:
    from ..models.bert import BERT

HIDDEN_BY_MASK = -30000.0  # as good as -inf after softmax and, unlike finfo.min, finite in float16


def bert_graph(model: "BERT") -> Graph:
    """The graph of this model in float32, all heads included."""
    config = model.config
    parts = Blocks(model, config)
    graph = parts.graph
    ids = graph.input("input_ids", INT64, ["batch", "sequence"])
    mask = graph.input("attention_mask", INT64, ["batch", "sequence"])
    length = graph.length(ids, 1)
    steps = graph.steps(length)
    x = graph.node("Gather", parts.weight("token_table.weight"), ids)
    if config.token_types:
        types = graph.input("token_type_ids", INT64, ["batch", "sequence"])
        x = graph.node("Add", x, graph.node("Gather", parts.weight("type_table.weight"), types))
    x = graph.node("Add", x, graph.node("Gather", parts.weight("position_table.weight"), steps))
    if not config.norm_first:
        x = parts.norm(x, "norm")

    allowed = _mask(graph, mask, length)
    if config.relative_buckets:
        allowed = graph.node(
            "Where", allowed, _relative_bias(parts, model, steps), graph.weight("hidden", _HIDDEN)
        )

    def core(query: str, key: str, value: str) -> str:
        return graph.node("Attention", query, key, value, allowed)

    for layer in range(config.layers):
        last = layer == config.layers - 1 and not config.norm_first
        x = parts.block(x, layer, config.norm_first, core, out="last_hidden_state" if last else "")
    if config.norm_first:
        x = parts.norm(x, "norm", out="last_hidden_state")
    graph.output(x, FLOAT, ["batch", "sequence", config.width])
    _heads(parts, config, x, mask)
    return graph


_HIDDEN = np.array(HIDDEN_BY_MASK, np.float32)


def _mask(graph: Graph, mask: str, length: str) -> str:
    """(batch, sequence) int64 to (batch, 1, sequence, sequence) bool: which keys each query may look at."""
    keys = graph.node("Unsqueeze", graph.node("Cast", mask, to=BOOL), graph.ints(1, 2))
    square = graph.node("Concat", graph.length(mask, 0), graph.ints(1), length, length, axis=0)
    return graph.node("Expand", keys, square)


def _relative_bias(parts: Blocks, model: "BERT", steps: str) -> str:
    """The bias (1, heads, sequence, sequence), looked up by distance in a table made from the model's own function."""
    import torch

    longest = parts.config.sequence_length
    assert model.relative_bias is not None
    with torch.no_grad():
        square = (
            model.relative_bias(torch.arange(longest))[0].float().cpu().numpy()
        )  # (A, S, S) by query, key
    by_distance = np.concatenate(
        (square[:, 1:, 0][:, ::-1], square[:, 0, :]), axis=1
    )  # key - query from 1 - S to S - 1
    graph = parts.graph
    table = graph.weight("relative_bias.by_distance", by_distance)
    offset = graph.node("Sub", steps, graph.node("Unsqueeze", steps, graph.ints(1)))
    index = graph.node("Add", offset, graph.scalar(longest - 1))
    return graph.node("Unsqueeze", graph.node("Gather", table, index, axis=1), graph.ints(0))


def _heads(parts: Blocks, config: BERTConfig, hidden: str, mask: str) -> None:
    graph = parts.graph
    ask = graph.input("logit_positions", INT64, ["batch", "asked"])
    features = graph.take(hidden, ask)
    if config.mlm_transform:
        features = parts.norm(parts.activation(parts.linear(features, "mlm_transform")), "mlm_norm")
    bias = parts.weight("mlm_bias") if parts.has("mlm_bias") else ""
    table, sizes = parts.weight("token_table.weight"), (config.vocab_size, config.width)
    graph.vocabulary_logits(features, ask, table, sizes, bias, out="mlm_logits")

    real = graph.node("Unsqueeze", graph.node("Cast", mask, to=FLOAT), graph.ints(-1))  # (batch, sequence, 1)
    total = graph.node("ReduceSum", graph.node("Mul", hidden, real), graph.ints(1), keepdims=0)
    count = graph.node("ReduceSum", real, graph.ints(1), keepdims=0)
    graph.output(graph.node("Div", total, count, out="sentence_embedding"), FLOAT, ["batch", config.width])
    if config.nsp:
        first = graph.node("Gather", hidden, graph.scalar(0), axis=1)
        pooled = graph.node("Tanh", parts.linear(first, "pooler"), out="pooler_output")
        graph.output(pooled, FLOAT, ["batch", config.width])
        graph.output(parts.linear(pooled, "nsp", out="nsp_logits"), FLOAT, ["batch", 2])
