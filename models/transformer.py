"""What the shapes of a GPT and of a BERT share; `config.py` has both. No torch here.

Letters: L layers, W width, A heads, G key-value heads, D head width, F feed-forward width, V vocabulary, S
sequence.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from ..core.errors import WrongUse, did_you_mean
from .pattern import AttentionPattern

# fields of a GPT-2, a Llama or a BERT among those that come late, and one that shapes nothing
PLAIN = (
    "huggingface",
    "tied",
    "norm_first",
    "token_types",
    "nsp",
    "mlm_transform",
    "relative_buckets",
    "relative_distance",
)
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
    positions: Literal["learned", "rotary", "alibi"] = "learned"  # alibi: scores fall with the distance
    rope_theta: float = 10000.0
    # from here on off by default, see `beyond`
    position_offset: int = 0  # rows of the position table before position 0: OPT and RoBERTa have 2
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
    embedding_norm: bool = False  # the embeddings have a norm of their own: BLOOM, ModernBERT
    output_bias: bool = (
        False  # of the output matrix, untied in a decoder; an encoder with biases has it anyway
    )
    huggingface: str = (
        ""  # model_type there that it is written as, where its shape has several; "": the first
    )
    plain_positions: ClassVar[tuple[str, ...]] = ("learned", "rotary")  # of what is not `beyond`

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

    def kind_of(self, layer: int) -> str:
        """The letter of a layer: `l`, `g` or `n`, see `layer_pattern`."""
        letters = self.layer_pattern or ("l" if self.attention_window else "g")
        return letters[layer % len(letters)]

    def pattern_of(self, layer: int) -> AttentionPattern | None:
        """What of the sequence a token sees in this layer; None: all of it."""
        return self.attention_pattern if self.kind_of(layer) == "l" else None

    @property
    def rotary_size(self) -> int:
        return self.rope_width or self.head_size

    def beyond(self, known: Collection[str]) -> list[str]:
        """The fields that make this more than a GPT-2, a Llama or a BERT, and that are not among the known ones."""
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        later = list(fields)[list(fields).index("position_offset") :]
        used = [name for name in later if name not in PLAIN and getattr(self, name) != fields[name]]
        used += ["activation"] if self.activation == "relu" else []
        used += ["positions"] if self.positions not in self.plain_positions else []
        return [name for name in used if name not in known]

    @property
    def windowed_layers(self) -> int:
        """How many layers see a part of the sequence."""
        return sum(self.pattern_of(layer) is not None for layer in range(self.layers))

    def has_bias(self, part: Literal["qkv", "out", "mlp"]) -> bool:
        """Whether the linear layers of this part of a block have biases."""
        return self.bias

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward of this layer is several, of which a token goes through a few."""
        return False

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
        return problems + self._position_problems()

    def _position_problems(self) -> list[str]:
        problems = []
        if self.positions == "rotary" and not self.rope_width and self.head_size % 2:
            problems.append(f"rotary positions turn pairs of numbers; the head width {self.head_size} is odd")
        if self.rope_width % 2 or not 0 <= self.rope_width <= self.head_size:
            problems.append(f"rope_width is {self.rope_width}; it must be even and at most {self.head_size}")
        problems += [
            f"{name} is {getattr(self, name)}; it must be 0 or more"
            for name in ("position_offset", "rope_original_length", "rope_magnitude")
            if getattr(self, name) < 0
        ]
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
        if self.positions == "alibi" and self.attention_pattern is not None:
            problems.append(
                "positions = alibi are a bias of all scores, and attention_window leaves some out"
            )
        return problems

    def parameter_count(self) -> int:
        raise NotImplementedError

    def norm_parameters(self, size: int = 0) -> int:
        return (size or self.width) * (2 if self.bias and self.norm == "layernorm" else 1)

    def block_matrix_parameters(self) -> int:
        """Weights of one dense block that multiply every token: of query, key, value, output and feed-forward."""
        attention = 2 * self.width * self.head_size * (self.heads + self.key_value_heads)
        return attention + self.feed_forward_parameters(self.feed_forward_size)

    def feed_forward_parameters(self, size: int) -> int:
        """Weights of a feed-forward of this width inside."""
        return (3 if self.gated else 2) * self.width * size

    def expert_parameters(self, active: bool = False) -> int:
        """What experts add to all dense blocks; `active`: those of the weights that multiply a token."""
        return 0

    def block_parameters(self) -> int:
        """All parameters of one dense block: its matrices, their biases and its norms."""
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
        matrices = self.layers * self.block_matrix_parameters() + self.expert_parameters(active=True)
        return 3 * (2 * matrices + attention)
