"""A checkpoint saved in any layout is scored as it lies, to the bits that one process's checkpoint of the same weights gets."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from throughline.benchmarks.forked import run_ranks, warm  # noqa: E402
from throughline.benchmarks.layout_proof import SEED, Case, make_trainer, value_of  # noqa: E402
from throughline.core.artifact import read_manifest  # noqa: E402
from throughline.data.train_tokenizer import train_tokenizer  # noqa: E402
from throughline.eval.session import Request, evaluate_one  # noqa: E402
from throughline.train.checkpoint import CheckpointWriter, restore  # noqa: E402
from throughline.train.parallel.crew import Crew  # noqa: E402
from throughline.train.parallel.engine import Engine  # noqa: E402
from throughline.train.parallel.layout import Layout  # noqa: E402

LAYOUTS = {
    "tensor": Layout(tensor=2),
    "pipeline": Layout(pipeline=2),
    "full": Layout(data=2, sharding="full"),
    "tensor x pipeline": Layout(tensor=2, pipeline=2),
}
STEP = "step-00000000"


def save(case: Case, target: Path, source: Path | None, tokenizer: bytes) -> None:
    """On each rank: write the case's checkpoint, of first values or taken over from another layout's."""
    crew = Crew.start(case.layout, torch.device("cpu"))
    engine = Engine(case.config, crew.mesh, case.precision, SEED)
    shapes = {leaf.name: torch.Size(leaf.piece.shape) for leaf in engine.leaves}
    engine.fill(lambda name, box: value_of(case, name, shapes[name])[box.slices()])
    trainer = make_trainer(case, engine, None)
    if source is not None:
        restore(source, trainer)
    writer = CheckpointWriter(target, 0, tokenizer, process=crew.mesh.rank, processes=case.layout.world, token=crew.token)
    writer.save(trainer)
    writer.close()
    crew.wait()


def test_scores_are_those_of_one_process(samples: Path, tmp_path: Path) -> None:
    """Every log-probability of LAMBADA and BLiMP records, without an export in between."""
    text = (samples / "tinyshakespeare" / "input.txt").read_text()[:50_000]
    tokenizer = train_tokenizer(text.splitlines(), "bpe", 300).to_json().encode()
    shape = {"vocab_size": 304, "sequence_length": 256}  # room, so that the rows of a shared table come out even
    alone = Case("alone", Layout(), precision="fp32", model=shape)
    warm()
    run_ranks(1, partial(save, alone, tmp_path / "alone", None, tokenizer))

    def scored(checkpoint: Path) -> str:
        evaluate_one(Request(checkpoint, "lambada_openai,blimp_wh_island", limit=8))
        return (checkpoint.parent / f"{checkpoint.name}.scores" / "scores" / "samples.jsonl").read_text()

    expected = scored(tmp_path / "alone" / STEP)
    for name, layout in LAYOUTS.items():
        run_ranks(layout.world, partial(save, replace(alone, layout=layout), tmp_path / name, tmp_path / "alone" / STEP, tokenizer))
        assert read_manifest(tmp_path / name / STEP, "checkpoint").facts["layout"]["world"] == layout.world
        assert scored(tmp_path / name / STEP) == expected, name
