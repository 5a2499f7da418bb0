"""One optimizer step: clipping, loss scaling, skipping, and how often the device is waited for."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from throughline.core import console
from throughline.core.errors import WrongUse
from throughline.core.hardware import machine
from throughline.models.attention_cuda import CAPABILITIES
from throughline.models.experts import RoutedFeedForward, Routing
from throughline.prove.forked import run_ranks, warm
from throughline.train.build import RunPlan, StepBatches, build_trainer, plan_run, training_rows
from throughline.train.logs.metrics import read_metrics
from throughline.train.loop import train
from throughline.train.objective import StepBatch
from throughline.train.optimizers.averages import averaged
from throughline.train.parallel.mesh import make_mesh, start_group
from throughline.train.precision import pick_device
from throughline.train.recipes.recipe import Recipe
from throughline.train.stage import ROUTER_FIGURES
from throughline.train.step import GROWTH_INTERVAL, LossScaler, Trainer, launch_step, train_step
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def setting(
    make_plan: Callable[..., RunPlan], family: str = "gpt", **sections: dict
) -> tuple[Trainer, StepBatch]:
    plan = make_plan(family, **sections)
    return build_trainer(plan), StepBatches(plan, training_rows(plan)).batch(0, 4)


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat(
        [parameter.detach().flatten().clone() for parameter in trainer.engine.stages[0].model.parameters()]
    )


def plain_step(trainer: Trainer, batch: StepBatch, clip: float) -> tuple[torch.Tensor, float]:
    """The same step in the obvious way."""
    (stage,) = trainer.engine.stages
    stage.load(batch.micro_batches, 1 / batch.counts_there, 1.0)
    for _ in batch.micro_batches:
        stage(torch.empty(0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(trainer.engine.stages[0].model.parameters(), clip).item()
    for group in trainer.optimizer.param_groups:
        group["lr"] = group["base_lr"] * 0.5
    trainer.optimizer.step()
    return weights(trainer), norm


@pytest.mark.parametrize("family", ["gpt", "bert"])
@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_equals_the_plain_step(make_plan: Callable[..., RunPlan], family: str, clip: float) -> None:
    """In float64, with and without clipping taking hold; 1e-12 is rounding."""
    sections = {"train": {"precision": "fp64", "clip_norm": clip, "micro_batch_rows": 2}}
    trainer, batch = setting(make_plan, family, **sections)
    other, _ = setting(make_plan, family, **sections)
    expected, norm = plain_step(other, batch, clip)
    result = train_step(trainer, batch, 0.5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-12)
    torch.testing.assert_close(weights(trainer), expected, atol=1e-12, rtol=0)
    assert (trainer.step, trainer.samples, trainer.skipped) == (1, 4, 0)


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_counted(
    make_plan: Callable[..., RunPlan],
) -> None:
    trainer, batch = setting(make_plan)
    train_step(trainer, batch, 1.0)
    before, state = weights(trainer), trainer.optimizer.state_dict()["state"]
    moments = {
        (index, slot): value.clone() for index, slots in state.items() for slot, value in slots.items()
    }
    (stage,) = trainer.engine.stages
    healthy = stage.head
    stage.head = lambda *inputs: healthy(*inputs) * math.nan
    assert train_step(trainer, batch, 1.0).skipped
    assert torch.equal(weights(trainer), before)
    after = trainer.optimizer.state_dict()["state"]
    assert all(torch.equal(after[index][slot], value) for (index, slot), value in moments.items())
    assert (trainer.step, trainer.samples, trainer.skipped, trainer.skipped_in_row) == (2, 8, 1, 1)
    stage.head = healthy
    assert not train_step(trainer, batch, 1.0).skipped
    assert (trainer.skipped, trainer.skipped_in_row) == (1, 0)


def test_a_nan_in_one_gradient_alone_is_noticed(make_plan: Callable[..., RunPlan]) -> None:
    """The loss is finite, one element of one gradient is not."""
    trainer, batch = setting(make_plan)
    spoil = torch.zeros(32)
    spoil[7] = math.inf
    trainer.engine.stages[0].model.norm.bias.register_hook(lambda gradient: gradient + spoil)
    before = weights(trainer)
    result = train_step(trainer, batch, 1.0)
    assert result.skipped
    assert math.isfinite(result.loss)
    assert torch.equal(weights(trainer), before)


def test_the_loss_scale_cancels(make_plan: Callable[..., RunPlan]) -> None:
    """Powers of two scale exactly: one step with any scale moves the weights to the same bits."""
    moved = []
    for scale in (1.0, 2.0**10):
        trainer, batch = setting(make_plan, train={"clip_norm": 0.0})
        trainer.scaler = LossScaler(scale, active=True)
        result = train_step(trainer, batch, 1.0)
        moved.append((weights(trainer), result.grad_norm))
    assert torch.equal(moved[0][0], moved[1][0])
    assert moved[0][1] == moved[1][1]


def test_the_loss_scale_finds_its_place() -> None:
    scaler = LossScaler.of("fp16")
    scaler.update(False)
    assert scaler.scale == 2.0**15
    for _ in range(GROWTH_INTERVAL):
        scaler.update(True)
    assert (scaler.scale, scaler.good_steps) == (2.0**16, 0)
    still = LossScaler.of("bf16")
    still.update(False)
    assert still.scale == 1.0


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_stays_near_fp32(make_plan: Callable[..., RunPlan], precision: str) -> None:
    """Weights are fp32 masters; the loss of a fresh model differs by rounding of 8 or 11 bits, not more."""
    trainer, batch = setting(make_plan, train={"precision": precision})
    reference, _ = setting(make_plan)
    assert all(value.dtype == torch.float32 for _, value in trainer.engine.named_parameters())
    assert all(parameter.dtype.itemsize == 2 for parameter in trainer.engine.stages[0].model.parameters())
    for _ in range(3):
        low, full = train_step(trainer, batch, 1.0), train_step(reference, batch, 1.0)
        assert low.loss == pytest.approx(full.loss, rel=2e-2)
        assert low.grad_norm == pytest.approx(full.grad_norm, rel=5e-2)


READS = ("tolist", "item", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__format__")


class Calls(TorchFunctionMode):
    """Methods of tensors that hand values to the host. A dispatch mode does not see `tolist` of a CPU tensor."""

    def __init__(self, seen: list[str], known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.seen, self.known = seen, {x.untyped_storage().data_ptr() for x in known}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in READS and args[0].untyped_storage().data_ptr() not in self.known:
            self.seen.append(function.__name__)
            with torch._C._DisableTorchDispatch():  # the operator below it is the same read
                return function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class Reads(TorchDispatchMode):
    """All for which the host would wait for a device: values that it reads, shapes that depend on values.

    Bounds of documents are read by the CPU's kernels alone, inside one operator or, `known`, by the ring of context
    processes: the GPU's take them as they lie on the device.
    """

    def __init__(self, known: Sequence[torch.Tensor] = ()) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.calls = Calls(self.seen, known)

    def __enter__(self):
        self.calls.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.calls.__exit__(*error)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "_unique2", "equal"):
            self.seen.append(name)
        if name in ("index", "index_put_"):
            self.seen += [name for index in args[1] if index is not None and index.dtype == torch.bool]
        return function(*args, **(kwargs or {}))


def test_every_way_to_read_is_seen() -> None:
    x = torch.arange(4.0)
    ways: tuple[Callable[[], object], ...] = (
        x.tolist,
        x.numpy,
        x.cpu,
        x[1].item,
        lambda: float(x[1]),
        lambda: int(x[1]),
        lambda: bool(x[1]),
        lambda: range(4)[x[1].long()],
        lambda: f"{x[1]}",
        lambda: torch.add(x, x, alpha=x[1]),
        lambda: x[x > 1],
        x.nonzero,
        x.unique,
        lambda: torch.equal(x, x),
    )
    for way in ways:
        with Reads() as reads:
            way()
        assert reads.seen, way
    with Reads() as reads:
        (x.where(x > 1, 0).softmax(0).sum() / x.norm()).sqrt()
    assert not reads.seen


PADDED = {"objective": {"short_fraction": 1.0}}  # rows that aim at a shorter length


def is_padded(batch: StepBatch) -> bool:
    return all("document_bounds" in part for part in batch.micro_batches)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_waits_for_the_device_once(make_plan: Callable[..., RunPlan], precision: str) -> None:
    given = {"micro_batch_rows": 2, "precision": precision, "sequence_length": 64}
    trainer, batch = setting(make_plan, "bert", train=given, **PADDED)
    assert is_padded(batch)
    train_step(trainer, batch, 1.0)  # optimizers make their state
    with Reads() as reads:
        train_step(trainer, batch, 1.0)
    assert reads.seen == ["tolist"]


def spoilt(head: Callable[..., torch.Tensor], *inputs: object) -> torch.Tensor:
    return head(*inputs) * math.nan


def test_the_device_decides_as_the_host_does(make_plan: Callable[..., RunPlan]) -> None:
    """Clip factor and skip as tensors of fused AdamW: launching reads nothing, a step that is not finite moves nothing,
    not even the averages, and is counted when it is read, and without clipping the bits are the host's (a factor of 1
    divides exactly).
    """
    # three steps of 1e-3, with one rounding of the factor in each
    for clip, bound in ((0.0, 0.0), (0.05, 1e-6)):
        found = []
        for there in (False, True):
            trainer, batch = setting(make_plan, train={"clip_norm": clip}, optimizer={"ema_decay": 0.9})
            trainer.decides_there = there
            (stage,) = trainer.engine.stages
            healthy, results = stage.head, []
            for number in range(5):
                stage.head = partial(spoilt, healthy) if number in (0, 2) else healthy
                with Reads() as reads:
                    launched = launch_step(trainer, batch, 1.0)
                assert launched.is_there is bool(reads.seen) is not there
                results.append(launched.read())
            assert [result.skipped for result in results] == [True, False, True, False, False]
            assert [result.step for result in results] == [1, 2, 3, 4, 5] and trainer.skipped == 2
            with averaged(trainer.engine, trainer.optimizer):
                averages = weights(trainer)
            found.append((weights(trainer), averages, [result.grad_norm for result in results[3:]]))
        assert (found[0][0] - found[1][0]).abs().max() <= bound
        assert (found[0][1] - found[1][1]).abs().max() <= bound
        assert found[0][2] == pytest.approx(found[1][2], rel=bound)


SPREAD = (
    *(("gpt", parallel) for parallel in ({"data": 2}, {"data": 2, "sharding": "full"}, {"tensor": 2})),
    ("bert", {"data": 2}),
    ("bert", {"data": 2, "sharding": "full"}),
    ("bert", {"tensor": 2}),
    ("bert", {"pipeline": 2}),
    ("bert", {"context": 2}),
)


@pytest.mark.parametrize(
    ("family", "parallel"), SPREAD, ids=[f"{family}-{'-'.join(parallel)}" for family, parallel in SPREAD]
)
def test_a_layout_waits_once_and_agrees_in_one_collective(
    make_recipe: Callable[..., Recipe], family: str, parallel: dict
) -> None:
    """With the counts summed a step ahead, the only small collective is that of the figures; a signal that one
    process received is known to both. BERT's rows are padded.
    """
    warm()
    given = {"precision": "bf16", "micro_batch_rows": 2, "sequence_length": 64}
    recipe = make_recipe(family, train=given, parallel=parallel, **(PADDED if family == "bert" else {}))

    def work() -> tuple[list[str], int, int]:
        torch.set_num_threads(1)
        device = torch.device("cpu")
        start_group(device, 60)
        mesh = make_mesh(recipe.parallel.layout(), device, 60)
        plan = plan_run(recipe)
        trainer = build_trainer(plan, mesh)
        rows = StepBatches(plan, training_rows(plan), mesh.data, mesh.context)
        own = 4 // mesh.data.size
        first, second, third = (rows.batch(4 * step + own * mesh.data.rank, own) for step in range(3))
        assert family == "gpt" or is_padded(second)
        train_step(trainer, first, 1.0, upcoming=second)
        small, original = [], dist.all_reduce

        def counting(tensor, *arguments, **named):
            small.append(tensor.numel() < 64)
            return original(tensor, *arguments, **named)

        dist.all_reduce = counting
        with Reads([part["document_bounds"] for part in second.micro_batches if family == "bert"]) as reads:
            result = train_step(trainer, second, 1.0, signal=lambda: 15 * (mesh.rank == 1), upcoming=third)
        dist.all_reduce = original
        return reads.seen, sum(small), result.signal

    for reads, small, heard in run_ranks(2, work):
        assert reads == ["tolist"]
        # a loss over a cut vocabulary has small sums of its own
        assert small == 1 or "tensor" in parallel
        assert heard == 15


def test_auto_is_what_the_gpu_is_made_for(
    make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp32 without one; bf16 from compute capability 8 on; fp16 on a V100 or T4, of which one is enough."""
    assert make_recipe(train={"precision": "auto"}).train.precision == "fp32"
    for gpus, expected in (
        (["9.0"], "bf16"),
        (["7.5"], "fp16"),
        (["8.0", "7.0"], "fp16"),
        (["6.1"], "fp32"),
    ):
        # the driver says nothing, as in a container without its tool: torch is asked
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: len(gpus))
        for index, gpu in enumerate(gpus):
            monkeypatch.setitem(CAPABILITIES, index, tuple(map(int, gpu.split("."))))
        found = make_recipe(train={"precision": "auto", "device": "auto"})
        assert found.train.precision == expected
        assert make_recipe(train={"precision": "auto", "device": "cpu"}).train.precision == "fp32"


