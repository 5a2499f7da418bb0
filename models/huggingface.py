"""Weights in and out of the Hugging Face layouts of the families (`families.toml`).

A table says which of their tensors make up each of ours; the same table is read in both directions, and both
are exact. Only safetensors files are read: a pickle can run code.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.errors import Failed, Refused, WrongUse
from .bert import BERT
from .families import families
from .gpt import GPT
from .huggingface_config import describe, read_config
from .huggingface_names import Pair, pairs
from .init import empty_model

State = dict[str, Tensor]
IGNORED = re.compile(
    r"(\.(attn|attention)\.(masked_)?bias|position_ids|rotary_emb\.inv_freq|^\w+\.pooler\.dense\.(weight|bias)"
    r"|^(lm_head|vocab_projector|generator_lm_head)\.weight|decoder\.(weight|bias)"
    r"|^discriminator_predictions\..*)$"
)


def to_huggingface(model: GPT | BERT) -> tuple[dict[str, Any], State]:
    """The `config.json` fields and the tensors of a model, in the layout that its shape has at Hugging Face.

    A model becomes the family that its config names or the first that has its shape (GPT-2's absent biases are written
    as zeros: the same function). Raises `Refused` for a shape that none of them can express.
    """
    config = model.config
    fields, target = describe(config)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in empty_model(target).named_parameters():
        if name not in state:  # only the biases of a bias-free GPT-2
            state[name] = torch.zeros(parameter.shape, dtype=model.token_table.weight.dtype)
    theirs = outward(state, list(pairs(target, fields["model_type"])), config.head_size)
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
    fill(model, list(pairs(config, fields["model_type"])), config.head_size, state, directory)
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
    family = families().get(str(fields.get("model_type")))
    return fields, _read_tensors(directory, (lambda name: name) if family is None else family.names.whole)


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
            value = _inward(_theirs(state, pair), pair, head_size)
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


def outward(state: State, table: Sequence[Pair], head_size: int) -> State:
    """Our tensors under their names and in their shapes."""
    theirs: State = {}
    stacked: dict[str, dict[int, Tensor]] = {}  # the rows of a tensor of theirs that several of ours make up
    for pair in table:
        for place, part in enumerate(_outward(state[pair.ours], pair, head_size)):
            if pair.rows:
                stacked.setdefault(pair.theirs[place], {})[pair.rows[place][0]] = part
            else:
                theirs[pair.theirs[place]] = part
    return theirs | {name: torch.cat([parts[i] for i in sorted(parts)]) for name, parts in stacked.items()}


def _theirs(state: Mapping[str, Tensor], pair: Pair) -> list[Tensor]:
    values = [state[name] for name in pair.theirs]
    return [value[first:last] for value, (first, last) in zip(values, pair.rows)] if pair.rows else values


def _outward(value: Tensor, pair: Pair, head_size: int) -> list[Tensor]:
    if pair.how == "same":
        return [value]
    if pair.how == "transposed":
        return [value.t().contiguous()]
    if pair.how == "stacked":
        return [one.clone() for one in value]  # a file has no tensors that share memory
    count = len(pair.theirs) if pair.how == "split" else 3
    rest = value.shape[1:]
    parts = [part.reshape(-1, *rest) for part in value.view(-1, count, head_size, *rest).unbind(1)]
    if pair.neighbours:
        parts[:2] = [_reordered(part, head_size, (2, pair.neighbours // 2)) for part in parts[:2]]
    return parts if pair.how == "split" else [torch.cat(parts).t().contiguous()]  # t() leaves a bias as it is


def _inward(values: list[Tensor], pair: Pair, head_size: int) -> Tensor:
    if pair.how == "same":
        return values[0]
    if pair.how == "transposed":
        return values[0].t()
    if pair.how == "stacked":
        return torch.stack(values)
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


def _read_tensors(directory: Path, named: Callable[[str], str]) -> _Tensors:
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
                places |= {named(name): (path, name) for name in file.keys()}  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError) as error:
            raise Failed("the weights cannot be read", where=path, why=str(error)) from error
    return _Tensors(places)
