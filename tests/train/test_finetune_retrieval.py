"""Retrieval knows texts by their content: what a query is compared with, and which passages are right."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from throughline.core.recipe import build_recipe
from throughline.data.tokenizer import Tokenizer
from throughline.train.finetune import records as scores
from throughline.train.finetune.recipe import RULES, FinetuneRecipe
from throughline.train.finetune.run import _split
from throughline.train.finetune.tasks import Retrieval
from throughline.train.parallel.mesh import ALONE

WORDS = ["the", "cat", "dog", "king", "moon", "likes", "rome", "paris"]


def task_of(bases: dict[str, Path], **sections: Any) -> Retrieval:
    data = {"text_field": "query", "pair_field": "passage"}
    tree = {"task": "retrieval", "data": data, "train": {"sequence_length": 16}} | sections
    return Retrieval(build_recipe(tree, FinetuneRecipe), Tokenizer.load(bases["bert"] / "tokenizer.json"))


def draw_pairs(count: int, seed: int, kinds: int = 4) -> list[dict[str, str]]:
    """Pairs of a few queries and passages, many of which repeat another."""
    draw = np.random.default_rng(seed)
    queries, passages = ([" ".join(draw.choice(WORDS, size)) for _ in range(kinds)] for size in (3, 5))
    return [{"query": str(draw.choice(queries)), "passage": str(draw.choice(passages))} for _ in range(count)]


def plain_loss(
    queries: np.ndarray, passages: np.ndarray, batch: list[dict[str, str]], known: list[dict[str, str]]
) -> float:
    """InfoNCE of a batch in float64, written down from its meaning: of the different passages of the batch a query is
    compared with its own and with those that no record pairs it with.
    """
    relevant = {(pair["query"], pair["passage"]) for pair in [*batch, *known]}
    total = 0.0
    for place, pair in enumerate(batch):
        candidates = {pair["passage"]: place}
        for other, another in enumerate(batch):
            if (pair["query"], another["passage"]) not in relevant:
                candidates.setdefault(another["passage"], other)
        cosines = {text: float(queries[place] @ passages[i]) / 0.05 for text, i in candidates.items()}
        top = max(cosines.values())
        log_sum = top + math.log(sum(math.exp(value - top) for value in cosines.values()))
        total += log_sum - cosines[pair["passage"]]
    return total


@pytest.mark.parametrize("knows_more", [False, True])
def test_equal_passages_are_one_candidate(knows_more: bool, bases: dict[str, Path]) -> None:
    """The loss and its gradient by a plain reference, over batches with repeated queries, passages and pairs; also
    where a passage of the batch belongs to a query elsewhere in the records.
    """
    for seed in range(4):
        pairs = draw_pairs(18, seed, 5)
        batch, others = pairs[:9], pairs[9:] if knows_more else []
        task = task_of(bases)
        task.inspect(task.rows([*batch, *others]))
        rows = task.collated(task.rows(batch))
        given = {name: torch.from_numpy(values) for name, values in rows.items()}
        names = sorted({text for pair in batch for text in pair.values()})
        drawn = torch.from_numpy(np.random.default_rng(seed).normal(size=(len(names), 8)))
        table = torch.nn.functional.normalize(drawn, dim=-1).requires_grad_()
        order = [names.index(pair[side]) for pair in batch for side in ("query", "passage")]
        task.vectors = lambda hidden, batch: hidden  # type: ignore[method-assign]
        loss = task.sums(None, table[order], given, ALONE)
        vectors = table.detach().numpy()[order]
        expected = plain_loss(vectors[0::2], vectors[1::2], batch, others)
        assert loss.item() == pytest.approx(expected, rel=1e-12)
        loss.backward()
        step = 1e-6
        for row, column in ((0, 1), (len(names) - 1, 5)):
            either = []
            for sign in (1, -1):
                moved = table.detach().clone()
                moved[row, column] += sign * step
                moved = moved.numpy()[order]
                either.append(plain_loss(moved[0::2], moved[1::2], batch, others))
            difference = (either[0] - either[1]) / (2 * step)
            assert table.grad[row, column].item() == pytest.approx(difference, rel=1e-5, abs=1e-6)


def test_one_passage_for_all_queries_is_learnt_already(bases: dict[str, Path]) -> None:
    """Nothing is left to compare with, so the loss is 0 and not the logarithm of the batch."""
    task = task_of(bases)
    pairs = [{"query": word, "passage": "the moon"} for word in WORDS]
    task.inspect(rows := task.rows(pairs))
    batch = {name: torch.from_numpy(values) for name, values in task.collated(rows).items()}
    hidden = torch.randn(*batch["input_ids"].shape, 8)
    assert task.sums(None, hidden, batch, ALONE).item() == 0.0
    assert task.notes == [
        (
            False,
            "8 pairs, of which 0 repeat another; 8 different queries, 1 different passages: "
            "equal passages are one candidate",
        )
    ]


def test_texts_that_the_model_reads_alike_are_one(bases: dict[str, Path]) -> None:
    """Passages that differ beyond the row, or in white space, have the same vector."""
    task = task_of(bases, train={"sequence_length": 5})
    pairs = [{"query": "the cat", "passage": f"rome  likes the {end}"} for end in ("king", "moon", "dog")]
    pairs += [{"query": "moon", "passage": "rome likes the"}]
    batch = task.collated(task.rows(pairs))
    assert np.array_equal(batch["is_candidate"], np.eye(4, dtype=bool)), "nothing is left to compare with"
    assert task.cut_rows == 3


def test_every_relevant_passage_counts_in_the_scores() -> None:
    """Of each query the best of its passages decides rank and accuracy; recall is of all; ties do not stand behind."""
    likeness = np.array([[0.9, 0.8, 0.7, 0.6], [0.1, 0.5, 0.5, 0.2]])
    relevant = np.array([[False, True, False, True], [False, True, True, False]])
    found = scores.retrieval(likeness, relevant)
    assert found["accuracy_at_1"] == 0.5 and found["accuracy_at_10"] == 1.0
    assert found["mean_reciprocal_rank"] == pytest.approx((1 / 2 + 1) / 2)
    draw = np.random.default_rng(0)
    likeness, relevant = draw.normal(size=(30, 40)), draw.random((30, 40)) < 0.1
    relevant[:, 0] = True
    orders = [np.argsort(-row) for row in likeness]
    ranked = [rights[order] for rights, order in zip(relevant, orders)]
    found = scores.retrieval(likeness, relevant)
    assert found["accuracy_at_1"] == pytest.approx(np.mean([row[0] for row in ranked]))
    assert found["accuracy_at_10"] == pytest.approx(np.mean([row[:10].any() for row in ranked]))
    assert found["recall_at_10"] == pytest.approx(np.mean([row[:10].sum() / row.sum() for row in ranked]))
    assert found["mean_reciprocal_rank"] == pytest.approx(np.mean([1 / (1 + row.argmax()) for row in ranked]))
    assert (found["queries"], found["passages"]) == (30, 40)


def test_a_query_is_measured_once_with_all_its_passages(bases: dict[str, Path]) -> None:
    """Those of training records too, where they stand among the passages that were held out."""
    task = task_of(bases)
    learnt = [{"query": "the cat", "passage": "rome likes paris"}]
    measured = [
        {"query": "the cat", "passage": "king"},
        {"query": "the cat", "passage": "moon moon"},
        {"query": "dog", "passage": "rome likes paris"},
        {"query": "dog", "passage": "rome likes paris"},
    ]
    task.inspect(task.rows(learnt))
    direction = {"the cat": 0, "king": 1, "moon moon": 1, "dog": 0, "rome likes paris": 0}
    vectors = torch.stack([torch.eye(2)[direction[text]] for pair in measured for text in pair.values()])
    task.vectors = lambda hidden, batch: hidden  # type: ignore[method-assign]
    found = task.measure(
        type("Base", (), {"hidden": staticmethod(lambda **inputs: vectors)}), measured, torch.device("cpu")
    )
    assert (found["queries"], found["passages"]) == (2, 3)
    assert found["accuracy_at_1"] == 1.0, "the passage of the training record is a right one"
    assert found["mean_reciprocal_rank"] == 1.0


def test_the_passages_of_a_query_are_on_one_side_of_the_split(bases: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("query,passage\n" + "".join(f"q{i % 40},p{i}\n" for i in range(400)))
    data = {"train": str(path), "text_field": "query", "pair_field": "passage", "validation_fraction": 0.5}
    tree = {"task": "retrieval", "model": {"init_from": str(bases["bert"])}, "data": data}
    learnt, measured = _split(build_recipe(tree, FinetuneRecipe, RULES))
    assert len(learnt) + len(measured) == 400
    assert not {one["query"] for one in learnt} & {one["query"] for one in measured}
