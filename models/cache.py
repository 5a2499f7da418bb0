"""Keys and values of the tokens read so far, for generation.

Shape letters: L layers, B rows, T places of a row, G key-value heads, D head width.
"""

import torch

from . import attention_cuda
from .config import GPTConfig


class KeyValueCache:
    """Room for `places` tokens in each of `rows` sequences; whoever runs a step knows how many each holds."""

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

    @property
    def rows(self) -> int:
        return self.keys_LBGTD.shape[1]

    @property
    def places(self) -> int:
        return self.keys_LBGTD.shape[3]

    @property
    def token_bytes(self) -> int:
        """What a token of a row takes."""
        return 2 * self.keys_LBGTD.nbytes // (self.places * self.rows)

    @property
    def has_flash(self) -> bool:
        """Whether a kernel with bounds reads it."""
        return attention_cuda.has_flash(self.keys_LBGTD)
