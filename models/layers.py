"""The parts of both models: attention, feed-forward, norms, one block.

Nothing here knows about devices, ranks or files. `Attention.attend` is a plain attribute: a windowed model has another
function of the same signature, and who packs rows in a way of their own lends one for a call.

Shape letters: B batch, S query positions, T key positions, W width, A heads, G key-value heads, D head width,
F feed-forward width.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Mask, scaled_dot_product
from .config import BERTConfig, GPTConfig
from .experts import RoutedFeedForward, gated
from .rotary import Rotary, Tables, rotate, yarn_magnitude
from .transformer import TransformerConfig

LATENT_EPSILON = 1e-6  # of the norms of latents, whatever the others have, as in transformers


class NormFromOne(nn.RMSNorm):
    """An RMS norm that scales by 1 + weight, so that weight decay pulls the scale to 1 (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


def make_norm(config: TransformerConfig, size: int = 0) -> nn.Module:
    """The norm that the config names, over the last dim: of the width, or of another size."""
    size = size or config.width
    if config.norm == "rmsnorm":
        from_one = isinstance(config, GPTConfig) and config.norm_from_one
        return (NormFromOne if from_one else nn.RMSNorm)(size, eps=config.norm_epsilon)
    return nn.LayerNorm(size, eps=config.norm_epsilon, bias=config.bias)


def squared_relu(x: Tensor) -> Tensor:
    """ReLU squared (So et al. 2021, Primer)."""
    positive = F.relu(x)
    return positive * positive  # square()'s backward is a power: two and a half times the time on a CPU


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """The activation that a config names."""
    if name in ("silu", "relu"):
        return F.silu if name == "silu" else F.relu
    if name == "relu2":
        return squared_relu
    approximate = "tanh" if name == "gelu_tanh" else "none"
    return lambda x: F.gelu(x, approximate=approximate)


def products(x: Tensor, *layers: nn.Module) -> Sequence[Tensor]:
    """What each of several layers makes of one input; layers that have to fetch it do so `together`."""
    together = getattr(layers[0], "together", None)
    return [layer(x) for layer in layers] if together is None else together(x, layers)


class Latent(nn.Module):
    """Queries, keys and values that are made of a few numbers of a token (DeepSeek-AI 2024, V2, section 2.1).

    The numbers of a head that are turned come first, of a key the same in all heads. Values are filled up with zeros to
    the width of queries and keys, so that every kernel and cache takes them: what is kept of a token is not its latent.
    Where `q_up` and `kv_up` fetch the rest of their rows, `gather` is set and fetches that of the shared part of a key.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        size, latent, self.turned = config.head_size, config.kv_latent, config.rope_width
        self.sizes = size, size - self.turned, config.value_size
        self.q_down = nn.Linear(config.width, config.q_latent, bias=False) if config.q_latent else None
        self.q_norm = nn.RMSNorm(config.q_latent, eps=LATENT_EPSILON) if config.q_latent else None
        self.q_up = nn.Linear(config.q_latent or config.width, config.heads * size, bias=False)
        self.kv_down = nn.Linear(config.width, self.turned + latent, bias=False)
        self.kv_norm = nn.RMSNorm(latent, eps=LATENT_EPSILON)
        self.kv_up = nn.Linear(latent, config.heads * sum(self.sizes[1:]), bias=False)
        self.gather: Callable[[Tensor], Tensor] | None = None

    def forward(self, x_BSW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each (B, A, S, D)."""
        size, key_size, value_size = self.sizes
        small = x_BSW if self.q_down is None or self.q_norm is None else self.q_norm(self.q_down(x_BSW))
        q = self.q_up(small).unflatten(-1, (-1, size))
        shared, latent = self.kv_down(x_BSW).tensor_split((self.turned,), -1)
        kv = self.kv_up(self.kv_norm(latent)).unflatten(-1, (-1, key_size + value_size))
        k, v = kv.tensor_split((key_size,), -1)
        shared = shared if self.gather is None else self.gather(shared)
        k = torch.cat((shared[:, :, None].expand(-1, -1, k.shape[2], -1), k), -1)
        v = F.pad(v, (0, size - value_size))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class Attention(nn.Module):
    """Self-attention with its projections.

    With as many key as query heads the three projections are one matrix of rows (A, 3, D): a contiguous slice of them
    is a set of whole heads, so tensor parallelism shards it on dim 0 like any other. With fewer key heads, `q` has rows
    (A, D) and `kv` (G, 2, D), each sharded by heads or, with fewer key heads than ranks, `kv` replicated. The number of
    heads is read from what the projections return, so a shard computes with the heads it has.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        heads, kv_heads, size = config.heads, config.key_value_heads, config.head_size
        self.head_size = size
        self.dropout = config.dropout
        self.value_size, self.latent = config.value_size, None
        self.fused = heads == kv_heads
        bias = config.has_bias("qkv")
        if isinstance(config, GPTConfig) and config.kv_latent:
            self.latent = Latent(config)
        elif self.fused:
            self.qkv = nn.Linear(config.width, heads * 3 * size, bias=bias)
        else:
            self.q = nn.Linear(config.width, heads * size, bias=bias)
            self.kv = nn.Linear(config.width, kv_heads * 2 * size, bias=bias)
        self.q_norm: nn.Module | None = None
        self.k_norm: nn.Module | None = None
        self.scale = 1.0  # of queries, beside the kernels' 1 / root of D
        self.settled: dict[str, float] = {}  # what `attend` is told besides, the same in every call
        self.sinks: nn.Parameter | None = None
        if isinstance(config, GPTConfig):
            self.whole_norm = config.qk_norm == "whole"
            if config.qk_norm != "none":
                self.q_norm = make_norm(config, heads * size if self.whole_norm else size)
                self.k_norm = make_norm(config, kv_heads * size if self.whole_norm else size)
            if config.query_scalar:
                self.scale = math.sqrt(size / config.query_scalar)
            if config.kv_latent and config.rope_scaling == "yarn":
                self.scale *= yarn_magnitude(config, config.rope_magnitude_all) ** 2
            if config.attention_softcap:
                self.settled = {"softcap": config.attention_softcap}
            if config.attention_sinks:
                self.sinks = nn.Parameter(torch.empty(heads))
        self.out = nn.Linear(heads * config.value_size, config.width, bias=config.has_bias("out"))
        self.attend: Callable[..., Tensor] = scaled_dot_product

    def project(self, x_BSW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query (B, A, S, D), key and value (B, G, S, D)."""
        if self.latent is not None:
            return self.latent(x_BSW)
        if self.fused:
            q, k, v = self.qkv(x_BSW).unflatten(-1, (-1, 3, self.head_size)).unbind(3)  # each (B, S, A, D)
        else:
            q, kv = products(x_BSW, self.q, self.kv)
            q = q.unflatten(-1, (-1, self.head_size))
            k, v = kv.unflatten(-1, (-1, 2, self.head_size)).unbind(3)
        if self.q_norm is not None and self.k_norm is not None:
            if self.whole_norm:
                q, k = (x.flatten(2) for x in (q, k))
            q, k = (x.view(*v.shape[:2], -1, self.head_size) for x in (self.q_norm(q), self.k_norm(k)))
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def forward(
        self, x_BSW: Tensor, mask: Mask | None = None, is_causal: bool = False, rotary: Rotary | None = None
    ) -> Tensor:
        """(B, S, W) -> (B, S, W)."""
        q, k, v = self.project(x_BSW)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if self.scale != 1.0:
            q = q * self.scale
        dropout = self.dropout if self.training else 0.0
        besides = self.settled if self.sinks is None else {**self.settled, "sinks": self.sinks}
        heads_BASD = self.attend(q, k, v, mask=mask, is_causal=is_causal, dropout=dropout, **besides)
        if self.value_size < self.head_size:
            heads_BASD = heads_BASD[..., : self.value_size]
        return self.out(heads_BASD.transpose(1, 2).flatten(2))


@contextmanager
def attending(
    modules: Iterable[Attention], attend_in: Callable[[int], Callable[..., Tensor]]
) -> Iterator[None]:
    """Give attention modules, numbered as they come, another `attend` for the length of the block."""
    before = [(module, module.attend) for module in modules]
    for layer, (module, _) in enumerate(before):
        module.attend = attend_in(layer)
    try:
        yield
    finally:
        for module, old in before:
            module.attend = old


class FeedForward(nn.Module):
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config: TransformerConfig, size: int) -> None:
        super().__init__()
        bias = config.has_bias("mlp")
        self.up = nn.Linear(config.width, size, bias=bias)
        self.gate = nn.Linear(config.width, size, bias=bias) if config.gated else None
        self.down = nn.Linear(size, config.width, bias=bias)
        self.activation = activation_function(config.activation)
        self.limit = config.gate_limit if isinstance(config, GPTConfig) else 0.0

    def forward(self, x_BSW: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x_BSW)))
        gate, up = products(x_BSW, self.gate, self.up)
        return self.down(gated(gate, up, self.activation, self.limit))