def test_tf32_is_of_gpus(make_plan: Callable[..., RunPlan]) -> None:
    with pytest.raises(WrongUse, match="no tf32"):
        make_plan(train={"precision": "tf32"})


@pytest.mark.parametrize("dtypes", [("fp32",), ("fp32", "bf16")])
def test_bf16_on_a_processor_without_it_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtypes: tuple[str, ...]
) -> None:
    """On a Zen 3 torch makes bf16 products at a twentieth of fp32's rate: a run that asks for them says so, once."""
    here = machine()
    cpu = dataclasses.replace(here.cpu, dtypes=dtypes)
    monkeypatch.setattr("throughline.train.precision.machine", lambda: dataclasses.replace(here, cpu=cpu))
    console.warn_once.cache_clear()
    for precision in ("fp32", "bf16", "bf16"):
        pick_device("cpu", precision)
    assert capsys.readouterr().err.count("no bf16 products") == ("bf16" not in dtypes)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_small_updates_reach_the_masters(make_plan: Callable[..., RunPlan], precision: str) -> None:
    """Steps far below the spacing of 16-bit weights add up in the masters, of which the weights are roundings."""
    trainer, batch = setting(make_plan, train={"precision": precision}, optimizer={"learning_rate": 1e-6})
    before = {local.name: local.value.detach().clone() for local in trainer.engine.local_shards}
    for _ in range(3):
        train_step(trainer, batch, 1.0)
    for local in trainer.engine.local_shards:
        assert not torch.equal(local.value, before[local.name]), local.name
        assert torch.equal(local.computed, local.value.to(local.computed.dtype))


