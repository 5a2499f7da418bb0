"""The transformer parts that the GPT and the BERT graph share, with weights by our names.

Shape letters as in models/layers.py: A heads, G key-value heads, D head width, W width.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from ...core.errors import Refused
from ...models.config import GPTConfig
from ...models.families import refuse_beyond
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
rope_truncate position_offset layer_pattern linear_bias output_bias qk_norm norm_from_one norm_place residual activation
pooler embedding_width embedding_norm scaled_embeddings query_scalar attention_softcap logit_softcap
experts experts_per_token expert_width shared_experts dense_layers expert_every router_scores router_normalised
router_scale balance_bias balance_rate balance_loss router_z_loss expert_capacity_factor
"""


def refuse_unknown(config: TransformerConfig, options: GraphOptions = PLAIN) -> None:
    """Raise Refused, by name, for a model with something that such graphs do not have."""
    refuse_beyond(config, KNOWN.split(), "an ONNX graph")
    if config.attention_pattern is not None and not config.attention_pattern.is_band:
        what = "a model with an attention pattern beyond a sliding window has no ONNX graph yet"
        fix = "evaluate, generate and serve it with the torch backend"
        raise Refused(what, where="attention_kind", fix=fix)
    if isinstance(config, GPTConfig) and config.experts:
        unlike = not config.gated or config.has_bias("mlp")
        if unlike or options.precision in ("int8", "int4") or options.variant == "tensorrt":
            what = "a graph has gated experts without biases, in fp32 and fp16, not for TensorRT"
            fix = "--precision fp32, or generate and serve by torch"
            raise Refused(what, where="model.experts", fix=fix)


def grouped(config: TransformerConfig, options: GraphOptions) -> bool:
    """Whether attention is ONNX Runtime's GroupQueryAttention, which takes heads of a multiple of 8."""
    on_cuda = options.variant == "cuda" and options.half  # CUDA's is of float16
    fits = isinstance(config, GPTConfig) and config.head_size % 8 == 0 and config.positions != "alibi"
    return fits and (options.variant == "onnxruntime" or on_cuda)


