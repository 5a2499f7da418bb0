"""Our parameters' names in the Hugging Face layouts of the families and of BERT, read both ways. No torch."""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from .config import BERTConfig, GPTConfig, ModelConfig
from .families import Names, families


class Pair(NamedTuple):
    """One tensor of ours and the tensors of theirs that hold the same numbers."""

    ours: str
    theirs: tuple[str, ...]
    how: Literal["same", "transposed", "split", "conv_qkv", "stacked"] = "same"
    rows: tuple[tuple[int, int], ...] = ()  # of each of theirs that is ours; (): all
    neighbours: int = 0  # numbers of a query or key head that are turned as pairs (2i, 2i + 1) there


def pairs(config: ModelConfig, kind: str = "") -> Iterator[Pair]:
    """Every parameter of ours with the names that it has in the Hugging Face layout of this `model_type`, or of the
    one that the config is written as.
    """
    if isinstance(config, BERTConfig):
        yield from _bert_pairs(config)
        return
    if not kind:
        from .huggingface_config import family_of_shape

        kind = family_of_shape(config)
    yield from _decoder_pairs(config, families()[kind].names)


def _both(ours: str, theirs: str, bias: bool = True, **more: Any) -> Iterator[Pair]:
    for kind in ("weight", "bias") if bias else ("weight",):
        yield Pair(f"{ours}.{kind}", (f"{theirs}.{kind}",), **more)


def _decoder_pairs(config: GPTConfig, names: Names) -> Iterator[Pair]:
    bias = config.bias and config.norm == "layernorm"
    yield Pair("token_table.weight", (f"{names.token}.weight",))
    if names.position:
        yield Pair("position_table.weight", (f"{names.position}.weight",))
    wide = config.feed_forward_size
    stacked = {"mlp.gate": ((0, wide),), "mlp.up": ((wide, 2 * wide),)} if names.how == "stacked" else {}
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"{names.layer}.{layer}"
        for mine, name in names.norms.items():
            yield from _both(f"{ours}.{mine}", f"{theirs}.{name}", bias)
        yield from _qkv_pairs(config, names, f"{ours}.attention", theirs)
        matrices = names.matrices
        if config.has_experts(layer):
            matrices = {mine: name for mine, name in matrices.items() if not mine.startswith("mlp")}
            yield from _expert_pairs(config, names, f"{ours}.mlp", theirs)
        for mine, name in matrices.items():
            biased = config.has_bias("mlp" if mine.startswith("mlp") else "out")
            for pair in _both(f"{ours}.{mine}", f"{theirs}.{name}", biased, rows=stacked.get(mine, ())):
                turned = names.how == "conv" and pair.ours.endswith("weight")
                yield pair._replace(how="transposed") if turned else pair
    yield from _both("norm", names.norm, bias)
    if not config.tied:
        yield from _both("output", names.output, config.output_bias)


def _expert_pairs(config: GPTConfig, names: Names, ours: str, theirs: str) -> Iterator[Pair]:
    yield from _both(f"{ours}.router", f"{theirs}.{names.router}", bias=False)
    for mine, name in names.experts.items():
        each = tuple(f"{theirs}.{name.format(expert)}.weight" for expert in range(config.experts))
        yield Pair(f"{ours}.experts.{mine}", each, "stacked")


def _qkv_pairs(config: GPTConfig, names: Names, ours: str, theirs: str) -> Iterator[Pair]:
    """Query, key and value: one matrix of ours, or one and another."""
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


def _bert_pairs(config: BERTConfig) -> Iterator[Pair]:
    yield from _encoder_pairs(config)
    yield from _both("mlm_transform", "cls.predictions.transform.dense")
    yield from _both("mlm_norm", "cls.predictions.transform.LayerNorm")
    yield Pair("mlm_bias", ("cls.predictions.bias",))
    if config.nsp:
        yield from _both("pooler", "bert.pooler.dense")
        yield from _both("nsp", "cls.seq_relationship")


def head_pairs(config: BERTConfig, output: str) -> Iterator[Pair]:
    """As `pairs` for a `BERTWithHead`, whose last matrix is `output` there ("": none); `config.nsp`: a pooler."""
    for pair in _encoder_pairs(config):
        yield pair._replace(ours=f"encoder.{pair.ours}")
    if config.nsp:
        yield from _both("encoder.pooler", "bert.pooler.dense")
    if output:
        yield from _both("output", output)


def _encoder_pairs(config: BERTConfig) -> Iterator[Pair]:
    for mine, name in (("token_table", "word"), ("position_table", "position"), ("type_table", "token_type")):
        yield Pair(f"{mine}.weight", (f"bert.embeddings.{name}_embeddings.weight",))
    yield from _both("norm", "bert.embeddings.LayerNorm")
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"bert.encoder.layer.{layer}"
        for kind in ("weight", "bias"):
            names = tuple(f"{theirs}.attention.self.{name}.{kind}" for name in ("query", "key", "value"))
            yield Pair(f"{ours}.attention.qkv.{kind}", names, "split")
        yield from _both(f"{ours}.attention.out", f"{theirs}.attention.output.dense")
        yield from _both(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
        yield from _both(f"{ours}.mlp.up", f"{theirs}.intermediate.dense")
        yield from _both(f"{ours}.mlp.down", f"{theirs}.output.dense")
        yield from _both(f"{ours}.mlp_norm", f"{theirs}.output.LayerNorm")