def make_feed_forward(config: TransformerConfig, layer: int) -> nn.Module:
    """That of a layer: one, or experts."""
    if not isinstance(config, GPTConfig) or not config.has_experts(layer):
        return FeedForward(config, config.feed_forward_size)
    size = config.shared_experts * config.expert_size
    shared = FeedForward(config, size) if size else None
    return RoutedFeedForward(config, activation_function(config.activation), shared)


class Block(nn.Module):
    """Attention and feed-forward, each a residual branch, with the norms where the config places them.

    Before each branch (GPT), after each sum (BERT), on what a branch gives (OLMo 2), or on both ends of it (Gemma 2).
    With a parallel residual both branches read the block's input (Wang and Komatsuzaki 2021, GPT-J).
    """

    def __init__(self, config: TransformerConfig, layer: int = 0) -> None:
        super().__init__()
        self.kind = config.kind_of(layer)  # `l`, `g` or `n`: whose rotary tables it takes
        self.way = "before" if isinstance(config, BERTConfig) and config.norm_first else "sum"
        if isinstance(config, GPTConfig):
            self.way = config.norm_place if config.residual == "sequential" else config.residual
        self.dropout = config.dropout
        self.attention_norm = make_norm(config)
        self.attention = Attention(config)
        if self.way == "around":
            self.attention_after_norm = make_norm(config)
        self.mlp_norm = nn.Identity() if self.way == "shared" else make_norm(config)
        self.mlp = make_feed_forward(config, layer)
        if self.way == "around":
            self.mlp_after_norm = make_norm(config)

    def forward(
        self, x_BSW: Tensor, mask: Mask | None = None, is_causal: bool = False, rotary: Tables | None = None
    ) -> Tensor:
        how = (mask, is_causal, rotary.get(self.kind) if rotary else None)
        if self.way == "before":
            x_BSW = x_BSW + self.drop(self.attention(self.attention_norm(x_BSW), *how))
            return x_BSW + self.drop(self.mlp(self.mlp_norm(x_BSW)))
        if self.way == "sum":
            x_BSW = self.attention_norm(x_BSW + self.drop(self.attention(x_BSW, *how)))
            return self.mlp_norm(x_BSW + self.drop(self.mlp(x_BSW)))
        if self.way == "after":
            x_BSW = x_BSW + self.drop(self.attention_norm(self.attention(x_BSW, *how)))
            return x_BSW + self.drop(self.mlp_norm(self.mlp(x_BSW)))
        if self.way == "around":
            attended = self.attention(self.attention_norm(x_BSW), *how)
            x_BSW = x_BSW + self.drop(self.attention_after_norm(attended))
            return x_BSW + self.drop(self.mlp_after_norm(self.mlp(self.mlp_norm(x_BSW))))
        read_BSW = self.attention_norm(x_BSW)
        also_BSW = read_BSW if self.way == "shared" else self.mlp_norm(x_BSW)
        return x_BSW + self.drop(self.attention(read_BSW, *how)) + self.drop(self.mlp(also_BSW))

    def drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class BlockAhead(Block):
    """A block of which training predicts a further token (DeepSeek-AI 2024, V3, section 2.2), from what the token
    before was predicted of and the embedding of that token, which comes first, as in the released weights.
    """

    def __init__(self, config: TransformerConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.token_norm, self.hidden_norm, self.norm = (make_norm(config) for _ in range(3))
        self.join = nn.Linear(2 * config.width, config.width, bias=False)

    def forward(self, x_BSW: Tensor, token_BSW: Tensor, *how: Any) -> Tensor:  # type: ignore[override]
        both = torch.cat((self.token_norm(token_BSW), self.hidden_norm(x_BSW)), -1)
        return self.norm(super().forward(self.join(both), *how))


class RelativeBias(nn.Module):
    """A number per head and distance bucket, added to the attention scores of every layer (Raffel et al.
    2020, T5, section 2.1).

    Half of the buckets are for keys to the right. In each half the first half counts single steps, the rest
    grow logarithmically up to `distance`; all beyond share the last one.
    """

    def __init__(self, config: BERTConfig) -> None:
        super().__init__()
        self.buckets, self.distance = config.relative_buckets, config.relative_distance
        self.table = nn.Embedding(config.relative_buckets, config.heads)

    def forward(self, positions: Tensor) -> Tensor:
        """`positions` (S,) or (B, S) -> (1 or B, A, S, S)."""
        offset = positions[..., None, :] - positions[..., :, None]  # key minus query
        half = self.buckets // 2
        exact = half // 2
        far = offset.abs().clamp(min=1).float() / exact
        scale = (half - exact) / torch.log(torch.tensor(self.distance / exact))
        grown = (exact + (torch.log(far) * scale).long()).clamp(max=half - 1)
        bucket = torch.where(offset.abs() < exact, offset.abs(), grown) + half * (offset > 0)
        bias = self.table(bucket).movedim(-1, -3)  # (A, S, S) or (B, A, S, S)
        return bias if positions.dim() == 2 else bias[None]
