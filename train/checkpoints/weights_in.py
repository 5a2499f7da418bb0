"""Trained weights from wherever they lie, as one of our models on the CPU: a run, a checkpoint, a model artifact, a
Hugging Face directory (GPT-2, Llama, BERT; safetensors), a nanoGPT checkpoint, a Megatron-LM checkpoint.

Runs, artifacts and Hugging Face directories are read here, the other two in `foreign_weights.py`.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ...core.artifact import MANIFEST, is_artifact, verify_artifact
from ...core.errors import Refused
from ...models.bert import BERT
from ...models.config import ModelConfig, family_of
from ...models.gpt import GPT
from ...models.huggingface_heads import load_huggingface
from ...models.init import empty_model, initial_values
from ...planner.tables import Box
from ..engine import Engine
from .checkpoint import load_model
from .foreign_weights import megatron_file, read_megatron, read_nanogpt


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
    model, tokenizer_file = load_model(path)
    return model, tokenizer_file


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
        found = family_of(model.config).upper()
        raise Refused(f"the weights are of a {found}", where=where, fix="set model.family")
    given = {name: parameter.detach() for name, parameter in model.named_parameters()}
    theirs = {name: tuple(value.shape) for name, value in given.items()}
    ours = {name: tuple(parameter.shape) for name, parameter in empty_model(wanted).named_parameters()}
    for name in sorted(ours | theirs, key=lambda name: (name in ours) + (name in theirs), reverse=True):
        there, here = theirs.get(name), ours.get(name)
        head = name.startswith(("mlm_", "pooler.", "nsp.")) and None in (there, here)
        if there != here and not head:
            why = f"{name} is {there or 'not there'}, the recipe asks for {here or 'none'}"
            fix = "set model.preset and model.overrides to the shape of the weights"
            raise Refused("the weights are of another model", where=where, why=why, fix=fix)
    return {name: value for name, value in given.items() if name in ours}


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
