"""Best-fit decreasing packing of pieces into rows, over the histogram of lengths instead of the pieces.

Pieces of one length are interchangeable, so rows are built as *patterns* (a tuple of lengths, made so many times) and the
work depends on the number of distinct lengths, not of pieces (Krell et al. 2021, "Efficient sequence packing without
cross-contamination"): millions of pieces take milliseconds.
"""

from __future__ import annotations

import numpy as np


def pack(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of at most `capacity` made of whole pieces: (order, ends), int64, deterministic.

    `lengths` (pieces,) are in 1 .. capacity. Row r holds pieces order[ends[r - 1] : ends[r]], longest first; every piece is in
    exactly one row.
    """
    lengths = np.asarray(lengths, np.int64)
    by_length = np.argsort(-lengths, kind="stable")
    counts = np.bincount(lengths, minlength=capacity + 1)
    assert not len(lengths) or (counts[0] == 0 and len(counts) == capacity + 1), "a piece is empty or longer than a row"
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


def columns(lengths: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Where each piece begins in its row, for pieces laid out row by row."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    heads = np.flatnonzero(np.diff(owner, prepend=-1))
    return starts - np.repeat(starts[heads], np.diff(np.append(heads, len(owner))))
