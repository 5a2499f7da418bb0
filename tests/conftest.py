"""Fixtures every test may use. Only this file knows where shared data are: THROUGHLINE_SHARED, by default
../shared.
"""

import importlib.util
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the modules beside the tests

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("THROUGHLINE_SHARED", ROOT.parent / "shared"))

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

if importlib.util.find_spec("hypothesis"):  # a bare GPU machine has none
    from hypothesis import settings

    # The same examples in every run; `pytest --hypothesis-profile=default` looks for new ones.
    settings.register_profile("repeatable", derandomize=True, deadline=None)
    settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    usual = os.environ.get("THROUGHLINE_MEGATRON")
    parser.addoption(
        "--megatron",
        type=Path,
        default=usual,
        help="A Megatron-LM checkout, whose own reader and writer are tried.",
    )
    parser.addoption(
        "--nanochat", type=Path, help="A nanochat checkout, whose own evaluator of CORE is tried."
    )


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> None:
    """Tests inherit ignored signals: SIGINT of a job in the background, SIGHUP of nohup. Give them their defaults."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture(scope="session", autouse=True)
def forkable() -> None:
    """Tests that fork ranks come after others that compile and train in the same process."""
    if importlib.util.find_spec("torch"):
        from throughline.prove.forked import keep_forkable

        keep_forkable()


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository root."""
    return ROOT


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a SentencePiece-style tokenizer and two end tokens (`tokenizer_fixtures`)."""
    from tokenizer_fixtures import write_sentencepiece

    return write_sentencepiece(tmp_path_factory.mktemp("sentencepiece") / "llama")


@pytest.fixture(scope="session")
def samples() -> Path:
    """The sample data that the repository ships."""
    return ROOT / "recipes" / "samples"


@pytest.fixture(scope="session")
def saved_in_layouts() -> Callable[..., dict[str, Path]]:
    """Writes a checkpoint of one model by processes in each of several layouts."""
    torch = pytest.importorskip("torch")
    from throughline.core.artifact import read_manifest
    from throughline.planner.layout import Layout
    from throughline.prove.forked import run_ranks, warm
    from throughline.prove.proof import SEED, make_trainer, own_rows, value_of
    from throughline.train.checkpoints.checkpoint import CheckpointWriter, restore
    from throughline.train.engine import Engine
    from throughline.train.parallel.ranks import Ranks
    from throughline.train.step import train_step

    layouts = {
        "alone": Layout(),
        "tensor": Layout(tensor=2),
        "pipeline": Layout(pipeline=2),
        "full": Layout(data=2, sharding="full"),
        "tensor x pipeline": Layout(tensor=2, pipeline=2),
    }

    def save(case: Any, target: Path, source: Path | None, steps: int, tokenizer: bytes | None) -> None:
        ranks = Ranks.start(case.layout, torch.device("cpu"))
        engine = Engine(case.config, ranks.mesh, case.precision, SEED)
        shapes = {local.name: torch.Size(local.spec.shape) for local in engine.local_shards}
        engine.fill(lambda name, box: value_of(case, name, shapes[name])[box.slices()])
        trainer = make_trainer(case, engine)
        if source is None:
            for step in range(steps):
                train_step(trainer, own_rows(case, engine, step), 1.0)
        else:
            restore(source, trainer)
        writer = CheckpointWriter(
            target, 0, tokenizer, process=ranks.mesh.rank, processes=case.layout.world, token=ranks.token
        )
        writer.save(trainer)
        writer.close()
        ranks.wait()

    def write(
        case: Any,
        folder: Path,
        *,
        steps: int = 0,
        tokenizer: bytes | None = None,
        only: Sequence[str] = tuple(layouts),
    ) -> dict[str, Path]:
        """Name -> checkpoint: "alone" is made by one process in so many steps, the others take it over."""
        warm()
        first, found = folder / "alone" / f"step-{steps:08d}", {}
        for name in ("alone", *(name for name in only if name != "alone")):
            layout, source = layouts[name], None if name == "alone" else first
            run_ranks(
                layout.world,
                partial(save, replace(case, layout=layout), folder / name, source, steps, tokenizer),
            )
            found[name] = folder / name / first.name
            assert read_manifest(found[name], "checkpoint").facts["layout"]["world"] == layout.world
        return found

    return write


@pytest.fixture(scope="session")
def shared() -> Path:
    """Shared corpora and published figures; the test is skipped where they are absent."""
    if not SHARED.is_dir():
        pytest.skip("needs the shared data directory (THROUGHLINE_SHARED)")
    return SHARED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, with the reason, where no CUDA device answers."""
    if not any(item.get_closest_marker("gpu") for item in items):
        return
    import torch

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
