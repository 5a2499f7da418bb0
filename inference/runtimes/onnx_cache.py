"""The cache of a GPT graph: memory of ours, which the graph reads as past and writes as present.

The standard Attention reads every row at the capacity of its tensor. A row that is much longer than the others
therefore gets a tensor of its own, as soon as the tokens that nobody reads cost more than the weights that are
then read once more.
"""

from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np

CAPACITY_STEP = 128  # tokens by which a cache grows; each growth copies it once
CACHE_LINE = 64  # bytes
WORTH = 0.9  # rows are moved when a step then reads at most this share of the bytes


def stepped(tokens: int) -> int:
    """The capacity that has room for so many tokens."""
    return -(-tokens // CAPACITY_STEP) * CAPACITY_STEP


def aligned_zeros(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Zeros that begin with a line of the processor's cache, so that no vector of a head lies across two."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return memory[start : start + size].view(dtype).reshape(shape)


class OnnxCache:
    """Keys and values of `rows` sequences: one tensor (rows, kv heads, capacity, head) for each cache of the
    graph, and how many tokens each row holds. Rows that are `apart` hold theirs in a cache of one row.
    """

    def __init__(
        self,
        names: list[str],
        rows: int,
        shape: tuple[int, int],
        capacity: int,
        zeros: Callable[[tuple[int, ...]], Any],
    ) -> None:
        self.names, self.capacity, self.shape, self._zeros = names, capacity, shape, zeros
        self.lengths = np.zeros(rows, np.int64)
        self.stores = {name: self._empty(rows, capacity) for name in names}
        self.bindings: dict[tuple[int, ...], Any] = {}
        self.apart: dict[int, OnnxCache] = {}
        self.settled = True  # no row has come or gone since rows were last moved

    def _empty(self, rows: int, capacity: int) -> Any:
        return self._zeros((rows, self.shape[0], capacity, self.shape[1]))

    def place(self, row: int) -> tuple["OnnxCache", int]:
        """Where a row lies: a cache and the number of its row there."""
        one = self.apart.get(row)
        return (self, row) if one is None else (one, 0)

    def held(self) -> dict[int, int]:
        """The tokens of each row that has some."""
        found = {row: int(self.lengths[row]) for row in np.flatnonzero(self.lengths).tolist()}
        return found | {row: int(one.lengths[0]) for row, one in self.apart.items()}

    def resize(self, capacity: int) -> None:
        """Other room in every row; what both have room for is kept."""
        both = min(capacity, self.capacity)
        self.bindings.clear()
        for name in self.names:
            new = self._empty(len(self.lengths), capacity)
            new[:, :, :both] = self.stores[name][:, :, :both]
            self.stores[name] = new
        self.capacity = capacity

    def shrink(self, capacity: int) -> None:
        """Give room back when at least half of it is not needed."""
        if 2 * capacity <= self.capacity:
            self.resize(capacity)

    def alone(self, row: int, tokens: int, capacity: int) -> "OnnxCache":
        """The first tokens of a row as a cache of one row."""
        one = OnnxCache(self.names, 1, self.shape, capacity, self._zeros)
        one.lengths[0] = tokens
        for name, store in self.stores.items():
            one.stores[name][0, :, :tokens] = store[row, :, :tokens]
        return one

    def part(self, row: int, capacity: int) -> None:
        """Give a row a tensor of its own."""
        self.apart[row] = self.alone(row, int(self.lengths[row]), capacity)
        self.lengths[row] = 0

    def rejoin(self, row: int) -> None:
        """Put a row back beside the others, which have room for it."""
        one = self.apart.pop(row)
        tokens = int(one.lengths[0])
        self.lengths[row] = tokens
        for name, store in one.stores.items():
            self.stores[name][row, :, :tokens] = store[0, :, :tokens]


def rows_apart(rooms: Mapping[int, int], present: Set[int], token_bytes: int, weight_bytes: int) -> Set[int]:
    """Which rows, of these capacities, should have tensors of their own: those with which a decode step of all
    rows reads the fewest bytes. Those that are `present` stay unless moving is worth it.
    """

    def step_bytes(apart: Set[int]) -> int:
        others = [room for row, room in rooms.items() if row not in apart]
        tokens = sum(rooms[row] for row in apart) + len(others) * max(others, default=0)
        return (len(apart) + bool(others)) * weight_bytes + tokens * token_bytes

    order = sorted(rooms, key=lambda row: -rooms[row])
    now = present & rooms.keys()
    best = min((frozenset(order[:count]) for count in range(max(len(order), 1))), key=step_bytes)
    return best if step_bytes(best) <= WORTH * step_bytes(now) else now