class Blocks:
    """Writes parts of a model into a graph; `x` is always (batch, sequence, width)."""

    def __init__(self, model: nn.Module, config: TransformerConfig, options: GraphOptions) -> None:
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
        self.softcap, query_scalar = (getattr(config, k, 0.0) for k in ("attention_softcap", "query_scalar"))
        self.scale = (query_scalar or config.head_size) ** -0.5  # of the scores
        # what attention operators are told of the scores, if anything
        self.scores: dict[str, Any] = {"scale": self.scale} if query_scalar else {}
        self.scores |= {"softcap": self.softcap} if self.softcap else {}
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
        """The config's norm over the last dim, in float32 whatever x is (`stash_type` 1), scaled in the type of x."""
        graph, epsilon = self.graph, self.config.norm_epsilon
        if f"{name}.weight" not in self.state:  # the first behind a norm of the embeddings
            return x
        scale = self.weight(f"{name}.weight")
        bias = [self.weight(f"{name}.bias")] if f"{name}.bias" in self.state else []
        if self.config.norm == "layernorm" or graph.opset >= 23:
            op = "LayerNormalization" if self.config.norm == "layernorm" else "RMSNormalization"
            return graph.node(op, x, scale, *bias, out=out, axis=-1, epsilon=epsilon, stash_type=1)
        wide = graph.wide(x)
        square = graph.node("Mul", wide, wide)
        if graph.opset >= 18:
            square = graph.node("ReduceMean", square, graph.ints(-1))
        else:
            square = graph.node("ReduceMean", square, axes=[-1])
        small = graph.weight("epsilon", np.array(epsilon, np.float32))
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
            query = self._heads(query, heads, f"{name}.q_norm")
            key, value = self._heads(key, groups, f"{name}.k_norm"), self._heads(value, groups)
        return query, key, value

    def _heads(self, x: str, heads: int, norm: str = "") -> str:
        """(batch, sequence, heads * D) as the attention core takes it, through the heads' norm if they have one."""
        graph, size, scale = self.graph, self.config.head_size, self.state.get(f"{norm}.weight")
        if scale is not None and len(scale) == size:
            x = self.norm(graph.node("Reshape", x, graph.ints(0, 0, heads, size)), norm)
            if not self.grouped:
                return graph.node("Transpose", x, perm=[0, 2, 1, 3])
            return graph.node("Reshape", x, graph.ints(0, 0, heads * size))
        x = x if scale is None else self.norm(x, norm)
        return x if self.grouped else graph.split_heads(x, heads, size)

    def _projected(self, x: str, name: str, heads: int, parts: int) -> list[str]:
        """The parts of a projection: of a GPT (batch, sequence, heads * D), of a BERT (batch, heads, sequence, D)."""
        graph, size = self.graph, self.config.head_size
        flat = self.graph.product(x, name, *self.reordered(name, heads, parts))
        if isinstance(self.config, GPTConfig):
            more: dict[str, Any] = {"num_outputs": parts} if graph.opset >= 18 else {}
            first = graph.node("Split", flat, outputs=parts, axis=-1, **more)
            return [first, *(f"{first}:{i}" for i in range(1, parts))]
        apart = graph.node("Reshape", flat, graph.ints(0, 0, parts, heads, size))
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

    def explicit_attention(self, query: str, key: str, value: str, hidden: str) -> str:
        """Attention in standard parts, softmax in float32 of scores plus `hidden` (batch, 1 or A, sequence, keys)."""
        graph, size = self.graph, self.config.head_size
        query = graph.node("Mul", query, graph.number(self.scale))
        key = self._repeated(graph.node("Transpose", key, perm=[0, 1, 3, 2]), (size, -1))
        scores = graph.node("Add", self.capped(graph.node("MatMul", query, key), self.softcap), hidden)
        share = graph.narrow(graph.node("Softmax", graph.wide(scores), axis=-1))
        return graph.node("MatMul", share, self._repeated(value, (-1, size)))

    def _repeated(self, x: str, last: tuple[int, int]) -> str:
        """A key or value (batch, G, ...) once for each query of its group: (batch, A, *last)."""
        graph, heads, groups = self.graph, self.config.heads, self.config.key_value_heads
        if groups == heads:
            return x
        apart = graph.node("Unsqueeze", x, graph.ints(2))
        apart = graph.node("Expand", apart, graph.ints(1, 1, heads // groups, 1, 1))
        return graph.node("Reshape", apart, graph.ints(0, heads, *last))

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
        graph, width = self.graph, self.config.heads * self.config.head_size
        attended = core(*self.project(x, name))
        if not self.grouped:
            attended = graph.node("Transpose", attended, perm=[0, 2, 1, 3])
            attended = graph.node("Reshape", attended, graph.ints(0, 0, width))
        return self.linear(attended, f"{name}.out")

    def feed_forward(self, x: str, name: str) -> str:
        if f"{name}.router.weight" in self.state:
            return self.experts(x, name)
        up = self.linear(x, f"{name}.up")
        if not self.config.gated:
            return self.linear(self.activation(up), f"{name}.down")
        gated = self.graph.node("Mul", self.activation(self.linear(x, f"{name}.gate")), up)
        return self.linear(gated, f"{name}.down")

    def experts(self, x: str, name: str) -> str:
        """What the experts of each token make of it. ONNX Runtime's operator on a CPU computes those alone, standard
        ones all of them, of which those that were not chosen have no share.
        """
        graph, config = self.graph, self.config
        assert isinstance(config, GPTConfig)
        flat = graph.node("Reshape", x, graph.ints(-1, config.width))
        share_NE = self.shares(flat, name)
        gate, up, down = (self.state[f"{name}.experts.{part}"] for part in ("gate", "up", "down"))
        if self.options.variant == "onnxruntime" and config.activation == "silu" and not graph.half:
            woven = graph.weight(f"{name}.woven", np.stack((gate, up), 2).reshape(len(up), -1, config.width))
            how: dict[str, Any] = {"k": config.experts_per_token, "normalize_routing_weights": 1}
            how |= {"activation_type": "swiglu", "swiglu_fusion": 1, "activation_alpha": 1.0}
            how |= {"activation_beta": 0.0, "domain": CONTRIB}
            logits = graph.node("Log", share_NE)  # which its softmax undoes
            y = graph.node("MoE", flat, logits, woven, "", graph.weight(f"{name}.down", down), **how)
            y = graph.node("Mul", y, graph.node("ReduceSum", share_NE, graph.ints(-1)))
        else:
            turned = [graph.constant(f"{name}.{i}", x.swapaxes(1, 2)) for i, x in enumerate((gate, up, down))]
            hidden = self.activation(graph.node("MatMul", flat, turned[0]))  # (E, N, F)
            hidden = graph.node("Mul", hidden, graph.node("MatMul", flat, turned[1]))
            share_EN1 = graph.node("Unsqueeze", graph.node("Transpose", share_NE), graph.ints(-1))
            y = graph.node("Mul", graph.node("MatMul", hidden, turned[2]), graph.narrow(share_EN1))
            y = graph.node("ReduceSum", y, graph.ints(0), keepdims=0)
        y = graph.node("Reshape", y, graph.node("Shape", x))
        return graph.node("Add", y, self.feed_forward(x, f"{name}.shared")) if config.shared_experts else y

    def shares(self, flat: str, name: str) -> str:
        """The weights (N, E) of the experts' answers in float32, 0 of those that were not chosen."""
        graph, config, state = self.graph, self.config, self.state
        assert isinstance(config, GPTConfig)
        router = graph.weight(f"{name}.router.T", state[f"{name}.router.weight"].T)
        logits = graph.node("MatMul", graph.wide(flat), router)
        scores = graph.node("Softmax" if config.router_scores == "softmax" else "Sigmoid", logits)
        ranked = scores
        if config.balance_bias:
            ranked = graph.node("Add", scores, graph.weight(f"{name}.balance", state[f"{name}.balance_bias"]))
        chosen = graph.node("TopK", ranked, graph.ints(config.experts_per_token), outputs=2) + ":1"
        weights = graph.node("GatherElements", scores, chosen, axis=-1)
        if config.router_normalised:
            weights = graph.node("Div", weights, graph.node("ReduceSum", weights, graph.ints(-1)))
        scale = graph.weight(f"{name}.scale", np.array(config.router_scale, np.float32))
        none = graph.node("Sub", scores, scores)
        return graph.node("ScatterElements", none, chosen, graph.node("Mul", weights, scale), axis=-1)

    def block(self, x: str, layer: int, attention: Callable[[str, str], str]) -> str:
        """One block. Its output is called `hidden.<layer>`, by which the parity report finds it."""
        graph, config, name, out = self.graph, self.config, f"blocks.{layer}", f"hidden.{layer}"
        graph.scope = f"{name}/"
        way = "before" if getattr(config, "norm_first", False) else "sum"
        if isinstance(config, GPTConfig):
            way = config.norm_place if config.residual == "sequential" else config.residual
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
        flat = graph.node("Reshape", hidden, graph.ints(-1, self.state[table].shape[1]))
        if self.options.precision in ("int8", "int4") and not self.options.static:
            logits = graph.product(flat, "output", self.state[table], self.state.get(bias))
        else:
            offsets = [self.weight(bias)] if bias in self.state else []
            logits = graph.node("Gemm", flat, self.weight(table), *offsets, transB=1)
        logits = self.capped(logits, getattr(config, "logit_softcap", 0.0))
        shape = graph.node("Concat", graph.node("Shape", at), graph.ints(config.vocab_size), axis=0)
        logits = graph.node("Reshape", logits, shape, allowzero=1)  # nothing asked gives (batch, 0, V)
        graph.result(logits, out, ["batch", "asked", config.vocab_size])
