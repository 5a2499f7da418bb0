"""A step waits for the device once: what the host reads, in one process and in layouts."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from stepping import setting, weights
from throughline.prove.forked import run_ranks, warm
from throughline.train.build import RunPlan, StepBatches, build_trainer, plan_run, training_rows
from throughline.train.objective import StepBatch
from throughline.train.optimizers.averages import averaged
from throughline.train.parallel.mesh import make_mesh, start_group
from throughline.train.recipes.recipe import Recipe
from throughline.train.step import launch_step, train_step
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

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
