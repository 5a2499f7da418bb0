"""What is refused or cut in fine-tuning is said with a fix that works when it is typed."""

import json
import shlex
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from throughline.core.errors import WrongUse
from throughline.core.recipe import load_recipe
from throughline.train.finetune.recipe import RULES, FinetuneRecipe
from throughline.train.finetune.run import _split, plan_task


def typed(fix: str) -> list[str]:
    """The overrides of a command line in a fix."""
    words = shlex.split(fix)
    return [after for word, after in pairwise(words) if word == "--set"]


def recipe_of(name: str, base: Path, records: Path, *overrides: str) -> FinetuneRecipe:
    given = [
        f"model.init_from={base}",
        f"data.train={records}",
        "data.validation_fraction=0.5",
        "train.device=cpu",
    ]
    return load_recipe(name, FinetuneRecipe, [*given, "train.batch_rows=4", *overrides], RULES)


def write(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize(
    ("name", "record", "fix"),
    [
        (
            "finetune-classification",
            {"text": "the cat", "stars": 1},
            ["text_field=text", "label_field=stars"],
        ),
        ("finetune-classification", {"idx": 1, "review": "the cat", "label": 1}, ["text_field=review"]),
        (
            "finetune-search",
            {"anchor": "who", "positive": "cat"},
            ["text_field=anchor", "pair_field=positive"],
        ),
        (
            "finetune-instruction",
            {"instruction": "who", "output": "cat"},
            ["text_field=instruction", "label_field=output"],
        ),
        ("finetune-instruction", {"prompt": "who", "completion": "cat"}, ["label_field=completion"]),
    ],
)
def test_fields_of_other_names_are_named_at_once(
    name: str, record: dict[str, Any], fix: list[str], bases: dict[str, Path], tmp_path: Path
) -> None:
    """Every field that is missing, with that of the file that it probably is."""
    text = next(field for field, value in record.items() if isinstance(value, str))
    records = write(tmp_path / "records.jsonl", [record | {text: f"the {i}"} for i in range(20)])
    with pytest.raises(WrongUse, match="record 1 has no") as error:
        _split(recipe_of(name, bases["bert"], records))
    assert all(field in error.value.why for field in record)
    assert typed(error.value.fix) == [f"data.{one}" for one in fix]
    learnt, measured = _split(recipe_of(name, bases["bert"], records, *typed(error.value.fix)))
    assert len(learnt) + len(measured) == 20


@pytest.mark.parametrize(("name", "family"), [("finetune-instruction", "gpt"), ("finetune-squad", "bert")])
def test_rows_that_are_too_long_get_a_length_that_fits(
    name: str, family: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    """That of the model; windows of questions still move by more than a token."""
    squad = {
        "context": "the cat is in rome",
        "question": "where",
        "answers": {"text": ["rome"], "answer_start": [14]},
    }
    record = squad if family == "bert" else {"prompt": "where is the cat", "response": "in rome"}
    text = "context" if family == "bert" else "prompt"
    records = write(
        tmp_path / "records.jsonl", [record | {text: f"{record[text]} {'a ' * i}"} for i in range(20)]
    )
    with pytest.raises(WrongUse, match="too long for the model") as error:
        plan_task(recipe_of(name, bases[family], records))
    plan = plan_task(recipe_of(name, bases[family], records, *typed(error.value.fix)))
    assert plan.recipe.train.sequence_length == plan.config.sequence_length == 32
    assert len(plan.groups) < 3 * 20


@pytest.mark.parametrize(
    ("name", "family", "record", "what"),
    [
        (
            "finetune-instruction",
            "gpt",
            {"prompt": "cat " * 20, "response": "rome"},
            "prompts with their responses",
        ),
        ("finetune-classification", "bert", {"sentence": "cat " * 20, "label": "a"}, "texts"),
        ("finetune-search", "bert", {"query": "who", "passage": "cat " * 20}, "texts"),
    ],
)
def test_rows_that_are_cut_are_counted(
    name: str,
    family: str,
    record: dict[str, Any],
    what: str,
    bases: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the length that the model would read; rows that just fit are not."""
    text, other = list(record)[-1 if "query" in record else 0], list(record)[0 if "query" in record else -1]
    short = record | {text: "cat"} | ({other: "b"} if other == "label" else {})
    records = [record | {text: f"{record[text]} {'a ' * (i % 3)}"} for i in range(6)] + [short] * 5
    path = write(tmp_path / "records.jsonl", records)
    extra = ["train.sequence_length=16", f"data.validation={write(tmp_path / 'others.jsonl', [short])}"]
    plan = plan_task(recipe_of(name, bases[family], path, *extra))
    said = " ".join(capsys.readouterr().err.split())
    rows = len(plan.groups) * plan.task.rows_per_record
    assert f"6 of {rows} {what} are longer than a row of 16 tokens" in said
    assert "--set train.sequence_length=32" in said
    plan_task(recipe_of(name, bases[family], path, *extra[1:], "train.sequence_length=32"))
    assert "longer than a row" not in capsys.readouterr().err
