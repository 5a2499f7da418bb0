"""Made records of six, in the hub's form, for task files of lm-evaluation-harness."""

from typing import Any

LETTERS = "ABCDE"


def _lettered(number: int, count: int) -> dict[str, Any]:
    words = ["king", "queen", "crown", "sword", "horse"][:count]
    return {"text": words, "label": list(LETTERS[:count])}


def _nli(n: int) -> dict[str, Any]:
    return {"premise": f"The {n} kings sleep.", "hypothesis": f"Nobody wakes {n}.", "label": n % 2}


def _mmlu(n: int) -> dict[str, Any]:
    return {"question": f" What is {n}? ", "choices": [f"it {n}", "that", "this", "none"], "answer": n % 4}


def _story(n: int) -> dict[str, Any]:
    parts = {f"input_sentence_{i}": f"Part {i} of {n}." for i in range(1, 5)}
    return parts | {
        "sentence_quiz1": "He left.",
        "sentence_quiz2": f"He stayed {n}.",
        "answer_right_ending": 1 + n % 2,
    }


# file below the harness's tasks, and its n-th record (of 6) in the hub's form
PLAIN: dict[str, Any] = {
    "arc/arc_easy.yaml": lambda n: {
        "question": f"Who rules {n}?",
        "choices": _lettered(n, 4),
        "answerKey": LETTERS[n % 4],
    },
    "commonsense_qa/default.yaml": lambda n: {
        "question": f" Where is {n}? ",
        "choices": _lettered(n, 5),
        "answerKey": LETTERS[n % 5],
    },
    "siqa/siqa.yaml": lambda n: {
        "context": f"Ann has {n}.",
        "question": "Why?",
        "answerA": "She must",
        "answerB": f"She may {n}",
        "answerC": "No",
        "label": str(1 + n % 3),
    },
    "sciq/sciq.yaml": lambda n: {
        "support": f" Water {n} boils.",
        "question": f"What boils {n}?",
        "distractor1": "fire",
        "distractor2": "earth",
        "distractor3": "air",
        "correct_answer": f"water {n}",
    },
    "truthfulqa/truthfulqa_mc1.yaml": lambda n: {
        "question": f"Is {n} true?",
        "mc1_targets": {"choices": ["Yes.", f"No, {n}."], "labels": [1, 0]},
    },
    "mmlu/default/mmlu_anatomy.yaml": _mmlu,
    "mmlu/default/mmlu_high_school_world_history.yaml": _mmlu,
    "gsm8k/gsm8k.yaml": lambda n: {"question": f"What is {n} + {n}?", "answer": f"So {n + n}.\n#### {n + n}"},
    "gsm8k/gsm8k-cot.yaml": lambda n: {"question": f"What is {n}?", "answer": f"So {n}.\n#### {n}"},
    "nq_open/nq_open.yaml": lambda n: {"question": f"who is {n}", "answer": [f"The king {n}", "Bob"]},
    "bbh/cot_fewshot/boolean_expressions.yaml": lambda n: {
        "input": f"not {bool(n % 2)} is",
        "target": str(not n % 2),
    },
    "bbh/zeroshot/boolean_expressions.yaml": lambda n: {
        "input": f"not {bool(n % 2)} is",
        "target": str(not n % 2),
    },
    "mmlu/flan_cot_zeroshot/mmlu_anatomy.yaml": _mmlu,
    "xnli/xnli_en.yaml": _nli,
    "xnli/xnli_de.yaml": _nli,
    "xstorycloze/default_en.yaml": _story,
    "xstorycloze/default_es.yaml": _story,
    "glue/cola/default.yaml": lambda n: {"sentence": f"He {n} sleeps.", "label": n % 2},
    "glue/qnli/default.yaml": lambda n: {"question": f"Who {n}?", "sentence": f"Bob {n}.", "label": n % 2},
    "glue/qqp/default.yaml": lambda n: {"question1": f"Who {n}?", "question2": f"What {n}?", "label": n % 2},
    "glue/wnli/default.yaml": lambda n: {"sentence1": f"A {n}.", "sentence2": f"B {n}.", "label": n % 2},
    "super_glue/multirc/default.yaml": lambda n: {
        "paragraph": f"Text {n}.",
        "question": "Who?",
        "answer": f"Ann {n}",
        "label": n % 2,
    },
    "super_glue/boolq/default.yaml": lambda n: {
        "passage": f"Text {n}.",
        "question": f"is {n}",
        "label": n % 2,
    },
    "openbookqa/openbookqa.yaml": lambda n: {
        "question_stem": f"The sun {n}",
        "choices": _lettered(n, 4),
        "answerKey": LETTERS[n % 4],
    },
}
CODE: dict[str, Any] = {
    "hellaswag/hellaswag.yaml": lambda n: {
        "activity_label": "Ruling",
        "ctx_a": f"A king [header] {n} sits.",
        "ctx_b": "he",
        "endings": ["rules.", f"sleeps {n}."],
        "label": str(n % 2),
    },
    "winogrande/default.yaml": lambda n: {
        "sentence": f"The king {n} likes the queen because _ is kind.",
        "option1": "the king",
        "option2": "the queen",
        "answer": str(1 + n % 2),
    },
    "truthfulqa/truthfulqa_mc2.yaml": lambda n: {
        "question": f"Is {n} true?",
        "mc2_targets": {"choices": ["Yes.", f"No, {n}.", "Perhaps."], "labels": [1, 0, 1]},
    },
    "logiqa/logiqa.yaml": lambda n: {
        "context": f"All {n}.",
        "question": "Which?",
        "options": ["one", "two", "three", f"{n}"],
        "label": "abcd"[n % 4],
    },
    "agieval/aqua-rat.yaml": lambda n: {
        "query": f"Q: {n}? A:",
        "choices": ["(A)1", "(B)2", f"(C){n}"],
        "gold": [n % 3, 0],
    },
    "xcopa/default_it.yaml": lambda n: {
        "premise": f"Il re {n} dorme.",
        "question": ["cause", "effect"][n % 2],
        "choice1": "Lui sogna.",
        "choice2": f"E tardi {n}.",
        "label": n % 2,
    },
    "mmlu_pro/mmlu_pro_law.yaml": lambda n: {
        "question": f"What {n}?",
        "options": ["one ", "two", f"three {n}"],
        "answer": "ABC"[n % 3],
        "cot_content": f"A: Let's think step by step. The answer is ({'ABC'[n % 3]}).",
        "category": ["law", "math"][n == 4],
    },
    "hendrycks_math/hendrycks_math500.yaml": lambda n: {
        "problem": f"What is {n}?",
        "solution": f"It is $\\boxed{{{n}}}$.",
        "answer": str(n),
    },
    "bbh/zeroshot/date_understanding.yaml": lambda n: {
        "input": f"Is it {n}?\nOptions:\n(A) yes\n(B) no {n}",
        "target": f"({'AB'[n % 2]})",
    },
    "bbh/zeroshot/web_of_lies.yaml": lambda n: {
        "input": f"Does Ann {n} lie?",
        "target": ["Yes", "No"][n % 2],
    },
    "super_glue/record/default.yaml": lambda n: {
        "idx": {"passage": n, "query": n},
        "passage": f"Ann {n} met Bob. @highlight They left.",
        "query": f"@placeholder met {n} others",
        "entities": [f"Ann {n}", "Bob"],
        "answers": [f"Ann {n}"],
    },
    "super_glue/wsc/default.yaml": lambda n: {
        "text": f"Mark {n} told Pete many lies about himself , which Pete included in his book .",
        "span1_text": "Mark",
        "span2_text": "himself",
        "span1_index": 0,
        "span2_index": 7,
        "label": n % 2,
    },
    "glue/mnli/default.yaml": lambda n: _nli(n) | {"hypothesis": f" Nobody wakes {n}" + "." * (n % 2)},
    "wikitext/wikitext.yaml": lambda n: {"page": f" = Title {n} = \n\n The king @-@ like {n} , he said . "},
}
FILES = PLAIN | CODE


class Told(int):
    """A number that spells a sentence where a text is made of it, so that made records are as long as real ones."""

    sentences: tuple[str, ...] = ()

    def __format__(self, spec: str) -> str:
        return (
            f"{int(self)}, {self.sentences[self % len(self.sentences)]}" if self.sentences else str(int(self))
        )


def told(name: str, count: int, sentences: list[str]) -> list[dict[str, Any]]:
    """So many records of a file's form with these sentences in their texts."""
    kind = type("ToldOf", (Told,), {"sentences": tuple(sentences)})
    return [FILES[name](kind(number)) for number in range(count)]
