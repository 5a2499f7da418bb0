"""A run and a checkpoint of any layout are scored to the bits that one process's get with the same weights."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

import torch
from throughline.data.new_tokenizer import train_tokenizer
from throughline.eval.inloop import TaskEvaluator
from throughline.eval.session import Request, evaluate_one
from throughline.planner.layout import Layout
from throughline.prove.forked import run_ranks, warm
from throughline.prove.proof import SEED, Case, value_of
from throughline.train.engine import Engine
from throughline.train.parallel.ranks import Ranks


def test_scores_are_those_of_one_process(
    samples: Path, tmp_path: Path, saved_in_layouts: Callable[..., dict[str, Path]]
) -> None:
    """Every log-probability of LAMBADA and BLiMP records, without an export in between."""
    text = (samples / "tinyshakespeare" / "input.txt").read_text()[:50_000]
    tokenizer = train_tokenizer(text.splitlines(), "bpe", 300).to_json().encode()
    # room, so that the rows of a shared table come out even
    shape = {"vocab_size": 304, "sequence_length": 256}
    checkpoints = saved_in_layouts(
        Case("", Layout(), precision="fp32", model=shape), tmp_path, tokenizer=tokenizer
    )

    def scored(checkpoint: Path) -> str:
        evaluate_one(Request(checkpoint, "lambada_openai,blimp_wh_island", limit=8))
        return (checkpoint.parent / f"{checkpoint.name}.scores" / "scores" / "samples.jsonl").read_text()

    expected = scored(checkpoints.pop("alone"))
    assert len(checkpoints) == 4
    for name, checkpoint in checkpoints.items():
        assert scored(checkpoint) == expected, name


LAYOUTS = {
    "tensor": Layout(tensor=2),
    "pipeline": Layout(pipeline=2),
    "full": Layout(data=2, sharding="full"),
    "tensor x pipeline": Layout(tensor=2, pipeline=2),
    "full x tensor": Layout(data=2, sharding="full", tensor=2),
}


def test_a_run_of_any_layout_scores_as_one_process_does(samples: Path, tmp_path: Path) -> None:
    """The curves of a run on 2 and 4 processes, to the bit in fp64, fp32 and, from fp32 masters, bf16, since the
    first process scores the masters whole.
    """
    text = (samples / "tinyshakespeare" / "input.txt").read_text()[:50_000]
    tokenizer = train_tokenizer(text.splitlines(), "bpe", 300)
    wanted = SimpleNamespace(tasks=["blimp_wh_island"], data_dir=None, limit=6, every_steps=1)
    recipe = SimpleNamespace(evaluation=wanted, train=SimpleNamespace(steps=1))

    def score(case: Case, target: Path) -> None:
        ranks = Ranks.start(case.layout, torch.device("cpu"))
        engine = Engine(case.config, ranks.mesh, case.precision, SEED)
        shapes = {local.name: torch.Size(local.spec.shape) for local in engine.local_shards}
        engine.fill(lambda name, box: value_of(case, name, shapes[name])[box.slices()])
        corpus = SimpleNamespace(tokenizer=tokenizer)
        inside = TaskEvaluator(SimpleNamespace(corpus=corpus, config=case.config, recipe=recipe))
        if found := inside(engine, 1):
            target.write_text(repr(found))
        ranks.wait()

    warm()
    for precision in ("fp64", "fp32", "bf16"):
        scores = {}
        for name, layout in {"alone": Layout(), **LAYOUTS}.items():
            case = Case("", layout, precision=precision, model={"vocab_size": 304, "sequence_length": 64})
            target = tmp_path / f"{precision}-{name}"
            run_ranks(layout.world, partial(score, case, target))
            scores[name] = target.read_text()
        assert set(scores.values()) == {scores["alone"]} and "blimp_wh_island/acc" in scores["alone"]
