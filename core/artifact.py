"""Artifacts: what one stage hands to the next is a directory with a `manifest.json`.

The manifest names the kind (tokenizer, tokens, checkpoint, run, model, calibration, scores, batch, onnx, gguf, engine,
plan, cache or bench), the command, the inputs with their hashes (back to the text), every file with size and sha256,
and facts. A directory is written under a temporary name, hashed, flushed and renamed, and never changed in place.
"""

import json
import os
import re
import shlex
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from .errors import Refused, ThroughlineError, WrongUse, beside
from .files import read_json, sha256_file, sha256_json, sync, walk_files, write_atomic, written_aside

FORMAT_VERSION = 1
CACHED_BYTES = 1 << 20  # of a foreign file whose hash is remembered; smaller ones are hashed in a millisecond
SETTLED_S = (
    2.0  # since a file's last change: one that is written again within a tick of the clock has the same time
)
CHECK_BYTES = 4 << 30  # of foreign inputs that are hashed to see whether they are the same: three seconds
MANIFEST = "manifest.json"
# settings, which whoever has a model may change or add
OPEN = ("chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class FileRecord:
    """One file of an artifact: name relative to its directory, size in bytes, sha256 of its content."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Input:
    """What an artifact was made from: its place, kind ("foreign" when not ours) and hash ("": unknown)."""

    path: str
    kind: str
    hash: str


@dataclass(frozen=True)
class Manifest:
    """The content of one `manifest.json`."""

    kind: str
    format_version: int
    throughline_version: str
    command: str
    recipe_hash: str | None
    created: str
    inputs: tuple[Input, ...]
    files: tuple[FileRecord, ...]
    facts: dict[str, Any]

    @property
    def hash(self) -> str:
        """Identity of the content: kind, files and facts but those under `made` (by which encoder, from which plan)."""
        facts = {key: value for key, value in self.facts.items() if key != "made"}
        files = [asdict(file) for file in self.files]
        return sha256_json({"kind": self.kind, "files": files, "facts": facts})


@dataclass
class Draft:
    """An artifact being written, files in `path`; `known` has the sha256 of those that were hashed and flushed then."""

    path: Path
    facts: dict[str, Any] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    known: dict[str, str] = field(default_factory=dict)


@contextmanager
def create_artifact(
    path: Path | str,
    kind: str,
    *,
    inputs: Sequence[Input] = (),
    recipe_hash: str | None = None,
    overwrite: bool = False,
) -> Iterator[Draft]:
    """Write an artifact that appears whole at `path` or not at all. Raises WrongUse when something is already there
    (with `overwrite`: no artifact) and Failed when the disk is full.
    """
    path = Path(os.path.realpath(path))  # a link stays, what it names is written
    check_free(path, overwrite)
    with written_aside(path) as staging:
        draft = Draft(staging, inputs=list(inputs))
        yield draft
        seal(draft, kind, recipe_hash)
        check_free(path, overwrite)


def seal(
    draft: Draft, kind: str, recipe_hash: str | None = None, *, leave_out: Sequence[str] = ()
) -> Manifest:
    """Hash and flush every file of the draft, those in OPEN or called `leave_out` excepted, and write its manifest."""
    directory, known, records = draft.path, draft.known, []
    for file in walk_files(directory):
        name = file.relative_to(directory).as_posix()
        if name in known:
            records.append(FileRecord(name, file.stat().st_size, known[name]))
        elif file.name not in (MANIFEST, *OPEN, *leave_out):
            file.chmod(file.stat().st_mode | (directory.stat().st_mode & 0o444))  # safetensors writes 0600
            sync(file)
            records.append(FileRecord(name, file.stat().st_size, sha256_file(file)))
    created, facts = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), json.loads(json.dumps(draft.facts))
    made = FORMAT_VERSION, version(), command_line(), recipe_hash, created
    manifest = Manifest(kind, *made, tuple(draft.inputs), tuple(records), facts)
    aside = directory / f".{MANIFEST}.tmp"
    aside.write_text(json.dumps(asdict(manifest), indent=1, sort_keys=True) + "\n")
    sync(aside)
    os.replace(aside, directory / MANIFEST)
    sync(directory)
    return manifest


def check_free(path: Path | str, overwrite: bool | None = None) -> None:
    """Refuse an output path that is taken, before hours of work. `overwrite` is None where there is no --overwrite."""
    path = Path(path)
    if path.is_dir() and ((here := path.samefile(".")) or os.path.ismount(path)):
        why = f"it is {'the current directory' if here else 'a mount point'}, and an output is renamed into its place"
        fix = f"a new one in it: {path / 'NAME'}"
        raise WrongUse("the output cannot be this directory", where=path, why=why, fix=fix)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not overwrite:
        fix = "choose another --out" + (", or pass --overwrite to replace it" if overwrite is False else "")
        raise WrongUse("the output already exists", where=path, fix=fix)
    if not (path / MANIFEST).is_file():
        why = "--overwrite replaces only directories that Throughline wrote"
        fix = "choose another --out or remove it yourself"
        raise WrongUse("the output exists and is no artifact", where=path, why=why, fix=fix)


def version() -> str:
    """The installed version, or "0+source" when run from a checkout that was never installed."""
    return installed("throughline") or "0+source"


def installed(package: str) -> str | None:
    """The version of an installed package."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def programs(*packages: str) -> list[str]:
    """This program and the libraries that compute, each with its version: "torch 2.13.0"."""
    libraries = [f"{package} {installed(package) or ''}".strip() for package in packages]
    return [f"throughline {version()}", *libraries]


def command_line() -> str:
    """The command that is running, as a person would type it."""
    program = Path(sys.argv[0] if sys.argv else "")
    name = program.name or "python"
    if program.parts[-2:] == ("cli", "main.py"):  # python -m throughline.cli.main
        name = "throughline"
    return shlex.join([name, *sys.argv[1:]])


def is_artifact(path: Path | str) -> bool:
    """Whether a directory holds a manifest."""
    return (Path(path) / MANIFEST).is_file()


def read_manifest(path: Path | str, *kinds: str) -> Manifest:
    """The manifest of the artifact at `path`. Raises WrongUse when there is none or it is of another kind."""
    path = Path(path)
    if not path.exists():
        fix = beside(path, "check the spelling; `ls` the directory that should hold it")
        raise WrongUse("no such path", where=path, fix=fix)
    if not is_artifact(path):
        why = "it has no manifest.json, so it is foreign, unfinished or not an output"
        fix = "give the directory that a throughline command wrote"
        raise WrongUse("not a Throughline artifact", where=path, why=why, fix=fix)
    manifest = _parse(path / MANIFEST)
    if kinds and manifest.kind not in kinds:
        what = f"expected {' or '.join(kinds)}, found {manifest.kind}"
        raise WrongUse(what, where=path, fix=f"give a {kinds[0]} directory")
    return manifest


def _parse(file: Path) -> Manifest:
    raw = read_json(file)
    try:
        newest = int(raw["format_version"])
        if newest > FORMAT_VERSION:
            what = f"written in format {newest}, newer than this program reads ({FORMAT_VERSION})"
            fix = f"install throughline {raw.get('throughline_version', '')} or later"
            raise Refused(what, where=file, fix=fix)
        raw["inputs"] = tuple(Input(**item) for item in raw["inputs"])
        raw["files"] = tuple(FileRecord(**item) for item in raw["files"])
        return Manifest(**raw)
    except (KeyError, TypeError, ValueError) as error:
        fix = "restore it or make the artifact again"
        raise Refused("damaged manifest", where=file, why=str(error), fix=fix) from error


def verify_artifact(
    path: Path | str, *, sizes_only: bool = False, read_back: Collection[str] = ()
) -> Manifest:
    """Check every file against the manifest, of those in `read_back`, just compared with their hash, the size. Raises
    Refused naming the first file that is missing, cut or changed.
    """
    path = Path(path)
    manifest = read_manifest(path)
    for record in manifest.files:
        file = path / record.name
        what = why = ""
        if file.name in OPEN:
            continue
        if not file.is_file():
            what = "is missing"
        elif (size := file.stat().st_size) != record.bytes:
            what, why = "has the wrong size", f"{size:,} bytes, the manifest says {record.bytes:,}"
        elif sizes_only or record.name in read_back:
            continue
        elif (found := sha256_file(file)) != record.sha256:
            what, why = "is damaged", f"sha256 {found[:16]}…, the manifest says {record.sha256[:16]}…"
        if what:
            fix = "copy it again from a good place, or make the artifact again with: " + manifest.command
            raise Refused(f"a file of the artifact {what}", where=file, why=why, fix=fix)
    return manifest


def input_record(path: Path | str, remembered: bool = False) -> Input:
    """The record by which an artifact names what it was made from: ours by manifest, foreign by bytes. `remembered`:
    large foreign files are hashed once, as long as size, time of change and inode stay (for opening a model, not for
    a check of what has changed).
    """
    path, kind = Path(path), "foreign"
    hashed = remembered_sha256 if remembered else sha256_file
    if is_artifact(path):
        manifest = read_manifest(path)
        kind, digest = manifest.kind, manifest.hash
    elif path.is_dir():
        digest = sha256_json([[f.relative_to(path).as_posix(), hashed(f)] for f in walk_files(path)])
    elif path.is_file():
        digest = hashed(path)
    else:
        raise WrongUse("no such file or directory", where=path, fix=beside(path, "check the spelling"))
    return Input(os.path.abspath(path), kind, digest)


def cache_directory() -> Path:
    """The user's directory for what may be lost, by the XDG base directories."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "throughline"


def remembered_sha256(path: Path) -> str:
    """The sha256 of a file, from the user's cache while place, size, time of change and inode are those of then."""
    before = path.stat()
    if before.st_size < CACHED_BYTES:
        return sha256_file(path)
    try:
        directory = cache_directory() / "sha256"
    except RuntimeError:  # a user without a home
        return sha256_file(path)
    known = [os.path.realpath(path), before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_ino]
    entry = directory / sha256_json(known)
    with suppress(OSError, UnicodeDecodeError):
        text = entry.read_text()
        if re.fullmatch("[0-9a-f]{64}", text):
            return text
    digest = sha256_file(path)
    after = path.stat()
    settled = time.time() - max(after.st_mtime, after.st_ctime) > SETTLED_S
    if settled and (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns):
        with suppress(OSError, ThroughlineError):  # a home that is read-only: it is hashed again next time
            entry.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(entry, digest)
    return digest


def chain(path: Path | str) -> list[tuple[int, Input, bool | None]]:
    """The provenance of an artifact: (depth, input, still the same?) back to foreign inputs; None: it is not there, was
    not hashed, or is beyond the first CHECK_BYTES of foreign inputs.
    """
    rows: list[tuple[int, Input, bool | None]] = []
    left, waiting = CHECK_BYTES, [(1, item) for item in reversed(read_manifest(path).inputs)]
    while waiting:
        depth, item = waiting.pop()
        here, same = Path(item.path), None
        if item.kind != "foreign" and is_artifact(here):
            parent = read_manifest(here)
            same = parent.hash == item.hash
            waiting += [(depth + 1, each) for each in reversed(parent.inputs) if same]
        elif item.hash and here.exists():
            size = sum(file.stat().st_size for file in ([here] if here.is_file() else walk_files(here)))
            if size <= left:
                left -= size
                same = input_record(here).hash == item.hash
        rows.append((depth, item, same))
    return rows
