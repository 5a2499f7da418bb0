"""What tests of many rooms write: the index of a store of tokens."""

from pathlib import Path

import numpy as np
from throughline.data.shard import write_index_in_blocks


def write_index(
    path: str | Path, lengths: np.ndarray, document_bounds: np.ndarray, dtype: np.dtype | str
) -> None:
    """One `.idx`: `lengths` (sequences,) in tokens, `document_bounds` (documents + 1,) in sequences."""
    counts = len(lengths), len(document_bounds) - 1
    write_index_in_blocks(path, counts, lambda: [lengths], lambda: [np.diff(document_bounds)], dtype)
