"""Checkpoints: whole or absent, checked before use, readable in pieces, without pickle."""

import errno
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from throughline.core.artifact import is_artifact, read_manifest, verify_artifact
from throughline.core.errors import Refused, WrongUse
from throughline.train.build import RunPlan, build_trainer
from throughline.train.checkpoints import checkpoint as module
from throughline.train.checkpoints import run_directory
from throughline.train.checkpoints.checkpoint import CheckpointWriter, TensorReader, load_model
from throughline.train.checkpoints.run_directory import find_resumable, locate
from throughline.train.loop import train
from throughline.train.parallel.ranks import Lost
from throughline.train.step import Trainer


@pytest.fixture
def trainer(make_plan: Callable[..., RunPlan]) -> Trainer:
    return build_trainer(make_plan("gpt"))


def save_steps(directory: Path, trainer: Trainer, *steps: int, keep: int = 0) -> CheckpointWriter:
    writer = CheckpointWriter(directory, keep)
    for step in steps:
        trainer.step = step
        writer.save(trainer)
    writer.close()
    return writer


def test_a_chat_template_goes_into_checkpoints(trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    writer = CheckpointWriter(tmp_path / "made", 0, b"{}", tmp_path / "given")
    writer.save(trainer)
    writer.close()
    (template,) = (tmp_path / "made").glob("step-*/chat_template.jinja")
    assert template.read_text() == "{{ messages }}"


def test_every_count_of_a_run_comes_back(
    trainer: Trainer, make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    """Whatever number a step changes, those of the loss scale too: each is given another value here."""

    def counts(of: Trainer) -> dict[str, Any]:
        """But the length of the run, which is the recipe's."""
        numbers = {name: value for name, value in vars(of).items() if type(value) is int}
        del numbers["planned_steps"]
        return numbers | {"scale": of.scaler.scale, "good_steps": of.scaler.good_steps}

    for index, name in enumerate(name for name in counts(trainer) if name in vars(trainer)):
        setattr(trainer, name, 10 + index)
    trainer.scaler.scale, trainer.scaler.good_steps = 8.0, 9
    save_steps(tmp_path, trainer, 7)
    other = build_trainer(make_plan("gpt"))
    module.restore(tmp_path / "step-00000007", other)
    assert counts(other) == counts(trainer) and len(set(counts(trainer).values())) == 6


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def flip(file: Path, place: float = 0.7) -> None:
    data = bytearray(file.read_bytes())
    data[int(len(data) * place)] ^= 1
    file.write_bytes(data)


def halve(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def test_holds_the_weights_and_no_pickle(make_plan: Callable[..., RunPlan], tmp_path: Path) -> None:
    plan = make_plan("bert")
    train(plan, tmp_path / "run")
    path = locate(tmp_path / "run")
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    manifest = verify_artifact(path)
    assert manifest.kind == "checkpoint"
    assert manifest.facts["step"] == 6
    assert manifest.facts["samples"] == 24
    assert manifest.inputs[0].kind == "tokens"
    model, tokenizer = load_model(tmp_path / "run")
    assert not model.training
    assert tokenizer is not None
    assert (
        tokenizer.read_bytes() == (Path(plan.recipe.data.sources()[0].path) / "tokenizer.json").read_bytes()
    )
    again, _ = load_model(path, dtype=torch.float64)
    assert all(torch.equal(p.double(), q) for p, q in zip(model.parameters(), again.parameters()))


def test_what_happens_after_the_save_does_not_reach_it(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread writes a copy: here it is held until the weights have been overwritten."""
    import threading

    gate, original = threading.Event(), module.Snapshot.write_tensors
    monkeypatch.setattr(module.Snapshot, "write_tensors", lambda *a: gate.wait(30) and original(*a))
    before = {name: p.detach().clone() for name, p in trainer.engine.stages[0].model.named_parameters()}
    writer = CheckpointWriter(tmp_path, 0)
    begun = time.perf_counter()
    writer.save(trainer)
    pause = time.perf_counter() - begun
    with torch.no_grad():
        for parameter in trainer.engine.stages[0].model.parameters():
            parameter.zero_()
    assert not (tmp_path / "latest").exists()
    gate.set()
    writer.close()
    assert pause < 1.0
    read = TensorReader(tmp_path / "step-00000000", "weights")
    assert all(torch.equal(read(name), value) for name, value in before.items())


@pytest.mark.parametrize("bytes_written", [0, 30])
def test_a_process_that_writes_is_waited_for_and_one_that_does_not_is_lost(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_written: int
) -> None:
    """A part that grows by a byte a second, for longer than the patience with one that stands still; the
    clock is made up.
    """
    part, now = tmp_path / ".step-00000000.start-00001.tmp", [0.0]

    def sleep(_: float) -> None:
        now[0] += 1.0
        part.mkdir(exist_ok=True)
        if now[0] <= bytes_written:
            with open(part / "weights-00001.safetensors", "ab") as file:
                file.write(b"x")
        elif bytes_written:
            (part / "part.json").write_text(json.dumps({"table": {}, "hashes": {}}))

    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=lambda: now[0], sleep=sleep)
    monkeypatch.setattr(module, "time", clock)
    writer = CheckpointWriter(tmp_path, 0, processes=2, token="start", patience_s=5.0)
    writer.save(trainer)
    if bytes_written:
        writer.close()
        assert names(tmp_path) == ["latest", "step-00000000"]
    else:
        with pytest.raises(Lost, match="could not be completed"):
            writer.close()
        assert now[0] < 10


def test_keeps_the_newest(trainer: Trainer, tmp_path: Path) -> None:
    save_steps(tmp_path, trainer, 1, 2, 3, 4, keep=2)
    assert names(tmp_path) == ["latest", "step-00000003", "step-00000004"]
    assert (tmp_path / "latest").read_text() == "step-00000004\n"


def test_a_damaged_later_one_is_not_kept_in_place_of_what_was_just_saved(
    trainer: Trainer, tmp_path: Path
) -> None:
    """A run that went on from before a damaged checkpoint, with keep = 1: what `latest` names stays."""
    save_steps(tmp_path, trainer, 1, 4)
    flip(tmp_path / "step-00000004" / "weights-00000.safetensors")
    for step in (2, 3):
        save_steps(tmp_path, trainer, step, keep=1)
        assert (tmp_path / "latest").read_text() == f"step-0000000{step}\n"
        assert find_resumable(tmp_path) == tmp_path / f"step-0000000{step}"
    save_steps(tmp_path, trainer, 4, keep=1)
    assert names(tmp_path) == ["latest", "step-00000004"]


def test_a_copy_that_somebody_made_is_left_alone(trainer: Trainer, tmp_path: Path) -> None:
    save_steps(tmp_path, trainer, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000001-good")
    save_steps(tmp_path, trainer, 2, 3, keep=1)
    assert names(tmp_path) == ["latest", "step-00000001-good", "step-00000003"]


@pytest.mark.parametrize("moment", ["write_tensors", "write_table", "verify_artifact", "write_atomic"])
def test_a_save_that_fails_never_becomes_latest(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Whatever breaks, the checkpoint before stays, and the failure is raised."""
    save_steps(tmp_path, trainer, 1)
    with monkeypatch.context() as patch:
        owner = module if hasattr(module, moment) else module.Snapshot
        patch.setattr(owner, moment, lambda *a, **k: (_ for _ in ()).throw(OSError("the disk went away")))
        with pytest.raises(OSError, match="went away"):
            save_steps(tmp_path, trainer, 2)
    assert (tmp_path / "latest").read_text() == "step-00000001\n"
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]
    save_steps(tmp_path, trainer, 2)  # and the same step can be saved again
    assert find_resumable(tmp_path) == tmp_path / "step-00000002"


def test_what_a_kill_left_of_a_save_is_removed(trainer: Trainer, tmp_path: Path) -> None:
    """A part of a checkpoint, and the pointer that was being written; a file of another name stays."""
    save_steps(tmp_path, trainer, 1)
    (tmp_path / ".step-00000002.abcd-00000.tmp").mkdir()
    (tmp_path / ".latest.1a2b3c4d.tmp").write_text("step-0000")
    (tmp_path / ".notes.tmp").write_text("mine")
    assert find_resumable(tmp_path) == tmp_path / "step-00000001"
    assert names(tmp_path) == [".notes.tmp", "latest", "step-00000001"]


def test_a_pointer_that_holds_no_name_is_refused_with_what_to_write(tmp_path: Path) -> None:
    pointer = tmp_path / "checkpoints" / "latest"
    pointer.parent.mkdir()
    for content in (b"\xff\xfe", b" \n"):
        pointer.write_bytes(content)
        with pytest.raises(Refused, match="latest checkpoint cannot be read") as refused:
            locate(tmp_path)
        assert refused.value.where == str(pointer) and f"> {pointer}" in refused.value.fix


@pytest.mark.parametrize("damage", [flip, halve, Path.unlink])
@pytest.mark.parametrize(
    "file", ["weights-00000.safetensors", "optimizer-00000.safetensors", "state.json", "tensors.json"]
)
def test_a_damaged_checkpoint_is_passed_over_by_name(
    trainer: Trainer, tmp_path: Path, capsys: pytest.CaptureFixture, damage: Callable[[Path], Any], file: str
) -> None:
    save_steps(tmp_path, trainer, 1, 2)
    damage(tmp_path / "step-00000002" / file)
    assert find_resumable(tmp_path) == tmp_path / "step-00000001"
    assert f"step-00000002/{file}" in capsys.readouterr().err


def test_when_all_are_damaged_it_is_refused_and_nothing_is_lost(trainer: Trainer, tmp_path: Path) -> None:
    save_steps(tmp_path, trainer, 1, 2)
    for step in (1, 2):
        halve(tmp_path / f"step-0000000{step}" / "weights-00000.safetensors")
    with pytest.raises(Refused, match="no checkpoint of this run is whole") as caught:
        find_resumable(tmp_path)
    assert "wrong size" in caught.value.why
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000002"]


def test_one_that_cannot_be_read_is_passed_over(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """A disk that fails where the newest checkpoint lies."""
    save_steps(tmp_path, trainer, 1, 2)

    def verify(path: Path, read_back: set[str]) -> None:
        if path.name == "step-00000002":
            raise OSError(errno.EIO, "Input/output error", str(path / "state.json"))

    monkeypatch.setattr(run_directory, "verify_artifact", verify)
    assert find_resumable(tmp_path) == tmp_path / "step-00000001"
    assert "Input/output error" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(Refused, match="no checkpoint of this run is whole"):
        find_resumable(tmp_path)


def test_a_manifest_cut_in_half_is_a_damaged_checkpoint(trainer: Trainer, tmp_path: Path) -> None:
    save_steps(tmp_path, trainer, 1, 2)
    halve(tmp_path / "step-00000002" / "manifest.json")
    assert find_resumable(tmp_path) == tmp_path / "step-00000001"


def test_remains_of_a_killed_save_or_removal_are_cleared(trainer: Trainer, tmp_path: Path) -> None:
    save_steps(tmp_path, trainer, 1)
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000002.abcd.tmp")
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000003")
    (tmp_path / "step-00000003" / "manifest.json").unlink()
    assert find_resumable(tmp_path) == tmp_path / "step-00000001"
    assert names(tmp_path) == ["latest", "step-00000001", "step-00000003"]
    save_steps(tmp_path, trainer, 3)
    assert is_artifact(tmp_path / "step-00000003")


def test_load_model_refuses_a_flipped_bit_and_what_is_no_run(trainer: Trainer, tmp_path: Path) -> None:
    save_steps(tmp_path / "run/checkpoints", trainer, 1)
    flip(tmp_path / "run/checkpoints/step-00000001/weights-00000.safetensors")
    with pytest.raises(Refused, match="damaged"):
        load_model(tmp_path / "run")
    with pytest.raises(WrongUse, match="no such run"):
        load_model(tmp_path / "other")
    with pytest.raises(WrongUse, match="neither a run"):
        load_model(tmp_path)


def test_a_checkpoint_of_another_shape_is_refused(
    trainer: Trainer, tmp_path: Path, make_plan: Callable[..., RunPlan]
) -> None:
    save_steps(tmp_path, trainer, 1)
    other = build_trainer(make_plan("gpt", model={"overrides": {"layers": 2, "width": 64, "heads": 2}}))
    with pytest.raises(Refused, match="another model"):
        module.restore(tmp_path / "step-00000001", other)


def test_tensors_are_put_together_from_any_chunks(tmp_path: Path) -> None:
    """The format other layouts write: pieces of one tensor in several files, cut along both dims."""
    whole = torch.arange(24.0).view(4, 6)
    save_file({"w": whole[:, :2].contiguous()}, tmp_path / "weights-00000.safetensors")
    save_file(
        {"w": whole[:1, 2:].contiguous(), "w.2": whole[1:, 2:].contiguous()},
        tmp_path / "weights-00001.safetensors",
    )
    chunks = [
        {"file": "weights-00000.safetensors", "key": "w", "offset": [0, 0], "shape": [4, 2]},
        {"file": "weights-00001.safetensors", "key": "w", "offset": [0, 2], "shape": [1, 4]},
        {"file": "weights-00001.safetensors", "key": "w.2", "offset": [1, 2], "shape": [3, 4]},
    ]
    table = {"weights": {"w": {"shape": [4, 6], "dtype": "float32", "chunks": chunks}}}
    (tmp_path / "tensors.json").write_text(json.dumps(table))
    assert torch.equal(TensorReader(tmp_path, "weights")("w"), whole)


def test_every_tensor_of_the_table_is_where_it_says(trainer: Trainer, tmp_path: Path) -> None:
    save_steps(tmp_path, trainer, 1)
    path = tmp_path / "step-00000001"
    table = json.loads((path / "tensors.json").read_text())
    assert set(table["weights"]) == {name for name, _ in trainer.engine.stages[0].model.named_parameters()}
    for group, entries in table.items():
        read = TensorReader(path, group)
        for name, entry in entries.items():
            tensor = read(name)
            assert (list(tensor.shape), str(tensor.dtype)) == (entry["shape"], f"torch.{entry['dtype']}")
    assert read_manifest(path).facts["layout"] == {"world": 1}
    reader = TensorReader(path, "optimizer")
    (path / "tensors.json").write_text(json.dumps(table, indent=1))  # as earlier checkpoints have it
    earlier = TensorReader(path, "optimizer")
    assert set(earlier.lines) == set(reader.lines) == set(table["optimizer"])
    assert all(earlier.entry(name) == reader.entry(name) for name in reader.lines)
