"""The transformer parts that the GPT and the BERT graph share, with weights by our names.

Shape letters as in models/layers.py: A heads, G key-value heads, D head width, W width.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ...core.errors import Refused
from ...models.config import GPTConfig
from ...models.experts import SWIGLU_GAIN
from ...models.families import refuse_beyond
from ...models.layers import LATENT_EPSILON
from ...models.rotary import rotary_table
from ...models.transformer import TransformerConfig
from .graph_options import PLAIN, GraphOptions
from .onnx_writer import CONTRIB, Graph, int8_by_output

# query, key, value (batch, heads, sequence, head) -> the same shape; `Blocks.grouped`: (batch, sequence, heads x head)
AttentionCore = Callable[[str, str, str], str]
HIDDEN_BY_MASK = -30000.0  # as good as -inf after softmax and, unlike finfo.min, finite in float16

# Fields beyond a Llama's that a graph has: rope is a table, whatever scaled it; biases are where there are weights.
KNOWN = """
rope_scaling rope_factor rope_original_length rope_low rope_high rope_magnitude rope_width rope_local_theta positions
rope_truncate rope_magnitude_part rope_magnitude_all position_offset layer_pattern linear_bias output_bias qk_norm
norm_from_one norm_place residual activation pooler embedding_width embedding_norm scaled_embeddings query_scalar
attention_softcap attention_sinks logit_softcap kv_latent q_latent value_width gate_limit experts experts_per_token
expert_width shared_experts dense_layers expert_every router_scores router_groups router_groups_per_token
router_normalised router_scale balance_bias balance_rate balance_loss router_z_loss expert_capacity_factor
"""


def refuse_unknown(config: TransformerConfig, options: GraphOptions = PLAIN) -> None:
    """Raise Refused, by name, for a model with something that such graphs do not have."""
    refuse_beyond(config, KNOWN.split(), "an ONNX graph")
    if config.attention_pattern is not None and not config.attention_pattern.is_band:
        what = "a model with an attention pattern beyond a sliding window has no ONNX graph yet"
        fix = "evaluate, generate and serve it with the torch backend"
        raise Refused(what, where="attention_kind", fix=fix)
    unlike = not config.gated or options.precision in ("int8", "int4") or options.variant == "tensorrt"
    if isinstance(config, GPTConfig) and config.experts and unlike:
        what = "a graph has gated experts, in fp32 and fp16, not for TensorRT"
        fix = "--precision fp32, or generate and serve by torch"
        raise Refused(what, where="model.experts", fix=fix)


def grouped(config: TransformerConfig, options: GraphOptions) -> bool:
    """Whether attention is ONNX Runtime's GroupQueryAttention, which takes heads of a multiple of 8."""
    if not isinstance(config, GPTConfig) or config.head_size % 8 or config.positions == "alibi":
        return False
    on_cuda = options.variant == "cuda" and options.half  # CUDA's is of float16
    return options.variant == "onnxruntime" or (on_cuda and not config.attention_sinks)


