"""The copies that a save makes, and the files they become."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from throughline.train.build import RunPlan, build_trainer
from throughline.train.checkpoints.checkpoint import CheckpointWriter, TensorReader
from throughline.train.checkpoints.snapshot import Buffers, take_snapshot
from throughline.train.checkpoints.tensor_file import NAMES, PIECE_BYTES, write_tensor_file


def test_files_are_what_the_library_reads(tmp_path: Path) -> None:
    """Every dtype, no dims, no elements, more than one spec; the hash is that of the file."""
    draw = torch.Generator().manual_seed(0)
    tensors = {str(dtype): torch.randint(0, 2, (3, 5), generator=draw).to(dtype) for dtype in NAMES}
    tensors |= {
        "number": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "long": torch.arange(PIECE_BYTES // 4 + 7).float(),
    }
    file = tmp_path / "a.safetensors"
    assert write_tensor_file(file, tensors) == hashlib.sha256(file.read_bytes()).hexdigest()
    read = load_file(file)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (read[name].dtype, read[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(read[name], tensor), name
    write_tensor_file(tmp_path / "none.safetensors", {})
    assert load_file(tmp_path / "none.safetensors") == {}


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
            torch.equal(read(name), torch.full(entry["shape"], float(step)))
            for name, entry in read.table.items()
        )
