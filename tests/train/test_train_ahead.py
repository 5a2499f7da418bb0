"""Further tokens that training predicts (DeepSeek-AI 2024, V3, section 2.2): loss and gradients against the paper's
formulas written out, and nothing of it in a model that is used.
"""

import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from throughline.inference.runtimes.source import open_model
from throughline.models.config import GPTConfig
from throughline.models.huggingface import to_huggingface
from throughline.planner.layout import Layout
from throughline.train import objective
from throughline.train.build import build_trainer, plan_run
from throughline.train.checkpoints.checkpoint import load_model
from throughline.train.checkpoints.weights_in import adopt, open_weights
from throughline.train.engine import Engine
from throughline.train.evaluate import Validation, whole_model
from throughline.train.logs.metrics import read_metrics
from throughline.train.loop import train
from throughline.train.objective import IGNORED, prepare
from throughline.train.parallel.mesh import Mesh
from throughline.train.recipes.recipe import Recipe
from torch import Tensor
from torch.nn import functional as F

CPU = torch.device("cpu")
SMALL = {"layers": 2, "width": 32, "heads": 2}
FP64 = {"precision": "fp64"}
LLAMA = GPTConfig(
    vocab_size=61,
    sequence_length=24,
    layers=2,
    width=32,
    heads=2,
    mlp_width=48,
    activation="silu",
    gated=True,
    norm="rmsnorm",
    bias=False,
    positions="rotary",
    tied=False,
    predict_ahead=2,
    predict_ahead_loss=0.4,
)
DOCUMENTS = [[24], [9, 1, 2, 12], [3, 17]]  # tokens of each, row by row; the last row has padding below them


class Found(NamedTuple):
    """Of one step."""

    terms: list[float]
    gradients: dict[str, Tensor]
    parameters: dict[str, Tensor]


def rows_of_documents(packed: bool) -> dict[str, np.ndarray]:
    """Rows of documents kept apart. Where they are `packed` the last token of one has a target too, which is no input
    of the row, and a row ends with padding; in windows it has none.
    """
    draw = np.random.default_rng(0)
    shape = len(DOCUMENTS), LLAMA.sequence_length
    rows = {name: np.zeros(shape, np.int64) for name in ("input_ids", "positions")}
    rows |= {"targets": np.full(shape, IGNORED), "document_ids": np.full(shape, -1, np.int32)}
    for row, lengths in enumerate(DOCUMENTS):
        ends = np.cumsum(lengths)
        for number, (start, stop) in enumerate(zip(ends - lengths, ends)):
            text = draw.integers(1, LLAMA.vocab_size, stop - start + 1)
            rows["input_ids"][row, start:stop], rows["targets"][row, start:stop] = text[:-1], text[1:]
            rows["positions"][row, start:stop] = np.arange(stop - start)
            rows["document_ids"][row, start:stop] = number
            if not packed:
                rows["targets"][row, stop - 1] = IGNORED
    return rows


