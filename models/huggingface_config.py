"""`config.json` of GPT-2, Llama and BERT at Hugging Face: from our configs and to them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..core.errors import Failed, Refused
from .config import BERTConfig, GPTConfig, ModelConfig

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
THEIR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()}
THEIR_ACTIVATIONS |= {"gelu_pytorch_tanh": "gelu_tanh"}
SIZES = {  # of Llama and BERT alike
    "hidden_size": "width",
    "intermediate_size": "mlp_width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
}
FIELDS = {  # our field for each of theirs, by their `model_type`, in the order of their file
    "gpt2": {
        "vocab_size": "vocab_size",
        "n_positions": "sequence_length",
        "n_embd": "width",
        "n_layer": "layers",
        "n_head": "heads",
        "n_inner": "mlp_width",
        "activation_function": "activation",
        "layer_norm_epsilon": "norm_epsilon",
        "tie_word_embeddings": "tied",
        "resid_pdrop": "dropout",
    },
    "llama": {
        "vocab_size": "vocab_size",
        "max_position_embeddings": "sequence_length",
        **SIZES,
        "num_key_value_heads": "kv_heads",
        "head_dim": "head_width",
        "hidden_act": "activation",
        "rms_norm_eps": "norm_epsilon",
        "rope_theta": "rope_theta",
    },
    "bert": {
        "vocab_size": "vocab_size",
        "max_position_embeddings": "sequence_length",
        "type_vocab_size": "token_types",
        **SIZES,
        "hidden_act": "activation",
        "layer_norm_eps": "norm_epsilon",
        "hidden_dropout_prob": "dropout",
    },
}
USUAL: dict[str, dict[str, Any]] = {  # what an absent field of theirs means; the others must be there
    "gpt2": {"n_positions": 1024, "n_inner": None, "activation_function": "gelu_new"}
    | {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "resid_pdrop": 0.1},
    "llama": {"num_key_value_heads": None, "head_dim": None, "hidden_act": "silu"}
    | {"rms_norm_eps": 1e-6, "rope_theta": 10000.0},
    "bert": {"type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "hidden_dropout_prob": 0.1},
}
WHOLE = {"mlp_width": "feed_forward_size", "kv_heads": "key_value_heads", "head_width": "head_size"}


def describe(config: ModelConfig) -> tuple[dict[str, Any], ModelConfig]:
    """Their config fields for a shape, and the shape that they imply: GPT-2 always has biases."""
    if config.attention_pattern is not None:
        what = "a model with an attention pattern has no Hugging Face layout of ours"
        why = "GPT-2, Llama and BERT there look at the whole sequence"
        raise Refused(what, where="attention_window", why=why)
    if isinstance(config, BERTConfig):
        return _describe_bert(config), config
    if config.positions == "rotary":
        return _describe_llama(config), config
    one_to_one = config.kv_heads in (0, config.heads) and not config.head_width
    if config.norm != "layernorm" or config.gated or not one_to_one:
        why = "GPT-2 there has layer norms, a plain MLP, and one key head of width / heads per head"
        raise Refused("this shape has no Hugging Face layout of ours", why=why)
    fields = _written(config, "gpt2", "GPT2LMHeadModel")
    fields |= {"embd_pdrop": config.dropout, "attn_pdrop": config.dropout}
    return fields, dataclasses.replace(config, bias=True)


def _written(config: ModelConfig, kind: str, architecture: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"architectures": [architecture], "model_type": kind}
    for theirs, ours in FIELDS[kind].items():
        value = getattr(config, WHOLE.get(ours, ours))
        fields[theirs] = ACTIVATIONS[value] if ours == "activation" else value
    return fields


def _describe_llama(config: GPTConfig) -> dict[str, Any]:
    if config.norm != "rmsnorm" or not config.gated or config.bias or config.dropout:
        why = "a rotary model there has RMS norms, a gated MLP, and neither biases nor dropout"
        raise Refused("this shape has no Hugging Face layout of ours", why=why)
    return _written(config, "llama", "LlamaForCausalLM") | {
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "tie_word_embeddings": config.tied,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _describe_bert(config: BERTConfig) -> dict[str, Any]:
    one_to_one = config.key_value_heads == config.heads
    plain = config.norm == "layernorm" and config.bias and not config.gated and one_to_one
    parts = config.mlm_transform and config.token_types and not config.relative_buckets
    if not plain or not parts or config.norm_first:
        why = "BERT there is post-norm, with biases, a segment table, an MLM transform and no relative positions"
        fix = "export it to ONNX, or train a post-norm one (model.overrides.norm_first = false)"
        raise Refused("this shape has no Hugging Face layout of ours", why=why, fix=fix)
    fields = _written(config, "bert", "BertForPreTraining" if config.nsp else "BertForMaskedLM")
    return fields | {"attention_probs_dropout_prob": config.dropout, "tie_word_embeddings": True}


def read_config(fields: dict[str, Any], state: Mapping[str, Tensor], where: str) -> ModelConfig:
    """The config for their fields; `state` says which heads are there. Raises `Refused` for another kind."""
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


def unlike_ours(where: str, why: str) -> Refused:
    """The error of a model that uses something that ours do not have."""
    return Refused("this model uses something that ours do not have", where=where, why=why)


def _allow(fields: dict[str, Any], where: str, name: str, usual: Any, *others: Any) -> Any:
    """The value of a field, `usual` when absent; refused unless it is the usual one or one of the others."""
    value = fields.get(name, usual)
    if value not in (usual, *others):
        raise unlike_ours(where, f"{name} = {value!r}")
    return value


def _read(fields: dict[str, Any], where: str, kind: str) -> dict[str, Any]:
    """Our fields; a size that is the usual one or absent is 0, so that a shape has one way to be written."""
    usual = USUAL[kind]
    found: dict[str, Any] = {}
    for theirs, ours in FIELDS[kind].items():
        if ours == "activation":
            found[ours] = THEIR_ACTIVATIONS[_allow(fields, where, theirs, usual[theirs], *THEIR_ACTIVATIONS)]
        else:
            found[ours] = fields.get(theirs, usual[theirs]) if theirs in usual else fields[theirs]
    sizes = {"mlp_width": 4 * found["width"], "kv_heads": found["heads"]}
    if "head_width" in found:
        sizes["head_width"] = found["width"] // found["heads"]
    return found | {name: 0 for name, size in sizes.items() if found.get(name) in (None, size)}


def _read_gpt2(fields: dict[str, Any], where: str) -> GPTConfig:
    _allow(fields, where, "scale_attn_by_inverse_layer_idx", False)
    _allow(fields, where, "scale_attn_weights", True)
    return GPTConfig(**_read(fields, where, "gpt2"))


def _read_llama(fields: dict[str, Any], where: str) -> GPTConfig:
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise unlike_ours(where, f"scaled rope: {rope}")
    _allow(fields, where, "attention_bias", False)
    _allow(fields, where, "mlp_bias", False)
    found = _read(fields, where, "llama")
    found["rope_theta"] = float(rope.get("rope_theta", found["rope_theta"]))
    found["tied"] = fields.get("tie_word_embeddings", False)
    return GPTConfig(**found, gated=True, norm="rmsnorm", bias=False, positions="rotary")


def _read_bert(fields: dict[str, Any], where: str, nsp: bool) -> BERTConfig:
    _allow(fields, where, "position_embedding_type", "absolute")
    return BERTConfig(**_read(fields, where, "bert"), nsp=nsp)
