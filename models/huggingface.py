"""Weights in and out of the Hugging Face layouts of GPT-2, Llama and BERT.

A table says which of their tensors make up each of ours; the same table is read in both directions, and both
are exact. Only safetensors files are read: a pickle can run code.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import Failed, Refused, WrongUse
from .bert import BERT
from .config import BERTConfig, GPTConfig, ModelConfig
from .gpt import GPT
from .huggingface_names import Pair, pairs
from .init import empty_model

State = dict[str, Tensor]
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}
THEIR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {
    "gelu_pytorch_tanh": "gelu_tanh"
}
IGNORED = re.compile(
    r"(\.attn\.(masked_)?bias|position_ids|rotary_emb\.inv_freq|^lm_head\.weight|decoder\.(weight|bias))$"
)


def to_huggingface(model: GPT | BERT) -> tuple[dict[str, Any], State]:
    """The `config.json` fields and the tensors of a model, in the layout that its shape has at Hugging Face.

    A GPT with learned positions becomes GPT-2 (absent biases are written as zeros: the same function), a
    rotary one Llama, a post-norm BERT with an MLM transform BERT. Raises `Refused` for a shape that none of
    them can express.
    """
    config = model.config
    fields, target = describe(config)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in empty_model(target).named_parameters():
        if name not in state:  # only the biases of a bias-free GPT-2
            state[name] = torch.zeros(parameter.shape, dtype=model.token_table.weight.dtype)
    theirs = outward(state, list(pairs(target)), config.head_size)
    fields["torch_dtype"] = str(model.token_table.weight.dtype).removeprefix("torch.")
    return fields, theirs


def from_huggingface(directory: str | Path, dtype: torch.dtype = torch.float32) -> GPT | BERT:
    """The model in a Hugging Face directory (`config.json` and safetensors), on the CPU, in this dtype.

    Raises `WrongUse` when files are missing, `Refused` when the model is of another kind or uses something
    that our models do not have, `Failed` when a tensor is missing or has the wrong shape.
    """
    directory = Path(directory)
    fields, state = read_directory(directory)
    config = read_config(fields, state, str(directory / "config.json"))
    model = empty_model(config, "cpu", dtype)
    fill(model, list(pairs(config)), config.head_size, state, directory)
    return model


def read_directory(directory: Path) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The fields of config.json, and the tensors by name, read when asked for. Raises as `from_huggingface`."""
    path = directory / "config.json"
    if not path.is_file():
        raise WrongUse(
            "this is not a Hugging Face model directory", where=directory, why="it has no config.json"
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Failed("config.json is not valid JSON", where=path, why=str(error)) from error
    if not isinstance(fields, dict):
        raise Failed("config.json is no table of fields", where=path)
    return fields, _read_tensors(directory)


def fill(
    model: nn.Module, table: Sequence[Pair], head_size: int, state: Mapping[str, Tensor], directory: Path
) -> None:
    """Give every parameter of a model its values by this table of names; every tensor must have a place."""
    ours = dict(model.named_parameters())
    missing = [name for pair in table for name in pair.theirs if name not in state]
    if missing:
        raise Failed(
            "tensors are missing",
            where=directory,
            why=f"{len(missing)} of them, such as {', '.join(missing[:5])}",
        )
    used: set[str] = set()
    with torch.no_grad():
        for pair in table:
            value = _inward([state[name] for name in pair.theirs], pair, head_size)
            if value.shape != ours[pair.ours].shape:
                why = (
                    f"it has shape {tuple(value.shape)}, config.json asks for {tuple(ours[pair.ours].shape)}"
                )
                raise Failed(f"tensor {pair.theirs[0]} does not fit", where=directory, why=why)
            ours[pair.ours].copy_(value)
            used.update(pair.theirs)
    extra = [name for name in state if name not in used and not IGNORED.search(name)]
    if extra:
        why = f"{len(extra)} tensors have no place in our model, such as {', '.join(extra[:5])}"
        raise Refused("this model has parts that ours do not", where=directory, why=why)


# --- configs
# --------------------------------------------------------------------------------------------------------------


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


# --- tensors
# --------------------------------------------------------------------------------------------------------------


def outward(state: State, table: Sequence[Pair], head_size: int) -> State:
    """Our tensors under their names and in their shapes."""
    theirs: State = {}
    for pair in table:
        theirs.update(zip(pair.theirs, _outward(state[pair.ours], pair, head_size), strict=True))
    return theirs


def _outward(value: Tensor, pair: Pair, head_size: int) -> list[Tensor]:
    if pair.how == "same":
        return [value]
    if pair.how == "transposed":
        return [value.t().contiguous()]
    count = len(pair.theirs) if pair.how == "split" else 3
    rest = value.shape[1:]
    parts = [part.reshape(-1, *rest) for part in value.view(-1, count, head_size, *rest).unbind(1)]
    return parts if pair.how == "split" else [torch.cat(parts).t().contiguous()]  # t() leaves a bias as it is


def _inward(values: list[Tensor], pair: Pair, head_size: int) -> Tensor:
    if pair.how == "same":
        return values[0]
    if pair.how == "transposed":
        return values[0].t()
    if pair.how == "conv_qkv":
        values = list(values[0].t().chunk(3))
    rest = values[0].shape[1:]
    return torch.stack([value.reshape(-1, head_size, *rest) for value in values], dim=1).flatten(0, 2)


class _Tensors(Mapping[str, Tensor]):
    """Tensors of safetensors files under today's names, read when asked for, so that loading a model holds
    one of them twice.

    A file is opened for each: a mapping keeps every page that was read until it is closed, which is the whole
    model again.
    """

    def __init__(self, places: dict[str, tuple[Path, str]]) -> None:
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        path, stored = self._places[name]
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(stored)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _read_tensors(directory: Path) -> _Tensors:
    from safetensors import SafetensorError, safe_open

    whole = directory / "model.safetensors"
    paths = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    if not paths:
        found = (
            "only pickled weights (.bin), which can run code"
            if list(directory.glob("*.bin"))
            else "no weights at all"
        )
        fix = "save the model again with save_pretrained() of a recent transformers, which writes safetensors"
        raise WrongUse(
            "there are no safetensors files", where=directory, why=f"the directory has {found}", fix=fix
        )
    places: dict[str, tuple[Path, str]] = {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                places |= {_canonical(name): (path, name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError) as error:
            raise Failed("the weights cannot be read", where=path, why=str(error)) from error
    return _Tensors(places)


def _canonical(name: str) -> str:
    """A tensor's name as today's classes write it: with the base model's prefix, and without TensorFlow's
    gamma and beta.
    """
    if name.startswith(("wte.", "wpe.", "h.", "ln_f.")):
        name = f"transformer.{name}"
    elif name.startswith(("embed_tokens.", "layers.", "norm.")):
        name = f"model.{name}"
    elif name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
