"""The directory of a run: whose it is, which recipe may go on in it, which of its checkpoints is whole."""

import os
import re
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...core.artifact import MANIFEST, Input, Manifest, is_artifact, read_manifest, verify_artifact
from ...core.console import say, warn
from ...core.errors import Refused, ThroughlineError, WrongUse, download_hint
from ...core.files import leaves, sha256_file, write_atomic
from ...core.recipe import dump_toml, load_recipe
from ...core.workspace import Workspace
from ..logs.target import reached
from ..recipes.recipe import Recipe

LATEST = "latest"  # a text file beside the checkpoints with the name of one
# on resume; every layout and split into micro-batches trains the same model, unless experts drop tokens of their own
MAY_CHANGE = re.compile(
    r"train\.(steps|eval_|stop_after_skipped|micro_batch_rows|recompute|compile|offload|device|deterministic)"
    r"|(parallel|evaluation|checkpoint|log|target)\."
    r"|(optimizer\.(learning_rate|matrix_learning_rate)|train\.clip_norm)$"
)
SHOWN_SECONDS = (
    10.0  # until a file that one machine has written is shown on another: NFS keeps names for seconds
)
HANDOVER_SECONDS = 2.0  # in which the processes of a launcher that was just killed have ended
OWNER = ".owner"  # the token of the start that writes the run's directory
HEARTBEAT = ".heartbeat"  # in it: how far its processes are


