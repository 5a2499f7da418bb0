"""`throughline export --to huggingface` from a checkpoint of any layout writes the files that one process's checkpoint gives."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from click.testing import CliRunner  # noqa: E402
from throughline.benchmarks.forked import run_ranks, warm  # noqa: E402
from throughline.benchmarks.layout_proof import SEED, Case, make_trainer, own_rows, value_of  # noqa: E402
from throughline.cli.main import main  # noqa: E402
from throughline.core.artifact import read_manifest  # noqa: E402
from throughline.core.files import sha256_file  # noqa: E402
from throughline.train.checkpoint import CheckpointWriter, restore  # noqa: E402
from throughline.train.parallel.crew import Crew  # noqa: E402
from throughline.train.parallel.engine import Engine  # noqa: E402
from throughline.train.parallel.layout import Layout  # noqa: E402
from throughline.train.step import train_step  # noqa: E402

LAYOUTS = {
    "tensor": Layout(tensor=2),
    "pipeline": Layout(pipeline=2),
    "full": Layout(data=2, sharding="full"),
    "tensor x pipeline": Layout(tensor=2, pipeline=2),
}
STEP = "step-00000001"


def save(case: Case, target: Path, source: Path | None) -> None:
    """On each rank: write the case's checkpoint of step 1, trained here or taken over from another layout's."""
    crew = Crew.start(case.layout, torch.device("cpu"))
    engine = Engine(case.config, crew.mesh, case.precision, SEED)
    shapes = {leaf.name: torch.Size(leaf.piece.shape) for leaf in engine.leaves}
    engine.fill(lambda name, box: value_of(case, name, shapes[name])[box.slices()])
    trainer = make_trainer(case, engine, None)
    if source is None:
        train_step(trainer, own_rows(case, engine, 0), 1.0)
    else:
        restore(source, trainer)
    writer = CheckpointWriter(target, 0, process=crew.mesh.rank, processes=case.layout.world, token=crew.token)
    writer.save(trainer)
    writer.close()
    crew.wait()


def exported(checkpoint: Path, out: Path) -> dict[str, str]:
    """Name -> hash of the files of an export that depend on the model."""
    result = CliRunner().invoke(main, ["export", str(checkpoint), "--to", "huggingface", "--out", str(out)])
    assert result.exit_code == 0, result.output
    return {name: sha256_file(out / name) for name in ("model.safetensors", "config.json")}


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_files_are_those_of_one_process(family: str, tmp_path: Path) -> None:
    warm()
    alone = Case("alone", Layout(), family=family, precision="fp32", model={"vocab_size": 257})
    run_ranks(1, lambda: save(alone, tmp_path / "alone", None))
    expected = exported(tmp_path / "alone" / STEP, tmp_path / "alone-export")
    for name, layout in LAYOUTS.items() if family == "gpt" else [("tensor x pipeline", LAYOUTS["tensor x pipeline"])]:
        case, directory = replace(alone, layout=layout), tmp_path / name
        run_ranks(layout.world, partial(save, case, directory, tmp_path / "alone" / STEP))
        manifest = read_manifest(directory / STEP, "checkpoint")
        assert manifest.facts["layout"]["world"] == layout.world
        assert sum(file.name.startswith("weights-") for file in manifest.files) > 1, "the pieces are in several files"
        assert exported(directory / STEP, tmp_path / f"{name}-export") == expected, name
