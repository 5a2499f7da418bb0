"""Answers are located in their contexts, in every form of file, and misplaced and missing ones are counted."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from throughline.core.errors import Failed, WrongUse
from throughline.core.recipe import build_recipe
from throughline.data.tokenizer import Tokenizer
from throughline.train.finetune.recipe import FinetuneRecipe
from throughline.train.finetune.records import read_records
from throughline.train.finetune.squad import Located, locate, questions
from throughline.train.finetune.tasks import QuestionAnswering


@pytest.mark.parametrize(
    ("context", "text", "start", "span"),
    [
        ("in rome, in rome", "rome", 3, (3, 7)),
        ("in rome, in rome", "rome", 12, (12, 16)),
        ("in rome, in rome", "rome", 9, (12, 16)),  # the nearest
        ("in rome, in rome", "rome", 9999, (12, 16)),
        ("in rome, in rome", "rome", -5, (3, 7)),
        ("in rome", "rome", None, (3, 7)),
        ("in rome", "paris", 3, None),
        ("in Rome", "rome", 3, None),
        ("in rome", " ", 2, None),
        ("new\n  york", "new york", 0, (0, 10)),  # other white space
        ("rome.+", ".+", 0, (4, 6)),
        ("\r\n" * 8 + "rome rome", "rome", 13, (21, 25)),  # where a line end was one character
        ("\n" * 6 + "rome" + "\n" * 6 + "rome", "rome", 12, (6, 10)),  # and where it was two
    ],
)
def test_an_answer_is_where_the_context_has_it(
    context: str, text: str, start: int | None, span: tuple[int, int] | None
) -> None:
    assert locate(context, text, start) == span


PARTS = st.text(alphabet="ab \n\U0001f600é你", max_size=12)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(before=PARTS, between=PARTS, after=PARTS, is_second=st.booleans(), is_windows=st.booleans())
def test_offsets_of_other_programs_are_understood(
    before: str, between: str, after: str, is_second: bool, is_windows: bool
) -> None:
    """In characters, UTF-16 units (JavaScript, Java), bytes, and of a file whose line ends were changed: of two places
    with the answer the one that the offset means, where it means one alone.
    """
    context = f"{before}rome{between}rome{after}"
    context = context.replace("\n", "\r\n") if is_windows else context
    place = context.index("rome", context.index("rome") + 1) if is_second else context.index("rome")
    measures: list[Callable[[str], int]] = [
        len,
        lambda head: len(head.encode("utf-16-le")) // 2,
        lambda head: len(head.encode()),
        lambda head: len(head.replace("\r\n", "\n")),
        lambda head: len(head.replace("\r\n", "\n").replace("\n", "\r\n")),
    ]
    for measure in measures:
        start = measure(context[:place])
        meant = {
            end
            for end in range(len(context))
            for other in measures
            if other(context[:end]) == start and context.startswith("rome", end)
        }
        assert place in meant
        assert len(meant) > 1 or locate(context, "rome", start) == (place, place + 4)


ROW = {"id": "q1", "title": "t", "context": "the cat is in rome", "question": "where"}
WANTED = [
    {"id": "q1", "context": ROW["context"], "question": "where", "answers": [(14, "rome"), (11, "in rome")]}
]


def nested(answers: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    asked = {"id": "q1", "question": "where", "answers": answers} | more
    return {"title": "t", "paragraphs": [{"context": ROW["context"], "qas": [asked]}]}


PAIRS = [{"text": "rome", "answer_start": 14}, {"text": "in rome", "answer_start": 11}]
LISTS = {"text": ["rome", "in rome"], "answer_start": [14, 11]}


@pytest.mark.parametrize(
    "record",
    [
        nested(PAIRS),
        ROW | {"answers": LISTS},
        ROW | {"answers": PAIRS},
        ROW | {"answers": json.dumps(LISTS)},
        ROW | {"answers.text": LISTS["text"], "answers.answer_start": LISTS["answer_start"]},
        ROW | {"answers.text": '["rome", "in rome"]', "answers.answer_start": "[14, 11]"},
    ],
)
def test_every_form_of_a_question_is_read_alike(record: dict[str, Any]) -> None:
    assert questions([record], "file") == WANTED


def test_answers_without_their_places_are_looked_for() -> None:
    """As a list of objects and as an object of lists."""
    for answers in ([{"text": "rome"}], {"text": ["rome"]}):
        kept = Located().take(questions([ROW | {"answers": answers}], "file"))
        assert [record["span"] for record in kept] == [(14, 18)]


def test_one_answer_a_row_and_none_are_read() -> None:
    """A table's cells are texts; without an offset there is none; a question may have no answer in every form."""
    row = ROW | {"answer": "rome", "answer_start": "14"}
    assert questions([row, ROW | {"answer_text": "rome"}], "file") == [
        WANTED[0] | {"answers": [(14, "rome")]},
        WANTED[0] | {"answers": [(None, "rome")]},
    ]
    empty = [
        nested([]),
        nested(PAIRS, is_impossible=True),
        ROW | {"answers": {"text": [], "answer_start": []}},
    ]
    empty += [ROW | {"answers": None}, ROW | {"answer": "", "answer_start": ""}]
    assert [one["answers"] for one in questions(empty, "file")] == [[]] * 5
    for wrong in ({"a": 1}, ROW, ROW | {"answers": {"text": ["a"], "answer_start": [1, 2]}}):
        with pytest.raises(Failed, match="SQuAD") as error:
            questions([wrong], "file")
        assert "answer_start" in error.value.fix


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".csv"])
def test_the_hubs_rows_are_read_from_every_file(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"train{suffix}"
    row = ROW | {"answers": LISTS}
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    elif suffix == ".csv":
        cells = [json.dumps(value) if isinstance(value, dict) else value for value in row.values()]
        quoted = ",".join('"' + cell.replace('"', '""') + '"' for cell in cells)
        path.write_text(f"{','.join(row)}\n{quoted}\n")
    else:
        path.write_text(json.dumps([row] if suffix == ".json" else row))
    assert read_records(str(path), squad=True) == WANTED


def test_misplaced_missing_and_unanswerable_are_counted_by_name() -> None:
    """What is missing is left out, the others stay; the second answer is taken where the first is nowhere."""
    context = "the \U0001f600 cat is in rome"
    found = {
        "right": [(16, "rome")],
        "utf-16": [(17, "rome")],
        "far": [(9999, "rome")],
        "second": [(0, "paris"), (16, "rome")],
        "nowhere": [(16, "paris")],
        "none": [],
    }
    records = [
        {"id": name, "question": "q", "context": context, "answers": pairs} for name, pairs in found.items()
    ]
    located = Located()
    kept = located.take(records)
    assert [record["id"] for record in kept] == ["right", "utf-16", "far", "second", "none"]
    assert [record["span"] for record in kept] == [(16, 20)] * 4 + [None]
    assert list(located.notes()) == [
        (True, "3 misplaced answers, taken where they stand in the context: utf-16, far, second"),
        (
            True,
            "1 missing answers, nowhere in their context: these questions are left out of training: nowhere",
        ),
        (False, "1 unanswerable questions, whose answer is no text: none"),
    ]


def task_of(bases: dict[str, Path], stride: int = 4) -> QuestionAnswering:
    recipe = {"task": "question-answering", "window_stride": stride, "train": {"sequence_length": 16}}
    tokenizer = Tokenizer.load(bases["bert"] / "tokenizer.json")
    return QuestionAnswering(build_recipe(recipe, FinetuneRecipe), tokenizer)


def test_what_is_learnt_is_the_answer_itself(bases: dict[str, Path]) -> None:
    """Of a misplaced one too, with an emoji before it; of none and outside of a window the place of [CLS]."""
    task = task_of(bases)
    context = "the \U0001f600 cat is in rome the cat likes a dog in paris the king sees it"
    records = [
        {"id": "1", "question": "where is it", "context": context, "answers": [(3, "in paris")]},
        {"id": "2", "question": "who", "context": context, "answers": []},
    ]
    kept = task.prepare(records, [])
    rows, words = task.rows(kept), []
    assert task.has_unanswerable and len(rows) > 3
    for row, (number, _, _) in zip(rows, task.windows, strict=True):
        span = row["input_ids"][int(row["start"]) : int(row["end"]) + 1]
        words.append((number, task.tokenizer.decode(span)))
    assert {word for number, word in words if number == 0} == {"[CLS]", "in paris"}
    assert {word for number, word in words if number == 1} == {"[CLS]"}
    with pytest.raises(WrongUse, match="no question has its answer"):
        task.prepare([{"id": "1", "question": "q", "context": "a", "answers": [(0, "b")]}], [])


@pytest.mark.parametrize(
    ("stride", "question"), [(4, "who"), (12, "who"), (99, "who"), (7, "who likes the cat " * 4)]
)
def test_every_token_of_a_context_is_in_a_window(stride: int, question: str, bases: dict[str, Path]) -> None:
    """Also beside a question that leaves fewer tokens than windows should share, and in no more windows than needed."""
    task = task_of(bases, stride)
    context = " ".join(["the cat is in rome"] * 9)
    record = {"id": "1", "question": question, "context": context, "answers": [(0, "the")], "span": (0, 3)}
    rows = task.rows([record])
    spans = [(offsets[0, 0], offsets[-1, 1]) for _, _, offsets in task.windows]
    assert spans[0][0] == 0 and spans[-1][1] == len(context)
    assert all(following[0] <= before[1] + 1 for before, following in pairwise(spans))
    assert len(rows) <= 45


@pytest.mark.parametrize("has_unanswerable", [True, False])
def test_no_text_is_predicted_where_cls_is_the_best_in_every_window(
    has_unanswerable: bool, bases: dict[str, Path]
) -> None:
    """As google-research/bert does with a threshold of 0, and only by a model that has learnt it."""
    task = task_of(bases)
    task.has_unanswerable = has_unanswerable
    context = " ".join(["the cat is in rome"] * 4)
    records = [
        {"id": str(number), "question": "who", "context": context, "answers": [(0, "the cat")]}
        for number in (0, 1)
    ]
    records[1]["answers"] = []
    count = len(task.rows(records)) // 2
    logits = np.zeros((2 * count, 16, 2), np.float32)
    logits[:, 0] = 5.0  # [CLS], in every window of both
    logits[0, 3, 0], logits[0, 4, 1] = 4.0, 4.0
    logits[1, 0] = 1.0  # but in one of the first question
    logits[count, 3, 0], logits[count, 4, 1] = 4.0, 4.0

    def model(**inputs: Any) -> torch.Tensor:
        return torch.from_numpy(logits)[:, : inputs["input_ids"].shape[1]]

    found = task.measure(model, records, torch.device("cpu"))
    assert found["answered_exact_match"] == 100.0
    assert found["unanswerable_exact_match"] == (100.0 if has_unanswerable else 0.0)
