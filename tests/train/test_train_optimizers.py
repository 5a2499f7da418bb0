"""LAMB and Adafactor against plainly written ones, one tensor at a time, and against the peer where there is
one.
"""

import dataclasses

import pytest
import torch
from throughline.models.config import BERTConfig
from throughline.models.init import build
from throughline.train.logs.metrics import read_metrics
from throughline.train.loop import train
from throughline.train.optimizers import lamb
from throughline.train.optimizers.adafactor import Adafactor
from throughline.train.optimizers.build import build_optimizer
from throughline.train.recipes.recipe import OptimizerSection, Recipe, TrainSection
from throughline.train.stage import WholeParameters

CONFIG = BERTConfig(vocab_size=24, sequence_length=8, layers=1, width=16, heads=2)
RATE, BETAS, EPSILON, DECAY = 0.01, (0.9, 0.999), 1e-6, 0.01
STEPS = 100


def plain_lamb(weight, gradients, adapted, most=None):
    """Algorithm 2 of You et al. 2020 for one matrix or vector, in the order of the paper."""
    m = v = torch.zeros_like(weight)
    for t, g in enumerate(gradients, 1):
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g**2
        r = (m / (1 - BETAS[0] ** t)) / ((v / (1 - BETAS[1] ** t)).sqrt() + EPSILON)
        if adapted:
            r = r + DECAY * weight
            ratio = weight.norm() / r.norm() if weight.norm() > 0 and r.norm() > 0 else 1.0
            r = r * (ratio if most is None else min(ratio, most))
        weight = weight - RATE * r
    return weight


def lamb_of(model, decay=DECAY, most=None):
    section = OptimizerSection(name="lamb", learning_rate=RATE, weight_decay=decay, max_trust_ratio=most)
    section = section.model_copy(update={"beta1": BETAS[0], "beta2": BETAS[1], "epsilon": EPSILON})
    train = TrainSection(steps=10, sequence_length=16, batch_rows=2)
    return build_optimizer(model, Recipe(train=train, optimizer=section))


def matrices_of(name, tensor):
    """What the published recipes have as separate tensors."""
    if not name.endswith("qkv.weight"):
        return [tensor]
    return list(tensor.view(-1, 3, CONFIG.head_size, tensor.shape[1]).unbind(1))


def run(optimizer, model, gradients):
    for step in range(len(next(iter(gradients.values())))):
        for name, parameter in model.named_parameters():
            parameter.grad = gradients[name][step].clone()
        optimizer.step()


def problem(dtype, steps=STEPS, config=CONFIG):
    model = build(config, dtype=dtype)
    torch.manual_seed(0)
    gradients = {
        name: [torch.randn_like(p) * 10.0 ** (step % 5 - 3) for step in range(steps)]
        for name, p in model.named_parameters()
    }
    return model, gradients


@pytest.mark.parametrize("most", [None, 0.02])
@pytest.mark.parametrize("piece", [1 << 16, 100])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_lamb_is_the_plain_one(dtype, bound, piece, most, monkeypatch):
    """100 steps; weights are of size 0.02 to 1, so 1e-6 is some ten roundings of fp32. Pieces of 100 cut every
    matrix.
    """
    monkeypatch.setitem(lamb.ROUND, "cpu", piece)
    model, gradients = problem(dtype, STEPS if piece > 100 else 10)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = lamb_of(model, most=most)
    run(optimizer, model, gradients)
    for name, parameter in model.named_parameters():
        pieces = zip(
            matrices_of(name, start[name]),
            zip(*(matrices_of(name, g) for g in gradients[name])),
            matrices_of(name, parameter.detach()),
            strict=True,
        )
        for first, given, ours in pieces:
            expected = plain_lamb(first, given, parameter.dim() > 1, most)
            assert (ours - expected).abs().max() <= bound, name
            assert (ours - first).abs().max() > 100 * bound, "it has moved"


def test_lamb_passes_over_what_has_no_gradient_and_takes_any_layout_of_one(monkeypatch):
    """The first matrix and the first vector get none and stay; what comes after them moves as the plain one does."""
    monkeypatch.setitem(lamb.ROUND, "cpu", 100)  # pieces of one parameter share their step
    model, gradients = problem(torch.float64, steps=3)
    named = dict(model.named_parameters())
    start = {name: p.detach().clone() for name, p in named.items()}
    still = [next(name for name, p in named.items() if p.dim() == dims) for dims in (2, 1)]
    optimizer = lamb_of(model)
    for step in range(3):
        for name, parameter in named.items():
            gradient = gradients[name][step]
            parameter.grad = (
                None
                if name in still
                else gradient.mT.contiguous().mT
                if gradient.dim() > 1
                else gradient.clone()
            )
        optimizer.step()
    for name, parameter in named.items():
        if name in still:
            assert torch.equal(parameter, start[name])
        elif not name.endswith("qkv.weight"):
            expected = plain_lamb(start[name], gradients[name], parameter.dim() > 1)
            torch.testing.assert_close(parameter.detach(), expected, rtol=0, atol=1e-13)


