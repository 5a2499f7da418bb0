"""The directory of a run, before its first step: whose it is, whether this recipe may go on in it, and from where."""

import platform
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from ...core.artifact import MANIFEST, Manifest, is_artifact, read_manifest, version
from ...core.errors import Refused, WrongUse
from ...core.files import write_atomic
from ...core.hardware import machine
from ...core.recipe import dump_toml, load_recipe
from ...core.workspace import Workspace
from ..build import RunPlan
from ..corpus import check_inputs
from ..logs.target import reached
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
HANDOVER_SECONDS = 2.0  # in which the processes of a launcher that was just killed have ended
OWNER = ".owner"  # the token of the start that writes the run's directory
HEARTBEAT = ".heartbeat"  # in it: how far its processes are


class RunWorkspace(Workspace):
    """The run's directory as the start of that token sees it: whoever starts the run later becomes its owner, and this
    one writes no more. The processes other than the first read it only, and take no lock.

    The lock keeps two starts on one machine apart, the token those that it does not reach (another machine, a file
    system without locks): a start that was taken for dead can wake up beside its successor.
    """

    def __init__(self, path: Path | str, token: str, leads: bool = True) -> None:
        super().__init__(path)
        self.token, self.leads = token, leads

    def __enter__(self) -> "RunWorkspace":
        end = time.monotonic() + HANDOVER_SECONDS
        while self.leads:
            try:
                super().__enter__()
                break
            except WrongUse:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
        return self

    def own(self) -> None:
        """Become the owner, after all checks: a start that is refused takes nothing from a run that lives."""
        write_atomic(self.path / OWNER, self.token)
        # of processes that were killed, perhaps more than there are now
        shutil.rmtree(self.path / HEARTBEAT, ignore_errors=True)

    def check_owner(self) -> None:
        """Raises Refused when the run was started again elsewhere since."""
        file = self.path / OWNER
        found = file.read_text() if file.exists() else "nobody"
        if found != self.token:
            raise Refused(
                "another start of this run has taken over its directory",
                where=self.path,
                why=f"this one is {self.token}, the directory belongs to {found}",
                fix="let the other one train; what it writes is whole, and nothing was written here",
            )

    def append(self, name: str, *records: dict[str, Any], sync: bool = False) -> None:
        if self.leads:
            self.check_owner()
            super().append(name, *records, sync=sync)

    def finish(self, *arguments: Any, **options: Any) -> Manifest | None:  # type: ignore[override]
        if not self.leads:
            return None
        self.check_owner()
        (self.path / OWNER).unlink()
        return super().finish(*arguments, **options)


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
    """The fields without the places of the data, which may move: their content is checked by `check_inputs`."""
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
