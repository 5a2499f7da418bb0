"""A checkpoint of any layout goes on in any other: the same losses to rounding, and bit by bit in the same
layout.
"""

import functools
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from throughline.core import artifact, files  # noqa: E402
from throughline.core.artifact import read_manifest, verify_artifact  # noqa: E402
from throughline.core.errors import Refused, ThroughlineError  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.prove.proof import BOUNDS, SEED, Case, make_trainer, own_rows, reference, value_of  # noqa: E402
from throughline.train.checkpoints import snapshot as snapshots  # noqa: E402
from throughline.train.checkpoints.checkpoint import CheckpointWriter, TensorReader, load_model, restore  # noqa: E402
from throughline.train.checkpoints.run_directory import find_resumable, verified_share  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.parallel.ranks import Ranks  # noqa: E402
from throughline.train.step import train_step  # noqa: E402

LAYOUTS = {
    "one": Layout(),
    "tensor": Layout(tensor=2),
    "full": Layout(data=2, sharding="full"),
    "pipeline": Layout(pipeline=2),
    "v": Layout(pipeline=2, schedule="zero-bubble-v", stages_per_process=2),
    "hybrid": Layout(data=4, sharding="full", replicas=2),
    "tensor x zero1": Layout(tensor=2, data=2, sharding="zero1"),
    "pipeline x tensor": Layout(pipeline=2, tensor=2),
    "context x full": Layout(context=2, data=2, sharding="full"),
}
CASE = Case("checkpoint", Layout(), steps=4, model={"vocab_size": 257})  # rows that no layout cuts evenly
BOUND = 1e-12  # float64 rounding is 1e-15; a lost or stale slot shows at 1e-5


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm()


@functools.cache
def expected(family: str = "gpt") -> list[tuple[float, float]]:
    return reference(replace(CASE, family=family)).steps


def train(case: Case, directory: Path, first: int, last: int, save: bool) -> list[tuple[float, float]]:
    """Steps [first, last) on this rank, from the checkpoint of step `first` unless it is 0."""
    ranks = Ranks.start(case.layout, torch.device("cpu"))
    engine = Engine(case.config, ranks.mesh, case.precision, SEED)
    shapes = {local.name: torch.Size(local.spec.shape) for local in engine.local_shards}
    engine.fill(lambda name, box: value_of(case, name, shapes[name])[box.slices()])
    trainer = make_trainer(case, engine)
    if first:
        restore(directory / f"step-{first:08d}", trainer)
    results = []
    for step in range(first, last):
        result = train_step(trainer, own_rows(case, engine, step), 1.0)
        results.append((result.loss, result.grad_norm))
    if save:
        writer = CheckpointWriter(
            directory, 0, process=ranks.mesh.rank, processes=case.layout.world, token=ranks.token
        )
        writer.save(trainer)
        writer.close()
        ranks.wait()
    return results


def run(
    name: str,
    directory: Path,
    first: int,
    last: int,
    save: bool = False,
    dropout: float = 0.0,
    family: str = "gpt",
) -> list[tuple[float, float]]:
    case = replace(CASE, layout=LAYOUTS[name], model=CASE.model | {"dropout": dropout}, family=family)
    return run_ranks(case.layout.world, lambda: train(case, directory, first, last, save))[0]


def shared_reading(directory: Path) -> tuple[set[str], list[str], Path | None]:
    """What this process has verified, what the first one read again, and the checkpoint that it found."""
    ranks = Ranks.start(Layout(data=2), torch.device("cpu"))
    own = verified_share(directory, ranks.mesh.rank, 2)
    read: list[str] = []
    artifact.sha256_file = lambda path: read.append(path.name) or files.sha256_file(path)
    shares = ranks.gathered(own)
    found = ranks.first_decides(lambda: find_resumable(directory, set().union(*shares)))
    ranks.wait()
    return {name for _, name in own}, read, found