class RunWorkspace(Workspace):
    """The run's directory as the start of that token sees it: a later start becomes its owner, and this one writes no
    more. The lock, taken by the first process alone, keeps two starts on one machine apart, the token those that it
    does not reach (another machine, a file system without locks): one taken for dead can wake up beside its successor.
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

    def seen_owner(self) -> tuple[str, str]:
        """This machine's name, and the token of the directory's owner as it is seen here ("" for none). A network file
        system may show a new file late.
        """
        file, end = self.path / OWNER, time.monotonic() + SHOWN_SECONDS
        while (found := file.read_text() if file.is_file() else "") != self.token and time.monotonic() < end:
            time.sleep(0.05)
        return socket.gethostname(), found

    def check_owner(self) -> None:
        """Raises Refused when the run was started again elsewhere since."""
        file = self.path / OWNER
        owner = file.read_text() if file.exists() else ""
        if owner == self.token:
            return
        is_finished = (self.path / MANIFEST).exists()
        if not owner and not is_finished:
            what, why = "the run's directory was removed or emptied", f"{file} is not there any more"
            fix = "restore the directory, and give the same command again"
            raise Refused(what, where=self.path, why=why, fix=fix)
        what = "another start of this run has taken over its directory"
        why = f"this one is {self.token}, the directory belongs to {owner}"
        fix = "let the other one train; what it writes is whole, and nothing was written here"
        if not owner:
            why = f"this one is {self.token}; the other one has finished the run"
            fix = "use the finished run; nothing was written here"
        raise Refused(what, where=self.path, why=why, fix=fix)

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


def check_owners(directory: Path, token: str, seen: Sequence[tuple[str, str]]) -> None:
    """Raise Refused when a process does not see the token that the first one has written into the run's directory.
    `seen`: machine and token by process.
    """
    apart = [(rank, machine) for rank, (machine, found) in enumerate(seen) if found != token]
    if apart:
        rank, machine = apart[0]
        others = f", and {len(apart) - 1} more" if len(apart) > 1 else ""
        what = "the processes do not share the run's directory"
        why = f"process {rank} on {machine}{others} does not see the file {OWNER} that process 0 on {seen[0][0]} wrote"
        fix = "--run-dir DIRECTORY on a file system that every machine mounts at the same path (NFS, Lustre, ...)"
        raise Refused(what, where=directory, why=why, fix=fix)


def open_run(
    workspace: RunWorkspace,
    recipe: Recipe,
    inputs: Sequence[Input],
    verified: Collection[tuple[Path, str]],
    check: Callable[[Path], None] = lambda checkpoint: None,
) -> tuple[Path | None, dict[str, Any] | None]:
    """Make the claimed directory ready for steps: the checkpoint to go on from, the summary of a run that has ended.
    `check` may refuse to go on from the checkpoint, before anything is changed.
    """
    checkpoint = find_resumable(workspace.path / "checkpoints", verified)
    if checkpoint is not None and is_artifact(workspace.path):
        done = read_manifest(workspace.path, "run").facts
        if done["step"] >= recipe.train.steps or reached(recipe.target, done["validation"]):
            return checkpoint, done
    if checkpoint is not None:
        check_inputs(checkpoint, inputs)
        check(checkpoint)
    (workspace.path / MANIFEST).unlink(missing_ok=True)
    if checkpoint is None and (workspace.path / "recipe.toml").exists():
        say(f"{workspace.path} has no checkpoint yet: its run begins again")
    write_atomic(workspace.path / "recipe.toml", dump_toml(recipe))
    return checkpoint, None


def claim(workspace: RunWorkspace, recipe: Recipe, resume: str) -> Recipe | None:
    """Become the directory's owner, and return the recipe of the run that is in it. Raises WrongUse when another run or
    other files are in it.
    """
    file, before = workspace.path / "recipe.toml", None
    if file.exists():
        before = load_recipe(file, Recipe)
        _check_recipe(file, before, recipe, resume)
    else:
        names = (path.name for path in workspace.path.iterdir())
        others = [name for name in names if name != "cache" and not name.startswith(".")]
        if others:
            why = f"it holds {others[0]} and no recipe.toml"
            fix = "choose another --run-dir"
            raise WrongUse("not a run's directory", where=workspace.path, why=why, fix=fix)
    workspace.own()
    return before


def _check_recipe(file: Path, old: Recipe, recipe: Recipe, resume: str) -> None:
    if resume == "never":
        fix = "--resume auto continues it; --run-dir starts elsewhere"
        raise WrongUse("a run is already there", where=file.parent, fix=fix)
    before, now = (dict(leaves(_placeless(tree))) for tree in (old, recipe))
    changed = [key for key in sorted(before | now) if before.get(key) != now.get(key)]
    changed = [key for key in changed if not MAY_CHANGE.match(key)]
    if recipe.compression.scheme == "none":  # it sends nothing
        changed = [key for key in changed if not key.startswith("compression.")]
    if changed:
        why = "\n".join(f"{key} was {before.get(key)}, is {now.get(key)}" for key in changed)
        fix = "train in another directory with --run-dir, or take the change back"
        raise WrongUse("the run there has another recipe", where=file, why=why, fix=fix)


def _placeless(recipe: Recipe) -> dict[str, Any]:
    """The fields without the places of the data, which may move: their content is checked by `check_inputs`."""
    tree = recipe.model_dump(mode="json")
    weights = [source["weight"] for source in tree["data"]["train"]]
    tree["data"]["train"] = weights if len(weights) > 1 else []  # one store is read whatever its weight
    tree["data"] |= {key: bool(tree["data"][key]) for key in ("validation", "tokenizer")}
    return tree


def check_inputs(checkpoint: Path, inputs: Sequence[Input]) -> None:
    """Refuse to go on with other data than the checkpoint was trained on: its position would mean other rows."""
    before = read_manifest(checkpoint).inputs
    changed = [item.path for item, old in zip(inputs, before) if item.hash != old.hash]
    if changed or len(before) != len(inputs):
        where = ", ".join(changed[:3]) or f"{len(inputs)} inputs instead of {len(before)}"
        why = f"their hashes are not those in {checkpoint / MANIFEST}"
        fix = "put the data back, or train in another directory with --run-dir"
        raise Refused("the data have changed since the run was saved", where=where, why=why, fix=fix)


def earlier_lengths(state: dict[str, Any], planned: int, planned_before: int | None) -> list[tuple[int, int]]:
    """`Trainer.earlier_lengths` of a run that goes on from a checkpoint's state with `planned` steps. `planned_before`
    is what the recipe before said, for checkpoints of versions that did not save it.
    """
    lengths = [(until, steps) for until, steps in state.get("earlier_lengths", [])]
    planned_then = state.get("planned_steps", planned_before) or planned
    return lengths if planned_then == planned else [*lengths, (state["step"], planned_then)]


def checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints`, newest first; other names are not the run's."""
    steps = (path for path in directory.glob("step-*") if path.name.removeprefix("step-").isdigit())
    return sorted((path for path in steps if is_artifact(path)), reverse=True)


