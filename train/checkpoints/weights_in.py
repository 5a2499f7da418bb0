"""Trained weights from wherever they lie, as one of our models on the CPU: a run, a checkpoint, a model artifact, a
Hugging Face directory (GPT-2, Llama, BERT; safetensors), a nanoGPT checkpoint, a Megatron-LM checkpoint.

nanoGPT's and Megatron-LM's are pickles: torch's weights-only loader reads them, which makes tensors and plain
containers and runs nothing. Of Megatron-LM, one tensor and one pipeline rank: GPT with learned positions and BERT
(which has its norms first), in the names of Megatron core and in those before it.
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.artifact import MANIFEST, is_artifact, verify_artifact
from ...core.console import warn
from ...core.errors import Failed, Refused, WrongUse
from ...core.files import leaves, shipped_table
from ...data.backends import difference
from ...data.tokenizer import Tokenizer
from ...models import families, huggingface, huggingface_config
from ...models.bert import BERT
from ...models.config import BERTConfig, GPTConfig, ModelConfig, family_of
from ...models.gpt import GPT
from ...models.init import empty_model, initial_values
from ...planner.tables import Box
from ..engine import Engine
from .checkpoint import load_model

# fields that the weights leave open
FREE = ("dropout", "sequence_length", "mlm_transform", *huggingface_config.NOT_THEIRS)


def open_weights(path: Path | str) -> tuple[nn.Module, Path | None]:
    """The model at `path` and its tokenizer.json. Raises WrongUse, Refused (damaged, dangerous) or Failed (unfit)."""
    path = Path(path)
    if (path / "config.json").is_file():
        if is_artifact(path):
            verify_artifact(path)
        tokenizer = path / "tokenizer.json"
        return huggingface.load_huggingface(path).eval(), tokenizer if tokenizer.is_file() else None
    if path.suffix == ".pt" or (path / "ckpt.pt").is_file():
        return read_nanogpt(path if path.is_file() else path / "ckpt.pt"), None
    if not (path / MANIFEST).is_file() and (found := megatron_file(path)) is not None:
        return read_megatron(found), None
    return load_model(path)


def plain(model: nn.Module) -> GPT | BERT:
    """The pretrained model; of one that was fine-tuned before, its encoder."""
    found = getattr(model, "encoder", model)
    assert isinstance(found, GPT | BERT), "a GPT, a BERT or a BERT with a head"
    return found


def adopt(model: nn.Module, wanted: ModelConfig, where: str) -> dict[str, Tensor]:
    """The values of a trained model, for a run of the shape `wanted`. Raises Refused when the shapes differ.

    Dropout may differ, the length where no table has it, blocks that predict further tokens, for BERT the pretraining
    heads, which then keep their first values; nothing else: other heads, another rope or epsilon are another model.
    """
    model = plain(model)
    if family_of(model.config) != family_of(wanted):
        found = family_of(model.config).upper()
        raise Refused(f"the weights are of a {found}", where=where, fix="set model.family")
    fix = "leave model.preset and these overrides out: the recipe takes the shape beside the weights"
    config: Any = model.config
    other = []
    for name in (field.name for field in fields(config) if field.name not in FREE):
        there, here = (getattr(each, huggingface_config.WHOLE.get(name, name)) for each in (config, wanted))
        if there != here:
            other.append(f"{name} is {there}, the recipe asks for {here}")
    if other:
        raise Refused("the weights are of another model", where=where, why="\n".join(other), fix=fix)
    most = max(config.block_count, wanted.block_count)
    given = {name: parameter.detach() for name, parameter in model.named_parameters()}
    theirs = {name: tuple(value.shape) for name, value in given.items()}
    ours = {name: tuple(parameter.shape) for name, parameter in empty_model(wanted).named_parameters()}
    extra = ("mlm_", "pooler.", "nsp.", *(f"blocks.{layer}." for layer in range(wanted.layers, most)))
    for name in sorted(ours | theirs, key=lambda name: (name in ours) + (name in theirs), reverse=True):
        there, here = theirs.get(name), ours.get(name)
        if there != here and not (name.startswith(extra) and None in (there, here)):
            why = f"{name} is {there or 'not there'}, the recipe asks for {here or 'none'}"
            raise Refused("the weights are of another model", where=where, why=why, fix=fix)
    return {name: value for name, value in given.items() if name in ours}


def check_tokens(tokens: Tokenizer, weights: Path | None, where: str) -> None:
    """Refuse tokens that are not those of the weights, whose tokenizer.json this is: the same text would be others."""
    if weights is None:
        return warn(f"no tokenizer.json beside {where}: whether it was trained on such tokens is not known")
    theirs = Tokenizer.load(weights)
    if theirs.fingerprint() != tokens.fingerprint() and (why := difference(theirs, tokens)):
        why = why.replace("the reference", "the tokens to train on")
        fix = f"tokenise the text again with --tokenizer {where}"
        raise Refused("the weights were trained with another tokenizer", where=weights, why=why, fix=fix)


def start_from(values: Mapping[str, Tensor], engine: Engine) -> None:
    """Give an engine these weights, which may stand below a new head there; what they lack keeps its first values."""

    def value_of(name: str, box: Box) -> Tensor:
        known = values.get(name.removeprefix("encoder."))
        if known is not None:
            return known.detach()[box.slices()]
        return initial_values(name, torch.Size(engine.shapes[name]), engine.config, engine.seed, box.slices())

    engine.fill(value_of)


def read_pickle(path: Path) -> dict[str, Any]:
    """A checkpoint file of tensors and plain values. Refused when it holds anything that would run code."""
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            tree = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # pickle, zip and torch each raise their own
        why = str(error).split("\n")[0][:300]
        fix = "save the weights alone: torch.save({'model': model.state_dict(), ...}), or as safetensors"
        what = "the checkpoint holds more than tensors, or is damaged"
        raise Refused(what, where=path, why=why, fix=fix) from error
    if not isinstance(tree, dict):
        raise Refused("the checkpoint is no table of tensors", where=path)
    return tree


SHAPE = ("vocab_size", "sequence_length", "layers", "width", "heads")
NANOGPT = ("vocab_size", "block_size", "n_layer", "n_embd", "n_head")  # the same there


def read_nanogpt(path: Path) -> GPT:
    """nanoGPT's `ckpt.pt`: {"model", "model_args", ...}, matrices as (out, in)."""
    tree = read_pickle(path)
    arguments, state = tree.get("model_args"), tree.get("model")
    if not isinstance(arguments, dict) or not isinstance(state, Mapping):
        raise WrongUse("not a nanoGPT checkpoint", where=path, why="it has no model_args and model")
    try:
        shape = {ours: arguments[theirs] for ours, theirs in zip(SHAPE, NANOGPT)}
    except KeyError as error:
        raise Failed(f"model_args has no {error}", where=path) from error
    dropout, bias = arguments.get("dropout", 0.0), bool(arguments.get("bias", True))
    config = GPTConfig(**shape, dropout=dropout, bias=bias, activation="gelu")
    theirs = {}
    for name, value in state.items():
        name = name.removeprefix("_orig_mod.")
        theirs[name] = value.t() if value.dim() == 2 and (".attn." in name or ".mlp." in name) else value
    model = empty_model(config, "cpu", torch.float32)
    ours = dict(model.named_parameters())
    table = families.pairs(config, huggingface_config.family_of_shape(config))
    huggingface.fill(model, [pair for pair in table if pair.ours in ours], theirs, path)
    assert isinstance(model, GPT)
    return model.eval()