def test_processes_share_the_reading_of_a_checkpoint(tmp_path: Path) -> None:
    """Each file is hashed by one of them; the first reads again what is not as written, and passes it over."""
    for step in (1, 2):
        run("full", tmp_path, 0, step, save=True)
    newest = tmp_path / "step-00000002"
    everything = {record.name for record in read_manifest(newest).files}
    (one, read, found), (other, none, _) = run_ranks(2, lambda: shared_reading(tmp_path))
    assert one | other == everything and not one & other and min(len(one), len(other)) >= len(everything) // 2
    assert (read, none, found) == ([], [], newest)
    damaged = max(newest.glob("optimizer-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    _, read, found = run_ranks(2, lambda: shared_reading(tmp_path))[0]
    assert read[0] == damaged.name and found == tmp_path / "step-00000001"


def assert_close(found: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> None:
    for (loss, norm), (wanted_loss, wanted_norm) in zip(found, wanted, strict=True):
        assert abs(loss - wanted_loss) <= BOUND
        assert abs(norm - wanted_norm) <= BOUND * wanted_norm


PAIRS = [
    ("gpt", "one", "pipeline x tensor"),
    ("gpt", "pipeline x tensor", "hybrid"),
    ("gpt", "context x full", "v"),
    ("bert", "pipeline x tensor", "one"),
    ("bert", "one", "v"),
]


@pytest.mark.parametrize(("family", "saved", "resumed"), PAIRS, ids=lambda name: name.replace(" ", ""))
def test_resumes_in_another_layout(family: str, saved: str, resumed: str, tmp_path: Path) -> None:
    assert_close(run(saved, tmp_path, 0, 2, save=True, family=family), expected(family)[:2])
    assert_close(run(resumed, tmp_path, 2, 4, family=family), expected(family)[2:])


def test_averages_go_on_in_another_layout(tmp_path: Path) -> None:
    """What is opened after four steps, two in each of two layouts, are the averages of one process."""
    case = replace(CASE, ema_decay=0.7)
    for name, first in (("pipeline x tensor", 0), ("hybrid", 2)):
        here = replace(case, layout=LAYOUTS[name])
        steps = first, first + 2
        run_ranks(here.layout.world, lambda here=here, steps=steps: train(here, tmp_path, *steps, True))
    wanted = reference(case).parameters
    for name, value in load_model(tmp_path / "step-00000004", dtype=torch.float64)[0].named_parameters():
        assert (value - wanted[name]).abs().max() <= BOUNDS["fp64"]["parameter"], name


EXPERTS = {"bias": False, "gated": True, "experts": 4, "expert_width": 40, "balance_bias": True}
EXPERT_AXES = (
    Layout(),
    Layout(data=2, expert=2),
    Layout(data=4, expert=4, sharding="full"),
    Layout(data=4, expert=2, sharding="zero1", replicas=2),
    Layout(),
)


def test_experts_go_on_over_another_expert_axis(tmp_path: Path) -> None:
    """From 1 process for the experts to 2, 4 and back, a step in each."""
    case = replace(CASE, steps=len(EXPERT_AXES), model=EXPERTS)
    found = []
    for step, layout in enumerate(EXPERT_AXES):
        here = replace(case, layout=layout)
        found += run_ranks(
            layout.world, lambda here=here, step=step: train(here, tmp_path, step, step + 1, True)
        )[0]
    assert_close(found, reference(case).steps)


def save_and_tell(case: Case, directory: Path, damaged: bool) -> tuple[list[str], list[str]]:
    """(tensor files that this process read back, what it was told went wrong); one byte of the second's is changed on
    the way to the disk when `damaged`.
    """
    ranks = Ranks.start(case.layout, torch.device("cpu"))
    engine = Engine(case.config, ranks.mesh, case.precision, SEED)
    engine.fill()
    read: list[str] = []
    real_hash, real_sync = artifact.sha256_file, snapshots.sync

    def hash_file(path: Path) -> str:
        read.append(Path(path).name)
        return real_hash(path)

    def sync(file: Path) -> None:
        real_sync(file)
        if damaged and file.name == "weights-00001.safetensors":
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            file.write_bytes(content)

    artifact.sha256_file = snapshots.sha256_file = hash_file
    snapshots.sync = sync
    writer = CheckpointWriter(
        directory, 0, process=ranks.mesh.rank, processes=2, token=ranks.token, patience_s=1.0
    )
    errors = []
    try:
        writer.save(make_trainer(case, engine))
        writer.close()
    except ThroughlineError as error:
        errors.append(str(error))
    ranks.wait()
    return [name for name in read if name.startswith("weights")], errors


def test_each_process_reads_back_what_it_wrote(tmp_path: Path) -> None:
    """Not the first all of it; and damage that another process finds keeps the checkpoint from coming into being."""
    case = replace(CASE, layout=LAYOUTS["tensor"])
    good = run_ranks(2, lambda: save_and_tell(case, tmp_path / "good", False))
    assert good == [(["weights-00000.safetensors"], []), (["weights-00001.safetensors"], [])]
    verify_artifact(tmp_path / "good" / "step-00000000")
    (_, first), (_, second) = run_ranks(2, lambda: save_and_tell(case, tmp_path / "bad", True))
    assert "not what was written" in second[0] and "could not be completed" in first[0]
    assert not (tmp_path / "bad" / "latest").exists()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("saved", LAYOUTS)
def test_resumes_in_every_layout(saved: str, family: str, tmp_path: Path) -> None:
    run(saved, tmp_path, 0, 2, save=True, family=family)
    for resumed in LAYOUTS:
        assert_close(run(resumed, tmp_path, 2, 4, family=family), expected(family)[2:])


def test_resumes_bitwise_in_the_same_layout_with_dropout(tmp_path: Path) -> None:
    whole = run("tensor x zero1", tmp_path / "a", 0, 4, dropout=0.1)
    start = run("tensor x zero1", tmp_path / "b", 0, 2, save=True, dropout=0.1)
    assert start + run("tensor x zero1", tmp_path / "b", 2, 4, dropout=0.1) == whole
    assert all(abs(loss - exact) > 1e-6 for (loss, _), (exact, _) in zip(whole, expected(), strict=True)), (
        "nothing was dropped"
    )


def test_is_one_artifact_of_whole_tensors(tmp_path: Path) -> None:
    run("pipeline x tensor", tmp_path, 0, 1, save=True)
    path = tmp_path / "step-00000001"
    assert (tmp_path / "latest").read_text().strip() == path.name
    manifest = verify_artifact(path)
    assert manifest.facts["layout"] == {"world": 4, "pipeline": 2, "tensor": 2}
    assert manifest.facts["parameters"] == CASE.config.parameter_count()
    assert not list(tmp_path.glob(".*")), "remains of the parts"
    model, _ = load_model(path)
    assert sum(p.numel() for p in model.parameters()) == CASE.config.parameter_count()
    read = TensorReader(path, "optimizer")
    assert read("token_table.weight.exp_avg").shape == (257, 64)
    assert read("token_table.weight.step").shape == ()
    file = path / "weights-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 4
    file.write_bytes(data)
    with pytest.raises(Refused, match="damaged"):
        verify_artifact(path)
    assert read_manifest(path).kind == "checkpoint"
