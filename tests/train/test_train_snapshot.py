"""The copies that a save makes."""

from collections.abc import Callable
from pathlib import Path

import torch
from throughline.train.build import RunPlan, build_trainer
from throughline.train.checkpoints.checkpoint import CheckpointWriter, TensorReader
from throughline.train.checkpoints.snapshot import Buffers, take_snapshot


def test_the_memory_of_a_copy_is_made_once(make_plan: Callable[..., RunPlan]) -> None:
    """Fresh memory costs fifty times the copy (0.2 against 13 GB/s here), and it would be paid while training
    stands still.
    """
    trainer, buffers = build_trainer(make_plan("gpt")), Buffers()
    buffers.prepare(buffers.plan(trainer))
    places = {key: tensor.data_ptr() for key, tensor in buffers._kept.items()}
    for _ in range(2):
        with torch.no_grad():
            for parameter in trainer.engine.stages[0].model.parameters():
                parameter += 1
        snapshot = take_snapshot(trainer, buffers)
        for name, parameter in trainer.engine.stages[0].model.named_parameters():
            copy = snapshot.tensors["weights"][name][0]
            assert torch.equal(copy, parameter)
            assert copy.data_ptr() == places["weights", name] != parameter.data_ptr()


def test_a_save_waits_for_the_memory_of_the_one_before(
    make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    """Saves as fast as they can be asked for: none overwrites what another is still writing."""
    trainer = build_trainer(make_plan("gpt"))
    writer = CheckpointWriter(tmp_path, 0)
    for step in range(4):
        with torch.no_grad():
            for parameter in trainer.engine.stages[0].model.parameters():
                parameter.fill_(step)
        trainer.step = step
        writer.save(trainer)
    writer.close()
    for step in range(4):
        read = TensorReader(tmp_path / f"step-{step:08d}", "weights")
        assert all(
            torch.equal(read(name), torch.full(read.entry(name)["shape"], float(step))) for name in read.lines
        )
