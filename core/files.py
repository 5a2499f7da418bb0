"""Files and directories that are either whole or absent: write aside, flush to disk, swap in."""

import ctypes
import errno
import hashlib
import json
import os
import re
import shutil
import tomllib
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from .errors import Failed, Refused, WrongUse

WRONG_NAMES = {
    errno.EEXIST: "something else has that name",
    errno.ENOTDIR: "a part of the path is a file",
    errno.ENAMETOOLONG: "the name is too long",
}
NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EPERM: "not permitted there",
    errno.EDQUOT: "the quota is used up",
    errno.EFBIG: "the file-size limit is reached",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "no permission to write there",
}


def sha256_file(path: Path | str) -> str:
    """Hex sha256 of a file's bytes (about 1.5 GB/s on one core with SHA instructions)."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex sha256 of a JSON value in canonical form (sorted keys, no spaces)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def sync(path: Path | str) -> None:
    """Flush a file's contents to the disk, or a directory's entries: a rename in it survives a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _beside(path: Path) -> Path:
    """A new name beside a path; not by the process's number, which two machines may share."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")


def write_atomic(path: Path | str, data: str | bytes) -> None:
    """Write a small file so that readers see the old content or the new. Raises Failed on a full disk."""
    path = Path(path)
    aside = _beside(path)
    try:
        with full_disk(path), open(aside, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync(path.parent)


@contextmanager
def written_aside(path: Path | str) -> Iterator[Path]:
    """A directory that is flushed and takes the place of `path` if the block succeeds. Raises Failed on a full disk."""
    path = Path(os.path.realpath(path))  # a link stays, what it names is written
    staging = _beside(path)
    try:
        with full_disk(path):
            staging.mkdir(parents=True)
            yield staging
            for file in walk_files(staging):
                sync(file)
            swap_in(staging, path)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def swap_in(staging: Path, path: Path) -> None:
    """Give the directory `staging`, whose files are flushed, the name `path`; what was there is removed last.

    Both names are exchanged in one system call: at no moment is nothing at `path`. Where the system or the file system
    cannot do that (some network ones), the old directory is renamed first, and back when that fails.
    """
    for folder in (staging, *(each for each in staging.rglob("*") if each.is_dir())):
        sync(folder)
    old = staging
    try:
        os.rename(staging, path)  # onto nothing, or an empty directory
    except OSError:
        if not path.exists():
            raise
        if not _exchange(staging, path):
            old = _beside(path).with_suffix(".old.tmp")
            os.rename(path, old)
            try:
                os.rename(staging, path)
            except BaseException:
                os.rename(old, path)
                raise
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


AT_FDCWD, RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names atomically; False where the system or the file system has no such call."""
    try:
        rename = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):  # not Linux, or a C library older than 2018
        return False
    return rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


@contextmanager
def full_disk(path: Path | str) -> Iterator[None]:
    """Turns the system's errors of NO_ROOM and WRONG_NAMES, also as numpy and Rust report them, into ours."""
    try:
        yield
    except Exception as error:
        number = _errno(error)
        if number in WRONG_NAMES:
            where, why = getattr(error, "filename", None) or path, WRONG_NAMES[number]
            fix = "choose another directory"
            raise WrongUse("cannot write there", where=where, why=why, fix=fix) from error
        if number not in NO_ROOM:
            raise
        why = f"{NO_ROOM[number]} ({free_text(path)})"
        fix = "free some room or choose another output directory; nothing was left half-written"
        raise Failed("cannot write", where=path, why=why, fix=fix) from error


def _errno(error: Exception) -> int | None:
    """The system's number of an error. numpy's tofile names none: the process's limit, or else the disk."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(error, OSError) and "requested and" in str(error):
        import resource

        return errno.EFBIG if resource.getrlimit(resource.RLIMIT_FSIZE)[0] >= 0 else errno.ENOSPC
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def free_text(path: Path | str) -> str:
    """Free room on the disk that holds `path`, in words."""
    folder = Path(path)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return f"{shutil.disk_usage(folder).free / 2**30:.2f} GiB free"


def read_json(path: Path | str) -> Any:
    """Parse a JSON file. Raises WrongUse when it is missing and Refused when it is damaged."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WrongUse("no such file", where=path) from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        fix = "restore the file or make it again"
        raise Refused("damaged JSON file", where=path, why=str(error), fix=fix) from error


@cache
def shipped_table(module: str, name: str) -> dict[str, Any]:
    """The TOML table of that name beside a module, whose `__file__` is given."""
    return tomllib.loads(Path(module).with_name(name).read_text(encoding="utf-8"))


def leaves(tree: Mapping[str, Any], between: str = ".", prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a tree of tables, each with the names on its way joined."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves(value, between, f"{prefix}{name}{between}")
        else:
            yield f"{prefix}{name}", value


def json_lines(path: Path | str, lines: Iterable[str] | None = None) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of a .jsonl file, or its `lines`, blank ones left out. Raises Failed for what is no object."""
    if lines is None:
        with open(path, encoding="utf-8-sig", errors="replace") as file:  # LF, CRLF or CR ends a line
            yield from json_lines(path, file)
        return
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place, fix = f"{path}:{number}", 'every line must be one JSON object: {"name": value, ...}'
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Failed("this line is no JSON", where=place, why=str(error), fix=fix) from error
        if not isinstance(value, dict):
            why = f"it is {type(value).__name__}"
            raise Failed("this line is no JSON object", where=place, why=why, fix=fix)
        yield place, value


def from_template(file: Path, facts: Mapping[str, Any]) -> str:
    """A template filled with facts; lines that begin with ? are jinja's statements. A name without a fact raises."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(  # noqa: S701 - not HTML: values are quoted where they stand
        loader=FileSystemLoader(file.parent),
        line_statement_prefix="?",
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    return environment.get_template(file.name).render(facts)


def walk_files(root: Path) -> Iterable[Path]:
    """Every regular file below `root`, sorted by relative path, hidden and temporary names included."""
    return sorted(path for path in root.rglob("*") if path.is_file())
