"""What depends on content is computed once per store and kept beside it, hashed: packing and sentence pairs.

An entry is `<key>.<n>.bin` files (raw arrays, mapped when read) and `<key>.json`, the commit record with
their sizes and sha256, written last. The key hashes everything the arrays depend on. Any number of processes
may compute the same entry at once: each writes aside and renames the same bytes. A damaged entry is computed
again.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import numpy as np

from ..core.console import warn
from ..core.files import full_disk, sha256_file, write_atomic
from .store import REHASH_BYTES

FORMAT = 1


def computed_once(
    cache: Path | None, identity: dict, dtypes: tuple[np.dtype, ...], parts: Iterable[tuple[np.ndarray, ...]]
) -> tuple[np.ndarray, ...]:
    """The arrays made by joining `parts` (a tuple per shard, consumed only when nothing usable is kept).

    Kept under `cache`, or only in memory when it is None or cannot be written (said once). `identity` must be
    JSON.
    """
    if cache is None:
        return _joined(dtypes, parts)
    name = sha256(json.dumps([FORMAT, identity], sort_keys=True).encode()).hexdigest()[:32]
    kept = _read(cache, name, dtypes)
    if kept is not None:
        return kept
    parts = iter(parts)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        probe = cache / f".{name}.{uuid.uuid4().hex[:8]}.tmp"
        probe.touch()
        probe.unlink()
    except OSError as error:
        what = f"cannot keep the sample index under {cache} ({error.strerror})"
        warn(f"{what}: it is computed again at every start")
        return _joined(dtypes, parts)
    _write(cache, name, identity, len(dtypes), parts)
    written = _read(cache, name, dtypes)
    assert written is not None, f"{cache / name} changed while it was written"
    return written


def _joined(dtypes: tuple[np.dtype, ...], parts: Iterable[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    columns = list(zip(*parts)) or [()] * len(dtypes)
    return tuple(np.concatenate([np.empty(0, dtype), *arrays]) for dtype, arrays in zip(dtypes, columns))


def _write(
    cache: Path, name: str, identity: dict, count: int, parts: Iterable[tuple[np.ndarray, ...]]
) -> None:
    aside = [cache / f".{name}.{n}.{uuid.uuid4().hex[:8]}.tmp" for n in range(count)]
    try:
        with full_disk(cache), contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path, "wb")) for path in aside]
            for arrays in parts:
                for file, array in zip(files, arrays):
                    file.write(np.ascontiguousarray(array).view(np.uint8).data)
            for file in files:
                file.flush()
                os.fsync(file.fileno())
        record = {"identity": identity, "files": [[path.stat().st_size, sha256_file(path)] for path in aside]}
        for n, path in enumerate(aside):
            os.replace(path, cache / f"{name}.{n}.bin")
        write_atomic(cache / f"{name}.json", json.dumps(record, indent=1))
    finally:
        for path in aside:
            path.unlink(missing_ok=True)


def _read(cache: Path, name: str, dtypes: tuple[np.dtype, ...]) -> tuple[np.ndarray, ...] | None:
    try:
        record = json.loads((cache / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    arrays = []
    for n, (dtype, (size, digest)) in enumerate(zip(dtypes, record["files"])):
        path = cache / f"{name}.{n}.bin"
        if not path.is_file() or path.stat().st_size != size:
            return None
        if size <= REHASH_BYTES and sha256_file(path) != digest:
            return None
        arrays.append(np.memmap(path, dtype, "r") if size else np.empty(0, dtype))
    return tuple(arrays)
