"""What is kept of finished sequences, for prompts that begin as they do."""

from typing import Any

import numpy as np

from ...core.backend import CausalBackend

LEAST_PREFIX = 16  # tokens below which looking up and copying saves nothing


class Prefixes:
    """Finished sequences whose keys and values are kept, the least recently used dropped first."""

    def __init__(self, backend: CausalBackend, limit_bytes: int) -> None:
        self._backend, self._limit = backend, limit_bytes
        self.kept: dict[tuple[str, bytes], tuple[np.ndarray, Any]] = {}  # of a tenant, in the order of use

    def find(self, tenant: str, prompt_ids: np.ndarray) -> tuple[int, Any]:
        """How many tokens the tenant's best entry shares with the prompt, and that entry (its use is noted)."""
        shared = self._shared(tenant, prompt_ids)
        if not any(shared.values()):
            return 0, None
        best = max(shared, key=shared.__getitem__)
        self.kept[best] = self.kept.pop(best)
        return shared[best], self.kept[best][1]

    def _shared(self, tenant: str, ids: np.ndarray) -> dict[tuple[str, bytes], int]:
        return {key: common(old, ids) for key, (old, _) in self.kept.items() if key[0] == tenant}

    def keep(self, tenant: str, ids: np.ndarray, cache: Any, row: int) -> None:
        """Save a row, unless an entry holds all of it already; entries that it continues are dropped."""
        tokens = len(ids)
        size = self._backend.token_bytes
        if not size or tokens < LEAST_PREFIX or tokens * size > self._limit:
            return
        shares = self._shared(tenant, ids)
        if any(shared == tokens for shared in shares.values()):
            return
        for key, shared in shares.items():
            if shared == len(self.kept[key][0]):
                del self.kept[key]
        while sum(len(old) for old, _ in self.kept.values()) * size + tokens * size > self._limit:
            del self.kept[next(iter(self.kept))]
        if (saved := self._backend.save_row(cache, row, tokens)) is not None:
            self.kept[tenant, ids.tobytes()] = (ids, saved)


def common(one: np.ndarray, other: np.ndarray) -> int:
    """How many tokens two sequences share at their beginning."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(np.asarray(one[:length]) != np.asarray(other[:length]))
    return int(differ[0]) if len(differ) else length