class Blocks:
    """Writes parts of a model into a graph; `x` is always (batch, sequence, width)."""

    def __init__(self, model: Any, config: TransformerConfig, options: GraphOptions) -> None:
        refuse_unknown(config, options)
        self.config, self.options = config, options
        self.graph = Graph(options)
        self.state = {name: x.detach().float().cpu().numpy() for name, x in model.state_dict().items()}
        # what a graph need not compute: the 1 of norms that have one, the rows of positions before position 0
        if getattr(config, "norm_from_one", False):
            self.state |= {name: x + 1 for name, x in self.state.items() if name.endswith("norm.weight")}
        if config.position_offset:
            table = "position_table.weight"
            self.state[table] = self.state[table][config.position_offset :]
        self.fused = options.variant in ("onnxruntime", "cuda") and config.norm == "layernorm"
        self.grouped = grouped(config, options)
        first, usual = model.blocks["0"], config.head_size**-0.5  # as in every block
        self.way, self.softcap = first.way, first.attention.settled.get("softcap", 0.0)
        self.scale = usual * first.attention.scale  # of the scores
        # what attention operators are told of the scores, if anything
        self.scores: dict[str, Any] = {"scale": self.scale} if self.scale != usual else {}
        self.scores |= first.attention.settled
        self._rotary: dict[bool, list[str]] = {}

    def weight(self, name: str) -> str:
        return self.graph.constant(name, self.state[name])

    def rows(self, table: str, ids: str) -> str:
        """Rows of an embedding table. With int8 for ONNX Runtime it is stored in int8, a scale for each row."""
        graph = self.graph
        if self.options.precision not in ("int8", "int4") or self.options.static:
            return graph.node("Gather", self.weight(table), ids)
        small_WV, scale_V = int8_by_output(self.state[table])
        rows = graph.node("Gather", graph.weight(f"{table}.int8", np.ascontiguousarray(small_WV.T)), ids)
        scale = graph.node("Gather", self.graph.constant(f"{table}.scale", scale_V[:, None]), ids)
        return graph.node("Mul", graph.node("Cast", rows, to=graph.kind), scale)

    def linear(self, x: str, name: str) -> str:
        return self.graph.product(x, name, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def norm(self, x: str, name: str, out: str = "") -> str:
        """The config's norm over the last dim, or a latent's, in float32 whatever x is, scaled in the type of x."""
        graph, latent = self.graph, ".latent." in name
        epsilon = LATENT_EPSILON if latent else self.config.norm_epsilon
        by_mean = self.config.norm == "layernorm" and not latent
        if f"{name}.weight" not in self.state:  # the first behind a norm of the embeddings
            return x
        scale = self.weight(f"{name}.weight")
        bias = [self.weight(f"{name}.bias")] if f"{name}.bias" in self.state else []
        if by_mean or graph.opset >= 23:
            op = "LayerNormalization" if by_mean else "RMSNormalization"
            return graph.node(op, x, scale, *bias, out=out, axis=-1, epsilon=epsilon, stash_type=1)
        wide = graph.wide(x)
        square = graph.node("Mul", wide, wide)
        if graph.opset >= 18:
            square = graph.node("ReduceMean", square, graph.ints(-1))
        else:
            square = graph.node("ReduceMean", square, axes=[-1])
        small = graph.weight(f"epsilon_{epsilon:g}", np.array(epsilon, np.float32))
        root = graph.node("Sqrt", graph.node("Add", square, small))
        return graph.node("Mul", graph.narrow(graph.node("Div", wide, root)), scale, out=out)

    def sum_norm(self, x: str, branch: str, name: str, out: str = "") -> str:
        if not self.fused or self.graph.half or f"{name}.bias" not in self.state:
            return self.norm(self.graph.node("Add", x, branch), name, out)
        inputs = (x, branch, self.weight(f"{name}.weight"), self.weight(f"{name}.bias"))
        kind: dict[str, Any] = {"domain": CONTRIB, "epsilon": self.config.norm_epsilon}
        return self.graph.node("SkipLayerNormalization", *inputs, out=out, **kind)

    def activation(self, x: str) -> str:
        graph = self.graph
        if self.config.activation == "silu":
            return graph.node("Mul", x, graph.node("Sigmoid", x))
        if self.config.activation.startswith("relu"):
            positive = graph.node("Relu", x)
            return graph.node("Mul", positive, positive) if self.config.activation == "relu2" else positive
        tanh = self.config.activation == "gelu_tanh"
        if graph.opset >= 20:
            return graph.node("Gelu", x, approximate="tanh" if tanh else "none")
        half, one = graph.number(0.5), graph.number(1.0)
        if tanh:
            cube = graph.node("Mul", graph.node("Mul", x, x), graph.node("Mul", x, graph.number(0.044715)))
            scaled = graph.node("Mul", graph.node("Add", x, cube), graph.number(math.sqrt(2 / math.pi)))
            share = graph.node("Tanh", scaled)
        else:
            share = graph.node("Erf", graph.node("Mul", x, graph.number(math.sqrt(0.5))))
        return graph.node("Mul", graph.node("Mul", x, half), graph.node("Add", share, one))

    def project(self, x: str, name: str) -> tuple[str, str, str]:
        """Query (batch, A, sequence, D), key and value (batch, G, sequence, D) of the attention called `name`, whose
        rows are put in the order (parts, heads, D), as TensorRT fuses best: one transposition and slices for a BERT (9
        kernels a layer against 10 or 11), a split for a GPT with its cache (8 against 10).
        """
        heads, groups = self.config.heads, self.config.key_value_heads
        if f"{name}.qkv.weight" in self.state:
            query, key, value = self._projected(x, f"{name}.qkv", heads, 3)
        else:
            key, value = self._projected(x, f"{name}.kv", groups, 2)
            query = self.linear(x, f"{name}.q")
            if not isinstance(self.config, GPTConfig):
                return self.graph.split_heads(query, heads, self.config.head_size), key, value
        if isinstance(self.config, GPTConfig):
            query = self.heads_of(query, heads, f"{name}.q_norm")
            key, value = self.heads_of(key, groups, f"{name}.k_norm"), self.heads_of(value, groups)
        return query, key, value

    def heads_of(self, x: str, heads: int, norm: str = "") -> str:
        """(batch, sequence, heads * D) as the attention core takes it, through the heads' norm if they have one."""
        graph, size, scale = self.graph, self.config.head_size, self.state.get(f"{norm}.weight")
        if scale is not None and len(scale) == size:
            x = self.norm(graph.reshape(x, 0, 0, heads, size), norm)
            if not self.grouped:
                return graph.node("Transpose", x, perm=[0, 2, 1, 3])
            return graph.reshape(x, 0, 0, heads * size)
        x = x if scale is None else self.norm(x, norm)
        return x if self.grouped else graph.split_heads(x, heads, size)

    def _projected(self, x: str, name: str, heads: int, parts: int) -> list[str]:
        """The parts of a projection: of a GPT (batch, sequence, heads * D), of a BERT (batch, heads, sequence, D)."""
        graph, size = self.graph, self.config.head_size
        flat = self.graph.product(x, name, *self.reordered(name, heads, parts))
        if isinstance(self.config, GPTConfig):
            return graph.split(flat, *[heads * size] * parts)
        apart = graph.reshape(flat, 0, 0, parts, heads, size)
        stacked = graph.node("Transpose", apart, perm=[2, 0, 3, 1, 4])  # (parts, batch, heads, sequence, D)
        return [graph.node("Gather", stacked, graph.scalar(i), axis=0) for i in range(parts)]

    def reordered(self, name: str, heads: int, parts: int) -> tuple[np.ndarray, np.ndarray | None]:
        """A projection whose rows are ordered (heads, parts, D) as (parts, heads, D): weight and bias."""
        weight, bias = self.state[f"{name}.weight"], self.state.get(f"{name}.bias")
        shape = (heads, parts, self.config.head_size)
        weight = weight.reshape(*shape, -1).swapaxes(0, 1).reshape(weight.shape)
        return weight, None if bias is None else bias.reshape(shape).swapaxes(0, 1).reshape(-1)

    def window(self, layer: int) -> int:
        """How many tokens a token of this layer sees on each side, itself included; 0: all."""
        pattern = self.config.pattern_of(layer)
        return pattern.window if pattern else 0

    def rotary(self, layer: int) -> list[str]:
        """Cosines and sines (sequence_length, D / 2) of a layer, the model's own with equal halves; [] for none."""
        config, kind = self.config, self.config.kind_of(layer)
        if config.positions != "rotary" or kind == "n":
            return []
        local = kind == "l" and config.rope_local_theta > 0
        if local not in self._rotary:
            places, half = torch.arange(config.sequence_length), config.rotary_size // 2
            tables = [table[0, 0, :, :half] for table in rotary_table(config, places, torch.float32, local)]
            self._rotary[local] = [
                self.graph.constant(f"rotary{'_local' if local else ''}.{name}", table.numpy())
                for name, table in zip(("cos", "sin"), tables)
            ]
        return self._rotary[local]

    def rotated(self, x: str, positions: str, tables: list[str]) -> str:
        """x (batch, heads, sequence, D) turned by its positions (batch, sequence); as it is without tables."""
        if not tables:
            return x
        graph, config, size = self.graph, self.config, self.config.rotary_size
        if graph.opset >= 23:
            part: dict[str, Any] = {"rotary_embedding_dim": size} if config.rope_width else {}
            return graph.node("RotaryEmbedding", x, *tables, positions, **part)
        found = [graph.node("Gather", table, positions) for table in tables]  # (batch, sequence, D / 2)
        cos, sin = (graph.node("Unsqueeze", part, graph.ints(1)) for part in found)
        ends = (graph.ints(0), graph.ints(size // 2), graph.ints(size))
        first = graph.node("Slice", x, ends[0], ends[1], graph.ints(3))
        second = graph.node("Slice", x, ends[1], ends[2], graph.ints(3))
        turned = [
            graph.node("Sub", graph.node("Mul", first, cos), graph.node("Mul", second, sin)),
            graph.node("Add", graph.node("Mul", second, cos), graph.node("Mul", first, sin)),
        ]
        if config.rope_width:
            turned.append(graph.node("Slice", x, ends[2], graph.ints(config.head_size), graph.ints(3)))
        return graph.node("Concat", *turned, axis=-1)

    def explicit_attention(self, query: str, key: str, value: str, hidden: str, layer: int = 0) -> str:
        """Attention in standard parts, softmax in float32 of scores plus `hidden` (batch, 1 or A, sequence, keys)."""
        graph, size = self.graph, self.config.head_size
        query = graph.node("Mul", query, graph.number(self.scale))
        key = self._repeated(graph.node("Transpose", key, perm=[0, 1, 3, 2]), (size, -1))
        scores = graph.node("Add", self.capped(graph.node("MatMul", query, key), self.softcap), hidden)
        scores = graph.wide(scores)
        # a sink is one more key of a head, without a value
        if (sinks := f"blocks.{layer}.attention.sinks") in self.state:
            learnt = graph.weight(f"{sinks}.column", self.state[sinks][:, None, None])
            one = graph.node("Gather", scores, graph.ints(0), axis=3)
            scores = graph.node(
                "Concat", scores, graph.node("Add", graph.node("Sub", one, one), learnt), axis=3
            )
        share = graph.narrow(graph.node("Softmax", scores, axis=-1))
        if sinks in self.state:
            share = graph.node("Slice", share, graph.ints(0), graph.ints(-1), graph.ints(3))
        return graph.node("MatMul", share, self._repeated(value, (-1, size)))

    def _repeated(self, x: str, last: tuple[int, int]) -> str:
        """A key or value (batch, G, ...) once for each query of its group: (batch, A, *last)."""
        graph, heads, groups = self.graph, self.config.heads, self.config.key_value_heads
        if groups == heads:
            return x
        apart = graph.node("Unsqueeze", x, graph.ints(2))
        apart = graph.node("Expand", apart, graph.ints(1, 1, heads // groups, 1, 1))
        return graph.reshape(apart, 0, heads, *last)

    def capped(self, x: str, cap: float) -> str:
        """cap tanh(x / cap); 0: as it is."""
        graph = self.graph
        if not cap:
            return x
        bent = graph.node("Tanh", graph.node("Mul", x, graph.number(1 / cap)))
        return graph.node("Mul", bent, graph.number(cap))

    def hidden_where_not(self, allowed: str, bias: str = "") -> str:
        """A bool mask as what is added to the scores: 0 or a bias where it is true, `HIDDEN_BY_MASK` elsewhere."""
        graph = self.graph
        return graph.node("Where", allowed, bias or graph.number(0.0), graph.number(HIDDEN_BY_MASK))

    def attention(self, x: str, name: str, core: AttentionCore) -> str:
        """Self-attention; `core` computes it between the projections."""
        graph, config = self.graph, self.config
        attended = core(*self.project(x, name))
        if not self.grouped:
            attended = graph.node("Transpose", attended, perm=[0, 2, 1, 3])
        if config.value_size < config.head_size:
            attended = graph.reshape(attended, 0, 0, config.heads, config.head_size)
            attended, _ = graph.split(attended, config.value_size, config.head_size - config.value_size)
        if not self.grouped or config.value_size < config.head_size:
            attended = graph.reshape(attended, 0, 0, config.heads * config.value_size)
        return self.linear(attended, f"{name}.out")

    def feed_forward(self, x: str, name: str) -> str:
        up = self.linear(x, f"{name}.up")
        if not self.config.gated:
            return self.linear(self.activation(up), f"{name}.down")
        return self.linear(self.gated(self.linear(x, f"{name}.gate"), up), f"{name}.down")

    def gated(self, gate: str, up: str) -> str:
        """As `models.experts.gated`."""
        graph, limit = self.graph, getattr(self.config, "gate_limit", 0.0)
        if not limit:
            return graph.node("Mul", self.activation(gate), up)
        most = graph.number(limit)
        gate, up = graph.node("Min", gate, most), graph.node("Clip", up, graph.number(-limit), most)
        share = graph.node("Sigmoid", graph.node("Mul", gate, graph.number(SWIGLU_GAIN)))
        return graph.node("Mul", graph.node("Mul", gate, share), graph.node("Add", up, graph.number(1.0)))

    def block(self, x: str, layer: int, attention: Callable[[str, str], str]) -> str:
        """One block. Its output is called `hidden.<layer>`, by which the parity report finds it."""
        graph, way, name, out = self.graph, self.way, f"blocks.{layer}", f"hidden.{layer}"
        graph.scope = f"{name}/"
        if way in ("parallel", "shared"):
            read = also = self.norm(x, f"{name}.attention_norm")
            if way == "parallel":
                also = self.norm(x, f"{name}.mlp_norm")
            x = graph.node("Add", x, attention(read, f"{name}.attention"))
            x = graph.node("Add", x, self.feed_forward(also, f"{name}.mlp"), out=out)
        else:
            for branch, part, end in ((attention, "attention", ""), (self.feed_forward, "mlp", out)):
                part = f"{name}.{part}"
                read = self.norm(x, f"{part}_norm") if way in ("before", "around") else x
                found = branch(read, part)
                if way in ("after", "around"):
                    found = self.norm(found, f"{part}_norm" if way == "after" else f"{part}_after_norm")
                if way == "sum":
                    x = self.sum_norm(x, found, f"{part}_norm", end)
                else:
                    x = graph.node("Add", x, found, out=end)
        graph.scope = ""
        return x

    def vocabulary_logits(self, hidden: str, at: str, table: str, bias: str, out: str) -> None:
        """float32 logits (batch, asked, V) of hidden states (batch, asked, W); `at` (batch, asked) gives their shape.
        Gemm reads the token table as it is stored, so a tied one is stored once; 8 or fewer bits are a copy of its own.
        """
        graph, config = self.graph, self.config
        flat = graph.reshape(hidden, -1, self.state[table].shape[1])
        if self.options.precision in ("int8", "int4") and not self.options.static:
            logits = graph.product(flat, "output", self.state[table], self.state.get(bias))
        else:
            offsets = [self.weight(bias)] if bias in self.state else []
            logits = graph.node("Gemm", flat, self.weight(table), *offsets, transB=1)
        logits = self.capped(logits, getattr(config, "logit_softcap", 0.0))
        shape = graph.node("Concat", graph.node("Shape", at), graph.ints(config.vocab_size), axis=0)
        logits = graph.node("Reshape", logits, shape, allowzero=1)  # nothing asked gives (batch, 0, V)
        graph.result(logits, out, ["batch", "asked", config.vocab_size])
