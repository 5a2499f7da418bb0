"""Loss, attention and optimizers of a run against plainly written or library references, and the choice of
compilation.
"""

import copy

import pytest
import torch
from throughline.core.errors import WrongUse
from throughline.models.attention import scaled_dot_product
from throughline.models.attention_cpu import QUERIES
from throughline.models.config import preset
from throughline.models.init import build
from throughline.train import loss as losses
from throughline.train import parallelize as compilation
from throughline.train.optimizers.build import build_optimizer
from throughline.train.optimizers.muon import MuonAdamW, orthogonalise
from throughline.train.parallelize import pays, to_compile
from throughline.train.recipes.recipe import Recipe
from torch.nn import functional as F

CPU = torch.device("cpu")


def recipe(optimizer=None, **train):
    fields = {"steps": 10, "sequence_length": 16, "batch_rows": 2} | train
    return Recipe.model_validate({"train": fields, "optimizer": optimizer or {}})


# --- loss
# -----------------------------------------------------------------------------------------------------------------


def test_a_small_vocabulary_is_summed_in_float32_too():
    """800 losses of bf16 logits: a bf16 sum would be off by a thousandth or more."""
    logits = torch.randn(800, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    targets = torch.arange(800) % 50
    found = losses.cross_entropy_sum(logits, targets)
    expected = F.cross_entropy(logits.double(), targets, reduction="sum")
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=1e-6)


# --- attention
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["causal", "causal in pieces", "full", "bool mask", "padding", "bias"])
def test_short_attention_is_as_near_to_the_truth_as_the_fused_kernel(kind, monkeypatch):
    torch.manual_seed(0)
    qkv = torch.randn(3, 2, 4, 2 * QUERIES + 9 if kind == "causal in pieces" else 48, 32, dtype=torch.float64)
    options = {
        "causal": {"is_causal": True},
        "causal in pieces": {"is_causal": True},
        "full": {},
        "bool mask": {"mask": torch.rand(2, 1, 48, 48).lt(0.7) | torch.eye(48).bool()},
        "padding": {"mask": (torch.arange(48) < 30).expand(2, 1, 1, 48)},
        "bias": {"mask": torch.randn(1, 4, 48, 48, dtype=torch.float64)},
    }[kind]

    def outcome(attend, dtype):
        x = qkv.detach().to(dtype, copy=True).requires_grad_()
        given = {
            name: value.to(dtype) if name == "mask" and kind == "bias" else value
            for name, value in options.items()
        }
        out = attend(*x.unbind(0), **given)
        out.square().sum().backward()
        return out.detach().double(), x.grad.double()

    truth = outcome(scaled_dot_product, torch.float64)
    ours = outcome(scaled_dot_product, torch.bfloat16)
    monkeypatch.setattr("throughline.models.attention.SHORT_ROW", 0)
    fused = outcome(scaled_dot_product, torch.bfloat16)
    for exact, theirs, mine in zip(truth, fused, ours, strict=True):
        # scores are rounded to bf16 here and not in the fused kernel: up to twice its error, which is itself
        # bf16's
        assert (mine - exact).norm() <= 2.5 * (theirs - exact).norm()


def test_plain_products_are_for_short_bf16_rows_that_learn():
    """Everything else gets the fused kernel, to the bit: other dtypes, long rows, grouped heads, inference."""

    def plain(x, heads=2, inference=False):
        with torch.inference_mode(inference):
            k = x[:, :heads]
            fused = F.scaled_dot_product_attention(x, k, k, is_causal=True, enable_gqa=heads < 2)
            return not torch.equal(scaled_dot_product(x, k, k, is_causal=True), fused)

    x = torch.randn(1, 2, 1025, 8, dtype=torch.bfloat16)
    assert plain(x[:, :, 1:]) and not plain(x)
    short = x[:, :, :20]
    assert plain(short) and not (
        plain(short.float()) or plain(short, heads=1) or plain(short, inference=True)
    )


# --- optimizers
# -----------------------------------------------------------------------------------------------------------


def test_orthogonalise_pulls_singular_values_to_about_one():
    """The quintic maps singular values into 0.68 to 1.21 (Jordan et al. 2024); very small ones need more
    iterations.
    """
    torch.manual_seed(0)
    for dtype, room in ((torch.float64, 0.0), (torch.float32, 0.0), (torch.bfloat16, 0.05)):
        x = torch.randn(3, 32, 96, dtype=torch.float64)
        moved = orthogonalise(x, dtype)
        values = torch.linalg.svdvals(moved)
        assert values.min() > 0.65 - room
        assert values.max() < 1.22 + room
        left, _, right = torch.linalg.svd(x, full_matrices=False)
        # singular values of 0.68 to 1.21 around 1: the cosine with the exact one stays above 0.97
        polar = left @ right
        assert (moved * polar).sum() / (moved.norm() * polar.norm()) > 0.97