def verified_share(directory: Path, rank: int, world: int) -> set[tuple[Path, str]]:
    """Of the newest checkpoint those files, every `world`-th by size, whose every byte is as written."""
    with suppress(OSError, ThroughlineError):  # then the first process reads again and says what is wrong
        for path in checkpoints(directory)[:1]:
            files = sorted(read_manifest(path).files, key=lambda file: (file.bytes, file.name))[rank::world]
            return {(path, file.name) for file in files if sha256_file(path / file.name) == file.sha256}
    return set()


def find_resumable(directory: Path, verified: Collection[tuple[Path, str]] = ()) -> Path | None:
    """The newest checkpoint whose every byte is as written, as that of `verified` is; None when there is none. Damaged
    ones are named and passed over, Refused when all are. Removes what a killed save left.
    """
    for remains in directory.glob(".step-*.tmp"):
        shutil.rmtree(remains, ignore_errors=True)
    for remains in directory.glob(f".{LATEST}.*.tmp"):  # of a kill while the pointer was written
        remains.unlink(missing_ok=True)
    damaged: ThroughlineError | None = None
    for path in checkpoints(directory):
        try:
            verify_artifact(path, read_back={name for place, name in verified if place == path})
            return path
        except (ThroughlineError, OSError) as error:
            warn(f"checkpoint passed over: {error}")
            if isinstance(error, OSError):
                error = Refused("it cannot be read", where=path, why=str(error))
            damaged = damaged or error
    if damaged is not None:
        why = f"{damaged.what}: {damaged.why}".rstrip(": ")
        fix = "restore a checkpoint from a copy, or start again in another directory: --run-dir"
        raise Refused("no checkpoint of this run is whole", where=damaged.where, why=why, fix=fix)
    return None


def _pointed_at(pointer: Path) -> str:
    """The name of a checkpoint in the file `latest`. Raises Refused for a file that holds none."""
    why = "it is empty"
    try:
        if name := pointer.read_text(encoding="utf-8").strip():
            return name
    except (OSError, UnicodeDecodeError) as error:
        why = str(error)
    fix = f"write the name of one of the checkpoints beside it into the file: echo step-00000010 > {pointer}"
    raise Refused(
        "the file that names a run's latest checkpoint cannot be read", where=pointer, why=why, fix=fix
    )


def locate(path: Path | str) -> Path:
    """The checkpoint that `path` means: itself, or the latest of a run. Raises WrongUse when there is none."""
    path = Path(path)
    pointer = path / "checkpoints" / LATEST
    if pointer.is_file():
        return path / "checkpoints" / _pointed_at(pointer)
    if is_artifact(path) and read_manifest(path).kind == "checkpoint":
        return path
    if not path.exists():
        fix = f"check the spelling; runs are under runs/{download_hint(Path(os.path.relpath(path)))}"
        raise WrongUse("no such run or checkpoint", where=path, fix=fix)
    what = "neither a run with a checkpoint nor a checkpoint"
    why = "it has no checkpoints/latest and no manifest"
    fix = "give a directory that `throughline train` wrote, or one under its checkpoints/"
    if is_artifact(path):
        what, why = f"a model is needed, this is an artifact of kind {read_manifest(path).kind}", ""
    elif (path / "adapter_config.json").is_file():
        what, why = "this is an adapter (LoRA), not a model", "it changes the weights of another directory"
        fix = "merge it first: merge_and_unload() and save_pretrained() of peft"
    elif (path / "recipe.toml").is_file():
        what, why, fix = "this run has no checkpoint yet", "", "give the command that began it again"
    elif path.is_dir() and not any(path.iterdir()):
        why = "it is empty"
    raise WrongUse(what, where=path, why=why, fix=fix)


def train_command(
    recipe: Recipe, run: Path, run_dir: Path, settings: list[str], init_from: Path | None = None
) -> str:
    """The command that trains the recipe of `run` with these settings in `run_dir`."""
    words = ["throughline"]
    if (processes := recipe.parallel.layout().world) > 1:
        words += ["launch", "--nproc", str(processes), "--"]
    words += ["train", str(run / "recipe.toml"), "--run-dir", str(run_dir)]
    if init_from is not None:
        words += ["--init-from", str(init_from)]
    for setting in settings:
        words += ["--set", setting]
    return shlex.join(words)


def free_directory(run: Path) -> Path:
    """A directory beside the run's that does not exist yet."""
    number = 2
    while (path := run.with_name(f"{run.name}-{number}")).exists():
        number += 1
    return path
