"""The rehearsal runs where `start.py` has put the null GPU before torch's CUDA build; elsewhere it has no tests."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside the tests
if "THROUGHLINE_NULL_GPU" not in os.environ:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def a_card_of_its_own() -> Iterator[None]:
    """Each test finds every card empty, and no process group."""
    import torch
    import torch.distributed as dist

    # its graphs cannot be built here; test_steps.py asks for them
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.cuda.set_sync_debug_mode("default")
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.cuda.empty_cache()
