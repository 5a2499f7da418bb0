"""Where the checkpoints of a run lie, and which of them is whole."""

import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ...core.artifact import is_artifact, read_manifest, verify_artifact
from ...core.console import warn
from ...core.errors import Refused, ThroughlineError, WrongUse, download_hint
from ...core.files import sha256_file

LATEST = "latest"  # a text file beside the checkpoints with the name of one


def checkpoints(directory: Path) -> list[Path]:
    """The complete checkpoints in a run's `checkpoints`, newest first; other names are not the run's."""
    steps = (path for path in directory.glob("step-*") if path.name.removeprefix("step-").isdigit())
    return sorted((path for path in steps if is_artifact(path)), reverse=True)


def verified_share(directory: Path, rank: int, world: int) -> set[tuple[Path, str]]:
    """Of the newest checkpoint those files whose every byte is as written, every `world`-th by size: each process reads
    a share where one would read a terabyte.
    """
    with suppress(OSError, ThroughlineError):  # then the first process reads again and says what is wrong
        for path in checkpoints(directory)[:1]:
            files = sorted(read_manifest(path).files, key=lambda file: (file.bytes, file.name))[rank::world]
            return {(path, file.name) for file in files if sha256_file(path / file.name) == file.sha256}
    return set()


def find_resumable(directory: Path, verified: Collection[tuple[Path, str]] = ()) -> Path | None:
    """The newest checkpoint whose every byte is as written, as that of `verified` is; None when there is none at all.

    A damaged one is named and passed over. Raises Refused when all are damaged. Removes what a killed save left.
    """
    for remains in directory.glob(".step-*.tmp"):
        shutil.rmtree(remains, ignore_errors=True)
    damaged: ThroughlineError | None = None
    for path in checkpoints(directory):
        try:
            verify_artifact(path, read_back={name for place, name in verified if place == path})
        except (ThroughlineError, OSError) as error:
            warn(f"checkpoint passed over: {error}")
            if isinstance(error, OSError):
                error = Refused("it cannot be read", where=path, why=str(error))
            damaged = damaged or error
        else:
            return path
    if damaged is not None:
        raise Refused(
            "no checkpoint of this run is whole",
            where=damaged.where,
            why=f"{damaged.what}: {damaged.why}".rstrip(": "),
            fix="restore a checkpoint from a copy, or start again in another directory: --run-dir",
        )
    return None


def locate(path: Path | str) -> Path:
    """The checkpoint that `path` means: itself, or the latest of a run. Raises WrongUse when there is none."""
    path = Path(path)
    pointer = path / "checkpoints" / LATEST
    if pointer.is_file():
        return path / "checkpoints" / pointer.read_text().strip()
    if is_artifact(path) and read_manifest(path).kind == "checkpoint":
        return path
    if not path.exists():
        fix = f"check the spelling; runs are under runs/{download_hint(path)}"
        raise WrongUse("no such run or checkpoint", where=path, fix=fix)
    what = "neither a run with a checkpoint nor a checkpoint"
    why = "it has no checkpoints/latest and no manifest"
    fix = "give a directory that `throughline train` wrote, or one under its checkpoints/"
    if is_artifact(path):
        what, why = f"a model is needed, this is an artifact of kind {read_manifest(path).kind}", ""
    elif (path / "adapter_config.json").is_file():
        what, why = "this is an adapter (LoRA), not a model", "it changes the weights of another directory"
        fix = "merge it first: merge_and_unload() and save_pretrained() of peft"
    elif path.is_dir() and not any(path.iterdir()):
        why = "it is empty"
    raise WrongUse(what, where=path, why=why, fix=fix)
