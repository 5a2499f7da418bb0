"""Trained weights from wherever they lie, as one of our models on the CPU: a run, a checkpoint, a model artifact, a
Hugging Face directory (GPT-2, Llama, BERT; safetensors), a nanoGPT checkpoint, a Megatron-LM checkpoint.

Foreign pickles are read by torch's weights-only loader, which makes tensors and plain containers and runs nothing.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.artifact import MANIFEST, is_artifact, verify_artifact
from ..core.errors import Failed, Refused, WrongUse
from ..models.bert import BERT
from ..models.config import GPTConfig, ModelConfig, family_of
from ..models.gpt import GPT
from ..models.huggingface import fill
from ..models.huggingface_heads import load_huggingface
from ..models.huggingface_names import pairs
from ..models.init import empty_model, initial_values
from ..planner.tables import Box, parameter_shapes
from .checkpoint import load_model
from .engine import Engine


def open_weights(path: Path | str) -> tuple[nn.Module, Path | None]:
    """The model at `path`, with its head if it has one, and its tokenizer.json (None when there is none).

    Raises WrongUse for what is no model, Refused for a damaged or dangerous one, Failed for one that does not
    fit together.
    """
    path = Path(path)
    if (path / "config.json").is_file():
        if is_artifact(path):
            verify_artifact(path)
        tokenizer = path / "tokenizer.json"
        return load_huggingface(path).eval(), tokenizer if tokenizer.is_file() else None
    if path.suffix == ".pt" or (path / "ckpt.pt").is_file():
        return _nanogpt(path if path.is_file() else path / "ckpt.pt"), None
    if not (path / MANIFEST).is_file() and (found := _megatron_file(path)) is not None:
        return _megatron(found), None
    model, tokenizer_file = load_model(path)
    return model, tokenizer_file


def read_pickle(path: Path) -> dict[str, Any]:
    """A checkpoint file of tensors and plain values. Refused when it holds anything that would run code."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, zip and torch each raise their own
        why = str(error).split("\n")[0][:300]
        fix = "save the weights alone: torch.save({'model': model.state_dict(), ...}), or as safetensors"
        raise Refused(
            "the checkpoint holds more than tensors, or is damaged", where=path, why=why, fix=fix
        ) from error
    if not isinstance(tree, dict):
        raise Refused("the checkpoint is no table of tensors", where=path)
    return tree


def adopt(model: nn.Module, wanted: ModelConfig, where: str) -> dict[str, Tensor]:
    """The values of a trained model, for a run of the shape `wanted`. Raises Refused when the shapes differ.

    Only what shapes no tensor may differ: dropout, and for BERT the pretraining heads, which then keep their
    first values.
    """
    if not isinstance(model, (GPT, BERT)):
        encoder = getattr(model, "encoder", None)
        assert isinstance(encoder, BERT), "a GPT, a BERT or a BERT with a head"
        model = encoder
    if family_of(model.config) != family_of(wanted):
        raise Refused(
            f"the weights are of a {family_of(model.config).upper()}", where=where, fix="set model.family"
        )
    given = {name: parameter.detach() for name, parameter in model.named_parameters()}
    ours = {name: tuple(parameter.shape) for name, parameter in empty_model(wanted).named_parameters()}
    heads = ("mlm_", "pooler.", "nsp.")
    missing = [name for name in ours if name not in given and not name.startswith(heads)]
    spare = [name for name in given if name not in ours and not name.startswith(heads)]
    other = [name for name in given if name in ours and tuple(given[name].shape) != ours[name]]
    if missing or spare or other:
        name = (other or missing or spare)[0]
        there, here = given.get(name), ours.get(name)
        why = f"{name} is {tuple(there.shape) if there is not None else 'not there'}, the recipe asks for {here or 'none'}"
        fix = "set model.preset and model.overrides to the shape of the weights"
        raise Refused("the weights are of another model", where=where, why=why, fix=fix)
    return {name: value for name, value in given.items() if name in ours}


def start_from(path: Path | str, engine: Engine) -> None:
    """Give an engine, in any layout, the weights at `path`; what they lack keeps its first values."""
    model, _ = open_weights(path)
    values, shapes = adopt(model, engine.config, str(path)), parameter_shapes(engine.config)

    def value_of(name: str, box: Box) -> Tensor:
        if name not in values:
            values[name] = initial_values(name, torch.Size(shapes[name]), engine.config, engine.seed)
        return values[name][box.slices()]

    engine.fill(value_of)


# --- nanoGPT --------------------------------------------------------------------------------------------------------


def _nanogpt(path: Path) -> GPT:
    """nanoGPT's `ckpt.pt`: {"model", "model_args", ...}, matrices as (out, in)."""
    tree = read_pickle(path)
    arguments, state = tree.get("model_args"), tree.get("model")
    if not isinstance(arguments, dict) or not isinstance(state, Mapping):
        raise WrongUse("not a nanoGPT checkpoint", where=path, why="it has no model_args and model")
    try:
        config = GPTConfig(
            vocab_size=arguments["vocab_size"],
            sequence_length=arguments["block_size"],
            layers=arguments["n_layer"],
            width=arguments["n_embd"],
            heads=arguments["n_head"],
            dropout=arguments.get("dropout", 0.0),
            bias=bool(arguments.get("bias", True)),
            activation="gelu",
        )
    except KeyError as error:
        raise Failed(f"model_args has no {error}", where=path) from error
    theirs = {}
    for name, value in state.items():
        name = name.removeprefix("_orig_mod.")
        turned = ".attn." in name or ".mlp." in name
        theirs[name] = value.t() if turned and value.dim() == 2 else value
    return _filled(config, theirs, path)


