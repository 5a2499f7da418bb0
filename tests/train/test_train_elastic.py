"""The number of processes may change between starts: the same rows, the same losses, the same batch. They
stop together.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from throughline.core.artifact import verify_artifact
from throughline.core.errors import Stopped
from throughline.prove.forked import run_ranks, warm
from throughline.train import build, loop
from throughline.train.build import plan_run
from throughline.train.checkpoints.checkpoint import CheckpointWriter
from throughline.train.logs.metrics import read_metrics
from throughline.train.recipes.recipe import Recipe

ROWS = 8
BOUND = 1e-12  # float64 rounding is 1e-15; one row read twice or left out shows at 1e-3


class Recording:
    """A dataset that remembers which row was read at which position."""

    def __init__(self, dataset: Any, seen: dict[int, bytes]) -> None:
        self.dataset, self.seen, self.rows = dataset, seen, dataset.rows

    def batch(self, position: int, count: int) -> dict[str, np.ndarray]:
        rows = self.dataset.batch(position, count)
        for index in range(count):
            assert position + index not in self.seen, "read twice"
            self.seen[position + index] = b"".join(rows[name][index].tobytes() for name in sorted(rows))
        return rows


def start(recipe: Recipe, run: Path) -> dict[int, bytes]:
    """One process of a start: what it read, by position."""
    seen: dict[int, bytes] = {}
    original = build.training_rows
    build.training_rows = lambda *arguments: Recording(original(*arguments), seen)
    loop.train(plan_run(recipe), run)
    return seen


CHANGES = {
    "fewer and more": ({"data": 2}, {}, {"data": 2}),
    "other axes": ({"tensor": 2}, {"pipeline": 2}, {"context": 2, "data": 2, "sharding": "full"}),
}


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("change", CHANGES)
def test_every_start_in_another_layout(
    make_recipe: Callable[..., Recipe], tmp_path: Path, family: str, change: str
) -> None:
    """Each row once, at its place, and by every process of those that share it."""
    warm()

    def recipe(steps: int, parallel: dict[str, Any]) -> Recipe:
        train = {"steps": steps, "batch_rows": ROWS, "precision": "fp64"}
        return make_recipe(family, train=train, schedule={"kind": "constant"}, parallel=parallel)

    whole = run_ranks(1, lambda: start(recipe(9, {}), tmp_path / "whole"))[0]
    first = 0
    for steps, parallel in zip((3, 6, 9), CHANGES[change], strict=True):
        layout = recipe(steps, parallel).parallel.layout()
        parts = run_ranks(layout.world, lambda n=steps, p=parallel: start(recipe(n, p), tmp_path / "run"))
        wanted = range(first * ROWS, steps * ROWS)
        # not those read ahead
        read = [{position: row for position, row in seen.items() if position in wanted} for seen in parts]
        shared = layout.world // layout.data
        assert sorted(position for seen in read for position in seen) == sorted([*wanted] * shared)
        assert all(row == whole[position] for seen in read for position, row in seen.items())
        first = steps
    one, other = read_metrics(tmp_path / "whole"), read_metrics(tmp_path / "run")
    assert [record["step"] for record in one] == [record["step"] for record in other] == list(range(1, 10))
    for record, again in zip(one, other, strict=True):
        assert record["loss"] == pytest.approx(again["loss"], rel=BOUND)
        # as the proof of the layouts
        assert record["grad_norm"] == pytest.approx(again["grad_norm"], rel=1e-11)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_one_process_stops_all_at_one_step(
    number: signal.Signals, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """The signal reaches the second process only, after step 4: it travels with the next step's totals, so all
    save step 5, say so (exit 75), and `latest` names it.
    """
    warm()

    def stop(model: Any, step: int) -> dict[str, Any]:
        if step == 4 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), number)
        return {}

    def rank() -> tuple[str, int]:
        recipe = make_recipe("gpt", train={"steps": 50, "eval_every_steps": 1}, parallel={"data": 2})
        try:
            loop.train(plan_run(recipe), tmp_path / "run", evaluators=[stop])
        except Stopped as stopped:
            return stopped.what, stopped.exit_code
        raise AssertionError("the run went to its end")

    assert run_ranks(2, rank) == [(f"stopped by {number.name} at step 5, saved and verified", 75)] * 2
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-00000005\n"
    verify_artifact(tmp_path / "run/checkpoints/step-00000005")
    assert not (tmp_path / "run/.heartbeat").exists()


@pytest.mark.slow
def test_a_checkpoint_may_take_longer_than_a_collective(
    make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    """The time limit is 10 s, the first process writes for 12: the other one waits, at the next save and at
    the end.
    """
    warm()

    def rank() -> int:
        write = CheckpointWriter._write

        def slowly(writer: CheckpointWriter, *arguments: Any) -> Path:
            if not writer.process:
                time.sleep(12)
            return write(writer, *arguments)

        CheckpointWriter._write = slowly
        save = {"save_every_steps": 1}
        recipe = make_recipe(
            "gpt", train={"steps": 2}, parallel={"data": 2, "timeout_seconds": 10}, checkpoint=save
        )
        return loop.train(plan_run(recipe), tmp_path / "run")["step"]

    assert run_ranks(2, rank) == [2, 2]
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-00000002\n"
