"""What the commands of `throughline data` share: the options that say how text is read, sizes, the output."""

from typing import Any

import click
from click.core import ParameterSource

from .common import flag, option


def text_options(function: Any) -> Any:
    """Adds INPUTS... and the options that say how they become documents."""
    for decorate in (
        option(
            "--max-replaced",
            click.FloatRange(0, 1),
            "Largest share of invalid characters that is accepted.",
            0.001,
        ),
        flag("--unwrap", "Join the hard-wrapped lines of a paragraph with spaces."),
        option("--split", None, "Split of a data set that is read.", "train"),
        option(
            "--field",
            None,
            "Name of the field of .jsonl, or of the column of .parquet or a data set, that holds the text.",
            "text",
        ),
        option(
            "--documents",
            click.Choice(["file", "line", "block"]),
            "What a document of a .txt file is: the file, a line, or a block between blank lines.",
            "block",
        ),
        click.argument("inputs", nargs=-1, required=True),
    ):
        function = decorate(function)
    return function


def out_options(function: Any) -> Any:
    """Adds --out and --overwrite."""
    overwrite = flag("--overwrite", "Replace the artifact that is already at --out.")
    return option("--out", None, "Directory to write.", required=True)(overwrite(function))


def read_options(documents: str, field: str, split: str, unwrap: bool) -> Any:
    """The options of `text_options` as a `ReadOptions`."""
    from ..data.ingest.readers import ReadOptions

    return ReadOptions(documents, field, split, unwrap)  # type: ignore[arg-type]


def found_in_text(counts: dict[str, int]) -> list[str]:
    """One line about dirty text, none about clean."""
    found = ", ".join(f"{key} {count:,}" for key, count in counts.items() if count)
    return [f"found in the text: {found}"] if found else []


def size_of(context: click.Context | None, option: click.Parameter | None, text: str | None) -> int | None:
    """Bytes from "512", "64M", "1.5G" (powers of 1000; KiB, MiB, GiB of 1024); an error names the option."""
    if text is None:
        return None
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
    number = text.upper().removesuffix("B")
    unit = number.lstrip("0123456789.")
    try:
        value = int(float(number.removesuffix(unit)) * units[unit.strip()])
    except (KeyError, ValueError, OverflowError):
        raise click.BadParameter(f"{text!r} is no size; write for example 64M or 1GiB") from None
    if value <= 0:
        raise click.BadParameter(f"{text!r} is not above zero")
    return value


def is_given(name: str) -> bool:
    """Whether the user gave this option of the running command."""
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE
