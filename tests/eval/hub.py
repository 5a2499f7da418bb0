"""The local benchmark files in the hub's schemas, as lm-evaluation-harness's own task files read them."""

import bz2
import csv
import gzip
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LETTERS = "ABCDEFGH"


def _jsonl(path: Path) -> Iterator[Row]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        yield from map(json.loads, file)


def _hellaswag(path: Path) -> Iterator[Row]:
    """Six lines a record: "activity: context", gold, four endings."""
    with bz2.open(path, "rt", encoding="utf-8") as file:
        while lines := [line.rstrip("\n") for line in islice(file, 6)]:
            activity, _, context = lines[0].partition(": ")
            yield {
                "activity_label": activity,
                "ctx_a": context,
                "ctx_b": "",
                "endings": lines[2:],
                "label": lines[1],
            }


def _partial(path: Path) -> Iterator[Row]:
    """Two contexts that differ at their end -> one sentence with a blank and two options."""
    for row in _jsonl(path):
        one, two = row["context_options"]
        same = next((i for i, (a, b) in enumerate(zip(one, two)) if a != b), min(len(one), len(two)))
        yield {
            "sentence": f"{one[:same]}_ {row['continuation']}",
            "option1": one[same:],
            "option2": two[same:],
            "answer": str(row["gold"] + 1),
        }


def _lettered(question: str, prefix: str = "") -> Callable[[Path], Iterator[Row]]:
    def rows(path: Path) -> Iterator[Row]:
        for row in _jsonl(path):
            labels = list(LETTERS[: len(row["choices"])])
            choices = {"text": row["choices"], "label": labels}
            yield {
                question: row["query"].removeprefix(prefix),
                "choices": choices,
                "answerKey": labels[row["gold"]],
            }

    return rows


def _piqa(path: Path) -> Iterator[Row]:
    for row in _jsonl(path):
        goal = row["query"].removeprefix("Question: ").removesuffix("\n")
        yield {"goal": goal, "sol1": row["choices"][0], "sol2": row["choices"][1], "label": row["gold"]}


def _copa(path: Path) -> Iterator[Row]:
    """The local form's comma stays before the connective: it is put where the harness drops a full stop."""
    for row in _jsonl(path):
        premise, _, connective = row["query"].rpartition(" ")
        question = {"because": "cause", "therefore": "effect"}[connective]
        one, two = row["choices"]
        yield {
            "premise": premise + ".",
            "question": question,
            "choice1": one,
            "choice2": two,
            "label": row["gold"],
        }


def _boolq(path: Path) -> Iterator[Row]:
    for row in _jsonl(path):
        yield {"passage": row["passage"], "question": row["question"], "label": int(row["label"] == "true")}


def _sst2(path: Path) -> Iterator[Row]:
    with path.open(newline="") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            yield {"sentence": row["sentence"], "label": int(row["label"])}


def _pages(path: Path) -> Iterator[Row]:
    """WikiText's articles as the harness's data set parts them: at lines of words between two single equals
    signs.
    """
    page: list[str] = []
    for line in [*path.read_text().split("\n"), "= the end ="]:
        words = line.split()
        if len(words) > 2 and words[0] == words[-1] == "=" and "=" not in (words[1], words[-2]):
            if any(map(str.strip, page)):
                yield {"page": "\n".join(page)}
            page = []
        page.append(line)


READERS: dict[str, tuple[str, Callable[[Path], Iterator[Row]]]] = {
    "lambada_openai": ("lambada/lambada_test.jsonl", _jsonl),
    "hellaswag": ("hellaswag/hellaswag_val_full.txt.bz2", _hellaswag),
    "piqa": ("piqa/piqa.jsonl", _piqa),
    "winogrande": ("winogrande/winogrande.jsonl", _partial),
    "arc_easy": ("arc/arc_easy.jsonl", _lettered("question", "Question: ")),
    "arc_challenge": ("arc/arc_challenge.jsonl", _lettered("question", "Question: ")),
    "boolq": ("boolq/val.jsonl", _boolq),
    "copa": ("copa/copa.jsonl", _copa),
    "openbookqa": ("openbookqa/openbook_qa.jsonl", _lettered("question_stem")),
    "sst2": ("sst2/test.tsv", _sst2),
    "wikitext_2": ("wikitext-2/test.txt", _pages),
}


def records(shared: Path, limit: int | None) -> dict[str, list[Row]]:
    """Our task name -> its first records, for every task whose data are shared (BLiMP: every paradigm there)."""
    data = shared / "data"
    found = {name: list(islice(reader(data / file), limit)) for name, (file, reader) in READERS.items()}
    for file in sorted((data / "blimp").glob("*.jsonl.gz")):
        found[f"blimp_{file.name.split('.')[0]}"] = list(islice(_jsonl(file), limit))
    return found
