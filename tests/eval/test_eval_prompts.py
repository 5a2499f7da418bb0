"""Prompts, choices and gold answers equal lm-evaluation-harness's own templates, on hand-written records in
the hub's schema.
"""

import re
from pathlib import Path
from typing import Any

import harness
import pytest
from throughline.data.records import Record
from throughline.eval.items import Draw, Item, with_examples
from throughline.eval.task import find_tasks, load_task, shipped_tasks

pytest.importorskip("lm_eval", reason="needs the extra `eval` (lm_eval)")


NLI = {"premise": "It's raining; nobody is out.", "hypothesis": "Somebody is out."}
PAGE = " = Some title = \n \n A sentence , with 1 @,@ 000 words @-@ like ( things ) and \" quotes \" . It 's his .\n Another ' one ' N .\n"
RACE = [
    {"question": "What is it?", "answer": "B", "options": ["one", "two", "three", "four"]},
    {"question": "They went to  _  .", "answer": "C", "options": ["bed", "town", "sea", "work"]},
    {"question": "The best title is  _  .", "answer": "D", "options": ["A b", "C d", "E f", "G h"]},
]
# One line a record, as in the data.
# ruff: noqa: E501
RECORDS: dict[str, list[dict[str, Any]]] = {
    "lambada_openai": [{"text": 'He said "no" and\n\nleft the house to the dog\'s owner'}],
    "hellaswag": [
        {
            "activity_label": "Roof work",
            "ctx_a": "A man sits on a roof.",
            "ctx_b": "he",
            "label": "2",
            "endings": ["is using wrap.", "[title] falls  off.", "pulls [step] shingles.", "sings."],
        },
    ],
    "piqa": [{"goal": "Make a fire", "sol1": "Use wood.", "sol2": "Use water.", "label": 0}],
    "winogrande": [
        {
            "sentence": "The trophy did not fit the case because the _ was too big.",
            "option1": "trophy",
            "option2": "case",
            "answer": "1",
        },
        {"sentence": "_ is here, a_b.", "option1": "Ann", "option2": "Bob", "answer": "2"},
    ],
    "wsc273": [
        {
            "text": "The councilmen refused the demonstrators a permit because they feared  violence.",
            "pronoun": "they",
            "pronoun_loc": 58,
            "quote": "they feared violence",
            "options": ["The councilmen", "The demonstrators"],
            "label": 0,
        },
        {
            "text": "Jim hit Bob. His hand hurt.",
            "pronoun": "His",
            "pronoun_loc": 13,
            "quote": "",
            "options": ["Jim", "The boy"],
            "label": 1,
        },
    ],
    "arc_easy": [
        {
            "id": "1",
            "question": "What is hot?",
            "answerKey": "B",
            "choices": {"text": ["ice", "fire", "snow"], "label": ["A", "B", "C"]},
        },
        {
            "id": "2",
            "question": "Which?",
            "answerKey": "3",
            "choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]},
        },
    ],
    "arc_challenge": [
        {
            "id": "1",
            "question": "Why?",
            "answerKey": "A",
            "choices": {"text": ["a b", "c"], "label": ["A", "B"]},
        }
    ],
    "openbookqa": [
        {
            "question_stem": "The sun is",
            "answerKey": " C",
            "choices": {"text": ["x", "y", "z z"], "label": ["A", "B", "C"]},
        }
    ],
    "copa": [
        {
            "premise": "The man turned on the tap.",
            "question": "effect",
            "choice1": "Water flowed.",
            "choice2": "The sink broke.",
            "label": 0,
        },
        {
            "premise": "She fell. ",
            "question": "cause",
            "choice1": "It was icy.",
            "choice2": "She ate.",
            "label": 0,
        },
    ],
    "boolq": [{"passage": "Water -- it is wet.", "question": "is water wet", "label": 1}],
    "rte": [{**NLI, "label": 1}],
    "cb": [{**NLI, "label": 2}],
    "wic": [
        {
            "sentence1": "He played the part.",
            "sentence2": "A part of it.",
            "start1": 14,
            "end1": 18,
            "word": "part",
            "label": 0,
        }
    ],
    "race": [
        {"article": "There was a\nhouse.", "problems": str(RACE)},
        {"article": "Short.", "problems": str(RACE[:1])},
    ],
    "anli_r1": [{**NLI, "label": 0}],
    "anli_r2": [{**NLI, "label": 1}],
    "anli_r3": [{**NLI, "label": 2}],
    "mrpc": [{"sentence1": "A is b .", "sentence2": "B is a .", "label": 1}],
    "sst2": [{"sentence": "it 's charming . ", "label": 1}],
    "triviaqa": [
        {"question": "Who wrote it?", "answer": {"aliases": ["Ann B.", "The author"], "value": "Ann"}}
    ],
    "wikitext_2": [{"page": PAGE}],
    "blimp_wh_island": [{"sentence_good": "Who sleeps?", "sentence_bad": "Who sleep?"}],
}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return harness.requests(tmp_path_factory.mktemp("harness"), RECORDS)


