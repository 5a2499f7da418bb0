"""The estimate before anything is allocated, and recomputation."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from throughline.core.errors import Failed, Refused
from throughline.core.recipe import dump_toml
from throughline.models.config import preset
from throughline.planner.memory import device_terms
from throughline.train import memory, objective
from throughline.train.build import RunPlan, StepBatches, build_trainer, training_rows
from throughline.train.checkpoints.run_directory import MAY_CHANGE
from throughline.train.logs.metrics import PhaseMemory
from throughline.train.loop import train
from throughline.train.memory import beside, check_memory, out_of_memory
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import described, model_config, predicted_memory
from throughline.train.step import train_step

BIG = {"layers": 4, "width": 64, "heads": 2}


def saved_bytes(plan: RunPlan) -> int:
    """Bytes that autograd keeps from forward for backward, parameters and inputs left out, each storage once."""
    trainer = build_trainer(plan)
    batch = StepBatches(plan, training_rows(plan)).batch(0, plan.recipe.train.rows_per_step)
    known = {
        parameter.untyped_storage().data_ptr() for parameter in trainer.engine.stages[0].model.parameters()
    }
    known |= {value.untyped_storage().data_ptr() for value in batch.micro_batches[0].values()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (stage,) = trainer.engine.stages
        stage.load(batch.micro_batches, torch.ones(len(batch.counts)), 1.0)
        result = stage(torch.empty(0))
    del result
    return sum(kept.values())


@pytest.mark.parametrize("ema_decay", [0.0, 0.9])
def test_states_are_counted_exactly(make_plan: Callable[..., RunPlan], ema_decay: float) -> None:
    plan = make_plan("bert", optimizer={"ema_decay": ema_decay})
    trainer = build_trainer(plan)
    batch = StepBatches(plan, training_rows(plan)).batch(0, 4)
    train_step(trainer, batch, 1.0)
    weights = sum(parameter.nbytes for parameter in trainer.engine.stages[0].model.parameters())
    moments = sum(
        value.nbytes
        for slots in trainer.optimizer.state.values()
        for name, value in slots.items()
        if name != "step"
    )
    terms = device_terms(*described(plan.config, plan.recipe, "cpu"))
    found = tuple(round(float(terms[name])) for name in ("weights", "gradients", "optimizer"))
    assert found == (weights, weights, moments)


@pytest.mark.parametrize(("recompute", "ahead"), [("none", 0), ("full", 0), ("none", 1)])
def test_activations_are_near_what_autograd_keeps(
    make_plan: Callable[..., RunPlan], recompute: str, ahead: int
) -> None:
    """Within 15 %: the estimate has no log-sum-exp, no norm statistics and no embedding indices. Of the three arrays of
    logits at the peak one is kept for backward, and another of a further token.
    """
    shape = BIG | {"predict_ahead": ahead}
    plan = make_plan("gpt", model={"overrides": shape}, train={"batch_rows": 16, "recompute": recompute})
    terms = device_terms(*described(plan.config, plan.recipe, "cpu"))
    kept = saved_bytes(plan)
    if recompute == "full":  # the layer at work is not kept between forward and backward
        tokens = 16 * 32
        terms["activations"] = plan.config.layers * tokens * plan.config.width * 4
        terms["activations"] += 2 * tokens * plan.config.width * 4  # the final norm
    logits = terms["logits"] * (1 + ahead) / (3 + ahead)
    assert kept == pytest.approx(terms["activations"] + logits, rel=0.15)


def test_recomputation_changes_memory_and_no_bit(make_plan: Callable[..., RunPlan]) -> None:
    """Dropout included: the second forward draws the same numbers."""
    results, kept = [], []
    for kind in ("none", "full", "selective"):
        plan = make_plan("bert", model={"overrides": BIG | {"dropout": 0.1}}, train={"recompute": kind})
        trainer = build_trainer(plan)
        batch = StepBatches(plan, training_rows(plan)).batch(0, 4)
        step = train_step(trainer, batch, 1.0)
        results.append(
            (
                step.loss,
                step.grad_norm,
                torch.cat([p.detach().flatten() for p in trainer.engine.stages[0].model.parameters()]),
            )
        )
        kept.append(saved_bytes(plan))
    assert kept[1] < 0.5 * kept[0]
    assert kept[2] < kept[0]
    for loss, norm, weights in results[1:]:
        assert (loss, norm) == results[0][:2]
        assert torch.equal(weights, results[0][2])


def test_a_model_larger_than_memory_is_refused_with_three_changes(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "memory_limit_bytes", lambda: 16 * 2**30)
    recipe = make_recipe(
        "gpt",
        model={"preset": "gpt2-1.5b", "overrides": {}},
        train={"sequence_length": 1024, "batch_rows": 64},
    )
    with pytest.raises(Refused, match=r"needs .* cpu has 16\.0 GiB") as caught:
        check_memory(preset("gpt2-1.5b"), recipe, torch.device("cpu"))
    lines = caught.value.fix.splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        "train.micro_batch_rows",
        "train.recompute",
        "model.preset",
    ]
    assert "largest that fits" in lines[2]
    assert "optimizer" in caught.value.why


def test_a_refusal_advises_the_largest_micro_batch_that_fits(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which the planner's own sum says, tried one by one."""
    overrides = {"layers": 4, "width": 256, "heads": 4}
    recipe = make_recipe(train={"batch_rows": 48, "sequence_length": 256}, model={"overrides": overrides})
    config = model_config(recipe, 64)

    def need(rows: int) -> int:
        train_section = recipe.train.model_copy(update={"micro_batch_rows": rows})
        return sum(predicted_memory(config, recipe.model_copy(update={"train": train_section})).values())

    for rows in (2, 8, 12, 24):
        monkeypatch.setattr(memory, "memory_limit_bytes", lambda rows=rows: need(rows))
        with pytest.raises(Refused) as caught:
            memory.check_memory(config, recipe, torch.device("cpu"))
        assert f"train.micro_batch_rows = {rows} (same result)" in caught.value.fix


