"""`throughline export --to huggingface` from a checkpoint of any layout writes the files that one process's
checkpoint gives.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.artifact import read_manifest
from throughline.core.files import sha256_file
from throughline.planner.layout import Layout
from throughline.prove.proof import Case


def exported(checkpoint: Path, out: Path) -> dict[str, str]:
    """Name -> hash of the files of an export that depend on the model."""
    result = CliRunner().invoke(main, ["export", str(checkpoint), "--to", "huggingface", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return {name: sha256_file(out / name) for name in ("model.safetensors", "config.json")}


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_files_are_those_of_one_process(
    family: str, tmp_path: Path, saved_in_layouts: Callable[..., dict[str, Path]]
) -> None:
    case = Case("", Layout(), family=family, precision="fp32", model={"vocab_size": 257})
    some = {"only": ["tensor x pipeline"]} if family == "bert" else {}
    checkpoints = saved_in_layouts(case, tmp_path, steps=1, **some)
    expected = exported(checkpoints.pop("alone"), tmp_path / "alone-export")
    assert len(checkpoints) == (4 if family == "gpt" else 1)
    for name, checkpoint in checkpoints.items():
        files = read_manifest(checkpoint, "checkpoint").files
        assert sum(file.name.startswith("weights-") for file in files) > 1, "the pieces are in several files"
        assert exported(checkpoint, tmp_path / f"{name}-export") == expected, name