def megatron_file(path: Path) -> Path | None:
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


NAMES = shipped_table(__file__, "megatron.toml")["names"]  # patterns, and ours


def read_megatron(path: Path) -> GPT | BERT:
    """The model of a Megatron-LM checkpoint. Raises Refused for a model that ours cannot be."""
    tree = read_pickle(path)
    state, arguments = tree.get("model"), tree.get("args")
    if not isinstance(state, Mapping) or arguments is None:
        raise WrongUse("not a Megatron-LM checkpoint", where=path, why="it has no model and args")
    heads = int(arguments.num_attention_heads)
    tensors = [(name, x) for name, x in leaves(state) if isinstance(x, Tensor)]
    # an extra state only says how to load it
    values = {_our_name(name): x for name, x in tensors if not name.endswith("_extra_state")}
    if "language_model" in state:
        version = float(tree.get("checkpoint_version", 0))
        for name in (name for name in values if ".attention.qkv." in name):
            values[name] = _by_heads(values[name], heads, version)
    config = _megatron_config(values, arguments, heads, path)
    if isinstance(config, BERTConfig) or config.tied:
        values.pop("output.weight", None)  # the token table once more
    model = empty_model(config, "cpu", torch.float32)
    try:
        model.load_state_dict(values)
    except RuntimeError as error:  # with each name and shape that differs
        raise Refused("the checkpoint has parts that ours do not", where=path, why=str(error)) from error
    assert isinstance(model, (GPT, BERT))
    return model.eval()


def _our_name(name: str) -> str:
    for theirs, ours in NAMES:
        name = re.sub(theirs, ours, name)
    return name


def _by_heads(value: Tensor, heads: int, version: float) -> Tensor:
    """Rows of query, key and value head by head, as checkpoints have them since version 2."""
    if version >= 2:
        return value
    split = (heads, -1, 3) if version >= 1 else (3, heads, -1)
    order = (0, 2, 1) if version >= 1 else (1, 0, 2)
    rows = value.unflatten(0, split)
    return rows.permute(*order, *range(3, rows.dim())).reshape(value.shape)


def _megatron_config(values: dict[str, Tensor], arguments: Any, heads: int, path: Path) -> ModelConfig:
    if not {"token_table.weight", "position_table.weight", "blocks.0.mlp.up.weight"} <= set(values):
        why = ", ".join(list(values)[:4])
        raise Refused("only a GPT or a BERT with learned positions can be read", where=path, why=why)
    table = values["token_table.weight"]
    epsilon = getattr(arguments, "norm_epsilon", getattr(arguments, "layernorm_epsilon", 1e-5))
    shape: dict[str, Any] = {
        "vocab_size": table.shape[0],
        "sequence_length": values["position_table.weight"].shape[0],
        "layers": 1 + max(int(name.split(".")[1]) for name in values if name.startswith("blocks.")),
        "width": table.shape[1],
        "heads": heads,
        "mlp_width": values["blocks.0.mlp.up.weight"].shape[0],
        "activation": "gelu",
        "norm_epsilon": float(epsilon),
        "bias": "blocks.0.mlp.up.bias" in values,
        "dropout": float(getattr(arguments, "hidden_dropout", 0.0)),
    }
    if "mlm_bias" not in values:
        return GPTConfig(**shape, tied=not getattr(arguments, "untie_embeddings_and_output_weights", False))
    types = values.get("type_table.weight")
    return BERTConfig(
        **shape,
        norm_first=True,
        token_types=0 if types is None else types.shape[0],
        nsp="nsp.weight" in values,
        mlm_transform="mlm_transform.weight" in values,
    )
