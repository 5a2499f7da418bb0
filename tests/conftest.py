"""Fixtures every test may use. Only this file knows where shared data are: THROUGHLINE_SHARED, by default ../shared."""

import importlib.util
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("THROUGHLINE_SHARED", ROOT.parent / "shared"))

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if importlib.util.find_spec("hypothesis"):  # a bare GPU machine has none
    from hypothesis import settings

    # The same examples in every run; `pytest --hypothesis-profile=default` looks for new ones.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository root."""
    return ROOT


@pytest.fixture(scope="session")
def samples() -> Path:
    """The sample data that the repository ships."""
    return ROOT / "recipes" / "samples"


@pytest.fixture(scope="session")
def shared() -> Path:
    """Shared corpora and published figures; the test is skipped where they are absent."""
    if not SHARED.is_dir():
        pytest.skip("needs the shared data directory (THROUGHLINE_SHARED)")
    return SHARED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, with the reason, where no CUDA device answers."""
    if not any("gpu" in item.keywords for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