def test_the_share_of_dropped_answers_is_told(
    make_plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all that were chosen in the step's micro-batches and layers, once each where a forward is repeated."""
    model = {"layers": 2, "width": 32, "heads": 2, "bias": False, "experts": 4, "expert_capacity_factor": 1.0}
    train = {"micro_batch_rows": 2, "recompute": "full"}
    trainer, batch = setting(make_plan, model={"overrides": model}, train=train)
    found, real = list[torch.Tensor](), RoutedFeedForward._dropped

    def dropped(layer: RoutedFeedForward, routing: Routing) -> torch.Tensor:
        found.append(real(layer, routing))
        return found[-1]

    monkeypatch.setattr(RoutedFeedForward, "_dropped", dropped)
    told = dict(zip(ROUTER_FIGURES, train_step(trainer, batch, 1.0).routers))["dropped_tokens"]
    assert len(found) == 2 * 2 * 2, "layers, micro-batches, forwards"
    assert told == pytest.approx(torch.stack(found).double().mean().item()) and told > 0.01


SMALL = {"layers": 2, "width": 32, "heads": 2}


@pytest.mark.parametrize(
    ("family", "sections", "terms", "logged"),
    [
        ("gpt", {"train": {"z_loss": 0.1}}, ("next", "z_loss"), ("next",)),
        ("gpt", {"model": {"overrides": SMALL | {"predict_ahead": 1}}}, ("next", "ahead"), ("next",)),
        ("bert", {}, ("mlm", "nsp"), ("mlm", "nsp")),
    ],
)
def test_the_logged_loss_leaves_auxiliary_terms_out(
    make_plan: Callable[..., RunPlan],
    tmp_path: Path,
    family: str,
    sections: dict[str, Any],
    terms: tuple[str, ...],
    logged: tuple[str, ...],
) -> None:
    """It is what a validation measures; every term is in the record by its name, and in the gradient."""
    train(
        make_plan(family, **sections | {"train": {"steps": 2} | sections.get("train", {})}), tmp_path / "run"
    )
    for record in read_metrics(tmp_path / "run"):
        assert record["loss"] == pytest.approx(sum(record[name] for name in logged))
        assert all(record[name] > 0 for name in terms)
