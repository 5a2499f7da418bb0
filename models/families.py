"""The model families of `families.toml`, in its order, and our parameters' names in their layouts, read both ways.

No torch here.
"""

from collections.abc import Collection, Iterator
from functools import cache
from typing import Any, Literal, NamedTuple

from ..core.errors import Refused
from ..core.files import shipped_table
from .config import BERTConfig, GPTConfig, ModelConfig
from .transformer import TransformerConfig


class Names(NamedTuple):
    """Their names of a model's tensors; "": it has none."""

    token: str
    layer: str
    norms: dict[str, str]
    qkv: list[str]  # three tensors, or one
    matrices: dict[str, str]
    norm: str
    output: str = "lm_head"
    position: str = ""
    router: str = ""
    experts: dict[str, str] = {}
    shared: dict[str, str] = {}  # of the feed-forward that every token goes through
    latent: dict[str, str] = {}  # what queries, keys and values are made of; `q`: queries without a latent
    sinks: str = ""  # a whole name too
    ahead: dict[str, str] = {}  # of a block that predicts a further token, beside those of the other blocks
    balance: str = ""  # the bias of the router's choice, a whole name
    how: str = "split"
    types: str = ""
    embedding_norm: str = ""
    projection: str = ""
    transform: tuple[str, str, str] = ("", "", "")  # before the masked-LM decoder: matrix, norm; its bias
    pair: str = ""  # the next-sentence matrix
    pooler: str = ""
    classifier: str = "classifier"  # of fine-tuned labels of texts, and of spans
    question: str = "qa_outputs"

    @property
    def prefix(self) -> str:
        """What stands before every name, and is missing where the model was saved without a head."""
        return self.token.partition(".")[0]

    def whole(self, name: str) -> str:
        """A tensor's name with the prefix, and without TensorFlow's gamma and beta."""
        known = (self.token, self.position, self.layer, self.norm, self.embedding_norm, self.projection)
        inner = {one.split(".")[1] for one in known if one} | {"pooler"}
        if name.partition(".")[0] in inner:
            name = f"{self.prefix}.{name}"
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


class Family(NamedTuple):
    """What a `model_type` of theirs is in our fields; families.toml says what each of these is."""

    architecture: str
    models: str
    fields: dict[str, str]
    usual: dict[str, Any]
    names: Names
    shape: dict[str, Any] = {}
    always: dict[str, Any] = {}
    must: dict[str, list[Any]] = {}
    ignored: list[str] = []
    theta: tuple[str, float] = ("rope_theta", 10000.0)
    part: tuple[str, float] = ("", 1.0)
    windows: str = ""
    biased: str = ""
    encoder: bool = False
    pad: str = "none"
    dropouts: list[str] = []


@cache
def families() -> dict[str, Family]:
    """By `model_type`."""
    rows: dict[str, dict[str, Any]] = {}
    for kind, said in shipped_table(__file__, "families.toml").items():
        if "architecture" in said or "like" in said:
            rows[kind] = _merged(rows.get(said.get("like", ""), {}), said)
    return {kind: _family(row) for kind, row in rows.items()}


def shared(name: str) -> Any:
    """What all families have in common: `everywhere`, `scalings` or `windows`."""
    return shipped_table(__file__, "families.toml")[name]


