"""Shapes of the models: what a GPT or a BERT is made of, how many parameters it has and what a token costs.

No torch here: recipes, the planner and `throughline show` read these on any machine. The counts are tested against the
built models and against the published ones. Named shapes and their sources are in `presets.toml`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from ..core.errors import WrongUse, did_you_mean
from ..core.files import shipped_table
from .transformer import TransformerConfig, listed

# what the outputs of a head for sequence classification are, by the names of transformers
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
SINGLE_LABEL: ProblemType = "single_label_classification"
MULTI_LABEL: ProblemType = "multi_label_classification"
REGRESSION: ProblemType = "regression"
PROBLEM_TYPES = (SINGLE_LABEL, MULTI_LABEL, REGRESSION)


@dataclass(frozen=True)
class GPTConfig(TransformerConfig):
    """A causal decoder: GPT-2 by default; rotary positions, RMS norm, gated MLP, fewer key heads: a Llama. The fields
    from `position_offset` on, and below `tied`, are off by default; they make the other decoders of docs/models.md.
    """

    tied: bool = True  # the output matrix is the token table
    # where there are biases, if not everywhere as `bias` says
    linear_bias: Literal["usual", "qkv", "attention", "mlp"] = "usual"
    qk_norm: Literal["none", "head", "whole"] = "none"  # norm of each query and key head, or of all at once
    kv_latent: int = 0  # latent attention: numbers that a token's keys and values are made of; 0: none
    q_latent: int = 0  # that its queries are made of
    # of a head with kv_latent; 0: the head width, of which `rope_width` numbers are turned
    value_width: int = 0
    query_scalar: float = 0.0  # scores are divided by its root; 0: by that of the head width
    norm_place: Literal["before", "after", "around"] = "before"  # of each branch: its input, its result, both
    norm_from_one: bool = False  # RMS norms scale by 1 + weight
    # parallel: both branches read the block's input, each through a norm of its own; shared: through one
    residual: Literal["sequential", "parallel", "shared"] = "sequential"
    scaled_embeddings: bool = False  # by the root of the width
    attention_softcap: float = 0.0  # scores x become c tanh(x / c); 0: they stay
    logit_softcap: float = 0.0
    attention_sinks: bool = False  # a learnt score of each head for nothing, in every softmax (gpt-oss)
    # a gated activation as gpt-oss has it, its inputs clamped to this; 0: a plain one
    gate_limit: float = 0.0
    predict_ahead: int = 0  # further tokens that training predicts, each by a block that is left out in use
    predict_ahead_loss: float = 0.3  # the weight of their mean loss: DeepSeek-V3's at first (its section 4.2)
    experts: int = 0  # feed-forwards of which a token goes through a few (models/experts.py); 0: a dense one
    experts_per_token: int = 2
    # in training an expert takes so many times its even share of a process's rows and drops others; 0: it takes all
    expert_capacity_factor: float = 0.0
    expert_width: int = 0  # of each; 0: `mlp_width`
    shared_experts: int = 0  # that every token goes through besides, as one of so many times the width
    dense_layers: int = 0  # the first ones, without experts
    expert_every: int = 1  # of every so many layers the last has experts
    router_scores: Literal["softmax", "sigmoid"] = "softmax"
    router_normalised: bool = True  # the scores of the experts that are chosen add up to 1
    router_scale: float = 1.0  # what they are multiplied by
    router_groups: int = 1  # of neighbouring experts, of which a token chooses among
    router_groups_per_token: int = 1  # so many: those of the two best scores together
    balance_bias: bool = False  # added to scores in the choice alone; training moves it to even the load
    balance_rate: float = 0.001  # by this much a step
    balance_loss: float = 0.0  # coefficients of the losses of train/loss.py that keep a router even
    router_z_loss: float = 0.0  # and its logits small

    def has_bias(self, part: Literal["qkv", "out", "mlp"]) -> bool:
        parts = {"qkv": ("qkv",), "attention": ("qkv", "out"), "mlp": ("mlp",)}
        return self.bias if self.linear_bias == "usual" else part in parts[self.linear_bias]

    def has_experts(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers and (layer + 1) % self.expert_every == 0

    @property
    def blocks_ahead(self) -> int:
        return self.predict_ahead

    def in_use(self) -> "GPTConfig":
        """Without what only training has."""
        return dataclasses.replace(self, predict_ahead=0, predict_ahead_loss=GPTConfig.predict_ahead_loss)

    @property
    def value_size(self) -> int:
        return self.value_width or self.head_size

    @property
    def expert_size(self) -> int:
        return self.expert_width or self.feed_forward_size

    def validate(self) -> list[str]:
        problems = super().validate()
        if problems:
            return problems
        rms_only = (self.qk_norm == "whole" or self.norm_from_one) and self.norm != "rmsnorm"
        parallel = self.residual != "sequential" and self.norm_place != "before"
        latent, plain = self.kv_latent > 0, self.key_value_heads == self.heads and self.qk_norm == "none"
        plain = plain and not self.has_bias("qkv") and not self.norm_from_one
        stray = not latent and (self.q_latent or self.value_width)
        turned = self.positions == "rotary" and 0 < self.rope_width < self.head_size
        sizes = ["kv_latent", "q_latent", "value_width", "query_scalar", "attention_softcap", "logit_softcap"]
        unlike = self.gate_limit and not (self.gated and self.activation == "silu")
        weighed = self.predict_ahead_loss != GPTConfig.predict_ahead_loss
        sizes += ["gate_limit", "predict_ahead", "predict_ahead_loss"]
        problems = self.below(0, *sizes) + listed(
            (stray, "q_latent and value_width are of latent attention, and kv_latent is 0"),
            (latent and not plain, "kv_latent goes with a key head per query head, no biases, no qk_norm"),
            (latent and not turned, "kv_latent goes with rotary positions and a rope_width below the head's"),
            (self.value_size > self.head_size, f"value_width must be at most the head's {self.head_size}"),
            (self.output_bias and self.tied, "output_bias is an output matrix's: with tied there is none"),
            (rms_only, f"qk_norm = whole and norm_from_one are of RMS norms, not {self.norm}"),
            (parallel, f"a {self.residual} residual has its norms before the branches"),
            (self.attention_softcap and self.dropout, "attention_softcap has no kernel with dropout"),
            (self.attention_sinks and self.dropout, "attention_sinks have no kernel with dropout"),
            (unlike, "gate_limit is of a gated feed-forward with activation = silu"),
            (weighed and not self.predict_ahead, "predict_ahead_loss is of predict_ahead, which is 0"),
        )
        return problems + self._expert_problems()

    def _expert_problems(self) -> list[str]:
        fields = {field.name: field.default for field in dataclasses.fields(self)}
        names = list(fields)[list(fields).index("experts_per_token") :]
        if not self.experts:
            said = [name for name in names if getattr(self, name) != fields[name]]
            return [f"{name} is of experts, and there are none" for name in said]
        numbers = [name for name in names if not isinstance(fields[name], str | bool)]
        experts, each = self.experts, self.experts_per_token
        groups, chosen = max(self.router_groups, 1), self.router_groups_per_token
        uneven = experts % groups or not 1 <= chosen <= groups or experts < 2 * groups > 2
        few = not uneven and chosen * (experts // groups) < each
        no_layer = self.expert_every < 1 or not self.expert_layers
        return self.below(0, "experts", *numbers) + listed(
            (not 1 <= each <= experts, f"experts_per_token is {each}; it must be 1 to {experts}"),
            (uneven, f"{experts} experts cannot be {groups} groups of two and more, {chosen} for each token"),
            (few, f"{chosen} groups have fewer than {each} experts for a token"),
            (no_layer, "dense_layers and expert_every leave no layer with experts"),
        )

    def attention_parameters(self) -> int:
        if not self.kv_latent:
            return super().attention_parameters()
        q = self.heads * self.head_size * (self.q_latent or self.width) + self.q_latent * self.width
        down = self.width * (self.kv_latent + self.rope_width)
        up = self.kv_latent * self.heads * (self.head_size - self.rope_width + self.value_size)
        return q + down + up + self.heads * self.value_size * self.width

    def block_norm_parameters(self) -> int:
        norms = {"before": 2, "after": 2, "around": 4}[self.norm_place] - (self.residual == "shared")
        scales = self.kv_latent + self.q_latent + self.heads * self.attention_sinks
        if self.qk_norm == "head":
            scales += 2 * self.norm_parameters(self.head_size)
        elif self.qk_norm == "whole":
            scales += (self.heads + self.key_value_heads) * self.head_size
        return norms * self.norm_parameters() + scales

    def parameter_count(self) -> int:
        """Parameters of the built model; a tied output matrix counts once."""
        tables = self.vocab_size * self.width * (1 if self.tied else 2)
        tables += self.vocab_size * self.output_bias
        if self.positions == "learned":
            tables += (self.sequence_length + self.position_offset) * self.width
        blocks = self.block_count * self.block_parameters() + self.expert_parameters()
        blocks += self.predict_ahead * (2 * self.width**2 + 3 * self.norm_parameters())
        return tables + blocks + (1 + self.embedding_norm) * self.norm_parameters()

    @property
    def expert_layers(self) -> int:
        """How many blocks have experts."""
        return sum(self.has_experts(layer) for layer in range(self.block_count))

    def expert_parameters(self, active: bool = False) -> int:
        if not self.experts:
            return 0
        through = self.experts_per_token if active else self.experts
        size = (through + self.shared_experts) * self.expert_size - self.feed_forward_size
        router = self.experts * self.width
        if not active:  # only what multiplies a token
            router += self.experts * (self.balance_bias + self.has_bias("mlp"))
            size_of, shared = self.feed_forward_biases, self.shared_experts * self.expert_size
            router += through * size_of(self.expert_size) - size_of(self.feed_forward_size)
            router += size_of(shared) if shared else 0
        return self.expert_layers * (self.feed_forward_parameters(size) + router)

    def active_parameter_count(self) -> int:
        """Of the parameters those that a token goes through: all but the experts that were not chosen for it."""
        idle = self.experts - self.experts_per_token
        each = self.feed_forward_parameters(self.expert_size) + self.feed_forward_biases(self.expert_size)
        return self.parameter_count() - (self.expert_layers * idle * each if self.experts else 0)

    def flops_per_token(self, sequence_length: int | None = None) -> int:
        """Model FLOPs of forward and backward for one token, with logits for every token.

        Equals 72 L W^2 (1 + S/(6W) + V/(12 L W)) for the GPT-2 shape: Narayanan et al. 2021 give 96 B S L W^2
        (1 + S/(6W) + V/(16 L W)) per iteration with the forward of every block computed twice; this is once.
        Recomputation is never counted. Each of `predict_ahead` is a block, a joining product and logits more.
        """
        blocks = self.blocks_flops_per_token(sequence_length or self.sequence_length)
        joined = 2 * self.width * self.predict_ahead
        return blocks + 6 * self.width * (joined + (1 + self.predict_ahead) * self.vocab_size)


@dataclass(frozen=True)
class BERTConfig(TransformerConfig):
    """A bidirectional encoder with the masked-LM and next-sentence heads: BERT-Base by default."""

    vocab_size: int = 30522
    sequence_length: int = 512
    activation: Literal["gelu", "gelu_tanh", "silu", "relu", "relu2"] = "gelu"
    norm_epsilon: float = 1e-12
    norm_first: bool = False  # True: Megatron's pre-norm order, a final norm and none on the embeddings
    token_types: int = 2  # 0: no segment table
    nsp: bool = True  # pooler and next-sentence head
    mlm_transform: bool = True  # dense + activation + norm before the tied decoder
    relative_buckets: int = 0  # T5's position bias, shared by all layers, a number a bucket and head; 0: none
    relative_distance: int = 128  # distances beyond this share the last bucket
    # what becomes of [CLS] in it before a label is read off; features: every label is read off what the MLM transform
    # and its norm make of the encoder's output
    pooler: Literal["tanh", "relu", "gelu", "features"] = "tanh"
    embedding_width: int = 0  # of the tables; 0: `width`; another is brought to it by a matrix (ELECTRA)
    plain_positions: ClassVar[tuple[str, ...]] = ("learned",)

    @property
    def table_width(self) -> int:
        return self.embedding_width or self.width

    @property
    def decoder_bias(self) -> bool:
        """Whether the masked-LM logits have a bias."""
        return self.bias or self.output_bias

    def validate(self) -> list[str]:
        if problems := super().validate():
            return problems
        buckets, distance, pooler = self.relative_buckets, self.relative_distance, self.pooler
        normed_twice = self.embedding_norm and not self.norm_first
        projected = self.embedding_width and (self.norm_first or not self.mlm_transform)
        untransformed = pooler == "features" and not self.mlm_transform
        unlike = pooler == "gelu" != self.activation
        bad_buckets = buckets % 2 or 0 < buckets < 4
        near = buckets and distance <= buckets // 4
        return self.below(0, "embedding_width", "token_types", "relative_buckets") + listed(
            (normed_twice, "embedding_norm is for norm_first: a post-norm encoder has that norm anyway"),
            (projected, "embedding_width is that of a post-norm encoder with an MLM transform, or 0"),
            (untransformed, "pooler = features reads the MLM transform, and there is none"),
            (unlike, f"pooler = gelu goes with activation = gelu, and it is {self.activation}"),
            (self.nsp and pooler != "tanh", f"the next-sentence head has a tanh; {pooler} needs nsp = false"),
            (self.positions == "alibi", "positions = alibi look back; an encoder has learned or rotary ones"),
            (bad_buckets, f"relative_buckets is {buckets}; it must be 0 or an even number from 4 on"),
            (near, f"relative_distance is {distance}; it must be above relative_buckets / 4"),
        )

    def parameter_count(self) -> int:
        """Parameters of the built model, heads included; the decoder is the token table and counts once."""
        linear_bias, table = (self.width if self.bias else 0), self.table_width
        tables = (self.vocab_size + self.token_types) * table
        if self.positions == "learned":
            tables += (self.sequence_length + self.position_offset) * table
        tables += self.relative_buckets * self.heads
        tables += (self.width * table + linear_bias) if self.embedding_width else 0
        norms = self.norm_parameters(table)  # on the embeddings or at the end
        # with both the first block reads what is normed, and has no norm before attention
        head = self.vocab_size if self.decoder_bias else 0
        if self.mlm_transform:
            head += self.width * table + (table if self.bias else 0) + self.norm_parameters(table)
        if self.nsp:
            head += self.width * self.width + linear_bias + 2 * self.width + (2 if self.bias else 0)
        return tables + norms + self.layers * self.block_parameters() + head

    def flops_per_token(self, sequence_length: int | None = None, predicted: float = 1.0) -> int:
        """Model FLOPs of forward and backward for one token; `predicted` is the share of tokens that get MLM logits;
        1.0 is the published convention, see `GPTConfig.flops_per_token`. The transform and the pooler are counted.
        """
        length = sequence_length or self.sequence_length
        table = self.table_width
        head = 6 * table * self.vocab_size + (6 * self.width * table if self.mlm_transform else 0)
        pooled = 6 * (self.width * self.width + 2 * self.width) if self.nsp else 0
        return self.blocks_flops_per_token(length) + round(predicted * head + pooled / length)


ModelConfig = GPTConfig | BERTConfig
FAMILIES: dict[str, type[GPTConfig] | type[BERTConfig]] = {"gpt": GPTConfig, "bert": BERTConfig}


def family_of(config: ModelConfig) -> str:
    """`gpt` or `bert`, as written in a checkpoint's `model.json`."""
    return "gpt" if isinstance(config, GPTConfig) else "bert"


def _presets() -> dict[str, dict[str, Any]]:
    return shipped_table(__file__, "presets.toml")


def preset_names(family: str | None = None) -> list[str]:
    """All names of presets, in the order of the file; with `family` ("gpt" or "bert") only its own."""
    return [name for name, fields in _presets().items() if family in (None, fields["family"])]


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The shape of that name, some fields replaced. Raises `WrongUse` for an unknown name or field or a wrong shape."""
    table = _presets()
    if name not in table:
        fix = did_you_mean(name, table, "the presets are: " + ", ".join(table), limit=3)
        raise WrongUse(f"there is no preset {name!r}", where="models/presets.toml", fix=fix)
    family = FAMILIES[table[name]["family"]]
    return family.from_dict({key: x for key, x in table[name].items() if key != "family"} | overrides)
