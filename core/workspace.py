"""Workspaces: work in progress (a run, a tokenisation, an evaluation) as append-only files.

One process at a time owns a workspace; the lock goes with the process, so a crash never leaves one behind.
The manifest is written when the stage ends, and from then on the directory is an artifact.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from .artifact import Draft, Input, Manifest, seal
from .errors import Refused, WrongUse
from .files import full_disk

LOCK = ".lock"


class Workspace:
    """A directory being worked in. Use as a context manager: it takes the lock and gives it back."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._lock: int | None = None

    def __enter__(self) -> "Workspace":
        with full_disk(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 64).decode(errors="replace").strip()
            os.close(handle)
            what = "another process is working in this directory"
            why = f"process {owner or 'unknown'} holds its lock"
            fix = "wait for it, stop it, or choose another directory"
            raise WrongUse(what, where=self.path, why=why, fix=fix) from None
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._lock = handle
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def append(self, name: str, *records: dict[str, Any], sync: bool = False) -> None:
        """Append records to `<name>` as JSON lines; with `sync` they survive a power cut."""
        text = "".join(json.dumps(record) + "\n" for record in records)
        with full_disk(self.path / name), open(self.path / name, "ab+") as file:
            _drop_cut_line(file)
            file.write(text.encode())
            if sync:
                file.flush()
                os.fsync(file.fileno())

    def finish(
        self, kind: str, inputs: Sequence[Input], recipe_hash: str | None, facts: dict[str, Any]
    ) -> Manifest:
        """Turn the workspace into an artifact."""
        manifest = seal(Draft(self.path, facts, list(inputs)), kind, recipe_hash, leave_out=[LOCK])
        (self.path / LOCK).unlink(missing_ok=True)  # now: nobody else worked in it meanwhile
        return manifest


def _drop_cut_line(file: BinaryIO) -> None:
    """Take away a last line that a full disk or a crash has cut: the next one would continue it."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(end - 1, 0))
    if file.read() not in (b"", b"\n"):
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def read_records(file: Path | str) -> Iterator[dict[str, Any]]:
    """The records of a JSON-lines file; a last line cut by a crash is left out. Raises Refused for others."""
    file = Path(file)
    if not file.exists():
        return
    lines = file.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline after it: the writer was killed inside this line
                return
            place = f"{file}:{number}"
            raise Refused("damaged line", where=place, why=str(error), fix="remove that line") from error
