"""Task files: small TOML files that say where records are, how a prompt is made from one, and what is measured.

A task has one kind and one or more `[[prompt]]` blocks, one per form in which its data circulate (the hub's
schema, a repackaged file); the first block whose `fields` a record has is used. Templates are Jinja; `gold`,
`answers` and a `choices` or `contexts` that is one string are Jinja expressions, which keep their type.
"""

from typing import Annotated, Literal

from pydantic import Field

from ..core.recipe import Section

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


class Source(Section):
    """Where the records are. `{name}`: the member of a group; other `{keys}`: what `[members]` gives."""

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
