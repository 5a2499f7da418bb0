"""Offload computes what the plain optimizer computes, to the bit, keeps its state loadable, and holds the
bytes it says.
"""

import copy
import time

import pytest
import torch
from throughline.models.bert import BERT
from throughline.models.config import BERTConfig, GPTConfig, preset
from throughline.models.gpt import GPT
from throughline.models.init import initialise
from throughline.planner.memory import device_terms, host_terms
from throughline.planner.work import Layouts, Work, find_software
from throughline.train.loss import cross_entropy_sum
from throughline.train.optimizers.offload import HostOffload
from throughline.train.stage import WholeParameters
from torch import Tensor, nn

SHAPE = {"vocab_size": 64, "sequence_length": 16, "layers": 3, "width": 32, "heads": 4}


def make_model(family: str = "gpt", dtype: torch.dtype = torch.float32) -> nn.Module:
    model = GPT(GPTConfig(**SHAPE)) if family == "gpt" else BERT(BERTConfig(**SHAPE))
    initialise(model, 1)
    return model.to(dtype)


def offloaded(model: nn.Module, micro_batches: int = 1) -> HostOffload:
    return HostOffload(model, micro_batches, WholeParameters.of(model).parts)


def masters(offload: HostOffload) -> list[tuple[str, nn.Parameter]]:
    offload.wait()
    return [(side.name, side.master) for side in offload.sides]


def make_optimizer(source: nn.Module | HostOffload) -> torch.optim.AdamW:
    """AdamW in two groups, as the recipe's."""
    named = masters(source) if isinstance(source, HostOffload) else list(source.named_parameters())
    groups = [
        {"params": [p for name, p in named if p.dim() > 1 and "table" not in name], "weight_decay": 0.1},
        {"params": [p for name, p in named if p.dim() < 2 or "table" in name], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)


def loss_of(model: nn.Module, step: int, micro: int) -> Tensor:
    """A BERT's next-sentence head gets no gradient here; the second micro-batch of a GPT has other rows than
    the first.
    """
    ids = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(10 * step + micro))
    hidden = model.hidden(ids[:, :-1])
    logits = model.head(hidden) if isinstance(model, GPT) else model.mlm_head(hidden)
    return cross_entropy_sum(logits.flatten(0, 1), ids[:, 1:].flatten()) / 64


def plain_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, micro_batches: int, clip: float
) -> float:
    for micro in range(micro_batches):
        loss_of(model, step, micro).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if norm > clip:
        torch._foreach_mul_(gradients, clip / float(norm))
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def offloaded_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, offload: HostOffload, step: int, clip: float
) -> float:
    for micro in range(offload.micro_batches):
        loss_of(model, step, micro).backward()
    assert all(p.grad is None for p in model.parameters())
    norm = float(offload.gradient_norm())
    offload.step(optimizer, clip / norm if norm > clip else 1.0)
    return norm


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_equals_the_plain_optimizer_to_the_bit(family: str, dtype: torch.dtype, micro_batches: int) -> None:
    """Five clipped AdamW steps: norms, weights and optimizer state. The arithmetic and its order are the
    same.
    """
    plain, moved = make_model(family, dtype), make_model(family, dtype)
    offload = offloaded(moved, micro_batches)
    optimizers = make_optimizer(plain), make_optimizer(offload)
    for step in range(5):
        expected = plain_step(plain, optimizers[0], step, micro_batches, clip=0.7)
        assert offloaded_step(moved, optimizers[1], offload, step, clip=0.7) == expected
    offload.wait()
    for (name, a), b, (_, master) in zip(plain.named_parameters(), moved.parameters(), masters(offload)):
        assert torch.equal(a, b) and torch.equal(a, master), name
        assert optimizers[0].state[a].keys() == optimizers[1].state[master].keys(), name
        assert all(
            torch.equal(value, optimizers[1].state[master][slot])
            for slot, value in optimizers[0].state[a].items()
        ), name
    offload.wait()


