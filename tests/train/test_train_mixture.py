"""Several stores: what a run reads of each, what it says of it, and what a validation measures of each."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from throughline.cli.main import main
from throughline.core.errors import WrongUse
from throughline.data.store import TokenStore
from throughline.models.init import build
from throughline.train.build import RunPlan, training_rows
from throughline.train.engine import Engine
from throughline.train.evaluate import Validation
from throughline.train.logs.target import reached
from torch.nn import functional as F


def tokens_read(plan: RunPlan) -> list[int]:
    """Targets that each source gives in the run, counted over the batches one by one."""
    mixture: Any = training_rows(plan)
    counts = [0] * len(mixture.datasets)
    for index, dataset in enumerate(mixture.datasets):
        read = dataset.batch

        def counted(position: int, count: int, index: int = index, read: Any = read) -> Any:
            batch = read(position, count)
            inputs = batch["document_ids"] >= 0 if "document_ids" in batch else np.ones_like(batch["targets"])
            counts[index] += int(inputs.sum())
            return batch

        dataset.batch = counted
    rows = plan.recipe.train.rows_per_step
    for step in range(plan.recipe.train.steps):
        mixture.batch(step * rows, rows)
    return counts


def test_stores_without_weights_are_read_by_size(
    make_plan: Callable[..., RunPlan], two_stores: list[str]
) -> None:
    """Each as often as the other, whatever their sizes, as Megatron-Core blends without weights."""
    plan = make_plan(data={"train": two_stores}, train={"steps": 60})
    read = tokens_read(plan)
    passes = [count / store.tokens for count, store in zip(read, plan.corpus.train)]
    assert passes[1] == pytest.approx(passes[0], rel=0.1)
    assert [source.passes for source in plan.source_passes()] == pytest.approx(passes, rel=0.1)


@pytest.mark.parametrize("packing", ["windows", "best_fit"])
def test_weights_are_shares_of_the_tokens(
    make_plan: Callable[..., RunPlan],
    two_stores: list[str],
    packing: str,
    tmp_path: Path,
    make_store: Callable[..., Path],
) -> None:
    """Packed rows of long documents hold more tokens than those of short ones; passes and warnings are per source."""
    tokenizer = make_plan(data={"train": two_stores}).corpus.tokenizer
    assert tokenizer is not None
    # rows of 32: a document of 18 tokens leaves 14 places of each row empty
    short = make_store(tmp_path / "short", tokenizer, [["the cat sees a dog"]] * 40)
    sources = [{"path": two_stores[0], "weight": 3}, {"path": str(short), "weight": 1.0}]
    plan = make_plan(
        data={"train": sources, "packing": packing, "validation_fraction": 0.2}, train={"steps": 200}
    )
    read = tokens_read(plan)
    assert read[0] / sum(read) == pytest.approx(0.75, abs=0.01)
    shares = [source.share for source in plan.source_passes()]
    assert shares == pytest.approx([0.75, 0.25])


def test_the_plan_says_what_is_read_of_each_store(two_stores: list[str], capsys: Any) -> None:
    """A small store read 30 times is named, though all stores together are read less than once."""
    data = json.dumps([{"path": two_stores[0], "weight": 1}, {"path": two_stores[1], "weight": 1}]).replace(
        '": ', '" = '
    )
    given = [f"data.train={data}", "train.steps=100", "train.device=cpu", "train.compile=off"]
    given += ["train.batch_rows=8", "train.sequence_length=64", "schedule.warmup_steps=1"]
    given += ["model.overrides.layers=1", "model.overrides.width=32", "model.overrides.heads=2"]
    options = [part for setting in given for part in ("--set", setting)]
    result = CliRunner().invoke(main, ["train", "gpt-shakespeare", *options, "--dry-run", "--json"])
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    large, small = facts["sources"]
    assert large["share"] == small["share"] == 0.5
    assert small["passes"] == pytest.approx(100 * 8 * 64 / 2 / small["tokens"])
    assert small["passes"] > 4 > large["passes"]
    assert (
        f"the run reads {two_stores[1]}" in result.stderr
        and f"the run reads {two_stores[0]}" not in result.stderr
    )


def test_some_weights_and_some_not_are_refused(
    make_plan: Callable[..., RunPlan], two_stores: list[str]
) -> None:
    with pytest.raises(WrongUse) as caught:
        make_plan(data={"train": [{"path": two_stores[0], "weight": 2}, two_stores[1]]})
    assert "has no weight" in str(caught.value.why)


def test_a_store_that_is_too_small_is_named(make_plan: Callable[..., RunPlan], two_stores: list[str]) -> None:
    """Of several stores the smaller one: to hold a row out, and to train on one."""
    smaller = min(two_stores, key=lambda path: TokenStore.open(path).tokens)
    tokens = TokenStore.open(smaller).tokens
    data: dict[str, Any] = {"train": two_stores, "validation_fraction": 0.1}
    with pytest.raises(WrongUse, match="less than a row") as caught:
        make_plan(data=data, train={"sequence_length": tokens // 8})
    assert caught.value.where == smaller
    data["validation_fraction"] = 0.0
    plan = make_plan(data=data, train={"sequence_length": tokens // 2 + 1})
    with pytest.raises(WrongUse, match="too little text") as caught:
        training_rows(plan)
    assert Path(str(caught.value.where)).is_relative_to(smaller)


def test_a_validation_reads_a_sample_of_every_store(
    make_plan: Callable[..., RunPlan], two_stores: list[str]
) -> None:
    """Rows by size, one at least; not the first ones; the same each time; figures of each and of all together."""
    plan = make_plan(
        data={"train": two_stores, "validation_fraction": 0.3}, train={"eval_rows": 16, "precision": "fp64"}
    )
    validation = Validation(plan)
    sizes = [dataset.rows for dataset in validation.datasets]
    assert validation.rows_by_source(16) == [15, 1] and sizes[1] < sizes[0] / 15
    assert validation.rows_by_source(1) == [1, 1] and validation.rows_by_source(10**6) == sizes
    for rows in range(2, sum(sizes)):
        counts = validation.rows_by_source(rows)
        exact = [rows * size / sum(sizes) for size in sizes]
        assert sum(counts) == rows and all(1 <= count <= size for count, size in zip(counts, sizes))
        assert counts[1] == 1 or max(abs(count - wanted) for count, wanted in zip(counts, exact)) < 1

    read: list[tuple[int, np.ndarray]] = []
    batches = validation._batches

    def noted(index: int, rows: int | None, processes: int) -> Any:
        for batch in batches(index, rows, processes):
            read.extend((index, row) for row in zip(batch["input_ids"], batch["targets"]))
            yield batch

    validation._batches = noted  # type: ignore[method-assign]
    model = build(plan.config, 3, dtype=torch.float64)
    engine = Engine.holding(model, "fp64", plan.device)
    figures = validation(engine, 3)
    losses: dict[int, list[float]] = {0: [], 1: []}
    for index, (inputs, targets) in read:
        logits = model(torch.from_numpy(inputs)[None])[0]
        losses[index].append(F.cross_entropy(logits, torch.from_numpy(targets)).item())
    assert [len(losses[0]), len(losses[1])] == [15, 1]
    everything = losses[0] + losses[1]
    assert figures["loss"] == pytest.approx(sum(everything) / 16, abs=1e-12)
    assert figures["sources/large/loss"] == pytest.approx(sum(losses[0]) / 15, abs=1e-12)
    assert figures["sources/small/loss"] == pytest.approx(losses[1][0], abs=1e-12)
    assert figures["tokens"] == 16 * 32 and figures["sources/small/tokens"] == 32
    assert figures["bits_per_byte"] == pytest.approx(figures["loss"] / math.log(2))  # one byte a character
    first = validation.datasets[0].batch(0, 15)["input_ids"]
    sampled = np.stack([inputs for index, (inputs, _) in read if index == 0])
    assert not np.array_equal(np.sort(first, axis=0), np.sort(sampled, axis=0))
    assert len({row.tobytes() for row in sampled}) == 15
    before = list(read)
    read.clear()
    assert validation(engine, 4) == figures
    assert all(np.array_equal(old[1][0], new[1][0]) for old, new in zip(before, read, strict=True))


def test_bytes_are_counted_over_the_tokens_that_are_measured(
    make_plan: Callable[..., RunPlan], two_stores: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bits per byte of a mixture divides by the bytes of what was read of each store, not by those of all text."""
    plan = make_plan(data={"train": two_stores, "validation_fraction": 0.3}, train={"eval_rows": 2})
    validation = Validation(plan)
    validation.__dict__["bytes_per_token"] = [1.0, 3.0]
    engine = Engine.holding(build(plan.config, 3), "fp32", plan.device)
    figures = validation(engine, 1)
    assert validation.rows_by_source(2) == [1, 1]
    assert figures["bits_per_byte"] == pytest.approx(figures["loss"] / math.log(2) / 2.0)
    small = figures["sources/small/loss"] / math.log(2) / 3.0
    assert figures["sources/small/bits_per_byte"] == pytest.approx(small)


def test_a_target_is_met_exactly(make_plan: Callable[..., RunPlan]) -> None:
    """An accuracy or a loss that equals the value has reached it; one that is missing by an ulp has not."""
    loss = make_plan(
        "gpt", train={"eval_every_steps": 1}, target={"figure": "loss", "value": 2.5}
    ).recipe.target
    assert reached(loss, {"loss": 2.5}) and not reached(loss, {"loss": math.nextafter(2.5, 3)})
    accuracy = {"figure": "mlm_accuracy", "value": 0.72}
    target = make_plan("bert", train={"eval_every_steps": 1}, target=accuracy).recipe.target
    assert reached(target, {"mlm_accuracy": 0.72})
    assert not reached(target, {"mlm_accuracy": math.nextafter(0.72, 0)})
