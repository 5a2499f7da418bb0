"""The model families of `families.toml`, in its order, and what no family needs to say. No torch."""

import tomllib
from collections.abc import Collection
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ..core.errors import Refused
from .transformer import TransformerConfig


class Names(NamedTuple):
    """Their names of a model's tensors; "": it has none."""

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
    shared: dict[str, str] = {}  # of the feed-forward that every token goes through
    balance: str = ""  # the bias of the router's choice, a whole name
    how: str = "split"
    types: str = ""
    embedding_norm: str = ""
    projection: str = ""
    transform: tuple[str, str, str] = ("", "", "")  # before the masked-LM decoder: matrix, norm; its bias
    pair: str = ""  # the next-sentence matrix
    pooler: str = ""
    classifier: str = "classifier"  # of fine-tuned labels of texts, and of spans
    question: str = "qa_outputs"

    @property
    def prefix(self) -> str:
        """What stands before every name, and is missing where the model was saved without a head."""
        return self.token.partition(".")[0]

    def whole(self, name: str) -> str:
        """A tensor's name with the prefix, and without TensorFlow's gamma and beta."""
        known = (self.token, self.position, self.layer, self.norm, self.embedding_norm, self.projection)
        inner = {one.split(".")[1] for one in known if one} | {"pooler"}
        if name.partition(".")[0] in inner:
            name = f"{self.prefix}.{name}"
        return name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")


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
    encoder: bool = False
    pad: str = "none"
    dropouts: list[str] = []


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
    return {
        name: value for name, value in (before | both).items() if value != "" or name in ("biased", "pad")
    }


def _family(row: dict[str, Any]) -> Family:
    usual = dict.fromkeys(row.get("optional", [])) | row["usual"]
    said = {name: value for name, value in row.items() if name not in ("like", "optional")}
    return Family(**said | {"usual": usual, "names": Names(**row["names"])})


def refuse_beyond(config: TransformerConfig, known: Collection[str], who: str) -> None:
    """Raise Refused where a model has fields beyond those of a GPT-2, a Llama or a BERT that `who` does not know."""
    if unknown := config.beyond(known):
        why = ", ".join(f"{name} = {getattr(config, name)!r}" for name in unknown)
        fix = "docs/models.md has the table of what each family can do; torch generates, evaluates and serves it"
        raise Refused(f"{who} does not know this model", where=f"model.{unknown[0]}", why=why, fix=fix)
