"""Weights in and out of the Hugging Face layouts of the families (`families.toml`), with a fine-tuned head or without.

A table says which of their tensors make up each of ours; the same table is read in both directions, and both
are exact. Only safetensors files are read: a pickle can run code.
"""

import dataclasses
import json
import re
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core.errors import Failed, Refused, WrongUse
from .bert import BERT, SPAN_LABELS, BERTWithHead, Head, HeadKind
from .config import PROBLEM_TYPES, SINGLE_LABEL, BERTConfig, GPTConfig
from .families import Pair, families, head_pairs, pairs
from .gpt import GPT
from .huggingface_config import describe, read_config, unlike_ours
from .init import empty_model, empty_with_head
from .sentence import embeds

State = dict[str, Tensor]
Model = GPT | BERT | BERTWithHead
IGNORED = re.compile(
    r"(\.(attn|attention)\.(masked_)?bias|position_ids|rotary_emb\.inv_freq|^\w+\.pooler\.dense\.(weight|bias)"
    r"|^(lm_head|vocab_projector|generator_lm_head)\.weight|decoder\.(weight|bias)"
    r"|^discriminator_predictions\..*|\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight)$"
)
CLASSES: dict[HeadKind, str] = {  # how the name of a class with the head ends
    "sequence-classification": "ForSequenceClassification",
    "token-classification": "ForTokenClassification",
    "question-answering": "ForQuestionAnswering",
    "embedding": "Model",
}


def to_huggingface(model: Model, kind: str = "") -> tuple[dict[str, Any], State]:
    """The `config.json` fields and the tensors of a model, as the family `kind` or its config's if they have its shape,
    else the first that has (absent biases of GPT-2 and Phi are zeros; blocks of `predict_ahead` are written as
    DeepSeek-V3 alone). Raises `Refused` where there is none.
    """
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    dtype = next(iter(state.values())).dtype
    if isinstance(model, BERTWithHead):
        # the classes with a head have no MLM transform, so one that was trained without it fits as well
        fields, _ = describe(dataclasses.replace(model.config, mlm_transform=True, nsp=False))
        fields |= _head_fields(model.head, fields["architectures"][0])
        table = head_pairs(model.config, fields["model_type"], model.head.kind)
    else:
        fields, target = describe(
            dataclasses.replace(model.config, huggingface=kind or model.config.huggingface)
        )
        table = pairs(target, fields["model_type"])
        for name, parameter in empty_model(target).named_parameters():
            if name not in state:  # biases
                state[name] = torch.zeros(parameter.shape, dtype=dtype)
    fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    return fields, _outward(state, table, model.config.head_size)


def _head_fields(head: Head, architecture: str) -> dict[str, Any]:
    stem = architecture.removesuffix("ForMaskedLM")
    fields: dict[str, Any] = {"architectures": [stem + CLASSES[head.kind]]}
    if head.kind in ("sequence-classification", "token-classification"):
        fields["id2label"] = {str(i): label for i, label in enumerate(head.labels)}
        fields["label2id"] = {label: i for i, label in enumerate(head.labels)}
    if head.kind == "sequence-classification":
        fields["problem_type"] = head.problem
    return fields


def load_huggingface(directory: str | Path, dtype: torch.dtype = torch.float32) -> Model:
    """The model in a Hugging Face directory (`config.json` and safetensors), on the CPU, in this dtype, with its
    fine-tuned head where `architectures` names one.

    Raises `WrongUse` when files are missing, `Refused` when the model is of another kind or uses something
    that our models do not have, `Failed` when a tensor is missing or has the wrong shape.
    """
    directory = Path(directory)
    fields, state = read_directory(directory)
    where = str(directory / "config.json")
    name = (fields.get("architectures") or [""])[0]
    head = _read_head(fields, name, where)
    config, kind = read_config(fields, state, where), fields["model_type"]
    if isinstance(config, GPTConfig) and embeds(directory):  # for which an output matrix may not be saved
        tied = config.tied or f"{families()[kind].names.output}.weight" not in state
        config = dataclasses.replace(config, tied=tied)
    model: Model
    if head is None:
        model = empty_model(config, "cpu", dtype)
        fill(model, pairs(config, kind), state, directory)
        return model
    if not isinstance(config, BERTConfig):
        raise Failed("config.json names an encoder's class for another model", where=where, why=name)
    pooling = fields.get("classifier_pooling", "cls")
    if head.kind == "sequence-classification" and config.pooler == "features" and pooling != "cls":
        why = f"classifier_pooling = {pooling!r} (here a text's label is read off its first token)"
        raise unlike_ours(where, why)
    model = empty_with_head(config, head, "cpu", dtype)
    fill(model, head_pairs(model.config, kind, head.kind), state, directory)
    return model


