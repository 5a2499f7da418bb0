"""IFEval: prompts, limits and the four scores are lm-evaluation-harness's, of the shipped task and of its own file."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from throughline.core.errors import MissingExtra, WrongUse
from throughline.data.records import Record
from throughline.eval.harness.reader import read_harness_task
from throughline.eval.items import Item
from throughline.eval.kinds import instructions
from throughline.eval.metrics import aggregate
from throughline.eval.task import find_tasks

ASKED: list[
    tuple[list[tuple[str, dict[str, Any]]], list[str]]
] = [  # of a record: instructions, and some answers
    ([("punctuation:no_comma", {})], ["no comma here", "one, two", "", "*bold*"]),
    (
        [
            ("length_constraints:number_words", {"relation": "at least", "num_words": 4}),
            ("change_case:english_lowercase", {}),
        ],
        ["the king is dead today", "The king is dead today", "Hello\nthe king is dead today", "the king"],
    ),
    (
        [
            ("length_constraints:number_sentences", {"relation": "less than", "num_sentences": 3}),
            ("keywords:existence", {"keywords": ["king", "queen"]}),
            ("startend:end_checker", {"end_phrase": "Goodbye."}),
        ],
        [
            "A king. Goodbye.",
            "King and queen. Goodbye.",
            "Sure:\nKing, queen. Goodbye.",
            "One. Two. Three. Four.",
        ],
    ),
    (
        [
            ("language:response_language", {"language": "de"}),
            ("detectable_format:number_bullet_lists", {"num_bullets": 2}),
        ],
        [
            "* Der König ist heute tot.\n* Die Königin lebt noch.",
            "* The king\n* the queen",
            "Der König schläft.",
        ],
    ),
    (
        [
            ("detectable_format:json_format", {}),
            ("combination:repeat_prompt", {"prompt_to_repeat": "Say it"}),
        ],
        ['{"king": 1}', "Say it: yes", "```json\n{}\n```"],
    ),
    (
        [
            (
                "length_constraints:nth_paragraph_first_word",
                {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
            )
        ],
        ["One.\n\nSo two.", "One.\n\n* * *\n\nTwo."],
    ),
]
KEYS = sorted({key for given, _ in ASKED for _, kwargs in given for key in kwargs})


def rows() -> list[dict[str, Any]]:
    """The records in the hub's form, where each instruction has every key and most are None."""
    return [
        {
            "key": number,
            "prompt": f"Follow this: {[name for name, _ in given]}.",
            "instruction_id_list": [name for name, _ in given],
            "kwargs": [dict.fromkeys(KEYS) | kwargs for _, kwargs in given],
        }
        for number, (given, _) in enumerate(ASKED)
    ]


def test_the_four_scores_are_the_harness_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of every answer by every record: the shipped task's, and its own file's read by --harness-task."""
    lm_eval = pytest.importorskip("lm_eval", reason="needs the extra `eval` (lm_eval)")
    for library in ("langdetect", "immutabledict"):
        pytest.importorskip(library, reason=f"needs {library} for lm_eval's IFEval")
    import datasets
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        judge = instructions.followed()
    except WrongUse as error:
        pytest.skip(str(error))
    file = Path(lm_eval.__file__).parent / "tasks" / "ifeval" / "ifeval.yaml"
    made = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows())})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    theirs = ConfigurableTask(config=load_yaml(file))
    (shipped,) = find_tasks(["ifeval"])
    (tmp_path / "IFEval").mkdir()
    (tmp_path / "IFEval" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    (read,) = read_harness_task(file, code=True)
    wanted: dict[str, list[Any]] = {}
    ours: list[dict[str, list[Any]]] = [{}, {}]
    bounds = (shipped, read)
    asked = [bound.kind.items(bound.records(tmp_path, None)) for bound in bounds]
    for number, doc in enumerate(theirs.eval_docs):
        request = theirs.construct_requests(doc, theirs.fewshot_context(doc, 0))
        for bound, items in zip(bounds, asked, strict=True):
            assert items[number].context == request.args[0]
            assert (bound.task.until, bound.task.max_tokens) == ([], request.args[1]["max_gen_toks"])
        for answer in ASKED[number][1]:
            for name, value in theirs.process_results(doc, [answer]).items():
                wanted.setdefault(name, []).append(value)
            for bound, items, found in zip(bounds, asked, ours, strict=True):
                for name, value in bound.kind.outcome(items[number], [answer]).items():
                    found.setdefault(name, []).append(value)
    strict = wanted["inst_level_strict_acc"]
    assert any(map(all, strict)) and not all(map(all, strict)) and judge is instructions.followed()
    assert wanted["prompt_level_loose_acc"] != wanted["prompt_level_strict_acc"]
    for bound, found in zip(bounds, ours, strict=True):
        for name in bound.kind.reported:
            value, error = aggregate(bound.kind.metric(name), found[name])
            assert value == pytest.approx(theirs.aggregation()[name](wanted[name]), abs=1e-12), name
            assert error is not None and 0 < error < 0.2


def test_shares_are_of_answers_and_of_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one answer followed whole and one of whose three instructions two are followed."""
    told = iter([(True, [True]), (False, [True, False, True])])

    def judged(*_: Any) -> dict[str, Any]:
        whole, each = next(told)
        return {"prompt_level_strict_acc": whole, "inst_level_strict_acc": each}

    monkeypatch.setattr(instructions, "followed", lambda: judged)
    kind = find_tasks(["ifeval"])[0].kind
    outcomes = [kind.outcome(Item("x:1", (("", ""),)), ["answer"]) for _ in range(2)]
    for name, share in (("prompt_level_strict_acc", 1 / 2), ("inst_level_strict_acc", 3 / 4)):
        assert aggregate(kind.metric(name), [outcome[name] for outcome in outcomes])[0] == share


def test_a_missing_library_is_named_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    (bound,) = find_tasks(["ifeval"])
    monkeypatch.setitem(sys.modules, "langdetect", None)
    instructions.followed.cache_clear()
    with pytest.raises(MissingExtra, match="langdetect"):
        bound.kind.items([Record("x:1", rows()[0])])


def test_missing_data_of_nltk_are_named_and_not_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    nltk = pytest.importorskip("nltk")
    pytest.importorskip("langdetect")
    monkeypatch.setattr(nltk.data, "path", [])
    instructions.followed.cache_clear()
    with pytest.raises(WrongUse, match="punkt_tab"):
        instructions.followed()
