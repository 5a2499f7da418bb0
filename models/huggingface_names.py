"""Our parameters' names in the Hugging Face layouts of GPT-2, Llama and BERT, read both ways. No torch."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

from .config import BERTConfig, GPTConfig, ModelConfig


class Pair(NamedTuple):
    """One tensor of ours and the tensors of theirs that hold the same numbers."""

    ours: str
    theirs: tuple[str, ...]
    how: Literal["same", "transposed", "split", "conv_qkv"] = "same"


def pairs(config: ModelConfig) -> Iterator[Pair]:
    """Every parameter of ours with the names that it has in the Hugging Face layout."""
    if isinstance(config, BERTConfig):
        yield from _bert_pairs(config)
    elif config.positions == "rotary":
        yield from _llama_pairs(config)
    else:
        yield from _gpt2_pairs(config)


def _both(ours: str, theirs: str) -> Iterator[Pair]:
    for kind in ("weight", "bias"):
        yield Pair(f"{ours}.{kind}", (f"{theirs}.{kind}",))


def _gpt2_pairs(config: GPTConfig) -> Iterator[Pair]:
    yield Pair("token_table.weight", ("transformer.wte.weight",))
    yield Pair("position_table.weight", ("transformer.wpe.weight",))
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        yield from _both(f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from _both(f"{ours}.mlp_norm", f"{theirs}.ln_2")
        for kind in ("weight", "bias"):
            yield Pair(f"{ours}.attention.qkv.{kind}", (f"{theirs}.attn.c_attn.{kind}",), "conv_qkv")
        for mine, name in (
            ("attention.out", "attn.c_proj"),
            ("mlp.up", "mlp.c_fc"),
            ("mlp.down", "mlp.c_proj"),
        ):
            yield Pair(f"{ours}.{mine}.weight", (f"{theirs}.{name}.weight",), "transposed")
            yield Pair(f"{ours}.{mine}.bias", (f"{theirs}.{name}.bias",))
    yield from _both("norm", "transformer.ln_f")
    if not config.tied:
        yield Pair("output.weight", ("lm_head.weight",))


def _llama_pairs(config: GPTConfig) -> Iterator[Pair]:
    yield Pair("token_table.weight", ("model.embed_tokens.weight",))
    for layer in range(config.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        q, k, v = (f"{theirs}.self_attn.{name}_proj.weight" for name in "qkv")
        if config.key_value_heads == config.heads:
            yield Pair(f"{ours}.attention.qkv.weight", (q, k, v), "split")
        else:
            yield Pair(f"{ours}.attention.q.weight", (q,))
            yield Pair(f"{ours}.attention.kv.weight", (k, v), "split")
        for mine, name in (
            ("attention_norm", "input_layernorm"),
            ("attention.out", "self_attn.o_proj"),
            ("mlp_norm", "post_attention_layernorm"),
            ("mlp.up", "mlp.up_proj"),
            ("mlp.gate", "mlp.gate_proj"),
            ("mlp.down", "mlp.down_proj"),
        ):
            yield Pair(f"{ours}.{mine}.weight", (f"{theirs}.{name}.weight",))
    yield Pair("norm.weight", ("model.norm.weight",))
    if not config.tied:
        yield Pair("output.weight", ("lm_head.weight",))


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