def turned(x_ASD: Tensor) -> Tensor:
    """Pairs (i, i + D/2) of every head turned by their angle at 0, 1, 2, ..."""
    half = x_ASD.shape[-1] // 2
    angles = torch.arange(x_ASD.shape[1])[:, None] * (
        1 / 10000.0 ** (torch.arange(half).float() * 2 / (2 * half))
    )
    cos, sin = angles.cos().double(), angles.sin().double()
    a, b = x_ASD[..., :half], x_ASD[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def plain_block(weights: dict[str, Tensor], x_SW: Tensor) -> Tensor:
    """One transformer block on one document, product by product."""
    heads, length = LLAMA.heads, len(x_SW)

    def norm(name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + LLAMA.norm_epsilon).sqrt() * weights[f"{name}.weight"]

    qkv = (norm("attention_norm", x_SW) @ weights["attention.qkv.weight"].T).view(length, heads, 3, -1)
    q, k, v = qkv.permute(2, 1, 0, 3)
    q, k = turned(q), turned(k)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    x_SW = x_SW + mixed @ weights["attention.out.weight"].T
    read = norm("mlp_norm", x_SW)
    inside = F.silu(read @ weights["mlp.gate.weight"].T) * (read @ weights["mlp.up.weight"].T)
    return x_SW + inside @ weights["mlp.down.weight"].T


def plain_loss(parameters: dict[str, Tensor], rows: dict[str, np.ndarray]) -> tuple[Tensor, Tensor]:
    """The loss of the next token and the weighed one of further tokens: equations 21 to 25, a document at a time."""

    def norm(name: str, x: Tensor) -> Tensor:
        return (
            x / (x.square().mean(-1, keepdim=True) + LLAMA.norm_epsilon).sqrt() * parameters[f"{name}.weight"]
        )

    def of_block(layer: int) -> dict[str, Tensor]:
        start = f"blocks.{layer}."
        return {name.removeprefix(start): x for name, x in parameters.items() if name.startswith(start)}

    table, output = parameters["token_table.weight"], parameters["output.weight"]
    count, sums = (
        int((rows["targets"] != IGNORED).sum()),
        [torch.zeros((), dtype=torch.float64) for _ in "12"],
    )
    for ids_S, targets_S, numbers_S in zip(rows["input_ids"], rows["targets"], rows["document_ids"]):
        for number in set(numbers_S[numbers_S >= 0].tolist()):
            ids, targets = (torch.from_numpy(x[numbers_S == number]) for x in (ids_S, targets_S))
            hidden = table[ids]
            for layer in range(LLAMA.layers):
                hidden = plain_block(of_block(layer), hidden)
            hidden = norm("norm", hidden)
            sums[0] = sums[0] + F.cross_entropy(hidden @ output.T, targets, reduction="sum")
            for depth in range(1, LLAMA.predict_ahead + 1):
                at = f"blocks.{LLAMA.layers + depth - 1}"
                before, token = (
                    norm(f"{at}.hidden_norm", hidden[:-1]),
                    norm(f"{at}.token_norm", table[ids[depth:]]),
                )
                joined = torch.cat((token, before), -1) @ parameters[f"{at}.join.weight"].T
                if not len(joined):
                    break
                hidden = norm(f"{at}.norm", plain_block(of_block(LLAMA.layers + depth - 1), joined))
                loss = F.cross_entropy(hidden @ output.T, targets[depth:], reduction="sum")
                sums[1] = sums[1] + LLAMA.predict_ahead_loss / LLAMA.predict_ahead * loss
    return sums[0] / count, sums[1] / count


def one_step(
    rows: dict[str, np.ndarray], config: GPTConfig = LLAMA, micro: int = 3, unpad: bool = False, **how: Any
) -> Found:
    """The terms of the loss of these rows, the gradient of every parameter, and the parameters."""
    engine = Engine(config, Mesh(Layout(), CPU), "fp64", seed=3, **how)
    engine.fill()
    with torch.no_grad():
        for name, value in engine.named_parameters():  # scales that are not all 1
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            value.add_(torch.randn(value.shape, generator=draw, dtype=value.dtype), alpha=0.1)
    batch = prepare(dict(rows), "gpt", micro, CPU, unpad=unpad, ahead=config.predict_ahead)
    terms = engine.accumulate(batch, 0)[: len(engine.objective.terms)].tolist()
    gradients = {local.name: local.computed.grad.clone() for local in engine.local_shards}
    return Found(terms, gradients, {name: value.detach() for name, value in engine.named_parameters()})


def expected(found: Found, rows: dict[str, np.ndarray]) -> Found:
    """The same by the formulas, of the same parameters."""
    parameters = {name: value.clone().requires_grad_() for name, value in found.parameters.items()}
    losses = plain_loss(parameters, rows)
    sum(losses).backward()
    gradients = {name: value.grad for name, value in parameters.items()}
    return Found([loss.item() for loss in losses], gradients, found.parameters)


def difference(one: Found, other: Found) -> float:
    """The largest, of losses and of gradients relative to the largest number of each."""
    found = [abs(a - b) for a, b in zip(one.terms, other.terms, strict=True)]
    for name, gradient in one.gradients.items():
        found.append(((gradient - other.gradients[name]).abs().max() / gradient.abs().max()).item())
    return max(found)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("micro", [1, 3])
def test_loss_and_gradients_are_those_of_the_formulas(packed: bool, micro: int) -> None:
    """Two further tokens, documents of all lengths: float64 rounds at 1e-15, angles and their sines alike in both."""
    rows = rows_of_documents(packed)
    found = one_step(rows, micro=micro)
    assert difference(found, expected(found, rows)) < 1e-10
    if packed:  # without its padding
        assert difference(one_step(rows, unpad=True), found) < 1e-10


@pytest.mark.slow
def test_a_compiled_step_is_the_same() -> None:
    """The block is compiled as the others are, and the head once for the tokens of all depths."""
    rows = rows_of_documents(packed=True)
    eager, compiled = (one_step(rows, micro=1, compiling=wanted) for wanted in ("off", "on"))
    assert difference(compiled, eager) < 1e-10


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_repeated_forward_is_the_same(recompute: str) -> None:
    rows = rows_of_documents(packed=True)
    assert difference(one_step(rows, recomputing=recompute), one_step(rows)) < 1e-10


@pytest.mark.parametrize("fault", ["one too few", "over the end of a document"])
def test_a_wrong_target_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    further = objective._with_further

    def wrong(rows: dict[str, np.ndarray], numbers: np.ndarray, ahead: int) -> dict[str, np.ndarray]:
        if fault == "over the end of a document":
            return further(rows, np.zeros_like(numbers), ahead)
        found = further(rows, numbers, ahead)
        return found | {
            f"targets_{d}": found.get(f"targets_{d - 1}", rows["targets"]) for d in range(1, ahead + 1)
        }

    rows = rows_of_documents(packed=True)
    monkeypatch.setattr(objective, "_with_further", wrong)
    found = one_step(rows)
    assert difference(found, expected(found, rows)) > 1e-3


@pytest.mark.parametrize(
    "more", [{}, {"tied": True}, {"norm": "layernorm", "bias": True, "positions": "alibi"}]
)
def test_a_further_token_of_no_weight_changes_nothing(more: dict[str, Any]) -> None:
    """The next token's loss and the gradients of all that a model in use has are those without it."""
    rows = rows_of_documents(packed=True)
    off = one_step(rows, replace(LLAMA, **more).in_use())
    none = one_step(rows, replace(LLAMA, **more, predict_ahead_loss=0.0))
    assert none.terms == [*off.terms, 0.0]
    for name, gradient in none.gradients.items():
        assert torch.equal(gradient, off.gradients.get(name, torch.zeros_like(gradient))), name


@pytest.fixture(scope="module")
def run(make_recipe: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps with one further token, and the same from its weights on."""
    path = tmp_path_factory.mktemp("ahead") / "run"
    plan = plan_run(make_recipe("gpt", model={"overrides": SMALL | {"predict_ahead": 1}}, train=FP64))
    train(plan, path, evaluators=[Validation(plan)])
    return path


def test_the_run_says_both_losses_and_validates_one(run: Path) -> None:
    """Untrained, both are the entropy of a uniform guess, the second by its weight and less the ends of rows."""
    first, last = read_metrics(run)[0], read_metrics(run)[-1]
    assert first["loss"] == first["next"]
    assert first["ahead"] == pytest.approx(0.3 * 31 / 32 * first["next"], rel=0.02)
    assert abs(last["validation"]["loss"] - last["next"]) < last["ahead"] / 2


def test_a_model_in_use_is_the_main_one(run: Path) -> None:
    """Opened for use it has neither the block nor the fields, the same logits, and a layout at Hugging Face."""
    whole, (model, *_) = load_model(run)[0], open_model(run)
    assert whole.config.predict_ahead == 1 and model.config == whole.config.in_use()
    assert {name for name, _ in whole.named_parameters()} - {
        name for name, _ in model.named_parameters()
    } == {name for name, _ in whole.named_parameters() if name.startswith("blocks.2.")}
    ids = torch.randint(0, model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
    assert torch.equal(model(ids), whole(ids))
    assert to_huggingface(model)[0] == to_huggingface(whole)[0]  # which leaves it out too


def test_a_run_from_weights_takes_the_block_or_begins_one(
    run: Path, make_recipe: Callable[..., Recipe]
) -> None:
    there, _ = open_weights(run)
    assert "blocks.2.join.weight" in adopt(there, there.config, "here")
    assert "blocks.2.join.weight" not in adopt(there, there.config.in_use(), "here")
    assert "blocks.3.join.weight" not in adopt(there, replace(there.config, predict_ahead=2), "here")
    recipe = make_recipe("gpt", model={"init_from": str(run), "overrides": {}}, train=FP64)
    trainer = build_trainer(plan_run(recipe))
    for name, value in trainer.engine.named_parameters():
        assert torch.equal(value, dict(there.named_parameters())[name].to(value.dtype)), name
    assert whole_model(trainer.engine).config.predict_ahead == 0