def test_a_tensor_of_zeros_moves_as_adam_does():
    """Its norm gives no ratio; the paper's phi(0) would hold it at zero for ever."""
    model, gradients = problem(torch.float64, steps=1)
    with torch.no_grad():
        model.pooler.weight.zero_()
    optimizer = lamb_of(model, decay=0.0)
    run(optimizer, model, gradients)
    gradient = gradients["pooler.weight"][0]
    expected = -RATE * gradient / (gradient.abs() + EPSILON)  # the first step: mean and square are corrected
    torch.testing.assert_close(model.pooler.weight.detach(), expected, rtol=1e-12, atol=0)


def plain_adafactor(weight, gradients, decay):
    """Algorithms 4 and 5 of Shazeer and Stern 2018 for one tensor."""
    rows = columns = square = 0.0
    for t, g in enumerate(gradients, 1):
        beta = 1 - t**-0.8
        squared = g**2 + 1e-30
        if g.dim() == 2:
            rows = beta * rows + (1 - beta) * squared.mean(1, keepdim=True)
            columns = beta * columns + (1 - beta) * squared.mean(0, keepdim=True)
            v = rows * columns / rows.mean()
        else:
            v = square = beta * square + (1 - beta) * squared
        u = g / v.sqrt()
        u = u / max(1.0, u.pow(2).mean().sqrt())
        rate = RATE * max(1e-3, weight.pow(2).mean().sqrt())
        weight = weight - rate * decay * weight - rate * u
    return weight


# norm scales are near 1, where fp32 rounds at 6e-8 a step
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 5e-6), (torch.float64, 1e-13)])
def test_adafactor_is_the_plain_one_and_transformers(dtype, bound):
    transformers = pytest.importorskip("transformers")
    model, gradients = problem(dtype)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = [{"params": list(model.parameters()), "weight_decay": DECAY}]
    run(Adafactor(groups, WholeParameters.of(model), lr=RATE), model, gradients)
    peer, _ = problem(dtype)
    theirs = transformers.optimization.Adafactor(
        peer.parameters(), lr=RATE, scale_parameter=True, relative_step=False, weight_decay=DECAY
    )
    run(theirs, peer, gradients)
    for (name, parameter), other in zip(model.named_parameters(), peer.parameters()):
        expected = plain_adafactor(start[name], gradients[name], DECAY)
        assert (parameter - expected).abs().max() <= bound, name
        assert (parameter - other).abs().max() <= bound, name


def test_adafactor_keeps_rows_and_columns_alone():
    model, gradients = problem(torch.float32, steps=1, config=dataclasses.replace(CONFIG, mlp_width=96))
    optimizer = Adafactor([{"params": list(model.parameters())}], WholeParameters.of(model), lr=RATE)
    run(optimizer, model, gradients)
    kept = optimizer.state[model.blocks["0"].mlp.up.weight]
    assert {name: tuple(value.shape) for name, value in kept.items()} == {
        "step": (),
        "row_square": (96, 1),
        "column_square": (1, 16),
    }


def test_the_twin_of_the_481b_encoder_trains(make_plan, tmp_path):
    """Multi-query, gated, without biases, with relative buckets, by Adafactor: the masked-token loss falls below
    its beginning, log(vocabulary), by a quarter.
    """
    plan = make_plan(
        "bert",
        model={"preset": "google-481b-toy", "overrides": {"layers": 2}},
        objective={"sentences": "none", "mask_fraction": 0.3, "packing": True, "label_smoothing": 0.1},
        optimizer={"name": "adafactor", "learning_rate": 0.05, "weight_decay": 0.0},
        schedule={"kind": "inverse-sqrt", "warmup_steps": 10},
        train={"steps": 60, "batch_rows": 8},
    )
    assert plan.config.relative_buckets == 32 and plan.config.key_value_heads == 1
    train(plan, tmp_path / "run")
    losses = [record["mlm"] for record in read_metrics(tmp_path / "run")]
    assert sum(losses[-5:]) / 5 < 3 / 4 * losses[0]
