"""Records that a rule decides, one kind for each fine-tuning task, and recipes over the tiny models of `bases`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from throughline.core.recipe import build_recipe
from throughline.data.tokenizer import Tokenizer
from throughline.train.finetune.recipe import RULES, FinetuneRecipe
from throughline.train.finetune.tasks import TASKS

SPOKEN = "the a cat dog king moon likes sees hates good bad fine poor in paris rome york new old"
WORDS = [*SPOKEN.split(), "who", "where", "is", "it"]
DRAW = np.random.default_rng(3)


def phrase(*extra: str) -> str:
    return " ".join(DRAW.permutation([*DRAW.choice(["the", "a", "cat", "dog", "king", "moon"], 4), *extra]))


def classes() -> dict[str, Any]:
    good = DRAW.random() < 0.5
    return {"text": phrase(DRAW.choice(["good", "fine"] if good else ["bad", "poor"])), "label": int(good)}


def tagged() -> dict[str, Any]:
    words = [*phrase().split(), "in", *(["new", "york"] if DRAW.random() < 0.5 else ["paris"])]
    tags = ["O"] * 5 + ["B-LOC", "I-LOC"][: len(words) - 5]
    return {"text": words, "label": tags}


def passages() -> dict[str, Any]:
    kind = DRAW.choice(["cat", "dog", "king", "moon"])
    place = DRAW.choice(["paris", "rome", "york", "new", "old"])
    return {"text": f"who likes the {kind} in {place}", "passage": f"{place} sees a {kind}"}


def prompts() -> dict[str, Any]:
    animal, place = [("cat", "paris"), ("dog", "rome"), ("king", "york"), ("moon", "old")][DRAW.integers(4)]
    return {"text": f"{phrase()} where is the {animal}", "label": f"{place} likes it"}


def question() -> dict[str, Any]:
    place = DRAW.choice(["paris", "rome", "york"])
    context = f"{phrase()} is in {place} {phrase()}"
    answer = {"answer_start": context.index(place), "text": str(place)}
    return {"context": context, "qas": [{"id": "1", "question": "where is the cat", "answers": [answer]}]}


CASES: dict[str, tuple[Any, str, dict[str, str], str, float]] = {
    "classification": (classes, "bert", {}, "accuracy", 0.9),
    "token-classification": (tagged, "bert", {}, "f1", 0.9),
    "question-answering": (question, "bert", {}, "exact_match", 70.0),
    "retrieval": (passages, "bert", {"pair_field": "passage"}, "mean_reciprocal_rank", 0.4),
    "instruction": (prompts, "gpt", {}, "response_token_accuracy", 0.9),
}


def scored() -> dict[str, Any]:
    """A text and a number that one of its words decides."""
    word, score = [("good", 0.9), ("fine", 0.7), ("bad", 0.2), ("poor", 0.35)][DRAW.integers(4)]
    return {"text": f"{word} {phrase()}", "label": score}


def several() -> dict[str, Any]:
    """A text and the classes that one of its words decides, or none."""
    word, found = [("good", ["warm"]), ("fine", ["warm", "dry"]), ("bad", []), ("poor", ["dry"])][
        DRAW.integers(4)
    ]
    return {"text": f"{word} {phrase()}", "label": found}


def write_records(task: str, folder: Path, count: int) -> Path:
    records = [CASES[task][0]() for _ in range(count)]
    squad = [{"data": [{"paragraphs": records}]}] if task == "question-answering" else None
    path = folder / ("records.json" if squad else "records.jsonl")
    path.write_text("".join(json.dumps(record) + "\n" for record in squad or records))
    return path


def recipe_for(task: str, bases: dict[str, Path], records: Path, **more: Any) -> FinetuneRecipe:
    """For rows of 32 tokens; `more` of `train`, and whole sections as dicts."""
    _, family, fields, _, _ = CASES[task]
    sections = {name: more.pop(name) for name in list(more) if isinstance(more[name], dict)}
    if rate := more.pop("learning_rate", None):
        sections["optimizer"] = {"learning_rate": rate}
    tree = {
        "task": task,
        "model": {"init_from": str(bases[family])},
        "data": {"train": str(records), **fields},
        "train": {"batch_rows": 16, "sequence_length": 32} | more,
    }
    return build_recipe(tree | {"window_stride": 4} | sections, FinetuneRecipe, RULES)


def task_for(task: str, bases: dict[str, Path], **data: str) -> Any:
    """The task over one of the tiny models."""
    recipe = build_recipe({"task": task, "data": data}, FinetuneRecipe)
    return TASKS[task](recipe, Tokenizer.load(bases[CASES[task][1]] / "tokenizer.json"))
