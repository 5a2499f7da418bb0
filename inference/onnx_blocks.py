"""The transformer parts that the GPT and the BERT graph share: norms, projections, feed-forward; weights by our names.

Shape letters as in models/layers.py: A heads, G key-value heads, D head width, W width.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ..models.config import TransformerConfig
from .onnx_writer import Graph

if TYPE_CHECKING:
    from torch import nn

AttentionCore = Callable[
    [str, str, str], str
]  # query, key, value, each (batch, heads, sequence, head) -> the same shape


class Blocks:
    """Writes parts of a model into a graph; `x` is always (batch, sequence, width)."""

    def __init__(self, model: "nn.Module", config: TransformerConfig) -> None:
        self.graph, self.config = Graph(), config
        self._state = {
            name: value.detach().float().cpu().numpy() for name, value in model.state_dict().items()
        }

    def has(self, name: str) -> bool:
        return name in self._state

    def weight(self, name: str) -> str:
        """A parameter as it is stored."""
        return self.graph.weight(name, self._state[name])

    def linear(self, x: str, name: str, out: str = "") -> str:
        """A linear layer with its bias, if it has one."""
        return self.graph.linear(x, name, self._state[f"{name}.weight"], self._state.get(f"{name}.bias"), out)

    def norm(self, x: str, name: str, out: str = "") -> str:
        """The config's norm over the last dim."""
        op = "RMSNormalization" if self.config.norm == "rmsnorm" else "LayerNormalization"
        bias = [self.weight(f"{name}.bias")] if self.has(f"{name}.bias") else []
        return self.graph.node(
            op, x, self.weight(f"{name}.weight"), *bias, out=out, axis=-1, epsilon=self.config.norm_epsilon
        )

    def activation(self, x: str) -> str:
        """The config's activation function."""
        if self.config.activation == "silu":
            return self.graph.node("Mul", x, self.graph.node("Sigmoid", x))
        tanh = self.config.activation == "gelu_tanh"
        return self.graph.node("Gelu", x, approximate="tanh" if tanh else "none")

    def project(self, x: str, name: str) -> tuple[str, str, str]:
        """Query (batch, A, sequence, D), key and value (batch, G, sequence, D) of the attention called `name`.

        With one matrix for all three, its rows are put in the order (3, A, D): one product, one transposition and three
        slices, the form that TensorRT fuses best (9 kernels a layer) and that ONNX Runtime runs as well as any.
        """
        heads, groups, size = self.config.heads, self.config.key_value_heads, self.config.head_size
        if self.has(f"{name}.qkv.weight"):
            weight, bias = self._reordered(f"{name}.qkv", heads, 3)
            both = self.graph.linear(
                x, f"{name}.qkv", np.concatenate(weight), None if bias is None else np.concatenate(bias)
            )
            apart = self.graph.node("Reshape", both, self.graph.ints(0, 0, 3, heads, size))
            stacked = self.graph.node("Transpose", apart, perm=[2, 0, 3, 1, 4])  # (3, batch, A, sequence, D)
            q, k, v = (self.graph.node("Gather", stacked, self.graph.scalar(i), axis=0) for i in range(3))
            return q, k, v
        query = self.graph.split_heads(self.linear(x, f"{name}.q"), heads, size)
        weight, bias = self._reordered(f"{name}.kv", groups, 2)
        parts = []
        for i, part in enumerate("kv"):
            flat = self.graph.linear(x, f"{name}.{part}", weight[i], None if bias is None else bias[i])
            parts.append(self.graph.split_heads(flat, groups, size))
        return query, parts[0], parts[1]

    def _reordered(self, name: str, heads: int, parts: int) -> tuple[np.ndarray, np.ndarray | None]:
        """A projection whose rows are ordered (heads, parts, D) as (parts, heads * D, …): weight and bias."""
        size = self.config.head_size
        weight = self._state[f"{name}.weight"]
        shape = (heads, parts, size)
        weight = weight.reshape(*shape, -1).swapaxes(0, 1).reshape(parts, heads * size, -1)
        bias = self._state.get(f"{name}.bias")
        return weight, None if bias is None else bias.reshape(shape).swapaxes(0, 1).reshape(
            parts, heads * size
        )

    def attention(self, x: str, name: str, core: AttentionCore) -> str:
        """Self-attention; `core` computes it between the projections."""
        joined = self.graph.join_heads(
            core(*self.project(x, name)), self.config.heads * self.config.head_size
        )
        return self.linear(joined, f"{name}.out")

    def feed_forward(self, x: str, name: str) -> str:
        """The block's MLP, gated or not."""
        up = self.linear(x, f"{name}.up")
        if self.config.gated:
            up = self.graph.node("Mul", self.activation(self.linear(x, f"{name}.gate")), up)
        else:
            up = self.activation(up)
        return self.linear(up, f"{name}.down")

    def block(self, x: str, layer: int, norm_first: bool, core: AttentionCore, out: str = "") -> str:
        """One block with its residual branches, the norm before each branch or after each sum."""
        graph, name = self.graph, f"blocks.{layer}"
        if norm_first:
            attended = self.attention(self.norm(x, f"{name}.attention_norm"), f"{name}.attention", core)
            x = graph.node("Add", x, attended)
            return graph.node(
                "Add", x, self.feed_forward(self.norm(x, f"{name}.mlp_norm"), f"{name}.mlp"), out=out
            )
        x = self.norm(
            graph.node("Add", x, self.attention(x, f"{name}.attention", core)), f"{name}.attention_norm"
        )
        return self.norm(
            graph.node("Add", x, self.feed_forward(x, f"{name}.mlp")), f"{name}.mlp_norm", out=out
        )
