"""Shapes of the models: what a GPT or a BERT is made of, how many parameters it has and what a token costs.

No torch here: recipes, the planner and `throughline show` read these on any machine. The counts are tested
against the built models and against the published ones.

Letters: L layers, W width, A heads, G key-value heads, D head width, F feed-forward width, V vocabulary, S
sequence.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from ..core.errors import WrongUse, did_you_mean
from .pattern import AttentionPattern

SHAPING = ("attention_kind", "attention_block", "attention_global_blocks", "attention_random_blocks")


def _wrong_kind(field: dataclasses.Field, value: Any) -> str:
    """What is wrong with the kind of a field's value, "" if nothing: no "12" for 12, no 1 for true, no inf."""
    if allowed := get_args(field.type):
        return (
            "" if value in allowed else f"{field.name} is {value!r}; it must be one of {', '.join(allowed)}"
        )
    if field.type is bool:
        right, wanted = isinstance(value, bool), "true or false"
    elif field.type is str:
        right, wanted = isinstance(value, str), "a text"
    else:
        whole = field.type is int
        right = (
            isinstance(value, int if whole else int | float)
            and not isinstance(value, bool)
            and abs(value) < float("inf")
        )
        wanted = "a whole number" if whole else "a number"
    return "" if right else f"{field.name} is {value!r}; it must be {wanted}"


