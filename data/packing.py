"""Pieces in rows: documents cut, best-fit decreasing over the histogram of lengths, each token's place. And what
depends on content, computed once per store and kept beside it, hashed: packing and sentence pairs.

Pieces of one length are interchangeable, so rows are built as *patterns* (a tuple of lengths, made so many times) in
time of the number of distinct lengths (Krell et al. 2021, "Efficient sequence packing without cross-contamination").
"""

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


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of at most `capacity` made of whole pieces of `lengths` (pieces,), 1 .. capacity: (order, ends), int64. Row
    r holds pieces order[ends[r - 1] : ends[r]], longest first.
    """
    lengths = np.asarray(lengths, np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    fitting = not len(lengths) or (counts[0] == 0 and len(counts) == capacity + 1)
    assert fitting, "a piece is empty or longer than a row"
    first = np.cumsum(counts[::-1])[::-1] - counts  # place in by_length of the first piece of a length
    used = np.zeros(capacity + 1, np.int64)
    orders, sizes = [], []
    for pattern, made in _patterns(counts, capacity):
        rows = np.empty((made, len(pattern)), np.int64)
        for column, length in enumerate(pattern):
            start = first[length] + used[length]
            rows[:, column] = by_length[start : start + made]
            used[length] += made
        orders.append(rows.ravel())
        sizes.append(np.full(made, len(pattern), np.int64))
    order = np.concatenate([np.empty(0, np.int64), *orders])
    return order, np.cumsum(np.concatenate([np.empty(0, np.int64), *sizes]))


def _patterns(counts: np.ndarray, capacity: int) -> list[tuple[tuple[int, ...], int]]:
    """[(pattern, times made)]: each length, longest first, goes where it leaves the least room."""
    open_rows: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # room left -> patterns
    rooms = 0  # bit r is set when a pattern with r tokens of room exists
    for length in range(len(counts) - 1, 0, -1):
        left = int(counts[length])
        while left:
            fitting = rooms >> length
            if fitting:
                room = length + (fitting & -fitting).bit_length() - 1
                pattern, made = open_rows[room].pop()
                times = min(left, made)
                if made > times:
                    open_rows[room].append((pattern, made - times))
            else:
                pattern, room = (), capacity
                times = left if 2 * length > capacity else max(1, left // (capacity // length))
            if fitting and not open_rows[room]:
                rooms &= ~(1 << room)
            open_rows.setdefault(room - length, []).append(((*pattern, length), times))
            rooms |= 1 << (room - length)
            left -= times
    return [item for room in sorted(open_rows) for item in open_rows[room]]


def lay_out(ends: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(places in `order`, which of `rows` each belongs to), for the pieces of some rows, row by row."""
    first = np.where(rows > 0, ends[rows - 1], 0)
    counts = ends[rows] - first
    owner = np.repeat(np.arange(len(rows)), counts)
    return first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts), owner


def split_documents(bounds: np.ndarray, capacity: int, spare: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Documents (token `bounds`) but their last `spare` tokens in stretches of `capacity`: (starts, lengths) int64."""
    sizes = np.maximum(np.diff(bounds) - spare, 0)
    counts = -(-sizes // capacity)
    owner = np.repeat(np.arange(len(sizes)), counts)
    offset = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * capacity
    return bounds[:-1][owner] + offset, np.minimum(sizes[owner] - offset, capacity)


class Placed:
    """Pieces of `sizes` tokens in rows of `length`, in the order of `owner`, one after another in a row; for every
    token its place `within` its piece, and by `numbers` which piece of its row that is.
    """

    def __init__(self, sizes: np.ndarray, owner: np.ndarray, count: int, length: int):
        self._shape = (count, length)
        ends = np.cumsum(sizes)
        starts = ends - sizes
        first = np.searchsorted(owner, owner)  # the first piece of each piece's row
        self.within = np.arange(int(sizes.sum())) - np.repeat(starts, sizes)
        self.numbers = np.repeat(np.arange(len(owner)) - first, sizes)
        self._spots = np.repeat(owner * length + starts - starts[first], sizes) + self.within

    def rows(self, values: np.ndarray | bool, empty: int | bool, dtype: type) -> np.ndarray:
        """The tokens' `values` in rows (count, length), `empty` where there is no token."""
        out: np.ndarray = np.full(self._shape, empty, dtype)
        out.reshape(-1)[self._spots] = values
        return out


FORMAT = 2


def computed_once(
    cache: Path | None, identity: dict, dtypes: tuple[np.dtype, ...], parts: Iterable[tuple[np.ndarray, ...]]
) -> tuple[np.ndarray, ...]:
    """The arrays made by joining `parts` (a tuple per shard, consumed only when nothing usable is kept).

    Kept under `cache`, or only in memory when it is None or cannot be written (said once): an artifact, named by a hash
    of `identity`, all that its arrays depend on, with a raw file for each array, mapped when read. Processes that
    compute it at once each write aside and exchange the same bytes; a damaged one is computed again.
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
