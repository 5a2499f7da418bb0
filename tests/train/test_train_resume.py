"""Stopped or killed anywhere, a run goes on to the last bit."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from throughline.core.artifact import verify_artifact
from throughline.core.errors import Stopped, WrongUse
from throughline.core.recipe import dump_toml
from throughline.core.workspace import read_records
from throughline.train.build import RunPlan
from throughline.train.checkpoints.checkpoint import load_model
from throughline.train.evaluate import Validation
from throughline.train.logs.metrics import read_metrics
from throughline.train.loop import Evaluator, train
from throughline.train.recipes.recipe import Recipe

FIGURES = ("step", "loss", "grad_norm", "lr", "skipped", "scale")


class Crash(Exception):
    pass


def crash_at(step: int) -> Evaluator:
    """An evaluator that ends the run as a fault in the middle would."""

    def evaluate(model: torch.nn.Module, now: int) -> dict[str, Any]:
        if now == step:
            raise Crash
        return {}

    return evaluate


def trained(run: Path) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Every step's figures, and the final weights."""
    records = [{name: record.get(name) for name in FIGURES} for record in read_metrics(run)]
    return records, dict(load_model(run)[0].state_dict())


def assert_same(first: Path, second: Path) -> None:
    (records, weights), (other_records, other_weights) = trained(first), trained(second)
    assert records == other_records
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt": ("gpt", {"train": {"batch_rows": 150}}),  # over the end of an epoch
    "bert": ("bert", {"train": {"batch_rows": 60}}),
    "gpt bf16": ("gpt", {"train": {"precision": "bf16"}}),
    "bert bf16, accumulated": ("bert", {"train": {"precision": "bf16", "micro_batch_rows": 2}}),
    "gpt fp16": ("gpt", {"train": {"precision": "fp16", "clip_norm": 0.1}}),
    "bert fp16": ("bert", {"train": {"precision": "fp16"}}),
    "gpt accumulated and recomputed": ("gpt", {"train": {"micro_batch_rows": 1, "recompute": "full"}}),
    "gpt muon": ("gpt", {"optimizer": {"name": "muon"}}),
    "gpt further tokens": ("gpt", {"model": {"overrides": {"predict_ahead": 1}}}),
    "bert packed": ("bert", {"objective": {"packing": True}, "train": {"recompute": "selective"}}),
    "gpt compiled": ("gpt", {"train": {"compile": "on"}}),
    "bert compiled": ("bert", {"train": {"compile": "on", "precision": "bf16"}}),
}
SLOW = [pytest.param(case, marks=pytest.mark.slow) if "compiled" in case else case for case in CASES]


