"""The directory of a run, before its first step: whose it is, whether this recipe may go on in it, and from where."""

import platform
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ...core.artifact import MANIFEST, is_artifact, read_manifest
from ...core.errors import WrongUse
from ...core.files import write_atomic
from ...core.hardware import machine
from ...core.recipe import dump_toml, load_recipe
from ...core.version import version
from ..build import RunPlan
from ..corpus import check_inputs
from ..logs.target import reached
from ..parallel.ranks import RunWorkspace
from ..recipes.recipe import Recipe
from .finding import find_resumable

MAY_CHANGE = (  # on resume; every layout and split into micro-batches trains the same model
    "train.steps",
    "train.eval_",
    "train.stop_after_skipped",
    "train.micro_batch_rows",
    "train.recompute",
    "train.compile",
    "train.offload",
    "train.device",
    "train.deterministic",
    "parallel.",
    "evaluation.",
    "checkpoint.",
    "log.",
    "target.",
)


def open_run(
    workspace: RunWorkspace, plan: RunPlan, verified: Collection[tuple[Path, str]]
) -> tuple[Path | None, dict[str, Any] | None]:
    """Make the directory, which is this run's, ready for steps: the checkpoint to go on from, and the summary of a run
    that has ended. Files of checkpoints that are `verified` are not read again.
    """
    recipe = plan.recipe
    checkpoint = find_resumable(workspace.path / "checkpoints", verified)
    if checkpoint is not None and is_artifact(workspace.path):
        done = read_manifest(workspace.path, "run").facts
        if done["step"] >= recipe.train.steps or reached(recipe.target, done["validation"]):
            return checkpoint, done
    if checkpoint is not None:
        check_inputs(checkpoint, plan.corpus.inputs)
    (workspace.path / MANIFEST).unlink(missing_ok=True)
    write_atomic(workspace.path / "recipe.toml", dump_toml(recipe))
    return checkpoint, None


def claim(workspace: RunWorkspace, recipe: Recipe, resume: str) -> None:
    """Become the directory's owner. Raises WrongUse when another run or other files are in it."""
    file = workspace.path / "recipe.toml"
    if file.exists():
        _check_recipe(file, recipe, resume)
    else:
        names = (path.name for path in workspace.path.iterdir())
        others = [name for name in names if name != "cache" and not name.startswith(".")]
        if others:
            why = f"it holds {others[0]} and no recipe.toml"
            fix = "choose another --run-dir"
            raise WrongUse("not a run's directory", where=workspace.path, why=why, fix=fix)
    workspace.own()


def _check_recipe(file: Path, recipe: Recipe, resume: str) -> None:
    """The recipe of the run that is there, to which this one must be equal but for what may change."""
    if resume == "never":
        fix = "--resume auto continues it; --run-dir starts elsewhere"
        raise WrongUse("a run is already there", where=file.parent, fix=fix)
    before, now = (_leaves(_placeless(tree)) for tree in (load_recipe(file, Recipe), recipe))
    # one left alone sends nothing
    free = (*MAY_CHANGE, "compression.") if recipe.compression.scheme == "none" else MAY_CHANGE
    changed = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
    changed = [key for key in changed if not key.startswith(free)]
    if changed:
        raise WrongUse(
            "the run there has another recipe",
            where=file,
            why="\n".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in changed),
            fix="train in another directory with --run-dir, or take the change back",
        )


def _placeless(recipe: Recipe) -> dict[str, Any]:
    """The fields without the places of the data, which may move: their content is checked by its hashes
    (check_inputs).
    """
    tree = recipe.model_dump(mode="json")
    tree["data"]["train"] = [source["weight"] for source in tree["data"]["train"]]
    tree["data"] |= {key: bool(tree["data"][key]) for key in ("validation", "tokenizer")}
    return tree


def _leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return leaves


def environment(plan: RunPlan, peak: float | None, peak_source: str) -> dict[str, Any]:
    """Where a run starts or goes on, for its events."""
    here = machine()
    return {
        "throughline": version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": str(plan.device),
        "cpu": here.cpu.name,
        "gpus": [gpu.name for gpu in here.gpus],
        "threads": torch.get_num_threads(),
        "data": [Path(source.path).name for source in plan.recipe.data.sources()],
        "training_tokens": sum(store.tokens for store in plan.corpus.train),
        "parameters": plan.config.parameter_count(),
        "predicted_memory": plan.memory,
        "peak_flops": peak,
        "peak_source": peak_source,
    }
