"""Validation: the whole split, each target once, equal to a plain reference, and without a trace in the
training.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from throughline.models.init import build
from throughline.planner.layout import Layout
from throughline.planner.memory import MOMENTS, device_terms
from throughline.train import evaluate
from throughline.train.build import RunPlan, validation_rows
from throughline.train.engine import Engine
from throughline.train.evaluate import Validation
from throughline.train.recipes.recipe import Recipe
from throughline.train.recipes.resolved import described, model_config
from torch.nn import functional as F


def test_gpt_figures_equal_a_plain_loop_over_the_split(
    make_plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 32 one by one in float64, the shorter rest included; bytes counted on the decoded text."""
    monkeypatch.setattr(evaluate, "evaluated_rows", lambda *_: 7)
    plan = make_plan("gpt", train={"precision": "fp64"})
    model = build(plan.config, 3, dtype=torch.float64)
    store = plan.corpus.validation[0]
    ids = torch.from_numpy(store.read(0, store.tokens).astype(np.int64))
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, 32):
        piece = ids[start : start + 33]
        total += F.cross_entropy(model(piece[None, :-1])[0], piece[1:], reduction="sum").item()
        count += len(piece) - 1
    figures = Validation(plan)(Engine.holding(model, plan.recipe.train.precision, plan.device), 6)
    assert count == store.tokens - 1 == figures["tokens"]
    assert figures["loss"] == pytest.approx(total / count, abs=1e-12)
    assert figures["perplexity"] == pytest.approx(math.exp(total / count))
    assert figures["bits_per_byte"] == pytest.approx(total / count / math.log(2))  # one byte a character here


def test_bert_figures_equal_a_plain_loop_over_the_rows(make_plan: Callable[..., RunPlan]) -> None:
    plan = make_plan("bert", train={"precision": "fp64"})
    model = build(plan.config, 3, dtype=torch.float64)
    dataset = validation_rows(plan)[0]
    right = masked = pairs_right = 0
    for row in range(dataset.rows):
        batch = {name: torch.from_numpy(values) for name, values in dataset.batch(row, 1).items()}
        hidden = model.hidden(
            batch["input_ids"], token_types=batch["token_types"], attention_mask=batch["attention_mask"]
        )
        at = batch["targets"] != -100
        right += int((model.mlm_head(hidden).argmax(-1) == batch["targets"])[at].sum())
        masked += int(at.sum())
        pairs_right += int((model.nsp_head(hidden[:, 0]).argmax(-1) == batch["nsp_targets"]).sum())
    figures = Validation(plan)(Engine.holding(model, plan.recipe.train.precision, plan.device), 6)
    assert (figures["masked_tokens"], figures["pairs"]) == (masked, dataset.rows)
    assert figures["mlm_accuracy"] == pytest.approx(right / masked)
    assert figures["nsp_accuracy"] == pytest.approx(pairs_right / dataset.rows)


def test_packed_pairs_are_each_counted(make_plan: Callable[..., RunPlan]) -> None:
    """Packing changes rows, not pairs: the same number of sentence pairs is judged."""
    plain, packed = make_plan("bert"), make_plan("bert", objective={"packing": True})
    engine = Engine.holding(build(plain.config, 3), "fp32", plain.device)
    assert Validation(plain)(engine, 6)["pairs"] == Validation(packed)(engine, 6)["pairs"]


def test_the_batch_does_not_matter_and_the_mode_is_given_back(
    make_plan: Callable[..., RunPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = {"layers": 1, "width": 32, "heads": 2, "dropout": 0.5}
    plan = make_plan("bert", train={"precision": "fp64"}, model={"overrides": overrides})
    model = build(plan.config, 3, dtype=torch.float64).train()
    state = torch.get_rng_state()
    one = Validation(plan)(Engine.holding(model, plan.recipe.train.precision, plan.device), 6)
    monkeypatch.setattr(evaluate, "evaluated_rows", lambda *_: 1)
    other = Validation(plan)(Engine.holding(model, plan.recipe.train.precision, plan.device), 6)
    assert one == pytest.approx(other, abs=1e-12)
    assert model.training
    assert torch.equal(torch.get_rng_state(), state)


def test_inside_the_run_a_part_is_enough_at_the_end_it_is_the_whole(
    make_plan: Callable[..., RunPlan],
) -> None:
    plan = make_plan("gpt", train={"eval_rows": 5})
    engine = Engine.holding(build(plan.config, 3), "fp32", plan.device)
    validation = Validation(plan)
    assert validation(engine, 3)["tokens"] == 5 * 32
    assert validation(engine, 6)["tokens"] == plan.corpus.validation[0].tokens - 1


def test_training_and_validation_share_no_token(make_plan: Callable[..., RunPlan]) -> None:
    plan = make_plan("gpt")
    train, held_out = plan.corpus.train[0], plan.corpus.validation[0]
    whole = make_plan("gpt", data={"validation_fraction": 0.0}).corpus.train[0]
    joined = np.concatenate([train.read(0, train.tokens), held_out.read(0, held_out.tokens)])
    assert np.array_equal(joined, whole.read(0, whole.tokens))


@pytest.mark.parametrize(
    ("device", "world", "offload", "dtype"),
    [
        ("cpu", 1, None, torch.float32),
        ("cpu", 2, None, torch.float32),
        ("cuda", 1, None, torch.float32),  # lent: no copy
        ("cuda", 2, None, torch.bfloat16),
        ("cuda", 1, "on the host", torch.bfloat16),
    ],
)
def test_a_copy_for_tasks_on_a_gpu_is_in_16_bits(
    device: str, world: int, offload: str | None, dtype: torch.dtype
) -> None:
    """Beside the first GPU's share of the training state a whole model in fp32 would not fit."""
    engine = SimpleNamespace(
        layout=Layout(data=world),
        device=torch.device(device),
        offload=offload,
        dtype=torch.bfloat16,
        wide=torch.float32,
    )
    assert evaluate.scored_dtype(engine) == dtype  # type: ignore[arg-type]


def test_the_account_of_memory_has_the_model_that_tasks_are_scored_with(
    make_recipe: Callable[..., Recipe],
) -> None:
    """On the first GPU of a layout in 16 bits, beside the batch of the validation; of one process nothing."""

    def scored(parallel: dict[str, int], tasks: list[str]) -> float:
        recipe = make_recipe(
            train={"precision": "bf16"}, parallel=parallel, evaluation={"tasks": tasks, "every_steps": 0}
        )
        terms = device_terms(*described(model_config(recipe, 64), recipe, "cuda"))
        assert "scored model" in MOMENTS["evaluation"]
        return float(terms["scored model"])

    count = model_config(make_recipe(), 64).parameter_count()
    assert scored({"data": 2}, ["blimp"]) == 2 * count
    assert scored({"tensor": 2}, ["blimp"]) == 2 * count
    assert scored({}, ["blimp"]) == scored({"data": 2}, []) == 0