def test_muon_moves_each_matrix_as_torch_does():
    """torch.optim.Muon on separate query, key, value and feed-forward matrices gives the same weights as our
    batched step.
    """
    torch.manual_seed(0)
    model = build(preset("gpt-toy", bias=False))
    chosen = {
        "name": "muon",
        "learning_rate": 1e-3,
        "matrix_learning_rate": 0.03,
        "weight_decay": 0.1,
        "beta1": 0.8,
    }
    optimizer = build_optimizer(model, recipe(chosen, precision="bf16"))
    assert isinstance(optimizer, MuonAdamW)
    block = model.blocks["1"]
    heads, size = 4, 16

    def matrices(weight):
        return [part.reshape(64, 64) for part in weight.view(heads, 3, size, 64).unbind(1)]

    def all_of(get):
        return [
            *matrices(get(block.attention.qkv.weight)),
            get(block.attention.out.weight),
            get(block.mlp.up.weight),
            get(block.mlp.down.weight),
        ]

    reference = [torch.nn.Parameter(x.clone()) for x in all_of(lambda p: p.detach())]
    # "original": lr x sqrt(max(1, rows / columns)); its momentum buffer and ours are the same moving average
    theirs = torch.optim.Muon(
        reference, lr=0.03, weight_decay=0.1, momentum=0.8, nesterov=True, adjust_lr_fn="original"
    )
    for _ in range(4):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for parameter, gradient in zip(reference, all_of(lambda p: p.grad), strict=True):
            parameter.grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"]
        optimizer.step()
        theirs.step()
    for ours, expected in zip(all_of(lambda p: p.detach()), reference, strict=True):
        # both iterate in bf16, in another order of batching: a step of 0.03 agrees within bf16's 3 digits
        assert (ours - expected).abs().max() < 1e-3


def test_groups_and_decay():
    """Muon has the matrices of the blocks, AdamW the rest; tables, norms and biases have no decay."""
    model = build(preset("llama-toy"))
    names = {parameter: name for name, parameter in model.named_parameters()}
    for kind in ("adamw", "muon"):
        optimizer = build_optimizer(model, recipe({"name": kind, "weight_decay": 0.1}))
        seen = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                seen[names[parameter]] = (group["weight_decay"], group.get("interleaved"), group["base_lr"])
        assert len(seen) == len(names)
        assert seen["token_table.weight"][0] == seen["blocks.0.mlp_norm.weight"][0] == 0.0
        assert seen["output.weight"] == (0.1, None, 3e-4)
        layouts = {"adamw": (None, None, None), "muon": ((1, 0), (2, 16), (1, 0))}[kind]
        for name, layout in zip(("attention.q", "attention.kv", "mlp.gate"), layouts, strict=True):
            assert seen[f"blocks.0.{name}.weight"][:2] == (0.1, layout)


def test_muon_state_is_saved_and_loaded():
    torch.manual_seed(0)
    models = [build(preset("gpt-toy")) for _ in range(2)]
    optimizers = [build_optimizer(model, recipe({"name": "muon"})) for model in models]
    gradients = [[torch.randn_like(parameter) for parameter in models[0].parameters()] for _ in range(3)]

    def step(i, number):
        for parameter, gradient in zip(models[i].parameters(), gradients[number], strict=True):
            parameter.grad = gradient.clone()
        optimizers[i].step()

    for number in range(2):
        step(0, number)
    models[1].load_state_dict(models[0].state_dict())
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for i in range(2):
        step(i, 2)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


# --- compilation
# ----------------------------------------------------------------------------------------------------------


def test_auto_compiles_long_runs_only():
    small, large = preset("gpt-shakespeare"), preset("gpt2-124m")
    assert not pays(recipe(steps=240, batch_rows=32, sequence_length=64, precision="bf16"), small, CPU)
    assert pays(recipe(steps=10_000, batch_rows=8, sequence_length=1024, precision="bf16"), large, CPU)
    assert not to_compile(recipe(), small, CPU)
    assert not to_compile(recipe(compile="off"), small, CPU)


def test_auto_does_not_compile_what_onednn_already_makes_faster(monkeypatch):
    long = recipe(steps=10_000, batch_rows=8, sequence_length=1024, precision="fp32")
    for faster in (True, False):
        monkeypatch.setattr(compilation, "onednn_is_faster", lambda faster=faster: faster)
        assert pays(long, preset("gpt2-124m"), CPU) is not faster


def test_without_a_compiler_it_says_so_and_trains(monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(WrongUse, match=r"no C\+\+ compiler"):
        to_compile(recipe(compile="on"), preset("gpt-toy"), CPU)
    monkeypatch.setattr(compilation, "pays", lambda *_: True)
    assert not to_compile(recipe(), preset("gpt-toy"), CPU)
    assert "training without torch.compile" in capsys.readouterr().err


def test_a_compilation_that_breaks_falls_back(capsys, monkeypatch):
    def broken(*_):
        raise torch._dynamo.exc.TorchDynamoException("the compiler is there and does not work")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    layer = torch.nn.Linear(2, 2)
    guarded = compilation._compiled(layer.forward, "auto", layer.parameters)
    for _ in range(2):
        assert torch.equal(guarded(torch.ones(1, 2)), layer.forward(torch.ones(1, 2)))
    assert capsys.readouterr().err.count("does not work") == 1
