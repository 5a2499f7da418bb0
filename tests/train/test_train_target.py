"""Training to a target: the run ends there, says what it took, and its log is one that MLPerf's own checker accepts
in the open division.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from throughline.core.errors import WrongUse
from throughline.core.workspace import read_records
from throughline.train.build import RunPlan
from throughline.train.evaluate import Validation
from throughline.train.logs.target import log_lines, reached
from throughline.train.loop import train
from throughline.train.recipes.recipe import Recipe, TargetSection
from throughline.train.recipes.resolved import model_config


def setting(plan: RunPlan, value: float, **changes: object) -> RunPlan:
    recipe = plan.recipe
    train_section = recipe.train.model_copy(update={"eval_every_steps": 2, **changes})
    target = TargetSection(figure="mlm_accuracy", value=value)
    return replace(plan, recipe=recipe.model_copy(update={"train": train_section, "target": target}))


@pytest.fixture
def bert_plan(make_plan: Callable[..., RunPlan]) -> RunPlan:
    return make_plan("bert", train={"steps": 6})


def checked(log: Path, division: str, tmp_path: Path) -> bool:
    compliance = pytest.importorskip("mlperf_logging.compliance_checker.mlp_compliance")
    text = log.read_text().replace('"value": "open"', f'"value": "{division}"')
    (tmp_path / "log.txt").write_text(text)
    checker = compliance.make_checker("training", "1.1.0", quiet=False, werror=False)
    return compliance.main(str(tmp_path / "log.txt"), "training_1.1.0/common.yaml", checker)[0]


def test_ends_where_the_target_is_reached(bert_plan: RunPlan, tmp_path: Path) -> None:
    """A target that any model meets, so the first evaluation ends the run; the same command is then done."""
    plan = setting(bert_plan, 0.0)
    summary = train(plan, tmp_path / "run", evaluators=[Validation(plan)])
    assert summary["step"] == 2
    rows = plan.recipe.train.rows_per_step
    assert summary["target"] | {"seconds": 0} == {
        "figure": "mlm_accuracy",
        "value": 0.0,
        "reached": True,
        "measured": summary["validation"]["mlm_accuracy"],
        "samples": 2 * rows,
        "seconds": 0,
        "mlperf_reference": {"batch": 256, "samples": 2_549_220, "mlm_accuracy": 0.72},
    }
    assert train(plan, tmp_path / "run", evaluators=[Validation(plan)])["step"] == 2


def test_the_log_is_accepted_as_open_and_rejected_as_closed(bert_plan: RunPlan, tmp_path: Path) -> None:
    """The closed division asks for the reference's 24 layers, their names and its target: the twin has none."""
    plan = setting(bert_plan, 0.0)
    train(plan, tmp_path / "run", evaluators=[Validation(plan)])
    log = tmp_path / "run" / "mllog.txt"
    assert checked(log, "open", tmp_path)
    assert not checked(log, "closed", tmp_path)
    lines = [json.loads(line.removeprefix(":::MLLOG ")) for line in log.read_text().splitlines()]
    times = [line["time_ms"] for line in lines]
    assert times == sorted(times)
    said = {line["key"]: line for line in lines}
    assert said["run_stop"]["metadata"]["status"] == "success"
    assert said["train_samples"]["value"] == 2 * plan.recipe.train.rows_per_step
    events = [
        event for event in read_records(tmp_path / "run" / "events.jsonl") if event["event"] == "evaluation"
    ]
    assert said["eval_accuracy"]["value"] == events[-1]["figures"]["mlm_accuracy"]


def test_what_a_killed_run_did_again_is_in_the_log_once(make_recipe: Callable[..., Recipe]) -> None:
    """Evaluations after the save from which a run went on: the later ones stand, and what never came again goes."""
    recipe = make_recipe("bert", train={"micro_batch_rows": 1}, parallel={"data": 2})
    events = [
        {"event": "started", "time": 0.0, "gpus": [], "cpu": "a processor"},
        {"event": "running", "time": 1.0},
        *(
            {
                "event": "evaluation",
                "time": 2.0 + at,
                "samples": samples,
                "seconds": 0.1,
                "figures": {"mlm_accuracy": at},
            }
            for at, samples in enumerate((200, 400, 600, 400))
        ),
    ]
    said = list(log_lines(events, recipe, model_config(recipe, 64)))
    found = [
        (line["metadata"]["epoch_num"], line["value"]) for line in said if line["key"] == "eval_accuracy"
    ]
    assert found == [(200, 0), (400, 3)]
    blocks = [line["metadata"] for line in said if line["key"] == "block_start"]
    assert [(block["first_epoch_num"], block["epoch_count"]) for block in blocks] == [(0, 200), (200, 200)]
    # a batch of four rows on two processes: each takes its two one by one
    assert {line["key"]: line["value"] for line in said}["gradient_accumulation_steps"] == 2


def test_a_target_that_is_not_reached_ends_with_the_steps(bert_plan: RunPlan, tmp_path: Path) -> None:
    plan = setting(bert_plan, 0.999)
    summary = train(plan, tmp_path / "run", evaluators=[Validation(plan)])
    assert summary["step"] == plan.recipe.train.steps
    assert not summary["target"]["reached"]
    assert '"status": "aborted"' in (tmp_path / "run" / "mllog.txt").read_text()


def test_a_loss_is_reached_from_above() -> None:
    target = TargetSection(figure="mlm_loss", value=2.0)
    assert reached(target, {"mlm_loss": 1.9})
    assert reached(target, {"mlm_loss": 2.0})  # met exactly
    assert not reached(target, {"mlm_loss": 2.1})
    share = TargetSection(figure="mlm_accuracy", value=0.72)
    assert reached(share, {"mlm_accuracy": 0.72}) and reached(share, {"mlm_accuracy": 0.8})
    assert not reached(share, {"mlm_accuracy": 0.71})
    assert not reached(target, {"mlm_accuracy": 0.9})
    assert not reached(None, {"mlm_loss": 0.0})


def test_a_target_without_evaluations_is_a_wrong_recipe(make_plan: Callable[..., RunPlan]) -> None:
    target = {"figure": "mlm_accuracy", "value": 0.5}
    with pytest.raises(WrongUse, match="no evaluation would look at it"):
        make_plan("bert", train={"eval_every_steps": 0}, target=target)
    with pytest.raises(WrongUse, match="a gpt has no mlm_accuracy"):
        make_plan("gpt", train={"eval_every_steps": 2}, target=target)