def _read_head(fields: dict[str, Any], name: str, where: str) -> Head | None:
    """The head of a class of an encoder, None where it has that of pretraining."""
    encoders = [family.architecture for family in families().values() if family.encoder]
    ends = CLASSES.items()
    kinds = {each.removesuffix("ForMaskedLM") + end: kind for each in encoders for kind, end in ends}
    kinds["ElectraForPreTraining"] = "embedding"  # its head tells replaced words, for pretraining alone
    if (kind := kinds.get(name)) in (None, "embedding", "question-answering"):
        return kind and Head(kind, SPAN_LABELS if kind == "question-answering" else ())
    problem = fields.get("problem_type") or SINGLE_LABEL
    known = PROBLEM_TYPES if kind == "sequence-classification" else (SINGLE_LABEL,)
    if problem not in known:
        raise unlike_ours(where, f"problem_type = {problem!r}")
    given = fields.get("id2label") or {str(i): f"LABEL_{i}" for i in range(fields.get("num_labels") or 2)}
    try:
        labels = tuple(str(given[str(i)]) for i in range(len(given)))
    except (KeyError, TypeError) as error:
        raise Failed("id2label does not number its labels from 0", where=where, why=str(given)) from error
    return Head(kind, labels, problem)


def read_directory(directory: Path) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The fields of config.json, and the tensors by name, read when asked for. Raises as `load_huggingface`."""
    path = directory / "config.json"
    if not path.is_file():
        why = "it has no config.json"
        raise WrongUse("this is not a Hugging Face model directory", where=directory, why=why)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise Failed("config.json is not valid JSON", where=path, why=str(error)) from error
    if not isinstance(fields, dict):
        raise Failed("config.json is no table of fields", where=path)
    family = families().get(str(fields.get("model_type")))
    return fields, _read_tensors(directory, str if family is None else family.names.whole)


def fill(model: Model, table: Iterable[Pair], state: Mapping[str, Tensor], directory: Path) -> None:
    """Give every parameter of a model its values by this table of names; every tensor must have a place."""
    ours, table = dict(model.named_parameters()), list(table)
    if missing := [name for pair in table for name in pair.theirs if name not in state]:
        why = f"{len(missing)} of them, such as {', '.join(missing[:5])}"
        raise Failed("tensors are missing", where=directory, why=why)
    with torch.no_grad():
        for pair in table:
            value, wanted = _inward(state, pair, model.config.head_size), ours[pair.ours]
            if value.shape != wanted.shape:
                why = f"it has shape {tuple(value.shape)}, config.json asks for {tuple(wanted.shape)}"
                raise Failed(f"tensor {pair.theirs[0]} does not fit", where=directory, why=why)
            wanted.copy_(value)
    used = {name for pair in table for name in pair.theirs}
    if extra := [name for name in state if name not in used and not IGNORED.search(name)]:
        why = f"{len(extra)} tensors have no place in our model, such as {', '.join(extra[:5])}"
        raise Refused("this model has parts that ours do not", where=directory, why=why)


def _outward(state: State, table: Iterable[Pair], head_size: int) -> State:
    """Our tensors under their names and in their shapes."""
    theirs: State = {}
    stacked: dict[str, dict[int, Tensor]] = {}  # the rows of a tensor of theirs that several of ours make up
    woven: dict[str, dict[int, Tensor]] = {}  # and its columns
    for pair in table:
        for place, part in enumerate(_parted(state[pair.ours], pair, head_size)):
            if pair.rows:
                stacked.setdefault(pair.theirs[place], {})[pair.rows[place][0]] = part
            elif pair.how == "woven":
                woven.setdefault(pair.theirs[place], {})[pair.size] = part
            else:
                theirs[pair.theirs[place]] = part
    theirs |= {name: torch.stack((parts[0], parts[1]), -1).flatten(-2) for name, parts in woven.items()}
    return theirs | {name: torch.cat([parts[i] for i in sorted(parts)]) for name, parts in stacked.items()}


def _parted(value: Tensor, pair: Pair, head_size: int) -> list[Tensor]:
    if pair.how == "same":
        return [value]
    if pair.how == "transposed":
        return [value.mT.contiguous()]
    if pair.how == "woven":
        return [value.mT if value.dim() == 3 else value]
    if pair.how == "stacked":
        return [one.clone() for one in value]  # a file has no tensors that share memory
    if pair.how == "rolled":
        value = _reordered(value, pair.size, (2, pair.neighbours // 2))
        return [value.unflatten(0, (-1, pair.size)).roll(-pair.neighbours, 1).flatten(0, 1)]
    count = len(pair.theirs) if pair.how == "split" else 3
    rest = value.shape[1:]
    parts = [part.reshape(-1, *rest) for part in value.view(-1, count, head_size, *rest).unbind(1)]
    if pair.neighbours:
        parts[:2] = [_reordered(part, head_size, (2, pair.neighbours // 2)) for part in parts[:2]]
    return parts if pair.how == "split" else [torch.cat(parts).t().contiguous()]  # t() leaves a bias as it is


def _inward(state: Mapping[str, Tensor], pair: Pair, head_size: int) -> Tensor:
    values = [state[name] for name in pair.theirs]
    if pair.rows:
        values = [value[first:last] for value, (first, last) in zip(values, pair.rows)]
    if pair.how == "same":
        return values[0]
    if pair.how == "transposed":
        return values[0].mT
    if pair.how == "woven":
        half = values[0][..., pair.size :: 2]
        return half.mT if half.dim() == 3 else half
    if pair.how == "stacked":
        return torch.stack(values)
    if pair.how == "rolled":
        value = values[0].unflatten(0, (-1, pair.size)).roll(pair.neighbours, 1).flatten(0, 1)
        return _reordered(value, pair.size, (pair.neighbours // 2, 2))
    if pair.how == "conv_qkv":
        values = list(values[0].t().chunk(3))
    if pair.neighbours:
        values[:2] = [_reordered(value, head_size, (pair.neighbours // 2, 2)) for value in values[:2]]
    rest = values[0].shape[1:]
    return torch.stack([value.reshape(-1, head_size, *rest) for value in values], dim=1).flatten(0, 2)


def _reordered(value: Tensor, head_size: int, square: tuple[int, int]) -> Tensor:
    """The rows of every head that are turned, as a square of this shape, transposed: pairs (i, i + D/2), of a square
    of 2 rows, become (2i, 2i + 1), or of 2 columns the other way.
    """
    heads = value.unflatten(0, (-1, head_size))
    turned, rest = heads.tensor_split((square[0] * square[1],), 1)
    return torch.cat((turned.unflatten(1, square).transpose(1, 2).flatten(1, 2), rest), 1).flatten(0, 1)


class _Tensors(UserDict[str, Any]):
    """Tensors by today's names, read when asked for, so that loading a model holds one of them twice. A file is opened
    for each: a mapping keeps every page that was read until it is closed, which is the whole model again.
    """

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import safe_open

        path, stored = self.data[name]
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(stored)


def _read_tensors(directory: Path, named: Callable[[str], str]) -> _Tensors:
    from safetensors import SafetensorError, safe_open

    whole = directory / "model.safetensors"
    paths = [whole] if whole.is_file() else sorted(directory.glob("*.safetensors"))
    if not paths:
        why = "the directory has no weights at all"
        if list(directory.glob("*.bin")):
            why = "the directory has only pickled weights (.bin), which can run code"
        fix = "save the model again with save_pretrained() of a recent transformers, which writes safetensors"
        raise WrongUse("there are no safetensors files", where=directory, why=why, fix=fix)
    tensors = _Tensors()
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                tensors.data |= {named(name): (path, name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError) as error:
            raise Failed("the weights cannot be read", where=path, why=str(error)) from error
    return tensors
