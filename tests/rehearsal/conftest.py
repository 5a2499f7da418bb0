"""The rehearsal runs where `start.py` has put the null GPU before torch's CUDA build; elsewhere it is skipped."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside the tests
HERE = "THROUGHLINE_NULL_GPU" in os.environ


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("rehearsal")
            if not HERE:
                item.add_marker(pytest.mark.skip(reason="no null GPU: make rehearse"))


@pytest.fixture(autouse=True)
def a_card_of_its_own() -> Iterator[None]:
    """Each test finds every card empty, and no process group."""
    if not HERE:
        yield
        return
    import torch
    import torch.distributed as dist

    torch.backends.cuda.enable_cudnn_sdp(
        False
    )  # its graphs cannot be built on the null GPU: see test_choice.py
    yield
    torch.cuda.set_sync_debug_mode("default")
    if dist.is_initialized():
        dist.destroy_process_group()
    torch.cuda.empty_cache()