@pytest.mark.parametrize("case", SLOW)
def test_a_crash_and_a_resume_change_no_bit(
    make_plan: Callable[..., RunPlan], tmp_path: Path, case: str
) -> None:
    """With dropout, for every precision: saved at step 2 of 6, crashed at 3. Each start compiles anew, as a
    process would.
    """
    family, sections = CASES[case]
    shape = {"layers": 2, "width": 32, "heads": 2, "dropout": 0.1}
    shape |= sections.get("model", {}).get("overrides", {})
    plan = make_plan(
        family,
        **sections
        | {"train": {"steps": 6, "eval_every_steps": 1} | sections.get("train", {})}
        | {"model": {"overrides": shape}},
        checkpoint={"save_every_steps": 2},
    )
    train(plan, tmp_path / "whole")
    torch.compiler.reset()
    with pytest.raises(Crash):
        train(plan, tmp_path / "parts", evaluators=[crash_at(3)])
    assert [r["step"] for r in read_records(tmp_path / "parts" / "metrics.jsonl") if "loss" in r] == [1, 2, 3]
    torch.compiler.reset()
    train(plan, tmp_path / "parts")
    assert len({record["loss"] for record in trained(tmp_path / "whole")[0]}) == 6
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_what_is_logged_evaluated_and_saved_changes_no_bit(
    make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    plain = make_plan("bert", train={"steps": 8}, log={"every_steps": 100})
    often = {"steps": 8, "eval_every_steps": 2, "eval_rows": 3}
    busy = make_plan("bert", train=often, checkpoint={"save_every_steps": 1, "keep": 1})
    train(plain, tmp_path / "plain")
    train(busy, tmp_path / "busy", evaluators=[Validation(busy)])
    weights, other = trained(tmp_path / "plain")[1], trained(tmp_path / "busy")[1]
    assert all(torch.equal(weights[name], other[name]) for name in weights)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stop_signal_saves_says_so_and_goes_on(
    number: signal.Signals, make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    """SIGTERM of a scheduler and SIGHUP of a lost terminal."""

    def stop(model: torch.nn.Module, step: int) -> dict[str, Any]:
        if step == 4:
            os.kill(os.getpid(), number)
        return {}

    plan = make_plan("gpt", train={"steps": 9, "eval_every_steps": 1})
    train(plan, tmp_path / "whole")
    with pytest.raises(Stopped) as caught:
        train(plan, tmp_path / "parts", evaluators=[stop])
    assert f"{number.name} at step 4" in caught.value.what
    assert (tmp_path / "parts/checkpoints/latest").read_text().strip() == "step-00000004"
    assert [event["event"] for event in read_records(tmp_path / "parts/events.jsonl")][-1] == "stopped"
    train(plan, tmp_path / "parts")
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_ctrl_c_saves_and_interrupts(make_plan: Callable[..., RunPlan], tmp_path: Path) -> None:
    plan, before = make_plan("gpt", train={"eval_every_steps": 1}), signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(
            plan, tmp_path / "run", evaluators=[lambda model, step: os.kill(os.getpid(), signal.SIGINT) or {}]
        )
    assert (tmp_path / "run/checkpoints/latest").read_text().strip() == "step-00000001"
    assert signal.getsignal(signal.SIGINT) is before


def test_a_finished_run_is_left_alone_and_more_steps_continue_it(
    make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    schedule = {"kind": "constant"}
    train(make_plan("gpt", train={"steps": 8}, schedule=schedule), tmp_path / "whole")
    first = train(make_plan("gpt", train={"steps": 4}, schedule=schedule), tmp_path / "parts")
    verify_artifact(tmp_path / "parts")
    assert train(make_plan("gpt", train={"steps": 4}, schedule=schedule), tmp_path / "parts") == first
    train(make_plan("gpt", train={"steps": 8}, schedule=schedule), tmp_path / "parts")
    assert_same(tmp_path / "whole", tmp_path / "parts")
    verify_artifact(tmp_path / "parts")


def test_another_recipe_or_other_files_are_refused(make_plan: Callable[..., RunPlan], tmp_path: Path) -> None:
    train(make_plan("gpt"), tmp_path / "run")
    with pytest.raises(WrongUse, match="another recipe") as caught:
        train(make_plan("gpt", train={"seed": 6}), tmp_path / "run")
    assert "train.seed was 5, is 6" in caught.value.why
    with pytest.raises(WrongUse, match="already there"):
        train(make_plan("gpt"), tmp_path / "run", resume="never")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/letter.txt").write_text("dear")
    with pytest.raises(WrongUse, match="not a run's directory"):
        train(make_plan("gpt"), tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir() if not path.name.startswith(".")] == [
        "letter.txt"
    ]


def test_a_run_that_has_no_checkpoint_says_that_it_begins_again(
    make_plan: Callable[..., RunPlan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after a kill before the first one: nothing was saved that could go on."""
    plan = make_plan("gpt", train={"steps": 1})
    train(plan, tmp_path / "run")
    assert "begins again" not in capsys.readouterr().err
    shutil.rmtree(tmp_path / "run/checkpoints")
    train(plan, tmp_path / "run")
    assert "has no checkpoint yet: its run begins again" in capsys.readouterr().err


def command(recipe: Path, run: Path) -> Sequence[str]:
    return [sys.executable, "-m", "throughline.cli.main", "train", str(recipe), "--run-dir", str(run)]


def write_recipe(tmp_path: Path, recipe: Recipe) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_text(dump_toml(recipe))
    return path


def test_sigterm_to_the_command_exits_75(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, make_recipe("gpt", train={"steps": 100_000}))
    process = subprocess.Popen(command(recipe, tmp_path / "run"), stderr=subprocess.PIPE, text=True)
    wait_for_steps(tmp_path / "run", process, 1)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 75, errors
    assert "saved and verified" in errors
    latest = (tmp_path / "run/checkpoints/latest").read_text().strip()
    verify_artifact(tmp_path / "run/checkpoints" / latest)


def wait_for_steps(
    run: Path, process: subprocess.Popen, more: int, file: str = "metrics.jsonl", before: int = 0
) -> None:
    """Until that many more records are written down."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if sum(1 for _ in read_records(run / file)) >= before + more:
            return
        time.sleep(0.02)
    raise AssertionError(f"no step after all: exit {process.poll()}")


@pytest.mark.slow
def test_kill_9_at_random_moments_loses_no_bit(
    make_recipe: Callable[..., Recipe], make_plan: Callable[..., RunPlan], tmp_path: Path
) -> None:
    """Killed five times, saving at every second step so that saves are hit too; what `latest` names is always
    whole.

    The run has no end to come before a kill; in the end it is given one. Each start gets as far as a few
    saves.
    """
    sections = {"checkpoint": {"save_every_steps": 2, "keep": 3}, "schedule": {"kind": "constant"}}
    endless = make_recipe("bert", train={"steps": 1_000_000}, **sections)
    recipe, run = write_recipe(tmp_path, endless), tmp_path / "parts"
    draw, env = random.Random(11), os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(5):
        before = sum(1 for _ in read_records(run / "events.jsonl"))
        process = subprocess.Popen(command(recipe, run), stderr=subprocess.DEVNULL, env=env)
        wait_for_steps(run, process, draw.randint(2, 12), "events.jsonl", before)
        process.kill()
        process.wait()
        latest = run / "checkpoints/latest"
        if latest.is_file():
            verify_artifact(latest.parent / latest.read_text().strip())
    last = max(record["step"] for record in read_records(run / "metrics.jsonl"))
    plan = make_plan("bert", train={"steps": last + 4}, **sections)
    train(plan, run)
    train(plan, tmp_path / "whole")
    assert_same(tmp_path / "whole", run)
