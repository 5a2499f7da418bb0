"""Moving averages of the weights: what they are, that a run is judged by them and saves them, and that training goes on
without a trace of it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from throughline.train.build import RunPlan, StepBatches, build_trainer, training_rows
from throughline.train.checkpoints import checkpoint as module
from throughline.train.checkpoints.checkpoint import load_model, restore
from throughline.train.checkpoints.run_directory import locate
from throughline.train.engine import Engine
from throughline.train.evaluate import Validation
from throughline.train.loop import train
from throughline.train.optimizers.averages import SLOT, averaged
from throughline.train.step import train_step

DECAY = 0.8
Weights = dict[str, torch.Tensor]


def weights(engine: Engine) -> Weights:
    return {local.name: local.value.detach().clone() for local in engine.local_shards}


def averages(plan: RunPlan, checkpoint: Path) -> Weights:
    """Those of a trainer that a checkpoint is read into."""
    trainer = build_trainer(plan, fill=False)
    restore(checkpoint, trainer)
    with averaged(trainer.engine, trainer.optimizer):
        return weights(trainer.engine)


def same(first: Weights, second: Weights) -> bool:
    return all(torch.equal(value, second[name]) for name, value in first.items())


CASES: dict[str, dict[str, Any]] = {
    name: {"optimizer": {"name": name, "ema_decay": DECAY}} for name in ("adamw", "muon", "lamb", "adafactor")
}
CASES["offload"] = {"optimizer": {"ema_decay": DECAY}, "train": {"offload": True}}


@pytest.mark.parametrize("case", CASES)
def test_is_the_average_of_a_plain_loop(make_plan: Callable[..., RunPlan], case: str) -> None:
    """Six steps in float64, of which one is skipped and leaves it; 1e-14 is rounding."""
    plan = make_plan(**CASES[case] | {"train": {"precision": "fp64"} | CASES[case].get("train", {})})
    trainer, batches = build_trainer(plan), StepBatches(plan, training_rows(plan))
    (stage,) = trainer.engine.stages
    healthy, expected = stage.head, Weights()
    for step in range(6):
        stage.head = (lambda *inputs: healthy(*inputs) * torch.nan) if step == 3 else healthy
        assert train_step(trainer, batches.batch(4 * step, 4), 1.0).skipped is (step == 3)
        trainer.engine.wait()
        if step != 3:
            now = weights(trainer.engine)
            expected = {n: DECAY * expected.get(n, x) + (1 - DECAY) * x for n, x in now.items()}
    with averaged(trainer.engine, trainer.optimizer):
        torch.testing.assert_close(weights(trainer.engine), expected, atol=1e-14, rtol=0)
    assert same(weights(trainer.engine), now)
    assert not same(now, expected)


def test_a_run_is_judged_by_them_and_whatever_opens_it_takes_them(
    make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    """In bf16, whose masters are saved; the evaluations on the way change no bit of what is trained."""
    ema, often = {"ema_decay": DECAY}, {"precision": "bf16", "eval_every_steps": 2}
    plan, quiet = (make_plan(optimizer=ema, train=often | more) for more in ({}, {"eval_every_steps": 0}))
    validation = Validation(plan)
    shown = train(plan, tmp_path / "judged", evaluators=[validation])["validation"]
    train(quiet, tmp_path / "quiet")
    trainers = []
    for name in ("judged", "quiet"):
        trainers.append(build_trainer(plan, fill=False))
        restore(locate(tmp_path / name), trainers[-1])
    assert same(*(weights(trainer.engine) for trainer in trainers))
    opened = dict(load_model(tmp_path / "judged")[0].named_parameters())
    assert same(averages(plan, locate(tmp_path / "judged")), opened)
    assert not same(weights(trainers[0].engine), opened)
    engine = trainers[0].engine
    assert validation.measure(engine)["loss"] != shown["loss"]
    module.load_weights(locate(tmp_path / "judged"), engine)
    engine.publish()
    assert validation.measure(engine)["loss"] == shown["loss"]


@pytest.mark.parametrize("forgets", [False, True])
def test_a_resumed_run_has_the_same_to_the_bit(
    make_plan: Callable[..., RunPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    """Stopped after three steps of six; one that forgets its averages is told from it."""
    saves = {"save_every_steps": 3, "keep": 0}
    plan = make_plan(optimizer={"ema_decay": DECAY}, checkpoint=saves, schedule={"kind": "constant"})
    train(plan, tmp_path / "whole")
    path, kept = tmp_path / "whole" / "checkpoints", module._restore_optimizer

    def forgetful(directory: Path, trainer: Any, scalars: dict[str, Any]) -> None:
        kept(directory, trainer, scalars)
        for state in trainer.optimizer.state.values():
            del state[SLOT]

    if forgets:
        monkeypatch.setattr(module, "_restore_optimizer", forgetful)
    trainer, batches = build_trainer(plan, fill=False), StepBatches(plan, training_rows(plan))
    restore(path / "step-00000003", trainer)
    for step in range(3, 6):
        train_step(trainer, batches.batch(4 * step, 4), 1.0)
    with averaged(trainer.engine, trainer.optimizer):
        found = weights(trainer.engine)
    monkeypatch.undo()
    assert same(found, averages(plan, path / "step-00000006")) is not forgets
