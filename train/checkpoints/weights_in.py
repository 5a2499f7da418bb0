"""Trained weights from wherever they lie, as one of our models on the CPU: a run, a checkpoint, a model artifact, a
Hugging Face directory (GPT-2, Llama, BERT; safetensors), a nanoGPT checkpoint, a Megatron-LM checkpoint.

Runs, artifacts and Hugging Face directories are read here, the other two in `foreign_weights.py`.
"""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.artifact import MANIFEST, is_artifact, verify_artifact
from ...core.errors import Refused
from ...data.backends import Reference, difference
from ...data.tokenizer import Tokenizer
from ...models.bert import BERT
from ...models.config import ModelConfig, family_of
from ...models.gpt import GPT
from ...models.huggingface_config import WHOLE
from ...models.huggingface_heads import load_huggingface
from ...models.init import empty_model, initial_values
from ...planner.tables import Box
from ..engine import Engine
from .checkpoint import load_model
from .foreign_weights import megatron_file, read_megatron, read_nanogpt

# fields that the weights leave open
FREE = ("dropout", "sequence_length", "nsp", "mlm_transform", "huggingface")


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
        return read_nanogpt(path if path.is_file() else path / "ckpt.pt"), None
    if not (path / MANIFEST).is_file() and (found := megatron_file(path)) is not None:
        return read_megatron(found), None
    return load_model(path)


def adopt(model: nn.Module, wanted: ModelConfig, where: str) -> dict[str, Tensor]:
    """The values of a trained model, for a run of the shape `wanted`. Raises Refused when the shapes differ.

    Dropout may differ, the length where no table has it, and for BERT the pretraining heads, which then keep their
    first values; nothing else: other heads, another rope or epsilon of the same shapes are another model.
    """
    if not isinstance(model, (GPT, BERT)):
        encoder = getattr(model, "encoder", None)
        assert isinstance(encoder, BERT), "a GPT, a BERT or a BERT with a head"
        model = encoder
    if family_of(model.config) != family_of(wanted):
        found = family_of(model.config).upper()
        raise Refused(f"the weights are of a {found}", where=where, fix="set model.family")
    fix = (
        "leave model.preset and these overrides out: the recipe takes the shape that lies beside the weights"
    )
    config: Any = model.config
    other = []
    for name in (field.name for field in fields(config) if field.name not in FREE):
        there, here = (getattr(each, WHOLE.get(name, name)) for each in (config, wanted))
        if there != here:
            other.append(f"{name} is {there}, the recipe asks for {here}")
    if other:
        raise Refused("the weights are of another model", where=where, why="\n".join(other), fix=fix)
    given = {name: parameter.detach() for name, parameter in model.named_parameters()}
    theirs = {name: tuple(value.shape) for name, value in given.items()}
    ours = {name: tuple(parameter.shape) for name, parameter in empty_model(wanted).named_parameters()}
    for name in sorted(ours | theirs, key=lambda name: (name in ours) + (name in theirs), reverse=True):
        there, here = theirs.get(name), ours.get(name)
        head = name.startswith(("mlm_", "pooler.", "nsp.")) and None in (there, here)
        if there != here and not head:
            why = f"{name} is {there or 'not there'}, the recipe asks for {here or 'none'}"
            raise Refused("the weights are of another model", where=where, why=why, fix=fix)
    return {name: value for name, value in given.items() if name in ours}


def check_tokens(tokens: Tokenizer, weights: Path | None, where: str) -> None:
    """Refuse tokens that are not those of the weights, whose tokenizer.json this is: the same text would be others."""
    theirs = None if weights is None else Tokenizer.load(weights)
    if theirs is None or theirs.fingerprint() == tokens.fingerprint():
        return
    if why := difference(Reference(theirs), tokens):
        why = why.replace("the reference", "the tokens to train on")
        fix = f"tokenise the text again with --tokenizer {where}"
        raise Refused("the weights were trained with another tokenizer", where=weights, why=why, fix=fix)


def start_from(values: Mapping[str, Tensor], engine: Engine) -> None:
    """Give an engine, in any layout, these weights, which may stand below a new head there; what they lack keeps its
    first values.
    """

    def value_of(name: str, box: Box) -> Tensor:
        known = values.get(name.removeprefix("encoder."))
        if known is not None:
            return known.detach()[box.slices()]
        return initial_values(name, torch.Size(engine.shapes[name]), engine.config, engine.seed, box.slices())

    engine.fill(value_of)
