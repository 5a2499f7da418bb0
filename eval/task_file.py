"""Task files: small TOML files that say where records are, how a prompt is made from one, and what is measured.

A task has one kind and one or more `[[prompt]]` blocks, one per form in which its data circulate (the hub's
schema, a repackaged file); the first block whose `fields` a record has is used. Templates are Jinja; `gold`,
`answers` and a `choices` or `contexts` that is one string are Jinja expressions, which keep their type.
"""

import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from ..core.errors import WrongUse
from ..core.recipe import Section, build_recipe

Kind = Literal[
    "multiple_choice",
    "partial",
    "loglikelihood",
    "last_token",
    "rolling",
    "stream",
    "generate_until",
    "cloze",
    "masked",
]

# What each kind's prompt block must give, and what the kind measures.
CHOICE = ("acc", "acc_norm", "acc_bytes", "f1", "f1_macro")
KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "multiple_choice": (("choices", "gold"), CHOICE),
    "partial": (("contexts", "target", "gold"), CHOICE),
    "loglikelihood": (("context", "target"), ("acc", "perplexity")),
    "last_token": (("text",), ("acc", "perplexity")),
    "rolling": (("text",), ("word_perplexity", "byte_perplexity", "bits_per_byte", "token_perplexity")),
    "stream": (("text",), ("adjusted_perplexity", "token_perplexity", "bits_per_byte")),
    "generate_until": (("context", "answers"), ("exact_match",)),
    "cloze": (("context", "answers"), ("p_at_1", "p_at_10")),
    "masked": (("text",), ("mlm_accuracy", "mlm_perplexity")),
}


class Source(Section):
    """Where the records are. `{name}` stands for the member of a group, other `{keys}` for what `[members]`
    gives.
    """

    files: list[str]
    """Patterns below --data-dir (without it, below the shipped samples), in order of preference."""
    fewshot_files: list[str] = []
    """The same for the records that few-shot examples are drawn from; none: the evaluated records themselves.
    """
    dataset: str = ""
    """Name for the `datasets` library, used only when no local file is found and no --data-dir is given."""
    config: str | None = None
    """Its configuration."""
    split: str = "test"
    """Its split that is evaluated."""
    fewshot_split: str = ""
    """Its split that few-shot examples are drawn from."""
    lines: Annotated[int, Field(ge=0)] = 0
    """Number of lines that make one record in a .txt file; 0 = the file is one record."""
    pages: bool = False
    """A .txt file is WikiText: one record an article."""
    tabs: bool = False
    """A .txt file is a table: tab-separated, with a header."""


class Prompt(Section):
    """How one form of the data becomes a question."""

    fields: list[str]
    """Fields by which this form is recognised."""
    context: str = ""
    """Template of the text before the answer."""
    choices: str | list[str] = ""
    """Templates of the choices, or one expression that yields them."""
    contexts: str | list[str] = ""
    """Kind partial: the contexts, one per choice, that `target` follows."""
    target: str = ""
    """Template of the scored text after the context(s)."""
    gold: str = ""
    """Expression: the index of the right choice."""
    text: str = ""
    """Template of the document to predict."""
    original: str = ""
    """Template of the text whose words and bytes normalise its perplexity; none: `text`."""
    answers: str = ""
    """Expression: the list of accepted answers."""


class Task(Section):
    """One task, or a group of tasks of one form (BLiMP's paradigms, ANLI's rounds)."""

    about: str
    """One line: what it asks, and which split is evaluated."""
    kind: Kind
    metrics: list[str]
    """What is reported, the first one being the score."""
    source: Source
    prompt: list[Prompt]
    delimiter: str = " "
    """Put between context and choice."""
    until: list[str] = []
    """Kind generate_until: strings that end an answer."""
    max_tokens: Annotated[int, Field(gt=0)] = 32
    """Kind generate_until: longest answer in tokens."""
    stride: Annotated[int, Field(ge=0)] = 0
    """Kind stream: new targets per window; 0 = windows do not overlap."""
    hidden: Annotated[float, Field(gt=0, le=1)] = 0.15
    """Kind masked: tokens of each window that are hidden at once."""
    members: dict[str, dict[str, str]] = {}
    """Kind of a group: member name -> values for `{keys}` in `source`."""
    mean: bool = False
    """A group reports the mean over its members."""
    checked: Literal["scores", "prompts", "nothing"] = "scores"
    """What the tests compared with lm-evaluation-harness: scores on real records, prompts on hand-written
    ones, or nothing.
    """


@cache
def load_task(path: Path) -> Task:
    """Read and check a task file. Raises WrongUse with every problem at once."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WrongUse(
            "cannot read the task file", where=path, why=str(error), fix="a task is TOML in UTF-8"
        ) from None
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise WrongUse(
            "the task file is not valid TOML", where=path, why=str(error), fix="mend that line"
        ) from None
    fix = f"the shipped task files are examples: {Path(str(resources.files(__package__))) / 'tasks'}"
    task = build_recipe(tree, Task, where=path, text=text, what="the task file", fix=fix)
    if problems := list(_problems(task)):
        raise WrongUse(
            f"the task cannot be one of kind {task.kind}",
            where=path,
            why="\n".join(problems),
            fix="mend the file",
        )
    return task


def _problems(task: Task) -> Iterator[str]:
    needed, measured = KINDS[task.kind]
    for name, given in (("[[prompt]]", task.prompt), ("metrics", task.metrics)):
        if not given:
            yield f"{name}: at least one is needed"
    for number, prompt in enumerate(task.prompt, 1):
        if missing := [key for key in needed if not getattr(prompt, key)]:
            yield f"prompt {number} lacks {', '.join(missing)}"
    if "" in task.until:
        yield "until: an empty string would end every answer before it begins"
    for name in task.metrics:
        if name not in measured:
            yield f"metrics: {name!r} is none of {', '.join(measured)}"
