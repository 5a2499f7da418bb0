"""Compressed sums lose nothing in the long run, agree on every process, and send exactly the bytes that they
count.
"""

import copy
import time
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from throughline.prove.forked import run_ranks, warm  # noqa: E402
from throughline.train.parallel.compression import (  # noqa: E402
    Bf16,
    Bf16Sum,
    CommunicationHook,
    OneBitAdam,
    PowerSum,
    Signs,
)
from throughline.train.parallel.data import Communicator  # noqa: E402
from throughline.train.parallel.mesh import Axis  # noqa: E402
from torch import Tensor, nn  # noqa: E402

WORLDS = (2, 3)
HEADER_BYTES = 4096  # gloo frames each message with 48 bytes and meets at barriers: measured below 3 kB here


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    warm()


def ranks(world: int, work: Callable[[Communicator], object]) -> list:
    """What `work` returns on each of `world` gloo processes."""

    def start() -> object:
        dist.init_process_group("gloo")
        return work(Communicator(Axis(world, dist.get_rank(), tuple(range(world)), dist.group.WORLD)))

    return run_ranks(world, start)


def draw(step: int, rank: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(*shape, generator=generator) * torch.logspace(-3, 1, shape[-1])


@pytest.mark.parametrize("shape", [(2048,), (3, 4096)])
def test_signs_survive_the_packing(shape: tuple[int, ...]) -> None:
    """Every sign, zero as plus, and the mean magnitude of every block, in L/8 + 4 bytes a block."""
    x = draw(0, 0, *shape)
    x[..., 5] = 0.0
    data = Signs().encode(x)
    assert data.dtype == torch.uint8 and data.shape[-1] == shape[-1] // 8 + 4 * shape[-1] // 2048
    found = Signs().decode(data, torch.float32)
    blocks = x.unflatten(-1, (-1, 2048))
    scales = blocks.abs().mean(-1, keepdim=True)
    assert torch.equal(found, torch.where(blocks >= 0, scales, -scales).flatten(-2))


def test_bf16_survives_the_packing() -> None:
    x = draw(0, 0, 3, 100)
    assert torch.equal(Bf16().decode(Bf16().encode(x), torch.float32), x.to(torch.bfloat16).float())


@pytest.mark.parametrize("codec", [Signs(), Bf16()], ids=["signs", "bf16"])
@pytest.mark.parametrize("world", WORLDS)
def test_error_feedback_loses_nothing(world: int, codec: Signs | Bf16) -> None:
    """All that was put in = all that came out + all errors that are still held, and every process got the
    same.
    """
    numel, steps = 5000, 6

    def work(communicator: Communicator) -> tuple[Tensor, Tensor]:
        hook = CommunicationHook(communicator)
        out = torch.zeros(numel, dtype=torch.float64)
        for step in range(steps):
            out += hook.compressed_sum(codec, 0, draw(step, communicator.axis.rank, numel).double())
        held, part = hook.kept["own.0"].flatten(), hook.kept["sum.0"]
        held[communicator.axis.rank * len(part) :][: len(part)] += part
        return out.numpy(), held[:numel].numpy()

    results = [(torch.from_numpy(out), torch.from_numpy(held)) for out, held in ranks(world, work)]
    assert all(torch.equal(out, results[0][0]) for out, _ in results)
    put_in = sum(draw(step, rank, numel).double() for step in range(steps) for rank in range(world))
    assert (
        results[0][0] + sum(held for _, held in results) - put_in
    ).abs().max() < 1e-10  # float64 sums of numbers up to 40


@pytest.mark.parametrize("world", WORLDS)
def test_power_sum_loses_nothing(world: int) -> None:
    """The same identity for thin factors, after a dense step; without feedback nothing is held and the sum is
    only near.
    """
    shapes = [(40, 30), (30,), (3, 2), (20, 50)]  # the second and third do not pay and go as they are

    def work(communicator: Communicator) -> list:
        power = PowerSum(communicator, rank=2, dense_steps=1)
        out = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
        for step in range(5):
            gradients = [draw(step, communicator.axis.rank, *shape).double() for shape in shapes]
            power.sum_gradients(gradients)
            for total, gradient in zip(out, gradients):
                total += gradient
        held = [power.kept.get(f"lost.{i}", torch.zeros(())).numpy() for i in range(len(shapes))]
        return [(total.numpy(), lost) for total, lost in zip(out, held)]

    results = ranks(world, work)
    for i, shape in enumerate(shapes):
        put_in = sum(draw(step, rank, *shape).double() for step in range(5) for rank in range(world))
        found = torch.from_numpy(results[0][i][0])
        assert all((found == torch.from_numpy(result[i][0])).all() for result in results)
        assert (found + sum(result[i][1] for result in results) - put_in).abs().max() < 1e-10
        # only the thin ones still owe something
        assert (i in (0, 3)) == bool((found - put_in).abs().max() > 1e-3)


@pytest.mark.parametrize("scheme", ["dense", "bf16", "power", "signs"])
@pytest.mark.parametrize("world", WORLDS)
def test_bytes_counted_are_bytes_sent(world: int, scheme: str, socket_bytes: Callable[[], int]) -> None:
    """What `Communicator` counts against the kernel's count of the same calls, on every process; and against the
    formulas.
    """
    numel = 2048 * 8 * 6  # whole blocks for 2 and for 3 processes

    def work(communicator: Communicator) -> tuple[float, int]:
        matrices = [draw(0, communicator.axis.rank, 256, numel // 256)]
        if scheme == "signs":
            hook = CommunicationHook(communicator)
            send = lambda: hook.compressed_sum(Signs(), 0, matrices[0].flatten())  # noqa: E731
        else:
            total = (
                {"dense": CommunicationHook, "bf16": Bf16Sum}[scheme](communicator)
                if scheme != "power"
                else PowerSum(communicator, 4, dense_steps=0)
            )
            send = lambda: total.sum_gradients(matrices)  # noqa: E731
        send()  # connections are made
        dist.barrier()
        time.sleep(0.05)  # acknowledged
        before, counted = socket_bytes(), communicator.bytes_sent
        send()
        dist.barrier()
        time.sleep(0.05)
        return communicator.bytes_sent - counted, socket_bytes() - before

    ring = 2 * (world - 1) / world
    expected = {
        "dense": ring * 4 * numel,
        "bf16": ring * 2 * numel,
        "power": ring * 4 * 4 * (256 + numel // 256),
        "signs": ring * (numel / 8 + 4 * numel / 2048),
    }[scheme]
    for counted, sent in ranks(world, work):
        assert counted == expected
        assert counted <= sent <= counted + HEADER_BYTES, (counted, sent)


def test_not_finite_numbers_are_passed_on_and_leave_no_trace() -> None:
    """One process has a NaN: every process sees a sum that is not finite, and the next sums are clean."""

    def work(communicator: Communicator) -> list[bool]:
        sums = [Bf16Sum(communicator), PowerSum(communicator, rank=2, dense_steps=0)]
        # past its warm-up from the start
        adam = OneBitAdam([torch.zeros(40, 30)], communicator=communicator, warmup_steps=0)
        finite = []
        for step in range(3):
            for total in sums:
                gradient = draw(step, communicator.axis.rank, 40, 30)
                if step == 1 and communicator.axis.rank == 1:
                    gradient[3, 4] = float("nan")
                # what decides whether its step is taken: known without sending gradients
                norm = adam.squared_norm([gradient])
                total.sum_gradients([gradient])
                finite.append(bool(gradient.isfinite().all()))
                assert bool(norm.isfinite()) == finite[-1]
        return finite

    for finite in ranks(2, work):
        assert finite == [True, True, False, False, True, True]


@pytest.mark.parametrize("kind", ["drawn", "low rank", "all ones", "many small"])
def test_the_sketch_of_a_norm_is_near_it(kind: str) -> None:
    """Also of gradients whose parts are alike, and longer than the signs that were drawn."""
    low_rank = torch.outer(draw(0, 0, 3000), draw(1, 0, 700))
    gradients = {
        "drawn": [draw(0, 0, 5000, 300), draw(0, 1, 77)],
        "low rank": [low_rank, draw(0, 2, 768)],
        "all ones": [torch.ones(4000, 1000)],
        "many small": [torch.ones(768) for _ in range(150)],
    }[kind]

    def work(communicator: Communicator) -> float:
        adam = OneBitAdam([torch.zeros(2)], communicator=communicator, warmup_steps=0)
        return float(adam.squared_norm(gradients) / sum(g.square().sum() for g in gradients))

    (ratio,) = ranks(1, work)
    assert 0.8 < ratio < 1.2, "1,024 buckets: a deviation of 4 %"


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 50))


def backward(model: nn.Module, step: int, rows: range) -> None:
    """The part of these rows of a mean over 24."""
    ids = torch.randint(0, 40, (24, 2), generator=torch.Generator().manual_seed(step))
    logits = model(ids[rows.start : rows.stop, 0])
    (nn.functional.cross_entropy(logits, ids[rows.start : rows.stop, 1], reduction="sum") / 24).backward()


def adam_steps(
    model: nn.Module, optimizer: OneBitAdam, rows: range, first: int, steps: int
) -> list[tuple[float, float]]:
    """Norms as the optimizer has them and as a dense sum has them, step by step."""
    norms = []
    for step in range(first, first + steps):
        backward(model, step, rows)
        gradients = [p.grad for p in model.parameters()]
        whole = [gradient.clone() for gradient in gradients]
        CommunicationHook(Communicator(optimizer.communicator.axis)).sum_gradients(whole)
        optimizer.sum_gradients(gradients)
        squares, true = optimizer.squared_norm(gradients), float(torch.nn.utils.get_total_norm(whole))
        norms.append((true if squares is None else float(squares) ** 0.5, true))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def test_one_bit_adam_divides_by_the_frozen_variance_as_it_was_corrected_then() -> None:
    """A step after the warm-up equals the formula written out: the variance of the warm-up's last step with that
    step's bias correction, the floor under its root, the momentum with the correction of now, decay apart.
    """

    def work(communicator: Communicator) -> bool:
        model, (beta1, beta2), lr, decay, eps = small_model(), (0.9, 0.95), 1e-2, 0.1, 1e-8
        options = {"lr": lr, "betas": (beta1, beta2), "weight_decay": decay, "eps": eps}
        optimizer = OneBitAdam(model.parameters(), communicator=communicator, warmup_steps=3, **options)
        adam_steps(model, optimizer, range(24), 0, 3)
        frozen = [optimizer.state[p]["exp_avg_sq"].double().clone() for p in model.parameters()]
        for step in (4, 5):
            before = [p.detach().double().clone() for p in model.parameters()]
            adam_steps(model, optimizer, range(24), step - 1, 1)
            for old, variance, p in zip(before, frozen, model.parameters()):
                root = (variance / (1 - beta2**3)).sqrt()
                root = root.clamp(min=0.1 * float(root.square().mean().sqrt())) + eps
                momentum = optimizer.state[p]["exp_avg"].double() / (1 - beta1**step)
                expected = old * (1 - lr * decay) - lr * momentum / root
                # float32 steps
                torch.testing.assert_close(p.detach().double(), expected, rtol=1e-6, atol=1e-7)
        return True

    assert ranks(1, work) == [True]


def test_one_bit_adam_is_adamw_while_it_warms_up_and_stays_together_after() -> None:
    """Six steps of warm-up equal AdamW on all rows; then weights and momentum stay the same on all processes
    to the bit.
    """

    def work(communicator: Communicator) -> dict:
        model, share = small_model(), 24 // communicator.axis.size
        rows = range(communicator.axis.rank * share, (communicator.axis.rank + 1) * share)
        optimizer = OneBitAdam(model.parameters(), communicator=communicator, warmup_steps=6, lr=1e-2)
        adam_steps(model, optimizer, rows, 0, 6)
        warm_weights = [p.detach().clone().numpy() for p in model.parameters()]
        variances = [optimizer.state[p]["exp_avg_sq"].clone() for p in model.parameters()]
        norms = adam_steps(model, optimizer, rows, 6, 20)
        assert all(
            torch.equal(a, optimizer.state[p]["exp_avg_sq"]) for a, p in zip(variances, model.parameters())
        ), "frozen"
        after = [x.numpy() for p in model.parameters() for x in (p.detach(), optimizer.state[p]["exp_avg"])]
        return {"warm": warm_weights, "norms": norms, "after": after}

    results = ranks(3, work)
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(6):
        backward(model, step, range(24))
        optimizer.step()
        optimizer.zero_grad()
    for found, p in zip(results[0]["warm"], model.parameters()):
        assert (
            torch.from_numpy(found) - p.detach()
        ).abs().max() < 1e-5  # fp32 sums in another order, 6 steps of 1e-2
    for result in results:
        assert all((a == b).all() for a, b in zip(result["after"], results[0]["after"]))
        for estimated, true in result["norms"]:
            # the sketch: 2.2 % standard deviation, five of which
            assert estimated == pytest.approx(true, rel=0.1)


def test_one_bit_adam_continues_to_the_bit_from_its_state_and_errors() -> None:
    def work(communicator: Communicator) -> bool:
        rows, states = range(communicator.axis.rank * 12, communicator.axis.rank * 12 + 12), []
        model = small_model()
        optimizer = OneBitAdam(model.parameters(), communicator=communicator, warmup_steps=3, lr=1e-2)
        adam_steps(model, optimizer, rows, 0, 6)
        fresh = small_model()
        fresh.load_state_dict(model.state_dict())
        resumed = OneBitAdam(fresh.parameters(), communicator=communicator, warmup_steps=3, lr=1e-2)
        saved = optimizer.state_dict()
        saved["state"] = {
            i: {k: copy.deepcopy(v) for k, v in slots.items()} for i, slots in saved["state"].items()
        }
        resumed.load_state_dict(saved)
        resumed.kept = {name: error.clone() for name, error in optimizer.kept.items()}
        for one, its in ((model, optimizer), (fresh, resumed)):
            adam_steps(one, its, rows, 6, 3)
            states.append([p.detach() for p in one.parameters()])
        return all(torch.equal(a, b) for a, b in zip(*states))

    assert all(ranks(2, work))


def test_what_is_owed_keeps_pace_with_the_loss_scale() -> None:
    """fp16: gradients come multiplied by a scale that changes. Halved after the third of six sums, all that
    was put in is still all that came out and what is held, each over the scale of its time.
    """

    def work(communicator: Communicator) -> list:
        answers = []
        for total in (Bf16Sum(communicator), PowerSum(communicator, rank=2, dense_steps=0)):
            scale, out = 1024.0, torch.zeros(40, 30, dtype=torch.float64)
            for step in range(6):
                gradient = scale * draw(step, communicator.axis.rank, 40, 30).double()
                total.sum_gradients([gradient])
                out += gradient / scale
                if step == 2:
                    scale /= 2
                    total.rescale(0.5)
            if isinstance(total, PowerSum):
                held = total.kept["lost.0"]
            else:
                own, part = total.kept["own.0"].flatten(), total.kept["sum.0"]
                own[communicator.axis.rank * len(part) :][: len(part)] += part
                held = own.view(40, 30)
            answers.append((out.numpy(), (held / scale).numpy()))
        return answers

    results = ranks(2, work)
    put_in = sum(draw(step, rank, 40, 30).double() for step in range(6) for rank in range(2))
    for scheme in (0, 1):
        held = sum(torch.from_numpy(result[scheme][1]) for result in results)
        assert (torch.from_numpy(results[0][scheme][0]) + held - put_in).abs().max() < 1e-10


def test_alone_nothing_is_sent_and_nothing_is_lost() -> None:
    communicator, gradient = Communicator(Axis()), draw(0, 0, 40, 30)
    for total in (
        CommunicationHook(communicator),
        Bf16Sum(communicator),
        PowerSum(communicator, dense_steps=0),
    ):
        found = gradient.clone()
        total.sum_gradients([found])
        assert torch.equal(found, gradient)
    assert communicator.bytes_sent == 0


def test_a_longer_run_does_not_take_the_warm_up_back() -> None:
    """1-bit Adam continued with another length, and so another warm-up: its frozen variance stays as it is
    corrected, and the next update is that of a run that was never stopped.
    """

    def optimizer(weight: torch.Tensor, warmup_steps: int) -> OneBitAdam:
        return OneBitAdam([weight], communicator=Communicator(Axis()), warmup_steps=warmup_steps, lr=1e-2)

    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(8, 8, generator=generator))
    gradients = [torch.randn(8, 8, generator=generator) for _ in range(6)]
    first = optimizer(weight, 3)
    for gradient in gradients[:5]:
        weight.grad = gradient.clone()
        first.step()
    other = torch.nn.Parameter(weight.detach().clone())
    second = optimizer(other, 40)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for one, parameter in ((first, weight), (second, other)):
        parameter.grad = gradients[5].clone()
        one.step()
    assert second.frozen
    assert torch.equal(weight, other)
