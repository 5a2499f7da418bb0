"""Compressed gradients from the recipe: runs of two processes, trained, stopped and continued to the bit, in
fewer bytes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from throughline.core.errors import WrongUse  # noqa: E402
from throughline.core.recipe import build_recipe  # noqa: E402
from throughline.planner.layout import Layout  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.prove.proof import SEED, Case, make_trainer, own_rows, reference, value_of  # noqa: E402
from throughline.train.build import plan_run  # noqa: E402
from throughline.train.checkpoints.checkpoint import load_model  # noqa: E402
from throughline.train.engine import Engine  # noqa: E402
from throughline.train.logs.metrics import read_metrics  # noqa: E402
from throughline.train.loop import train  # noqa: E402
from throughline.train.parallel.compression import (  # noqa: E402
    Bf16Sum,
    OneBitAdam,
    PowerSum,
)
from throughline.train.parallel.mesh import make_mesh, start_group  # noqa: E402
from throughline.train.recipes.recipe import Recipe  # noqa: E402
from throughline.train.recipes.resolved import (  # noqa: E402
    model_config,
    predicted_memory,
    resolve,
)
from throughline.train.recipes.rules import RULES  # noqa: E402
from throughline.train.step import GROWTH_INTERVAL, LossScaler, train_step  # noqa: E402

# nats: PowerSGD of rank 4 is 0.19 to 0.21 behind after five steps (seeds 0 to 6); without them the loss is 0.65 higher
BEHIND = 0.25


def make_recipe(store: Path, scheme: str, steps: int = 8, **sections: dict[str, Any]) -> Recipe:
    tree: dict[str, Any] = {
        "data": {"train": str(store)},
        "model": {"overrides": {"layers": 2, "width": 64, "heads": 2, "vocab_size": 40}},
        "train": {"steps": steps, "sequence_length": 32, "batch_rows": 8, "compile": "off", "device": "cpu"},
        "schedule": {"kind": "constant"},
        "optimizer": {"learning_rate": 3e-3},
        "parallel": {"data": 2},
        "compression": {"scheme": scheme, "warmup_steps": 3},
    }
    for name, fields in sections.items():
        tree[name] = tree.get(name, {}) | fields
    return resolve(build_recipe(tree, Recipe, RULES))


@pytest.fixture(scope="module")
def run(store: Path) -> Callable[..., list[float]]:
    """Train over processes; the losses of every step."""
    warm()

    def go(
        directory: Path, scheme: str, steps: int = 8, processes: int = 2, **sections: dict[str, Any]
    ) -> list[float]:
        recipe = make_recipe(store, scheme, steps, parallel={"data": processes}, **sections)

        def work() -> None:
            torch.set_num_threads(1)
            train(plan_run(recipe), directory)

        run_ranks(processes, work)
        return [record["loss"] for record in read_metrics(directory)]

    return go


@pytest.fixture(scope="module")
def plain(run: Callable[..., list[float]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plain") / "run"
    run(directory, "none")
    return directory


def sent_bytes(directory: Path) -> list[int]:
    """What the first process sent for gradients in each step, as the metrics say."""
    return [record["gradient_bytes"] for record in read_metrics(directory)]


@pytest.mark.parametrize("scheme", ["bf16", "powersgd", "one-bit-adam"])
def test_trains_and_continues_to_the_bit(
    scheme: str, run: Callable[..., list[float]], plain: Path, tmp_path: Path
) -> None:
    """Steps 6 to 8 after a stop are those of an uninterrupted run: what the processes owe each other is in
    the checkpoint.

    The metrics say what it saves: fp32 gradients over two processes are sent once, 2 (n-1)/n times their
    bytes.
    """
    uncompressed = [record["loss"] for record in read_metrics(plain)]
    whole = run(tmp_path / "whole", scheme)
    run(tmp_path / "parts", scheme, steps=5)
    assert run(tmp_path / "parts", scheme) == whole
    first, second = (load_model(tmp_path / name)[0].state_dict() for name in ("whole", "parts"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert whole[-1] < whole[0] - 0.1
    dense, sent = 4 * sum(value.numel() for value in first.values()), sent_bytes(tmp_path / "whole")
    assert sent_bytes(plain) == [dense] * 8
    if scheme == "bf16":
        assert whole == pytest.approx(uncompressed, abs=5e-3)
        assert all(dense / 2 <= size < dense / 2 + 64 for size in sent)
    else:  # the warm-up is whole gradients; only then do they differ
        assert whole[:4] == pytest.approx(uncompressed[:4], abs=1e-5)
        assert whole[4:] != uncompressed[4:]
        assert whole == pytest.approx(uncompressed, abs=BEHIND)
        assert sent[:3] == [dense] * 3
        assert all(size < dense / (4 if scheme == "powersgd" else 15) for size in sent[3:])


@pytest.mark.parametrize("scheme", ["bf16", "powersgd", "one-bit-adam"])
def test_goes_on_with_more_processes(
    scheme: str, run: Callable[..., list[float]], plain: Path, tmp_path: Path
) -> None:
    """Nobody owes anything then: the new ones know of no step or factor that the others had, and all must
    send alike.
    """
    uncompressed = [record["loss"] for record in read_metrics(plain)]
    run(tmp_path / "run", scheme, steps=5)
    found = run(tmp_path / "run", scheme, processes=4)
    assert found[5:] == pytest.approx(uncompressed[5:], abs=BEHIND)
    assert found[-1] < found[0] - 0.1


@pytest.mark.parametrize("scheme", ["bf16", "one-bit-adam"])
def test_goes_on_alone_with_whole_gradients(
    scheme: str, run: Callable[..., list[float]], plain: Path, tmp_path: Path
) -> None:
    """One process is left: it has nobody to send to, and compression may be given up. Remains of more
    processes are cleared.
    """
    uncompressed = [record["loss"] for record in read_metrics(plain)]
    run(tmp_path / "run", scheme, steps=5)
    (tmp_path / "run" / ".heartbeat").mkdir()
    (tmp_path / "run" / ".heartbeat" / "7").write_text("{}")
    with pytest.raises(WrongUse, match="1 problem"):
        make_recipe(tmp_path, scheme, parallel={"data": 1})
    found = run(tmp_path / "run", "none", processes=1)
    assert found[5:] == pytest.approx(uncompressed[5:], abs=BEHIND)
    assert not (tmp_path / "run" / ".heartbeat").exists()
    with pytest.raises(
        RuntimeError, match=r"another recipe|SystemExit: 2"
    ):  # as the first process says, or the other one
        run(tmp_path / "run", scheme, steps=9)


@pytest.mark.parametrize(
    ("sections", "field"),
    [
        ({"parallel": {"data": 1}}, "compression.scheme"),
        ({"parallel": {"data": 2, "sharding": "full"}}, "compression.scheme"),
        ({"parallel": {"data": 2, "tensor": 2}}, "compression.scheme"),
        ({"optimizer": {"name": "muon"}}, "compression.scheme"),
        ({"compression": {"scheme": "one-bit-adam", "warmup_steps": 0}}, "compression.warmup_steps"),
    ],
)
def test_what_cannot_be_is_told(sections: dict[str, Any], field: str, store: Path) -> None:
    with pytest.raises(WrongUse) as caught:
        make_recipe(store, "one-bit-adam", **sections)
    assert f"[{field}]" in caught.value.why


@pytest.mark.parametrize("scheme", ["bf16", "powersgd"])
def test_gradients_of_16_bits_are_compressed_too(
    scheme: str, run: Callable[..., list[float]], plain: Path, tmp_path: Path
) -> None:
    """With offload gradients have 16 bits, in which no library factorises a matrix; what they owe is
    accounted.
    """
    half = {"precision": "bf16", "offload": True}
    found = run(tmp_path / "run", scheme, train=half)
    assert found == pytest.approx([record["loss"] for record in read_metrics(plain)], abs=BEHIND)
    assert found[-1] < found[0] - 0.1
    sent = sent_bytes(tmp_path / "run")
    assert sent[-1] < sent[0] or scheme == "bf16"
    recipe = make_recipe(tmp_path, scheme, train=half)
    assert (
        predicted_memory(model_config(recipe), recipe)["gradient residuals"]
        >= 4 * model_config(recipe).parameter_count()
    )


def residuals_after_a_step(good_steps: int) -> tuple[float, list[Any]]:
    """fp16's loss scale, and what this process owes, after a step that was good once more."""
    case = Case("", Layout(data=2))
    device = torch.device("cpu")
    start_group(device, 60)
    engine = Engine(case.config, make_mesh(case.layout, device, 60), case.precision, SEED)
    engine.fill()
    engine.communication_hook = Bf16Sum(engine.communicator)
    trainer = make_trainer(case, engine)
    trainer.scaler = LossScaler(1024.0, good_steps, True)
    train_step(trainer, own_rows(case, engine, 0), 1.0)
    return trainer.scaler.scale, [error.numpy() for error in engine.communication_hook.kept.values()]