@dataclass(frozen=True)
class TransformerConfig:
    """What a GPT and a BERT share. Zero in `kv_heads`, `head_width` or `mlp_width` means the usual size."""

    vocab_size: int = 50257
    sequence_length: int = 1024  # the longest sequence, and the rows of a learned position table
    layers: int = 12
    width: int = 768
    heads: int = 12
    kv_heads: int = 0  # 0: one per head; fewer: grouped-query attention; 1: multi-query
    head_width: int = 0  # 0: width / heads
    mlp_width: int = 0  # 0: 4 x width
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = "gelu_tanh"
    gated: bool = False  # down(activation(gate(x)) * up(x)): SwiGLU, GeGLU and their kin
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    norm_epsilon: float = 1e-5
    bias: bool = True  # in the linear layers and in the layer norms; an RMS norm has a scale only
    dropout: float = 0.0  # on embeddings, attention probabilities and both residual branches
    attention_window: int = 0  # 0: every token sees all (before it); else see AttentionPattern
    attention_kind: Literal["sliding", "fixed"] = "sliding"
    attention_block: int = 256
    attention_global_blocks: int = 0
    attention_random_blocks: int = 0

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def feed_forward_size(self) -> int:
        return self.mlp_width or 4 * self.width

    @property
    def attention_pattern(self) -> AttentionPattern | None:
        """What of the sequence a token sees where it does not see all of it; None: it sees all in every layer."""
        if not self.attention_window:
            return None
        kind, window, block = self.attention_kind, self.attention_window, self.attention_block
        return AttentionPattern(
            kind, window, block, self.attention_global_blocks, self.attention_random_blocks
        )

    def pattern_of(self, layer: int) -> AttentionPattern | None:
        """What of the sequence a token sees in this layer; None: all of it."""
        return self.attention_pattern

    @property
    def windowed_layers(self) -> int:
        """How many layers see a part of the sequence."""
        return sum(self.pattern_of(layer) is not None for layer in range(self.layers))

    def has_bias(self, part: Literal["qkv", "out", "mlp"]) -> bool:
        """Whether the linear layers of this part of a block have biases."""
        return self.bias

    def to_dict(self) -> dict[str, Any]:
        """Every field, as plain values for JSON or TOML."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """The config with these fields, the others at their defaults.

        Raises `WrongUse` on a field that does not exist (naming the nearest one) and on a shape that cannot
        be built.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for key in fields:
            if key not in known:
                fix = did_you_mean(key, known, "the fields are: " + ", ".join(known))
                raise WrongUse(f"{cls.__name__} has no field {key!r}", where=f"model.{key}", fix=fix)
        config = cls(**fields)
        if problems := config.validate():
            raise WrongUse(f"this {cls.__name__} cannot be built", where="model", why="\n".join(problems))
        return config

    def validate(self) -> list[str]:
        """Everything that is wrong with this shape, one sentence each; empty when it can be built."""
        if problems := [
            text
            for field in dataclasses.fields(self)
            if (text := _wrong_kind(field, getattr(self, field.name)))
        ]:
            return problems
        problems = [
            f"{name} is {getattr(self, name)}; it must be at least 1"
            for name in ("vocab_size", "sequence_length", "layers", "width", "heads")
            if getattr(self, name) < 1
        ]
        problems += [
            f"{name} is {getattr(self, name)}; it must be 0 (the usual size) or more"
            for name in ("kv_heads", "head_width", "mlp_width")
            if getattr(self, name) < 0
        ]
        if problems:
            return problems
        if not self.head_width and self.width % self.heads:
            problems.append(f"width {self.width} is not a multiple of heads {self.heads} (or set head_width)")
        if self.heads % self.key_value_heads:
            problems.append(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if not 0.0 <= self.dropout < 1.0:
            problems.append(f"dropout is {self.dropout}; it must be in [0, 1)")
        if self.norm_epsilon <= 0:
            problems.append(f"norm_epsilon is {self.norm_epsilon}; it must be above 0")
        if (pattern := self.attention_pattern) is not None:
            problems += pattern.validate()
        else:
            fields = (field for field in dataclasses.fields(self) if field.name in SHAPING)
            shaping = [field.name for field in fields if getattr(self, field.name) != field.default]
            problems += [
                f"{name} shapes a pattern, and attention_window is 0: there is none" for name in shaping
            ]
        return problems

    def parameter_count(self) -> int:
        raise NotImplementedError

    def norm_parameters(self) -> int:
        return self.width * (2 if self.bias and self.norm == "layernorm" else 1)

    def block_matrix_parameters(self) -> int:
        """Weights of one block that multiply every token: query, key, value, output, feed-forward matrices."""
        attention = 2 * self.width * self.head_size * (self.heads + self.key_value_heads)
        return attention + (3 if self.gated else 2) * self.width * self.feed_forward_size

    def block_parameters(self) -> int:
        """All parameters of one block: its matrices, their biases and its norms."""
        biases = self.head_size * (self.heads + 2 * self.key_value_heads) * self.has_bias("qkv")
        biases += self.width * self.has_bias("out")
        wide = (2 if self.gated else 1) * self.feed_forward_size
        biases += (wide + self.width) * self.has_bias("mlp")
        return self.block_matrix_parameters() + biases + self.block_norm_parameters()

    def block_norm_parameters(self) -> int:
        return 2 * self.norm_parameters()

    def blocks_flops_per_token(self, sequence_length: int) -> int:
        """Forward and backward through all blocks, for one token of a sequence of this length.

        Forward: 2 FLOPs per weight, and 2 S A D each for the scores and for the weighted sum; backward: twice
        that. Attention is counted over the whole square (of a pattern: over the band that it leaves), causal
        or not, as the published figures do (Narayanan et al. 2021, section 5.1 and appendix, without the
        recomputed forward; the same convention as Chowdhery et al. 2022, appendix B).
        """
        keys, pattern = self.layers * sequence_length, self.attention_pattern
        if pattern is not None:
            near = self.windowed_layers
            keys = near * pattern.widest(sequence_length) + (self.layers - near) * sequence_length
        attention = 2 * 2 * keys * self.heads * self.head_size
        return 3 * (2 * self.layers * self.block_matrix_parameters() + attention)


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """A causal decoder: GPT-2 by default; rotary positions, RMS norm, gated MLP, fewer key heads: a Llama.

    The fields from `position_offset` on are off by default. They make the other decoders of docs/models.md.
    """

    positions: Literal["learned", "rotary"] = "learned"
    rope_theta: float = 10000.0
    tied: bool = True  # the output matrix is the token table
    position_offset: int = 0  # rows of the position table before position 0: OPT has 2
    rope_width: int = 0  # how many numbers of a head rotary positions turn; 0: all
    rope_scaling: Literal["none", "linear", "dynamic", "yarn", "llama3"] = "none"  # `rotary.frequencies`
    rope_factor: float = 1.0
    rope_original_length: int = 0  # the sequence length before scaling; 0: `sequence_length`
    rope_low: float = (
        1.0  # turns in the original length: below, llama3 and yarn divide a frequency by the factor
    )
    rope_high: float = 4.0  # and above, they leave it as it is
    rope_magnitude: float = 0.0  # yarn: of cosines and sines; 0: 0.1 ln(rope_factor) + 1
    rope_local_theta: float = 0.0  # of layers with a window, unscaled there; 0: as in the others
    # a letter for each layer, repeated: l has the attention window, g sees all, n sees all and turns nothing
    layer_pattern: str = ""
    linear_bias: Literal["usual", "qkv", "attention", "mlp"] = (
        "usual"  # where, if not everywhere as `bias` says
    )
    output_bias: bool = False  # of an untied output matrix
    qk_norm: Literal["none", "head", "whole"] = (
        "none"  # RMS norm of each query and key head, or of all together
    )
    query_scalar: float = 0.0  # scores are divided by its root; 0: by that of the head width
    norm_place: Literal["before", "after", "around"] = "before"  # of each branch: its input, its result, both
    norm_from_one: bool = False  # RMS norms scale by 1 + weight
    residual: Literal["sequential", "parallel", "shared"] = "sequential"  # parallel: both branches read the
    # block's input, each through a norm of its own, or through a shared one
    scaled_embeddings: bool = False  # by the root of the width
    attention_softcap: float = 0.0  # scores x become c tanh(x / c); 0: they stay
    logit_softcap: float = 0.0
    huggingface: str = (
        ""  # model_type there that it is written as, where its shape has several; "": the first
    )

    def kind_of(self, layer: int) -> str:
        """The letter of a layer: `l`, `g` or `n`, see `layer_pattern`."""
        letters = self.layer_pattern or ("l" if self.attention_window else "g")
        return letters[layer % len(letters)]

    def pattern_of(self, layer: int) -> AttentionPattern | None:
        return self.attention_pattern if self.kind_of(layer) == "l" else None

    def has_bias(self, part: Literal["qkv", "out", "mlp"]) -> bool:
        parts = {"qkv": ("qkv",), "attention": ("qkv", "out"), "mlp": ("mlp",)}
        return self.bias if self.linear_bias == "usual" else part in parts[self.linear_bias]

    @property
    def rotary_size(self) -> int:
        return self.rope_width or self.head_size

    def beyond(self, known: Collection[str]) -> list[str]:
        """The fields that make this more than a GPT-2 or a Llama, and that are not among the known ones."""
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        later = list(fields)[list(fields).index("position_offset") : list(fields).index("huggingface")]
        used = [name for name in later if getattr(self, name) != fields[name]]
        used += ["activation"] if self.activation == "relu" else []
        return [name for name in used if name not in known]

    def validate(self) -> list[str]:
        problems = super().validate()
        if problems:
            return problems
        if self.positions == "rotary" and not self.rope_width and self.head_size % 2:
            problems.append(f"rotary positions turn pairs of numbers; the head width {self.head_size} is odd")
        if self.rope_width % 2 or not 0 <= self.rope_width <= self.head_size:
            problems.append(f"rope_width is {self.rope_width}; it must be even and at most {self.head_size}")
        for name in ("position_offset", "rope_original_length", "query_scalar", "rope_magnitude"):
            if getattr(self, name) < 0:
                problems.append(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.position_offset and self.positions != "learned":
            problems.append("position_offset belongs to learned positions")
        if min(self.rope_factor, self.rope_low) <= 0 or self.rope_high <= self.rope_low:
            problems.append("rope_factor and rope_low must be above 0, and rope_high above rope_low")
        if self.rope_scaling == "none" and self.rope_factor != 1.0:
            problems.append(
                f"rope_factor is {self.rope_factor}, and rope_scaling does not say what it scales"
            )
        if self.rope_scaling == "dynamic" and self.rotary_size <= 2:
            problems.append("dynamic rope_scaling needs more than one pair of numbers to turn")
        if stray := set(self.layer_pattern) - set("gln"):
            problems.append(f"layer_pattern has {', '.join(sorted(stray))}; its letters are g, l and n")
        elif self.layer_pattern and ("l" in self.layer_pattern) != (self.attention_window > 0):
            problems.append("layers of kind l in layer_pattern and attention_window need each other")
        elif "n" in self.layer_pattern and self.positions != "rotary":
            problems.append(
                "layers of kind n in layer_pattern leave out rotary positions, and there are none"
            )
        if self.rope_local_theta and self.attention_pattern is None:
            problems.append("rope_local_theta is for layers with a window, and attention_window is 0")
        if self.output_bias and self.tied:
            problems.append("output_bias is that of an output matrix, and with tied there is none")
        if (self.qk_norm != "none" or self.norm_from_one) and self.norm != "rmsnorm":
            problems.append(f"qk_norm and norm_from_one are of RMS norms, and norm is {self.norm}")
        if self.residual != "sequential" and self.norm_place != "before":
            problems.append(f"a {self.residual} residual has its norms before the branches")
        if min(self.attention_softcap, self.logit_softcap) < 0:
            problems.append("attention_softcap and logit_softcap must be 0 (off) or above")
        if self.attention_softcap and self.dropout:
            problems.append("attention_softcap has no kernel with dropout")
        return problems

    def block_norm_parameters(self) -> int:
        norms = {"before": 2, "after": 2, "around": 4}[self.norm_place] - (self.residual == "shared")
        scales = {"none": 0, "head": 2, "whole": self.heads + self.key_value_heads}[self.qk_norm]
        return norms * self.norm_parameters() + scales * self.head_size

    def parameter_count(self) -> int:
        """Parameters of the built model; a tied output matrix counts once."""
        tables = self.vocab_size * self.width * (1 if self.tied else 2)
        tables += self.vocab_size * self.output_bias
        if self.positions == "learned":
            tables += (self.sequence_length + self.position_offset) * self.width
        return tables + self.layers * self.block_parameters() + self.norm_parameters()

    def flops_per_token(self, sequence_length: int | None = None) -> int:
        """Model FLOPs of forward and backward for one token, with logits for every token.

        Equals 72 L W^2 (1 + S/(6W) + V/(12 L W)) for the GPT-2 shape: Narayanan et al. 2021 give 96 B S L W^2
        (1 + S/(6W) + V/(16 L W)) per iteration with the forward of every block computed twice; this is once.
        Recomputation is never counted.
        """
        blocks = self.blocks_flops_per_token(sequence_length or self.sequence_length)
        return blocks + 6 * self.width * self.vocab_size


@dataclass(frozen=True)
class BERTConfig(TransformerConfig):
    """A bidirectional encoder with the masked-LM and next-sentence heads: BERT-Base by default."""

    vocab_size: int = 30522
    sequence_length: int = 512
    activation: Literal["gelu", "gelu_tanh", "silu", "relu"] = "gelu"
    norm_epsilon: float = 1e-12
    norm_first: bool = False  # True: Megatron's pre-norm order, a final norm and none on the embeddings
    token_types: int = 2  # 0: no segment table
    nsp: bool = True  # pooler and next-sentence head
    mlm_transform: bool = True  # dense + activation + norm before the tied decoder
    relative_buckets: int = 0  # T5's position bias, shared by all layers, a number a bucket and head; 0: none
    relative_distance: int = 128  # distances beyond this share the last bucket

    def validate(self) -> list[str]:
        if problems := super().validate():
            return problems
        if self.token_types < 0:
            problems.append(f"token_types is {self.token_types}; it must be 0 or more")
        if self.relative_buckets and (self.relative_buckets < 4 or self.relative_buckets % 2):
            problems.append(
                f"relative_buckets is {self.relative_buckets}; it must be 0 or an even number from 4 on"
            )
        elif self.relative_buckets and self.relative_distance <= self.relative_buckets // 4:
            problems.append(
                f"relative_distance is {self.relative_distance}; it must be above relative_buckets / 4"
            )
        return problems

    def parameter_count(self) -> int:
        """Parameters of the built model, heads included; the decoder is the token table and counts once."""
        linear_bias = self.width if self.bias else 0
        tables = (self.vocab_size + self.sequence_length + self.token_types) * self.width
        tables += self.relative_buckets * self.heads
        norms = self.norm_parameters()  # on the embeddings or at the end, never both
        head = self.vocab_size if self.bias else 0
        if self.mlm_transform:
            head += self.width * self.width + linear_bias + self.norm_parameters()
        if self.nsp:
            head += self.width * self.width + linear_bias + 2 * self.width + (2 if self.bias else 0)
        return tables + norms + self.layers * self.block_parameters() + head

    def flops_per_token(self, sequence_length: int | None = None, predicted: float = 1.0) -> int:
        """Model FLOPs of forward and backward for one token; `predicted` is the share of tokens that get MLM
        logits.

        With 1.0 (logits everywhere) this is the published convention, see `GPTConfig.flops_per_token`; a
        model that computes the head on the masked 15 % only does less. The transform and the pooler (once per
        sequence) are counted.
        """
        length = sequence_length or self.sequence_length
        head = 6 * self.width * self.vocab_size + (6 * self.width * self.width if self.mlm_transform else 0)
        pooled = 6 * (self.width * self.width + 2 * self.width) if self.nsp else 0
        return self.blocks_flops_per_token(length) + round(predicted * head + pooled / length)


ModelConfig = GPTConfig | BERTConfig
FAMILIES: dict[str, type[GPTConfig] | type[BERTConfig]] = {"gpt": GPTConfig, "bert": BERTConfig}


def family_of(config: ModelConfig) -> str:
    """`gpt` or `bert`, as written in a checkpoint's `model.json`."""
    return "gpt" if isinstance(config, GPTConfig) else "bert"