def _merged(before: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """A row with the lines of its tables over those of another; "" takes a line away."""
    both = dict(before)
    for name, value in said.items():
        both[name] = _merged(before.get(name, {}), value) if isinstance(value, dict) else value
    return {name: value for name, value in both.items() if value != "" or name in ("biased", "pad")}


def _family(row: dict[str, Any]) -> Family:
    usual = dict.fromkeys(row.get("optional", [])) | row["usual"]
    said = {name: value for name, value in row.items() if name not in ("like", "optional")}
    return Family(**said | {"usual": usual, "names": Names(**row["names"])})


def refuse_beyond(config: TransformerConfig, known: Collection[str], who: str) -> None:
    """Raise Refused where a model has fields beyond those of a GPT-2, a Llama or a BERT that `who` does not know."""
    if unknown := config.beyond(known):
        why = ", ".join(f"{name} = {getattr(config, name)!r}" for name in unknown)
        fix = "docs/models.md has the table of what each family can do; torch generates, evaluates and serves it"
        raise Refused(f"{who} does not know this model", where=f"model.{unknown[0]}", why=why, fix=fix)


class Pair(NamedTuple):
    """One tensor of ours and the tensors of theirs that hold the same numbers."""

    ours: str
    theirs: tuple[str, ...]
    how: Literal["same", "transposed", "split", "conv_qkv", "stacked", "rolled", "woven"] = "same"
    rows: tuple[tuple[int, int], ...] = ()  # of each of theirs that is ours; (): all
    neighbours: int = 0  # numbers of a query or key head that are turned as pairs (2i, 2i + 1) there
    # rolled: of a head whose last numbers are turned there, its first ones here; woven: the first of every two columns
    size: int = 0


def pairs(config: ModelConfig, kind: str) -> Iterator[Pair]:
    """Every parameter of ours with the names that it has in the Hugging Face layout of this `model_type`."""
    names = families()[kind].names
    yield from _trunk_pairs(config, names)
    if isinstance(config, GPTConfig):
        if not config.tied:
            yield from _both("output", names.output, config.output_bias)
        return
    dense, norm, bias = names.transform
    yield from _both("mlm_transform", dense, config.bias)
    yield from _both("mlm_norm", norm, config.bias)
    if config.decoder_bias:
        yield Pair("mlm_bias", (bias,))
    if config.nsp and names.pair:
        yield from _both("pooler", names.pooler)
        yield from _both("nsp", names.pair)


def _both(ours: str, theirs: str, bias: bool = True, **more: Any) -> Iterator[Pair]:
    for kind in ("weight", "bias") if bias else ("weight",):
        yield Pair(f"{ours}.{kind}", (f"{theirs}.{kind}",), **more)


def _trunk_pairs(config: ModelConfig, names: Names) -> Iterator[Pair]:
    """What embeds and encodes."""
    bias = config.bias and config.norm == "layernorm"
    # where embeddings are normed the first block of an encoder has no norm of its own before attention
    reads_normed = isinstance(config, BERTConfig) and config.embedding_norm
    for mine in ("token", "position", "types"):
        if name := getattr(names, mine):
            yield Pair(f"{'type' if mine == 'types' else mine}_table.weight", (f"{name}.weight",))
    if names.embedding_norm:
        yield from _both("embedding_norm", names.embedding_norm, bias)
    if isinstance(config, BERTConfig) and config.embedding_width:
        yield from _both("projection", names.projection, config.bias)
    wide = config.feed_forward_size
    stacked = {"mlp.gate": ((0, wide),), "mlp.up": ((wide, 2 * wide),)} if names.how == "stacked" else {}
    for layer in range(config.block_count if names.ahead else config.layers):
        ours, theirs = f"blocks.{layer}", f"{names.layer}.{layer}"
        for mine, name in names.norms.items():
            if layer or mine != "attention_norm" or not reads_normed:
                yield from _both(f"{ours}.{mine}", f"{theirs}.{name}", bias)
        yield from _qkv_pairs(config, names, f"{ours}.attention", theirs)
        if names.sinks:
            yield Pair(f"{ours}.attention.sinks", (f"{theirs}.{names.sinks}",))
        for mine, name in names.ahead.items() if layer >= config.layers else ():
            yield from _both(f"{ours}.{mine}", f"{theirs}.{name}", bias=False)
        matrices = names.matrices
        if isinstance(config, GPTConfig) and config.has_experts(layer):
            matrices = {mine: name for mine, name in matrices.items() if not mine.startswith("mlp")}
            yield from _expert_pairs(config, names, f"{ours}.mlp", theirs)
        for mine, name in matrices.items():
            biased = config.has_bias("mlp" if mine.startswith("mlp") else "out")
            for pair in _both(f"{ours}.{mine}", f"{theirs}.{name}", biased, rows=stacked.get(mine, ())):
                turned = names.how == "conv" and pair.ours.endswith("weight")
                yield pair._replace(how="transposed") if turned else pair
    yield from _both("norm", names.norm, bias)


def _expert_pairs(config: GPTConfig, names: Names, ours: str, theirs: str) -> Iterator[Pair]:
    biased = config.has_bias("mlp")
    yield from _both(f"{ours}.router", f"{theirs}.{names.router}", biased)
    for mine, name in names.experts.items():
        if "{}" not in name:  # of all experts one tensor, turned, with the columns of gate and up in turn
            pair = Pair(f"{ours}.experts.{mine}", (f"{theirs}.{name}",), "woven", size=int(mine == "up"))
            yield pair._replace(how="transposed") if mine == "down" else pair
            bias = pair._replace(ours=f"{pair.ours}_bias", theirs=(f"{theirs}.{name}_bias",))
            yield bias._replace(how="same") if mine == "down" else bias
            continue
        each = tuple(f"{theirs}.{name.format(expert)}.weight" for expert in range(config.experts))
        yield Pair(f"{ours}.experts.{mine}", each, "stacked")
    for mine, name in names.shared.items() if config.shared_experts else ():
        yield from _both(f"{ours}.shared.{mine}", f"{theirs}.{name}", bias=False)
    if names.balance:
        yield Pair(f"{ours}.balance_bias", (f"{theirs}.{names.balance}",))


def _latent_pairs(config: GPTConfig, names: Names, ours: str, theirs: str) -> Iterator[Pair]:
    turned = config.rope_width
    sizes = {"q_up": config.head_size, "kv_down": config.kv_latent + turned}
    for mine, name in names.latent.items():
        if mine == "q" or (not config.q_latent and mine in ("q_down", "q_norm")):
            continue
        found = (f"{theirs}.{names.latent['q'] if mine == 'q_up' and not config.q_latent else name}.weight",)
        pair = Pair(f"{ours}.{mine}.weight", found)
        rolled = pair._replace(how="rolled", neighbours=turned, size=sizes.get(mine, 0))
        yield rolled if mine in sizes else pair


def _qkv_pairs(config: ModelConfig, names: Names, ours: str, theirs: str) -> Iterator[Pair]:
    """Query, key and value: one matrix of ours, or one and another."""
    if isinstance(config, GPTConfig) and config.kv_latent:
        yield from _latent_pairs(config, names, f"{ours}.latent", theirs)
        return
    fused = config.key_value_heads == config.heads
    size = config.head_size
    ends = [0, config.heads * size, (config.heads + config.key_value_heads) * size]
    stacked = list(zip(ends, [*ends[1:], 2 * ends[2] - ends[1]])) if names.how == "stacked" else []
    for kind in ("weight", "bias") if config.has_bias("qkv") else ("weight",):
        found = tuple(f"{theirs}.{name}.{kind}" for name in names.qkv)
        if names.how in ("same", "conv"):
            yield Pair(f"{ours}.qkv.{kind}", found, "same" if names.how == "same" else "conv_qkv")
            continue
        three = found * 3 if stacked else found
        turned = config.rotary_size if names.how == "neighbours" else 0
        if fused:
            yield Pair(f"{ours}.qkv.{kind}", three, "split", tuple(stacked), turned)
        else:
            yield Pair(f"{ours}.q.{kind}", three[:1], "same", tuple(stacked[:1]))
            yield Pair(f"{ours}.kv.{kind}", three[1:], "split", tuple(stacked[1:]))


def head_pairs(config: BERTConfig, kind: str, head: str) -> Iterator[Pair]:
    """As `pairs` for a `BERTWithHead` with a head of this kind ("embedding": none)."""
    names = families()[kind].names
    for pair in _trunk_pairs(config, names):
        yield pair._replace(ours=f"encoder.{pair.ours}")
    if head == "embedding":
        return
    if config.pooler == "features":
        yield from _both("encoder.mlm_transform", names.transform[0], config.bias)
        yield from _both("encoder.mlm_norm", names.transform[1], config.bias)
    elif head == "sequence-classification":
        yield from _both("encoder.pooler", names.pooler)
    outputs = {"sequence-classification": names.classifier, "question-answering": names.question}
    yield from _both("output", outputs.get(head, "classifier"))
