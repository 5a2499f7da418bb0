"""Checkpoints of the form before there were masters: fp32 weights under autocast, `owed` for what compressed gradients
have not sent. Written here by hand, file by file, as that version wrote them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from throughline.core.artifact import create_artifact
from throughline.models.config import GPTConfig
from throughline.planner.layout import Layout
from throughline.planner.tables import parameter_shapes
from throughline.train.build import RunPlan, StepBatches, build_trainer, training_rows
from throughline.train.checkpoints.checkpoint import load_model, restore
from throughline.train.checkpoints.run_directory import find_resumable
from throughline.train.engine import Engine
from throughline.train.logs.metrics import read_metrics
from throughline.train.loop import train
from throughline.train.parallel.mesh import Mesh
from throughline.train.step import train_step

Tensors = dict[str, torch.Tensor]


def drawn(shapes: dict[str, tuple[int, ...]], seed: int, std: float = 0.02) -> Tensors:
    draw = torch.Generator().manual_seed(seed)
    return {name: std * torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def write_old(
    path: Path, config: Any, groups: dict[str, Tensors], step: int, processes: int, inputs: Any = ()
) -> None:
    """One file a process and group, each with an equal part of the rows of every tensor that can be cut so."""
    layout: dict[str, Any] = {"world": 1}
    if processes > 1:
        layout = {"world": processes, "data": processes, "sharding": "full"}
    table: dict[str, Any] = {group: {} for group in groups}
    with create_artifact(path, "checkpoint", inputs=inputs) as draft:
        for group, tensors in groups.items():
            files: list[Tensors] = [{} for _ in range(processes)]
            for name, value in tensors.items():
                cuts = processes if value.dim() and len(value) % processes == 0 and group != "rng" else 1
                chunks = []
                for process in range(cuts):
                    size = len(value) // cuts if value.dim() else 0
                    part = value[process * size : (process + 1) * size] if value.dim() else value
                    files[process][name] = part.contiguous()
                    offset = [process * size, *[0] * (value.dim() - 1)] if value.dim() else []
                    file = f"{group}-{process:05d}.safetensors"
                    chunks.append({"file": file, "key": name, "offset": offset, "shape": list(part.shape)})
                dtype = str(value.dtype).removeprefix("torch.")
                table[group][name] = {"shape": list(value.shape), "dtype": dtype, "chunks": chunks}
            for process, held in enumerate(files):
                save_file(held, draft.path / f"{group}-{process:05d}.safetensors")
        (draft.path / "tensors.json").write_text(json.dumps(table))
        (draft.path / "model.json").write_text(json.dumps({"family": "gpt", "config": config.to_dict()}))
        state = {
            "step": step,
            "samples": 4 * step,
            "skipped": 1,
            "skipped_in_row": 0,
            "scale": 1.0,
            "good_steps": 0,
            "optimizer_scalars": {},
            "precision": "bf16",
            "threads": 1,
            "torch": torch.__version__,
            "device": "cpu",
            "layout": layout,
        }
        (draft.path / "state.json").write_text(json.dumps(state))
        draft.facts |= {"step": step, "family": "gpt", "layout": layout, "precision": "bf16"}


def old_groups(config: Any, step: int) -> dict[str, Tensors]:
    shapes = parameter_shapes(config)
    means, squares = drawn(shapes, 1, 1e-3), drawn(shapes, 2, 1e-3)
    optimizer = {f"{name}.exp_avg": value for name, value in means.items()}
    optimizer |= {f"{name}.exp_avg_sq": value.square() for name, value in squares.items()}
    optimizer |= {f"{name}.step": torch.tensor(float(step)) for name in shapes}
    state = torch.Generator().manual_seed(77).get_state()
    return {"weights": drawn(shapes, 0), "optimizer": optimizer, "rng": {"cpu": state}}


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_was_saved_is_what_goes_on(
    make_plan: Callable[..., RunPlan], tmp_path: Path, processes: int, precision: str
) -> None:
    """In 16 bits the saved weights are the masters, and the model has their roundings."""
    plan = make_plan("gpt", train={"precision": precision})
    groups = old_groups(plan.config, 3)
    write_old(tmp_path / "step-00000003", plan.config, groups, 3, processes)
    trainer = build_trainer(plan, fill=False)
    restore(tmp_path / "step-00000003", trainer)
    assert (trainer.step, trainer.samples, trainer.skipped) == (3, 12, 1)
    for local in trainer.engine.local_shards:
        saved, slots = groups["weights"][local.name], trainer.optimizer.state[local.value]
        assert torch.equal(local.value, saved), local.name
        assert torch.equal(local.computed, saved.to(local.computed.dtype)), local.name
        assert local.computed.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        for slot in ("exp_avg", "exp_avg_sq", "step"):
            assert torch.equal(slots[slot], groups["optimizer"][f"{local.name}.{slot}"]), (local.name, slot)
    batch = StepBatches(plan, training_rows(plan)).batch(trainer.samples, 4)
    assert not train_step(trainer, batch, 1.0).skipped and trainer.step == 4
    model, _ = load_model(tmp_path / "step-00000003")
    assert all(torch.equal(value, groups["weights"][name]) for name, value in model.named_parameters())


def test_a_run_goes_on_from_it(make_plan: Callable[..., RunPlan], tmp_path: Path) -> None:
    plan = make_plan("gpt", train={"precision": "bf16", "steps": 4})

    def losses() -> list[float]:
        return [record["loss"] for record in read_metrics(tmp_path / "run") if "loss" in record]

    train(plan, tmp_path / "run")
    new = losses()
    for path in (tmp_path / "run" / "checkpoints").glob("step-*"):
        path.rename(tmp_path / path.name)
    old = tmp_path / "run" / "checkpoints" / "step-00000003"
    write_old(old, plan.config, old_groups(plan.config, 3), 3, 1, plan.corpus.inputs)
    (old.parent / "latest").write_text(old.name + "\n")
    (tmp_path / "run" / "manifest.json").unlink()
    assert find_resumable(old.parent) == old
    train(plan, tmp_path / "run")
    assert losses()[:3] == new[:3] and losses()[3] != new[3], "the last step is of the old weights"


def test_what_compressed_gradients_owed_is_taken_over() -> None:
    config = GPTConfig(vocab_size=31, sequence_length=8, layers=1, width=16, heads=2)
    engine: Any = Engine(config, Mesh(Layout(), torch.device("cpu")), "fp32")
    old = {
        "owed.0.own.0": torch.ones(3),
        "owed.1.own.0": torch.zeros(3),
        "owed.0.sum.0": torch.full((2,), 2.0),
    }
    for renamed in (old, {name.replace("owed", "residual"): value for name, value in old.items()}):
        engine.communication_hook = hook = SimpleNamespace()
        engine.load_states(renamed, renamed.__getitem__, True)
        assert set(hook.kept) == {"own.0", "sum.0"} and hook.kept["own.0"].sum() == 3
