"""What depends on content is computed once per store and kept beside it, hashed: packing and sentence pairs.

An entry is an artifact, named by a hash of everything that its arrays depend on, with a raw file for each array (mapped
when read). Any number of processes may compute the same entry at once: each writes aside, and exchanges the same
bytes. A damaged entry is computed again.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from ..core.artifact import Draft, seal, verify_artifact
from ..core.console import warn
from ..core.errors import ThroughlineError
from ..core.files import sha256_json, written_aside
from .store import REHASH_BYTES

FORMAT = 2


def computed_once(
    cache: Path | None, identity: dict, dtypes: tuple[np.dtype, ...], parts: Iterable[tuple[np.ndarray, ...]]
) -> tuple[np.ndarray, ...]:
    """The arrays made by joining `parts` (a tuple per shard, consumed only when nothing usable is kept).

    Kept under `cache`, or only in memory when it is None or cannot be written (said once). `identity` must be
    JSON.
    """
    if cache is None:
        return _joined(dtypes, parts)
    entry = cache / sha256_json([FORMAT, identity])[:32]
    if (kept := _read(entry, dtypes)) is not None:
        return kept
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        what = f"cannot keep the sample index under {cache} ({error.strerror})"
        warn(f"{what}: it is computed again at every start")
        return _joined(dtypes, parts)
    with written_aside(entry) as folder:
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(folder / f"{n}.bin", "wb")) for n in range(len(dtypes))]
            for arrays in parts:
                for file, array in zip(files, arrays):
                    file.write(np.ascontiguousarray(array).view(np.uint8).data)
        seal(Draft(folder, {"identity": identity}), "cache")
    written = _read(entry, dtypes)
    assert written is not None, f"{entry} changed while it was written"
    return written


def _joined(dtypes: tuple[np.dtype, ...], parts: Iterable[tuple[np.ndarray, ...]]) -> tuple[np.ndarray, ...]:
    columns = list(zip(*parts)) or [()] * len(dtypes)
    return tuple(np.concatenate([np.empty(0, dtype), *arrays]) for dtype, arrays in zip(dtypes, columns))


def _read(entry: Path, dtypes: tuple[np.dtype, ...]) -> tuple[np.ndarray, ...] | None:
    files = [entry / f"{n}.bin" for n in range(len(dtypes))]
    try:
        sizes = [file.stat().st_size for file in files]
        verify_artifact(entry, sizes_only=sum(sizes) > REHASH_BYTES)
    except (OSError, ThroughlineError):
        return None
    found = zip(files, dtypes, sizes)
    return tuple(np.memmap(file, dtype, "r") if size else np.empty(0, dtype) for file, dtype, size in found)