def _filled(config: GPTConfig, theirs: dict[str, Tensor], path: Path) -> GPT:
    model = empty_model(config, "cpu", torch.float32)
    ours = dict(model.named_parameters())
    table = [pair for pair in pairs(config) if pair.ours in ours]
    fill(model, table, config.head_size, theirs, path)
    assert isinstance(model, GPT)
    return model.eval()


# --- Megatron-LM ----------------------------------------------------------------------------------------------------


def _megatron_file(path: Path) -> Path | None:
    """The weights of a Megatron-LM checkpoint of one process: `model_optim_rng.pt` below `path`."""
    pointer = path / "latest_checkpointed_iteration.txt"
    if pointer.is_file():
        step = pointer.read_text().strip()
        path = path / ("release" if step == "release" else f"iter_{int(step):07d}")
    found = sorted(path.glob("mp_rank_*/model_optim_rng.pt")) if path.is_dir() else []
    if len(found) > 1:
        why = f"it has {len(found)} parts"
        fix = "convert it to one tensor and pipeline rank with Megatron-LM's tools/checkpoint"
        raise Refused("the Megatron-LM checkpoint is cut over processes", where=path, why=why, fix=fix)
    return found[0] if found else None


# Megatron core's names for a GPT with learned positions -> ours, below `decoder.layers.N.` and `blocks.N.`
CORE_LAYER = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.linear_proj": "attention.out",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
}
CORE = {
    "embedding.word_embeddings.weight": "token_table.weight",
    "embedding.position_embeddings.weight": "position_table.weight",
    "decoder.final_layernorm.weight": "norm.weight",
    "decoder.final_layernorm.bias": "norm.bias",
    "output_layer.weight": "output.weight",
}


def _megatron(path: Path) -> GPT:
    """A GPT of Megatron core, one process: its matrices lie as ours do, query, key and value head by head."""
    tree = read_pickle(path)
    state, arguments = tree.get("model"), tree.get("args")
    if not isinstance(state, Mapping) or arguments is None:
        raise WrongUse("not a Megatron-LM checkpoint", where=path, why="it has no model and args")
    if "language_model" in state:
        fix = "convert it with Megatron-LM's tools/checkpoint to Megatron core"
        raise Refused("the checkpoint is of Megatron-LM's old layout", where=path, fix=fix)
    values: dict[str, Tensor] = {}
    for name, value in state.items():
        if isinstance(value, Tensor) and (ours := _core_name(name)) is not None:
            values[ours] = value
    count = 1 + max((int(name.split(".")[1]) for name in values if name.startswith("blocks.")), default=-1)
    if not count or "token_table.weight" not in values or "position_table.weight" not in values:
        raise Refused(
            "only a GPT with learned positions can be read", where=path, why=", ".join(list(state)[:4])
        )
    table, up = values["token_table.weight"], values["blocks.0.mlp.up.weight"]
    config = GPTConfig(
        vocab_size=table.shape[0],
        sequence_length=values["position_table.weight"].shape[0],
        layers=count,
        width=table.shape[1],
        heads=int(arguments.num_attention_heads),
        mlp_width=up.shape[0],
        activation="gelu",
        norm_epsilon=float(getattr(arguments, "norm_epsilon", getattr(arguments, "layernorm_epsilon", 1e-5))),
        bias="blocks.0.mlp.up.bias" in values,
        dropout=float(getattr(arguments, "hidden_dropout", 0.0)),
        tied=not getattr(arguments, "untie_embeddings_and_output_weights", False),
    )
    model = empty_model(config, "cpu", torch.float32)
    if config.tied:
        values.pop("output.weight", None)
    ours_names = dict(model.named_parameters())
    if different := set(ours_names) ^ set(values):
        raise Refused(
            "the checkpoint has parts that ours do not", where=path, why=", ".join(sorted(different)[:4])
        )
    with torch.no_grad():
        for name, parameter in ours_names.items():
            if parameter.shape != values[name].shape:
                why = f"{name} is {tuple(values[name].shape)}, ours {tuple(parameter.shape)}"
                raise Refused("the checkpoint is of a shape that ours does not have", where=path, why=why)
            parameter.copy_(values[name])
    assert isinstance(model, GPT)
    return model.eval()


def _core_name(name: str) -> str | None:
    """Our name of one of Megatron core's; None for what is no parameter of the function (extra states)."""
    if name.endswith("_extra_state"):
        return None
    if name in CORE:
        return CORE[name]
    if not name.startswith("decoder.layers."):
        return name
    layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
    for fused, norm in (("self_attention.linear_qkv", "attention_norm"), ("mlp.linear_fc1", "mlp_norm")):
        if rest.startswith(f"{fused}.layer_norm_"):  # transformer engine's linear holds the norm before it
            return f"blocks.{layer}.{norm}.{rest.removeprefix(f'{fused}.layer_norm_')}"
    module, _, kind = rest.rpartition(".")
    return f"blocks.{layer}.{CORE_LAYER.get(module, module)}.{kind}"