def our_items(name: str) -> list[Item]:
    (bound,) = find_tasks([name])
    return bound.kind.items(
        [Record(f"{name}:{number}", record) for number, record in enumerate(RECORDS[name])]
    )


@pytest.mark.parametrize("name", RECORDS)
def test_prompts_equal_the_harness(name: str, asked) -> None:
    items = our_items(name)
    assert len(items) == len(asked[name]) == len(RECORDS[name])
    for item, theirs in zip(items, asked[name], strict=True):
        arguments, gold = theirs["arguments"], theirs["gold"]
        if name == "wikitext_2":
            assert arguments == [(item.text,)] and item.original == PAGE
        elif name == "triviaqa":
            assert arguments[0][0] == item.context and list(item.answers) == gold
        else:
            assert list(item.pairs) == [tuple(pair) for pair in arguments]
            if item.choices:
                assert list(item.choices) == theirs["choices"]
                assert item.gold == (theirs["choices"].index(gold) if isinstance(gold, str) else gold)


def test_examples_have_the_form_of_the_harness(tmp_path: Path) -> None:
    """One example out of two records can only be the other one, so both draw it: every task's context with
    it, every character.
    """
    two = {name: (records * 2)[:2] for name, records in RECORDS.items() if name != "wikitext_2"}
    for name, (one, other) in two.items():
        if one == other:  # tell them apart by a word in a text of theirs
            key = next(
                key
                for key in (
                    "sentence_good",
                    "premise",
                    "question",
                    "goal",
                    "text",
                    "passage",
                    "sentence1",
                    "sentence",
                    "question_stem",
                    "ctx_a",
                    "article",
                )
                if key in other
            )
            two[name] = [one, other | {key: f"Also {other[key]}"}]
    asked = harness.requests(tmp_path, two, shots=1)
    for name, records in two.items():
        (bound,) = find_tasks([name])
        items = bound.kind.items(
            [Record(f"{name}:{number}", record) for number, record in enumerate(records)]
        )
        for item, theirs in zip(with_examples(items, None, Draw(name, 1)), asked[name], strict=True):
            wanted = [pair[0] for pair in theirs["arguments"]]
            assert [context for context, _ in item.pairs[: len(wanted)]] == wanted, name


def test_squad_completion_is_the_harness_s() -> None:
    """Its prompt, stops and limit, and what it says of made-up answers; its task is a class, not a file."""
    from lm_eval.api.task import TaskConfig
    from lm_eval.tasks.squad_completion.task import SQUADCompletion

    theirs = SQUADCompletion.__new__(SQUADCompletion)  # without its data
    theirs._config = TaskConfig()
    record = {"text": " It was won by the Denver ", "value": "Broncos (team) "}
    (bound,) = find_tasks(["squad_completion"])
    (item,) = bound.kind.items([Record("squad:1", record)])
    (asked,) = theirs.construct_requests(record, theirs.doc_to_text(record))
    context, limits = asked.args
    assert item.context == context
    assert (bound.task.until, bound.task.max_tokens) == (limits["until"], limits["max_gen_toks"])
    for answer in ("the broncos (TEAM) won", "Broncos", "", "Broncos (team)"):
        wanted = theirs.process_results(record, [answer])["contains"]
        assert bound.kind.outcome(item, [answer])["contains"] == [wanted]


def test_every_task_of_the_harness_is_checked_or_run() -> None:
    """Every shipped task is in RECORDS, or compared with the harness's own file in another test, but
    those that say `checked = "nothing"`: they are no tasks of the harness.
    """
    ours = {name for name, file in shipped_tasks().items() if load_task(file).checked != "nothing"}
    covered = {bound.group or bound.name for name in RECORDS for bound in find_tasks([name])}
    names = []
    for file, begin in (("harness_tasks", "SHIPPED = {"), ("programs", "PROGRAMS: dict[str, Any] = {")):
        compared = Path(__file__).with_name(f"test_eval_{file}.py").read_text().partition(begin)[2]
        names += re.findall(r'^    "(\w+)": ', compared.partition("\n}\n")[0], re.MULTILINE)
    covered |= {"squad_completion", "ifeval"}  # above, and in test_eval_instructions.py
    assert ours == covered | {bound.group or bound.name for bound in find_tasks(names)}
