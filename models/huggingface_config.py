"""`config.json` of GPT-2, Llama and BERT at Hugging Face: from our configs and to them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..core.errors import Failed, Refused
from .config import BERTConfig, GPTConfig, ModelConfig

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
THEIR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {
    "gelu_pytorch_tanh": "gelu_tanh"
}


def describe(config: ModelConfig) -> tuple[dict[str, Any], ModelConfig]:
    """Their config fields for a shape, and the shape that they imply (biases added where their model always
    has them).
    """
    if config.attention_pattern is not None:
        why = "GPT-2, Llama and BERT there look at the whole sequence"
        raise Refused(
            "a model with an attention pattern has no Hugging Face layout of ours",
            where="attention_window",
            why=why,
        )
    if isinstance(config, BERTConfig):
        return _describe_bert(config), config
    if config.positions == "rotary":
        return _describe_llama(config), config
    if (
        config.norm != "layernorm"
        or config.gated
        or config.kv_heads not in (0, config.heads)
        or config.head_width
    ):
        raise Refused(
            "this shape has no Hugging Face layout of ours",
            why="GPT-2 there has layer norms, a plain MLP, and one key head of width / heads per head",
        )
    fields = {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.sequence_length,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.feed_forward_size,
        "activation_function": ACTIVATIONS[config.activation],
        "layer_norm_epsilon": config.norm_epsilon,
        "tie_word_embeddings": config.tied,
        "resid_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "attn_pdrop": config.dropout,
    }
    return fields, dataclasses.replace(config, bias=True)


def _describe_llama(config: GPTConfig) -> dict[str, Any]:
    if config.norm != "rmsnorm" or not config.gated or config.bias or config.dropout:
        why = "a rotary model there has RMS norms, a gated MLP, and neither biases nor dropout"
        raise Refused("this shape has no Hugging Face layout of ours", why=why)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.sequence_length,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_size,
        "hidden_act": ACTIVATIONS[config.activation],
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _describe_bert(config: BERTConfig) -> dict[str, Any]:
    plain = (
        config.norm == "layernorm"
        and config.bias
        and not config.gated
        and config.key_value_heads == config.heads
    )
    if (
        not plain
        or config.norm_first
        or not config.mlm_transform
        or not config.token_types
        or config.relative_buckets
    ):
        why = "BERT there is post-norm, with biases, a segment table, an MLM transform and no relative positions"
        fix = "export it to ONNX, or train a post-norm one (model.overrides.norm_first = false)"
        raise Refused("this shape has no Hugging Face layout of ours", why=why, fix=fix)
    return {
        "architectures": ["BertForPreTraining" if config.nsp else "BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.sequence_length,
        "type_vocab_size": config.token_types,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "hidden_act": ACTIVATIONS[config.activation],
        "layer_norm_eps": config.norm_epsilon,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.dropout,
        "tie_word_embeddings": True,
    }


def read_config(fields: dict[str, Any], state: Mapping[str, Tensor], where: str) -> ModelConfig:
    """The config for their `config.json` fields; `state` says which heads are there. Raises `Refused` for
    what we cannot build.
    """
    kind = fields.get("model_type")
    try:
        if kind == "gpt2":
            config: ModelConfig = _read_gpt2(fields, where)
        elif kind == "llama":
            config = _read_llama(fields, where)
        elif kind == "bert":
            config = _read_bert(fields, where, nsp="cls.seq_relationship.weight" in state)
        else:
            raise Refused(
                f"models of type {kind!r} cannot be read", where=where, fix="GPT-2, Llama and BERT can"
            )
    except KeyError as error:
        raise Failed(f"config.json has no field {error}", where=where) from error
    except (TypeError, ValueError) as error:
        raise Failed("config.json holds a value of the wrong kind", where=where, why=str(error)) from error
    if problems := config.validate():
        raise Failed(
            "config.json describes a model that cannot be built", where=where, why="\n".join(problems)
        )
    return config


def _allow(fields: dict[str, Any], where: str, name: str, usual: Any, *others: Any) -> Any:
    """The value of a field, `usual` when absent; refused unless it is the usual one or one of the others."""
    value = fields.get(name, usual)
    if value not in (usual, *others):
        raise Refused(
            "this model uses something that ours do not have", where=where, why=f"{name} = {value!r}"
        )
    return value


def _read_gpt2(fields: dict[str, Any], where: str) -> GPTConfig:
    _allow(fields, where, "scale_attn_by_inverse_layer_idx", False)
    _allow(fields, where, "scale_attn_weights", True)
    activation: Any = THEIR_ACTIVATIONS[
        _allow(fields, where, "activation_function", "gelu_new", *THEIR_ACTIVATIONS)
    ]
    return GPTConfig(
        vocab_size=fields["vocab_size"],
        sequence_length=fields.get("n_positions", 1024),
        layers=fields["n_layer"],
        width=fields["n_embd"],
        heads=fields["n_head"],
        mlp_width=_unless(fields.get("n_inner"), 4 * fields["n_embd"]),
        activation=activation,
        norm_epsilon=fields.get("layer_norm_epsilon", 1e-5),
        dropout=fields.get("resid_pdrop", 0.1),
        tied=fields.get("tie_word_embeddings", True),
    )


def _read_llama(fields: dict[str, Any], where: str) -> GPTConfig:
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise Refused(
            "this model uses something that ours do not have", where=where, why=f"scaled rope: {rope}"
        )
    _allow(fields, where, "attention_bias", False)
    _allow(fields, where, "mlp_bias", False)
    heads, width = fields["num_attention_heads"], fields["hidden_size"]
    activation: Any = THEIR_ACTIVATIONS[_allow(fields, where, "hidden_act", "silu", *THEIR_ACTIVATIONS)]
    return GPTConfig(
        vocab_size=fields["vocab_size"],
        sequence_length=fields["max_position_embeddings"],
        layers=fields["num_hidden_layers"],
        width=width,
        heads=heads,
        kv_heads=_unless(fields.get("num_key_value_heads"), heads),
        head_width=_unless(fields.get("head_dim"), width // heads),
        mlp_width=_unless(fields["intermediate_size"], 4 * width),
        activation=activation,
        gated=True,
        norm="rmsnorm",
        norm_epsilon=fields.get("rms_norm_eps", 1e-6),
        bias=False,
        positions="rotary",
        rope_theta=float(rope.get("rope_theta", fields.get("rope_theta", 10000.0))),
        tied=fields.get("tie_word_embeddings", False),
    )


def _read_bert(fields: dict[str, Any], where: str, nsp: bool) -> BERTConfig:
    _allow(fields, where, "position_embedding_type", "absolute")
    activation: Any = THEIR_ACTIVATIONS[_allow(fields, where, "hidden_act", "gelu", *THEIR_ACTIVATIONS)]
    return BERTConfig(
        vocab_size=fields["vocab_size"],
        sequence_length=fields["max_position_embeddings"],
        layers=fields["num_hidden_layers"],
        width=fields["hidden_size"],
        heads=fields["num_attention_heads"],
        mlp_width=_unless(fields["intermediate_size"], 4 * fields["hidden_size"]),
        activation=activation,
        norm_epsilon=fields.get("layer_norm_eps", 1e-12),
        dropout=fields.get("hidden_dropout_prob", 0.1),
        token_types=fields.get("type_vocab_size", 2),
        nsp=nsp,
    )


def _unless(value: int | None, usual: int) -> int:
    """0, our word for the usual size, when the value is that size or absent: so that a shape has one way to
    be written.
    """
    return 0 if value is None or value == usual else value
