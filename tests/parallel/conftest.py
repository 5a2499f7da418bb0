"""What the tests of runs in layouts share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A foreign store of 20,000 tokens in a pattern that can be learnt."""
    import numpy as np
    from throughline.data.shard import write_index

    directory = tmp_path_factory.mktemp("store")
    tokens = (np.arange(20_000) * 7 % 31 + np.arange(20_000) // 50 % 3).astype(np.uint16)
    tokens.tofile(directory / "00000.bin")
    write_index(directory / "00000.idx", np.array([len(tokens)]), np.array([0, 1]), np.uint16)
    return directory