def test_running_out_of_memory_names_the_phase_and_the_way_out(
    make_plan: Callable[..., RunPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def greedy(*inputs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(objective, "gpt_sums", greedy)
    with pytest.raises(Failed, match="out of memory in forward") as caught:
        train(make_plan("gpt"), tmp_path / "run")
    assert "activations" in caught.value.why
    assert "train.micro_batch_rows = 1" in caught.value.fix


class FakeCard:
    """What the error asks of a CUDA device."""

    total_memory = 2**30


@pytest.mark.parametrize(
    ("phase", "rows", "named"),
    [
        ("forward", 4, ["train.micro_batch_rows", "train.recompute", "parallel.data", "train.offload"]),
        ("backward", 1, ["train.recompute", "train.offload"]),  # one row is for one process
        ("the optimizer", 4, ["parallel.data", "train.offload"]),
    ],
)
def test_advice_on_a_gpu_is_what_the_same_directory_can_follow(
    make_recipe: Callable[..., Recipe],
    monkeypatch: pytest.MonkeyPatch,
    phase: str,
    rows: int,
    named: list[str],
) -> None:
    """A small run, whose peak is no matter of its rows over all: what helps in the phase that failed, cheapest first,
    and all of it among the fields that a resume may change.
    """
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: FakeCard)
    recipe = make_recipe("gpt", model={"overrides": BIG}, train={"batch_rows": rows, "sequence_length": 64})
    error = out_of_memory(model_config(recipe, 64), recipe, torch.device("cuda"), phase)
    lines = error.fix.splitlines()
    assert [line.split(" = ")[0] for line in lines] == named
    assert all(map(MAY_CHANGE.match, named))
    assert "1.00 GiB" in str(error.where)


def test_the_host_of_a_gpu_is_asked_too(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A 13B with its update on the host: 12 B a parameter of masters and moments, its sums and its pinned weights."""
    monkeypatch.setattr(memory, "memory_limit_bytes", lambda: 128 * 2**30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80 * 2**30, 80 * 2**30))
    given = {"sequence_length": 1024, "batch_rows": 8, "micro_batch_rows": 1, "precision": "bf16"}

    def check(name: str, offload: bool) -> None:
        model = {"preset": name, "overrides": {}}
        recipe = make_recipe("gpt", model=model, train=given | {"offload": offload})
        check_memory(preset(name), recipe, torch.device("cuda"))

    check("gpt2-124m", False)  # a copy for its checkpoints fits
    with pytest.raises(Refused, match=r"needs .* of the host, which has 128\.0 GiB") as caught:
        check("gpt3-13b", True)
    assert "master weights" in caught.value.why and "optimizer" in caught.value.why


def test_the_run_says_predicted_and_measured(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    """A small run is nearly all program: the resident memory of its process is within a factor of three of
    the prediction.
    """
    (tmp_path / "recipe.toml").write_text(dump_toml(make_recipe("gpt")))
    words = ["train", str(tmp_path / "recipe.toml"), "--run-dir", str(tmp_path / "run")]
    subprocess.run([sys.executable, "-m", "throughline.cli.main", *words], check=True, capture_output=True)
    memory = json.loads((tmp_path / "run/manifest.json").read_text())["facts"]["memory_bytes"]
    assert 1 / 3 < memory["measured"] / memory["predicted"] < 3
    assert "predicted" in (tmp_path / "run/report.html").read_text()


def test_a_gpu_is_compared_by_what_its_allocator_gave_out(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A card whose allocator holds just what the formulas say: predicted equals measured, though the prediction that a
    run is refused by has the context in it.
    """
    recipe, card = make_recipe("gpt"), torch.device("cuda")
    terms = predicted_memory(model_config(recipe, 64), recipe, "cuda")
    tensors = sum(terms.values()) - terms["runtime"]
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: tensors)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    seen = PhaseMemory(card)
    seen.start()
    seen.mark("forward")
    assert terms["runtime"] > 0 and beside(terms, card, seen.peak) == {
        "predicted": tensors,
        "measured": tensors,
    }
    assert beside(terms, torch.device("cpu"), 5) == {"predicted": sum(terms.values()), "measured": 5}


def test_what_fits_is_let_through(make_recipe: Callable[..., Recipe]) -> None:
    recipe = make_recipe("gpt")
    assert (
        check_memory(preset("gpt-toy"), recipe, torch.device("cpu"))["weights"]
        == 4 * preset("gpt-toy").parameter_count()
    )