def test_the_next_forward_waits_for_its_weights() -> None:
    """With an update that takes long, the forward right after step() already sees the new weights, in every
    part of the model.
    """

    class Slow(torch.optim.SGD):
        def step(self, closure=None):
            time.sleep(0.05)
            return super().step(closure)

    plain, moved = make_model(), make_model()
    offload = offloaded(moved)
    optimizer = Slow([p for _, p in masters(offload)], lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        loss = loss_of(moved, step, 0)
        assert torch.equal(loss, loss_of(plain, step, 0))
        loss.backward()
        start = time.perf_counter()
        offload.step(optimizer)
        assert time.perf_counter() - start < 0.1  # the four units take 0.2 s; step() does not wait for them
        plain_step(plain, reference, step, 1, clip=float("inf"))
    offload.wait()


def test_a_skipped_step_changes_nothing() -> None:
    model = make_model()
    before = [p.detach().clone() for p in model.parameters()]
    offload = offloaded(model)
    (loss_of(model, 0, 0) * float("inf")).backward()
    assert not offload.gradient_norm().isfinite()
    offload.discard()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    loss_of(model, 0, 0).backward()  # the next step counts from zero
    assert offload.gradient_norm().isfinite()
    offload.wait()


def test_a_micro_batch_without_some_gradients_counts_the_others() -> None:
    """A parameter that only one of two micro-batches uses (a sentence head) has that gradient, in the norm
    and in the update.
    """
    model = make_model("bert")
    offload = offloaded(model, 2)
    hidden = model.hidden(torch.zeros(2, 8, dtype=torch.long))
    model.nsp_head(hidden[:, 0]).sum().backward()
    pair_head = next(side for side in offload.sides if side.name == "nsp.weight")
    alone = pair_head.norm
    loss_of(model, 0, 0).backward()
    assert alone is None
    moved = [side.total for side in offload.sides if side.received]
    assert float(offload.gradient_norm()) ** 2 == pytest.approx(
        sum(float(total.square().sum()) for total in moved), rel=1e-5
    )
    assert pair_head.received == 1
    offload.wait()


def test_continues_from_saved_state_to_the_bit() -> None:
    """Masters and optimizer state after two steps, loaded into a fresh model: the third step is that of the
    first.
    """
    model = make_model()
    offload = offloaded(model)
    optimizer = make_optimizer(offload)
    for step in range(2):
        offloaded_step(model, optimizer, offload, step, clip=1.0)
    weights = {name: master.detach().clone() for name, master in masters(offload)}
    fresh = make_model(dtype=torch.float32)
    second = offloaded(fresh)
    resumed = make_optimizer(second)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # load_state_dict would share the tensors
    with torch.no_grad():
        for name, master in masters(second):
            master.copy_(weights[name])
    second.publish()
    for run in ((model, optimizer, offload), (fresh, resumed, second)):
        offloaded_step(*run, 2, clip=1.0)
        run[2].wait()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters()))


def host_bytes(offload: HostOffload, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Bytes of the tensors that exist now, by the terms of the planner's `host_terms`."""
    offload.wait()
    sides, slots = offload.sides, [x for slots in optimizer.state.values() for x in slots.values()]
    host = {
        "master weights": sum(side.master.nbytes for side in sides),
        "optimizer": sum(x.nbytes for x in slots if x.dim()),  # step counts left out
        "transfer buffers": sum(side.staging.nbytes for side in sides),
        "gradient sums": sum(side.total.nbytes for side in sides if side.total is not None),
        "update scratch": max(
            (s.scratch.untyped_storage().nbytes() for s in sides if s.scratch is not None), default=0
        ),
    }
    return {name: size for name, size in host.items() if size}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_bytes_are_those_accounted(micro_batches: int) -> None:
    """16-bit weights: 2 bytes on the device, 12 + 2 on the host, 4 more for sums of micro-batches; masters
    are fp32.
    """
    model = make_model(dtype=torch.bfloat16)
    offload = offloaded(model, micro_batches)
    optimizer = make_optimizer(offload)
    for step in range(3):
        offloaded_step(model, optimizer, offload, step, clip=1.0)
    count = sum(p.numel() for p in model.parameters())
    held = host_bytes(offload, optimizer)
    work, layouts = Work(model.config, micro_batches, 16), Layouts(offload=1)
    software = find_software("throughline", "bf16")
    terms = host_terms(work, layouts, software)
    assert held == {name: int(size) for name, size in terms.items() if size}
    assert device_terms(work, layouts, software)["weights"] == sum(p.nbytes for p in model.parameters())
    unit = terms["update scratch"] / 4
    assert sum(held.values()) == (12 + 2) * count + 4 * (count if micro_batches > 1 else unit)
    for parameter, (_, master) in zip(model.parameters(), masters(offload)):
        assert master.dtype == torch.float32 and torch.equal(parameter, master.to(torch.bfloat16))
    offload.wait()


def test_published_figure_for_13_billion_parameters() -> None:
    """13B on one V100-32GB (ZeRO-Offload): 2 bytes each on the device; 12 + 2 on the host, one block's gradients."""
    config = preset("gpt3-13b")
    work, layouts, software = (
        Work(config, 4, 1024),
        Layouts(offload=1, micro_rows=4),
        find_software("throughline", "fp16"),
    )
    count, terms = config.parameter_count(), host_terms(work, layouts, software)
    assert device_terms(work, layouts, software)["weights"] == 2 * count
    scratch = float(terms.pop("update scratch"))
    assert float(sum(terms.values())) == pytest.approx(14 * count, rel=1e-12)
    assert scratch / 2**30 == pytest.approx(1.17, abs=0.02)


def test_a_failing_update_is_raised_at_the_next_forward() -> None:
    class Broken(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError("no update")

    model = make_model()
    offload = offloaded(model)
    loss_of(model, 0, 0).backward()
    offload.step(Broken([p for _, p in masters(offload)], lr=0.1))
    with pytest.raises(ArithmeticError):
        model.hidden(torch.zeros(1, 4, dtype=torch.long))


def test_too_many_backward_passes_are_refused() -> None:
    model = make_model()
    offload = offloaded(model)
    loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match="more than 1 backward"):
        loss_of(model, 0, 0).backward()
    offload.wait()
