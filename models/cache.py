"""Keys and values of the tokens read so far, for generation.

A cache has a fixed number of rows (slots) and of places per row. Rows may hold different numbers of tokens: a
batch of prompts is given padded on the right, `advance` says how many tokens of each row were real, and the
next call overwrites the rest.

Shape letters: B rows, S new positions, T places, G key-value heads, D head width.
"""

import torch
from torch import Tensor

from . import attention_cuda
from .config import GPTConfig


class KeyValueCache:
    """Room for `places` tokens in each of `rows` sequences; `lengths` (B,) says how many each holds.

    One step: `model.hidden(ids, cache=cache)` and then `cache.advance(counts)`. Until `advance` is called,
    nothing counts as read. An exporter or a server may pass its own object with the same four methods:
    `positions`, `mask`, `layer`, `advance`.
    """

    def __init__(
        self,
        config: GPTConfig,
        rows: int,
        places: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        places = places or config.sequence_length
        sizes = [config.key_value_heads, places]
        by_token = device is not None and torch.device(device).type == "cuda"
        # a GPU's kernels read runs of tokens, a CPU's the tokens of a head
        shape = (config.layers, rows, *(sizes[::-1] if by_token else sizes), config.head_size)
        # zeros, not empty: a masked place still enters a product with probability 0, and 0 x NaN is NaN
        stores = (torch.zeros(shape, device=device, dtype=dtype) for _ in range(2))
        self.keys_LBGTD, self.values_LBGTD = (
            store.transpose(2, 3) if by_token else store for store in stores
        )
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.seen = 0  # places that this step looks at: a number, so that reading it costs no device sync
        self._places_now = self.lengths

    @property
    def places(self) -> int:
        return self.keys_LBGTD.shape[3]

    @property
    def token_bytes(self) -> int:
        """What a token of a row takes."""
        return 2 * self.keys_LBGTD.nbytes // (self.places * len(self.lengths))

    @property
    def has_flash(self) -> bool:
        """Whether a kernel with bounds reads it."""
        return attention_cuda.has_flash(self.keys_LBGTD)

    def positions(self, count: int) -> Tensor:
        """Where the next `count` tokens of every row stand: (B, S)."""
        return self.lengths[:, None] + torch.arange(count, device=self.lengths.device)

    def mask(self, positions: Tensor) -> Tensor:
        """(B, S) -> (B, 1, S, T): a token sees the places up to its own. Called once a step, before layers."""
        self._places_now = positions
        self.seen = int(positions[:, -1].max()) + 1
        if self.seen > self.places:
            raise IndexError(
                f"a row would hold {self.seen} tokens and the cache has {self.places} places per row"
            )
        return (torch.arange(self.seen, device=positions.device) <= positions[:, :, None])[:, None]

    def layer(self, number: int) -> "_Layer":
        return _Layer(self, number)

    def advance(self, counts: Tensor | int) -> None:
        """The first `counts` (B,) tokens of the last step are now part of each row."""
        self.lengths += counts

    def take(self, start: int, stop: int) -> "KeyValueCache":
        """Rows [start, stop) as a cache over the same memory: one row can read a prompt while others wait."""
        part = object.__new__(KeyValueCache)
        part.keys_LBGTD, part.values_LBGTD = self.keys_LBGTD[:, start:stop], self.values_LBGTD[:, start:stop]
        part.lengths = self.lengths[start:stop]
        part.seen, part._places_now = 0, part.lengths
        return part


class _Layer:
    def __init__(self, cache: KeyValueCache, number: int) -> None:
        self.cache, self.number = cache, number

    def extend(self, key_BGSD: Tensor, value_BGSD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new keys and values at their places; give back everything that this step may look at."""
        cache = self.cache
        where = cache._places_now[:, None, :, None].expand_as(key_BGSD)
        found = []
        for store, new in ((cache.keys_LBGTD, key_BGSD), (cache.values_LBGTD, value_BGSD)):
            store[self.number].scatter_(2, where, new.to(store.dtype))
            found.append(store[self.number, :, :, : cache.seen])
        return found[0], found[1]
