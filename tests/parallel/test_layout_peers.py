"""The peers of benchmarks/layouts.py train the model that our layouts train: the same losses, step by step."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from layouts import AGREE, CASES, PEERS_OF, collective_share  # noqa: E402
from layouts_peers import measure  # noqa: E402
from throughline.core.recipe import build_recipe  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.train.build import plan_run  # noqa: E402
from throughline.train.logs.metrics import read_metrics  # noqa: E402
from throughline.train.logs.profile import ACTIVE, SKIPPED, WARMUP  # noqa: E402
from throughline.train.loop import train  # noqa: E402
from throughline.train.recipes.recipe import Recipe  # noqa: E402
from throughline.train.recipes.resolved import resolve  # noqa: E402
from throughline.train.recipes.rules import RULES  # noqa: E402


def tiny(case: str, store: Path) -> Recipe:
    tree: dict[str, Any] = {
        "data": {"train": str(store), "validation_fraction": 0},
        "model": {"overrides": {"layers": 2, "width": 32, "heads": 2, "vocab_size": 41, "tied": False}},
        "train": {"steps": 5, "sequence_length": 16, "batch_rows": 4, "compile": "off", "device": "cpu"},
        # a rate at which the losses of wrong gradients part company within the five steps
        "optimizer": {"learning_rate": 1e-2, "weight_decay": 0.0},
        "schedule": {"kind": "constant"},
        "parallel": {},
    }
    for key, value in CASES[case].items():
        section, field = key.split(".")
        tree[section][field] = value
    return resolve(build_recipe(tree, Recipe, RULES))


@pytest.mark.parametrize("case", ["fsdp2", "tp2", "pp2"])
def test_the_traces_of_both_sides_show_their_collectives(case: str, store: Path, tmp_path: Path) -> None:
    """Without any the share would be 0; it is below 1, since steps compute too."""
    warm()
    recipe = tiny(case, store)
    steps = {"steps": SKIPPED + WARMUP + ACTIVE}
    recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update=steps)})

    def ours() -> None:
        torch.set_num_threads(1)
        train(plan_run(recipe), tmp_path / "run", profile=True)

    run_ranks(2, ours)
    losses_of_peer(case, recipe, tmp_path / "theirs.json")
    for trace in (tmp_path / "run" / "profile" / "trace.json", tmp_path / "theirs.json"):
        assert 0.001 < collective_share(trace) < 1, trace


def losses_of_peer(kind: str, recipe: Recipe, trace: Path | None = None) -> list[float]:
    def work() -> list[float]:
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        return measure(kind, recipe, trace)[0]

    return run_ranks(2, work)[0]


@pytest.mark.parametrize("case", CASES)
def test_the_peers_of_a_layout_have_its_losses(case: str, store: Path, tmp_path: Path) -> None:
    """The bound is the benchmark's own, above which it measures nothing; the fall of the loss is a hundred times it."""
    warm()
    recipe = tiny(case, store)

    def ours() -> None:
        torch.set_num_threads(1)
        train(plan_run(recipe), tmp_path / "run")

    run_ranks(2, ours)
    losses = [record["loss"] for record in read_metrics(tmp_path / "run") if "loss" in record]
    bound = AGREE[recipe.train.precision]
    assert losses[-1] < (1 - 10 * bound) * losses[0], losses
    for kind in PEERS_OF.get(case, (case.partition("-")[0],)):
        assert losses_of_peer(kind, recipe) == pytest.approx(losses, rel=bound), kind
