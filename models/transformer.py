"""What the shapes of a GPT and of a BERT share (`config.py` has both): fields, checks, counts, patterns of attention.

No torch here. Letters: L layers, W width, A heads, G key-value heads, D head width, F feed-forward width, V
vocabulary, S sequence.
"""

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, get_args

from ..core.errors import WrongUse, did_you_mean


def listed(*checks: tuple[Any, str]) -> list[str]:
    """The texts of what is wrong."""
    return [text for wrong, text in checks if wrong]


@dataclass(frozen=True)
class AttentionPattern:
    """Which tokens see which, in tokens and blocks; the table in `attention_patterns.py` says how."""

    kind: Literal["sliding", "fixed"] = "sliding"
    window: int = 512  # tokens: how far a sliding one reaches (an encoder's both ways), or a fixed stretch
    block: int = 256  # tokens handled together
    global_blocks: int = 0  # blocks that every token sees
    random_blocks: int = 0  # sliding: blocks beyond the window that each block sees, others in each layer

    def validate(self) -> list[str]:
        """Everything that is wrong with it, one sentence each."""
        if self.window < 1 or self.block < 1 or min(self.global_blocks, self.random_blocks) < 0:
            return ["attention_window and attention_block must be 1 or more, global and random blocks 0"]
        if self.kind == "sliding":
            return []
        window, block, blocks = self.window, self.block, self.global_blocks
        return listed(
            (self.random_blocks > 0, "attention_random_blocks belong to a sliding window, not a fixed one"),
            (window % block > 0, f"a fixed window of {window} is no whole number of blocks of {block}"),
            (blocks * block > window, f"{blocks} global blocks of {block} do not fit a window of {window}"),
        )

    @property
    def is_band(self) -> bool:
        """Whether a token sees those less than `window` away and no others."""
        return self.kind == "sliding" and not self.global_blocks and not self.random_blocks

    def sees(self, queries: Any, keys: Any, causal: bool, length: int = 0, layer: int = 0) -> Any:
        """Whether the token at each query position sees the one at each key position: int arrays or tensors, broadcast.
        `length` of the sequence and `layer` matter to random blocks alone, the length only when bidirectional.
        """
        wide = self.global_blocks * self.block
        if self.kind == "sliding":
            seen = (abs(queries - keys) < self.window) | (keys < wide) | (queries < wide)
            for draw in range(self.random_blocks):
                drawn = self._drawn(queries // self.block, draw, causal, length, layer)
                seen = seen | (keys // self.block == drawn)
        else:
            seen = queries // self.window == keys // self.window
            seen = seen | (keys % self.window >= self.window - wide)
        return seen & (keys <= queries) if causal else seen

    def _drawn(self, rows: Any, draw: int, causal: bool, length: int, layer: int) -> Any:
        """The block that each block of queries draws, -1 where nothing is left: what lies beyond the window and the
        global blocks is cut into as many stretches as there are draws, and each draw takes one block of its stretch.
        """
        reach = (self.window + self.block - 2) // self.block  # blocks of the window on each side
        left = (rows - reach - self.global_blocks) * (rows > reach + self.global_blocks)
        blocks = -(-length // self.block)
        right = 0 * rows if causal else (blocks - 1 - rows - reach) * (rows + reach < blocks)
        first = (left + right) * draw // self.random_blocks
        room = (left + right) * (draw + 1) // self.random_blocks - first
        number = rows + 1
        # Park and Miller's generator, something new mixed in each time
        for salt in (draw + 1, layer + 1, 1, 1):
            number = (number * 48271 + salt * 69621) % 2147483647
        taken = first + number // 8 % (room + (room == 0))
        block = self.global_blocks + taken + (taken >= left) * (rows + reach + 1 - left - self.global_blocks)
        return block * (room > 0) - (room == 0) * 1

    def keys_per_query(self, length: int, causal: bool) -> float:
        """Keys that a query sees, the mean over a row of `length` tokens. Exact for a causal sliding window, with
        global blocks too, and for the band of an encoder; blocks drawn at random and an encoder's global blocks count
        as if no token saw them twice.
        """
        blocks = self.global_blocks * self.block
        if self.kind == "fixed":
            window = min(self.window, length)
            others = length / window - 1  # fixed stretches beside the query's own
            return (window + 1) / 2 + blocks * others / 2 if causal else window + blocks * others
        drawn = self.random_blocks * self.block
        if causal:  # query i sees itself and the i keys before it, at most `reach` in all
            reach = min(self.window + blocks + drawn, length)
            return reach - reach * (reach - 1) / (2 * length)
        reach = min(self.window, length)
        band = 2 * (reach - reach * (reach - 1) / (2 * length)) - 1
        return min(band + blocks + drawn, length)


# fields of a GPT-2, a Llama or a BERT among those that come late, and one that shapes nothing
PLAIN: tuple[str, ...] = ("huggingface", "tied", "norm_first", "token_types", "nsp", "mlm_transform")
PLAIN += ("relative_buckets", "relative_distance")
SHAPING = ("attention_kind", "attention_block", "attention_global_blocks", "attention_random_blocks")


def _wrong_kind(field: dataclasses.Field, value: Any) -> str:
    """What is wrong with the kind of a field's value, "" if nothing: no "12" for 12, no 1 for true, no inf."""
    if allowed := get_args(field.type):
        wanted, right = f"one of {', '.join(allowed)}", value in allowed
    elif field.type is bool:
        wanted, right = "true or false", isinstance(value, bool)
    elif field.type is str:
        wanted, right = "a text", isinstance(value, str)
    else:
        whole = field.type is int
        wanted = "a whole number" if whole else "a number"
        right = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        right = right and abs(value) < float("inf")
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
    activation: Literal["gelu", "gelu_tanh", "silu", "relu", "relu2"] = "gelu_tanh"
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
    # turns in the original length below which llama3 and yarn divide a frequency by the factor
    rope_low: float = 1.0
    rope_high: float = 4.0  # and above which they leave it as it is
    rope_truncate: bool = True  # yarn: the ramp between them begins and ends at a whole frequency
    rope_magnitude: float = 0.0  # yarn: of cosines and sines; 0: 0.1 ln(rope_factor) + 1
    # yarn as DeepSeek has it: with m(x) = 0.1 x ln(rope_factor) + 1 cosines and sines have m(part) / m(all), and
    # where keys have a latent the scores m(all)^2
    rope_magnitude_part: float = 0.0
    rope_magnitude_all: float = 0.0
    rope_local_theta: float = 0.0  # of layers with a window, unscaled there; 0: as in the others
    # a letter for each layer, repeated: l has the attention window, g sees all, n sees all and turns nothing
    layer_pattern: str = ""
    embedding_norm: bool = False  # the embeddings have a norm of their own: BLOOM, ModernBERT
    output_bias: bool = False  # of an untied output matrix; an encoder with biases has it anyway
    huggingface: str = ""  # model_type there that it is written as, of several with its shape; "": the first
    plain_positions: ClassVar[tuple[str, ...]] = ("learned", "rotary")  # of what is not `beyond`

    @property
    def key_value_heads(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.head_width or self.width // self.heads

    @property
    def value_size(self) -> int:
        """The width of a head's values and of its result."""
        return self.head_size

    @property
    def feed_forward_size(self) -> int:
        return self.mlp_width or 4 * self.width

    @property
    def blocks_ahead(self) -> int:
        """Blocks after the layers, which predict further tokens in training."""
        return 0

    @property
    def block_count(self) -> int:
        return self.layers + self.blocks_ahead

    @property
    def attention_pattern(self) -> AttentionPattern | None:
        """What of the sequence a token sees where it does not see all of it; None: it sees all in every layer."""
        if not self.attention_window:
            return None
        blocks = self.attention_block, self.attention_global_blocks, self.attention_random_blocks
        return AttentionPattern(self.attention_kind, self.attention_window, *blocks)

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
        used += ["activation"] if self.activation in ("relu", "relu2") else []
        used += ["positions"] if self.positions not in self.plain_positions else []
        return [name for name in used if name not in known]

    @property
    def windowed_layers(self) -> int:
        """How many blocks see a part of the sequence."""
        return sum(self.pattern_of(layer) is not None for layer in range(self.block_count))

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
        """The config with these fields. Raises `WrongUse` on an unknown one (naming the nearest) or a wrong shape."""
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
        fields = dataclasses.fields(self)
        wrong = [_wrong_kind(field, getattr(self, field.name)) for field in fields]
        if problems := list(filter(None, wrong)):
            return problems
        problems = self.below(1, "vocab_size", "sequence_length", "layers", "width", "heads")
        if problems := problems + self.below(0, "kv_heads", "head_width", "mlp_width"):
            return problems
        heads, kv_heads = self.heads, self.key_value_heads
        ragged = not self.head_width and self.width % heads > 0
        problems = listed(
            (ragged, f"width {self.width} is not a multiple of heads {heads} (or set head_width)"),
            (heads % kv_heads > 0, f"heads {heads} is not a multiple of kv_heads {kv_heads}"),
            (not 0.0 <= self.dropout < 1.0, f"dropout is {self.dropout}; it must be in [0, 1)"),
            (self.norm_epsilon <= 0, f"norm_epsilon is {self.norm_epsilon}; it must be above 0"),
        )
        if (pattern := self.attention_pattern) is not None:
            problems += pattern.validate()
        else:
            usual = {field.name: field.default for field in fields}
            shaping = [name for name in SHAPING if getattr(self, name) != usual[name]]
            problems += [f"{name} shapes a pattern, and attention_window is 0" for name in shaping]
        return problems + self._position_problems()

    def below(self, least: int, *names: str) -> list[str]:
        """What is wrong with those of these fields that are less."""
        values = {name: getattr(self, name) for name in names}
        return [f"{name} is {x}; it must be {least} or more" for name, x in values.items() if x < least]

    def _position_problems(self) -> list[str]:
        rotary, size, letters = self.positions == "rotary", self.head_size, set(self.layer_pattern)
        windows, stray = self.attention_pattern is not None, sorted(letters - set("gln"))
        learned, offset = self.positions == "learned", self.position_offset
        odd = rotary and not self.rope_width and size % 2 > 0
        bad_width = self.rope_width % 2 or not 0 <= self.rope_width <= size
        alone = bool(letters) and ("l" in letters) != (self.attention_window > 0)
        ordered = min(self.rope_factor, self.rope_low) > 0 and self.rope_high > self.rope_low
        unscaled = self.rope_scaling == "none" and self.rope_factor != 1.0
        narrow = self.rope_scaling == "dynamic" and self.rotary_size <= 2
        no_window = self.rope_local_theta and not windows
        unturned, alibi = "n" in letters and not rotary, self.positions == "alibi"
        return self.below(0, "position_offset", "rope_original_length", "rope_magnitude") + listed(
            (odd, f"rotary positions turn pairs of numbers; the head width {size} is odd"),
            (bad_width, f"rope_width is {self.rope_width}; it must be even and at most {size}"),
            (offset and not learned, "position_offset belongs to learned positions"),
            (not ordered, "rope_factor and rope_low must be above 0, and rope_high above rope_low"),
            (unscaled, f"rope_factor is {self.rope_factor}, and rope_scaling does not say what it scales"),
            (narrow, "dynamic rope_scaling needs more than one pair of numbers to turn"),
            (stray, f"layer_pattern has {', '.join(stray)}; its letters are g, l and n"),
            (alone, "layers of kind l in layer_pattern and attention_window need each other"),
            (unturned, "layers of kind n in layer_pattern leave out rotary positions, and there are none"),
            (no_window, "rope_local_theta is for layers with a window, and attention_window is 0"),
            (alibi and windows, "positions = alibi bias all scores, and attention_window leaves some out"),
        )

    def parameter_count(self) -> int:
        raise NotImplementedError

    def norm_parameters(self, size: int = 0) -> int:
        return (size or self.width) * (2 if self.bias and self.norm == "layernorm" else 1)

    def block_matrix_parameters(self) -> int:
        """Weights of one dense block that multiply every token: of query, key, value, output and feed-forward."""
        return self.attention_parameters() + self.feed_forward_parameters(self.feed_forward_size)

    def attention_parameters(self) -> int:
        """Weights of query, key, value and output in one block."""
        return 2 * self.width * self.head_size * (self.heads + self.key_value_heads)

    def feed_forward_parameters(self, size: int) -> int:
        """Weights of a feed-forward of this width inside."""
        return (3 if self.gated else 2) * self.width * size

    def feed_forward_biases(self, size: int) -> int:
        """Biases of a feed-forward of this width inside."""
        return ((2 if self.gated else 1) * size + self.width) * self.has_bias("mlp")

    def expert_parameters(self, active: bool = False) -> int:
        """What experts add to all dense blocks; `active`: those of the weights that multiply a token."""
        return 0

    def block_parameters(self) -> int:
        """All parameters of one dense block: its matrices, their biases and its norms."""
        biases = self.head_size * (self.heads + 2 * self.key_value_heads) * self.has_bias("qkv")
        biases += self.width * self.has_bias("out") + self.feed_forward_biases(self.feed_forward_size)
        return self.block_matrix_parameters() + biases + self.block_norm_parameters()

    def block_norm_parameters(self) -> int:
        return 2 * self.norm_parameters()

    def blocks_flops_per_token(self, sequence_length: int) -> int:
        """Forward and backward through all blocks, for one token of a sequence of this length.

        Forward: 2 FLOPs per weight, and 2 S A D each for the scores and for the weighted sum; backward: twice
        that. Attention is counted over the whole square (of a pattern: over the band that it leaves to an encoder),
        causal or not, as the published figures do (Narayanan et al. 2021, section 5.1 and appendix, without the
        recomputed forward; the same convention as Chowdhery et al. 2022, appendix B).
        """
        blocks, pattern = self.block_count, self.attention_pattern
        keys = float(blocks * sequence_length)
        if pattern is not None:
            near = self.windowed_layers
            band = pattern.keys_per_query(sequence_length, causal=False)
            keys = near * band + (blocks - near) * sequence_length
        attention = round(2 * keys) * self.heads * (self.head_size + self.value_size)
        matrices = blocks * self.block_matrix_parameters() + self.expert_parameters(active=True)
        return 3 * (2 * matrices + attention)