def test_residuals_follow_the_loss_scale() -> None:
    warm()
    (scale, residuals), (doubled, more) = (
        run_ranks(2, lambda n=n: residuals_after_a_step(n))[0] for n in (0, GROWTH_INTERVAL - 1)
    )
    assert (scale, doubled) == (1024.0, 2048.0)
    assert all((2 * one == other).all() and one.any() for one, other in zip(residuals, more, strict=True))


def bert_steps(scheme: str) -> list[tuple[float, float]]:
    """Loss and gradient norm of a BERT's steps over two processes, by one scheme from the first step or the fourth."""
    case = Case("", Layout(data=2), family="bert", precision="fp32")
    device = torch.device("cpu")
    start_group(device, 60)
    engine = Engine(case.config, make_mesh(case.layout, device, 60), case.precision, SEED)
    shapes = {local.name: torch.Size(local.spec.shape) for local in engine.local_shards}
    engine.fill(lambda name, box: value_of(case, name, shapes[name]))
    trainer = make_trainer(case, engine)
    if scheme == "one-bit-adam":
        trainer.optimizer = OneBitAdam(
            trainer.optimizer.param_groups, communicator=engine.communicator, warmup_steps=3
        )
        engine.communication_hook = trainer.optimizer
    else:
        engine.communication_hook = (
            Bf16Sum(engine.communicator) if scheme == "bf16" else PowerSum(engine.communicator, dense_steps=3)
        )
    results = [train_step(trainer, own_rows(case, engine, step), 1.0) for step in range(6)]
    return [(result.loss, result.grad_norm) for result in results]


@pytest.mark.parametrize("scheme", ["bf16", "powersgd", "one-bit-adam"])
def test_a_bert_trains_alike(scheme: str) -> None:
    """Its pair head and its unequal counts of both terms too: losses near those of one process, the same on both.

    The norm that clips is the whole gradient's on any number of processes: 1-bit Adam estimates it (2.2 % deviation),
    PowerSGD's first four factors miss 16 %; once too often over two processes it would be 41 % larger.
    """
    warm()
    first, second = run_ranks(2, lambda: bert_steps(scheme))
    expected = reference(Case("", Layout(), family="bert", precision="fp32", steps=6)).steps
    losses = [loss for loss, _ in expected]
    assert first == second and [loss for loss, _ in first] == pytest.approx(losses, abs=0.02)
    close = 1e-4 if scheme != "bf16" else 0.02
    assert [loss for loss, _ in first[:4]] == pytest.approx(losses[:4], abs=close)
    assert [norm for _, norm in first[:4]] == pytest.approx([norm for _, norm in expected[:4]], rel=0.2)
