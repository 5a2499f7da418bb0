"""Named shapes: `preset("gpt2-124m")`. The shapes and their sources are in `presets.toml`."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from ..core.errors import WrongUse, did_you_mean
from .config import FAMILIES, ModelConfig


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files(__package__).joinpath("presets.toml").read_text(encoding="utf-8"))


def preset_names(family: str | None = None) -> list[str]:
    """All names, in the order of the file; with `family` ("gpt" or "bert") only its own."""
    return [name for name, fields in _table().items() if family in (None, fields["family"])]


def preset(name: str, **overrides: Any) -> ModelConfig:
    """The shape of that name, with some of its fields replaced.

    Raises `WrongUse` for an unknown name (with the nearest ones), an unknown field, or a shape that cannot be
    built.
    """
    table = _table()
    if name not in table:
        fix = did_you_mean(name, table, "the presets are: " + ", ".join(table), limit=3)
        raise WrongUse(f"there is no preset {name!r}", where="models/presets.toml", fix=fix)
    fields = dict(table[name])
    config = FAMILIES[fields.pop("family")]
    return config.from_dict(fields | overrides)
