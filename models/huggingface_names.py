"""Our parameters' names in the Hugging Face layouts of the families, read both ways. No torch."""

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
    if not kind:
        from .huggingface_config import family_of_shape

        kind = family_of_shape(config)
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


def _reads_normed(config: ModelConfig) -> bool:
    """Whether the first block reads what is normed, and has no norm of its own before attention."""
    return isinstance(config, BERTConfig) and config.embedding_norm


def _trunk_pairs(config: ModelConfig, names: Names) -> Iterator[Pair]:
    """What embeds and encodes."""
    bias = config.bias and config.norm == "layernorm"
    for mine in ("token", "position", "types"):
        if name := getattr(names, mine):
            yield Pair(f"{'type' if mine == 'types' else mine}_table.weight", (f"{name}.weight",))
    if names.embedding_norm:
        yield from _both("embedding_norm", names.embedding_norm, bias)
    if isinstance(config, BERTConfig) and config.embedding_width:
        yield from _both("projection", names.projection, config.bias)
    wide = config.feed_forward_size
    stacked = {"mlp.gate": ((0, wide),), "mlp.up": ((wide, 2 * wide),)} if names.how == "stacked" else {}
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"{names.layer}.{layer}"
        for mine, name in names.norms.items():
            if layer or mine != "attention_norm" or not _reads_normed(config):
                yield from _both(f"{ours}.{mine}", f"{theirs}.{name}", bias)
        yield from _qkv_pairs(config, names, f"{ours}.attention", theirs)
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
    yield from _both(f"{ours}.router", f"{theirs}.{names.router}", bias=False)
    for mine, name in names.experts.items():
        each = tuple(f"{theirs}.{name.format(expert)}.weight" for expert in range(config.experts))
        yield Pair(f"{ours}.experts.{mine}", each, "stacked")
    for mine, name in names.shared.items() if config.shared_experts else ():
        yield from _both(f"{ours}.shared.{mine}", f"{theirs}.{name}", bias=False)
    if names.balance:
        yield Pair(f"{ours}.balance_bias", (f"{theirs}.{names.balance}",))


def _qkv_pairs(config: ModelConfig, names: Names, ours: str, theirs: str) -> Iterator[Pair]:
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
