"""The model families of `families.toml`, in its order, and what no family needs to say. No torch."""

import tomllib
from collections.abc import Collection
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ..core.errors import Refused
from .config import GPTConfig
from .transformer import TransformerConfig


class Names(NamedTuple):
    """Their names of a decoder's tensors."""

    token: str
    layer: str
    norms: dict[str, str]
    qkv: list[str]  # three tensors, or one
    matrices: dict[str, str]
    norm: str
    output: str = "lm_head"
    position: str = ""
    router: str = ""
    experts: dict[str, str] = {}
    how: str = "split"


class Family(NamedTuple):
    """What a `model_type` of theirs is in our fields; families.toml says what each of these is."""

    architecture: str
    models: str
    fields: dict[str, str]
    usual: dict[str, Any]
    names: Names
    shape: dict[str, Any] = {}
    must: dict[str, list[Any]] = {}
    ignored: list[str] = []
    theta: tuple[str, float] = ("rope_theta", 10000.0)
    part: tuple[str, float] = ("", 1.0)
    windows: str = ""
    biased: str = ""


@cache
def families() -> dict[str, Family]:
    """By `model_type`."""
    found: dict[str, dict[str, Any]] = {}
    for kind, said in _table().items():
        if isinstance(said, dict):
            found[kind] = _merged(found.get(said.get("like", ""), {}), said)
    return {kind: _family(row) for kind, row in found.items()}


def ignored() -> frozenset[str]:
    """Fields of any config.json that change no number of the model."""
    return frozenset(_table()["everywhere"])


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("families.toml").read_text(encoding="utf-8"))


def _merged(before: dict[str, Any], said: dict[str, Any]) -> dict[str, Any]:
    """A row with the lines of its tables over those of another; "" takes a line away."""
    both = {
        name: _merged(before.get(name, {}), value) if isinstance(value, dict) else value
        for name, value in said.items()
    }
    return {name: value for name, value in (before | both).items() if value != "" or name == "biased"}


def _family(row: dict[str, Any]) -> Family:
    usual = dict.fromkeys(row.get("optional", [])) | row["usual"]
    said = {name: value for name, value in row.items() if name not in ("like", "optional")}
    return Family(**said | {"usual": usual, "names": Names(**row["names"])})


def refuse_beyond(config: TransformerConfig, known: Collection[str], who: str) -> None:
    """Raise Refused where a decoder has fields set, beyond those of a GPT-2 and a Llama, that `who` does not know."""
    if isinstance(config, GPTConfig) and (unknown := config.beyond(known)):
        why = ", ".join(f"{name} = {getattr(config, name)!r}" for name in unknown)
        fix = "docs/models.md has the table of what each family can do; torch generates, evaluates and serves it"
        raise Refused(f"{who} does not know this model", where=f"model.{unknown[0]}", why=why, fix=fix)
