"""Task files: small TOML files that say where records are, how a prompt is made from one, and what is measured.

A task has one kind and one or more `[[prompt]]` blocks, one per form in which its data circulate (the hub's
schema, a repackaged file); the first block whose `fields` a record has is used. Templates are Jinja; `gold`,
`answers` and a `choices` or `contexts` that is one string are Jinja expressions, which keep their type.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from ..core.recipe import Section


class Source(Section):
    """Where the records are. `{name}`: the member of a group; other `{keys}`: what `[members]` gives."""

    files: list[str]
    """Patterns below --data-dir (without it, below the shipped samples), in order of preference."""
    fewshot_files: list[str] = []
    """The same for the records that few-shot examples are drawn from; none: the evaluated ones."""
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
    anywhere: bool = False
    """The files are paths of their own, not below --data-dir."""
    keep: str = ""
    """Expression: whether a record of the files belongs to the task; none: all do."""


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
    """Expression: the index of the right choice, or a list of the indices of all that are right."""
    text: str = ""
    """Template of the document to predict; of kind program what the written code stands behind."""
    original: str = ""
    """Template of the text whose words and bytes normalise its perplexity; none: `text`."""
    answers: str = ""
    """Expression: the list of accepted answers."""


class Step(Section):
    """One step of a chain of filters, by which a written answer is made ready to be compared."""

    function: Literal["regex", "remove_whitespace", "lowercase", "uppercase", "map", "take_first"]
    """What it does: find a pattern, strip blanks, change case, look the answer up; take_first does nothing, since one
    answer is written a question."""
    regex_pattern: str = r"#### (\-?[0-9\.\,]+)"
    """regex: the pattern that is looked for."""
    group_select: int = 0
    """regex: which match counts, -1 being the last."""
    fallback: str = "[invalid]"
    """regex: the answer where nothing matches."""
    mapping_dict: dict[str, Any] = {}
    """map: answer -> what takes its place."""
    default_value: Any = None
    """map: what takes the place of an answer that is not there."""


class Matching(Section):
    """What metric exact_match does not see, in the answer and in what is accepted."""

    ignore_case: bool = False
    """Upper and lower case are the same."""
    ignore_punctuation: bool = False
    """ASCII punctuation is removed."""
    ignore_numbers: bool = False
    """Digits are removed."""
    regexes_to_ignore: list[str] = []
    """Patterns that are removed first, one after another."""


class Task(Section):
    """One task, or a group of tasks of one form (BLiMP's paradigms, ANLI's rounds)."""

    about: str
    """One line: what it asks, and which split is evaluated."""
    kind: str
    """How it asks and scores: one of the kinds below."""
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
    filters: dict[str, list[Step]] = {}
    """Kind generate_until: chains of filters by name; metrics are reported for each as
    "exact_match,NAME", of a chain called `none` without its name."""
    exact_match: Matching = Matching()
    """Kind generate_until: what metric exact_match does not see."""
    description: str = ""
    """Template of the text before the examples and the question; of a group it may name `member.key`."""
    shots: Annotated[int, Field(ge=0)] = 0
    """Number of solved examples where --shots is not given."""
    examples: list[dict[str, Any]] = []
    """Records of the solved examples; none: they are those of `fewshot_files`."""
    example_prompt: list[Prompt] = []
    """How a solved example is made from its record; none: as a question is."""
    first: bool = False
    """The examples are the first ones, in order, and not drawn."""
    headroom: bool = False
    """--draw harness: one example more is drawn, and the question itself left out, as the harness does where it knows
    no other split."""
    separator: str = "\n\n"
    """Put behind every solved example."""
    stride: Annotated[int, Field(ge=0)] = 0
    """Kind stream: new targets per window; 0 = windows do not overlap."""
    hidden: Annotated[float, Field(gt=0, le=1)] = 0.15
    """Kind masked: tokens of each window that are hidden at once."""
    members: dict[str, dict[str, str]] = {}
    """Of a group: member name -> values for `{keys}` in `source`; templates know them as `member.key`."""
    mean: bool = False
    """A group reports the mean over its members."""
    weighted: bool = False
    """The mean is over the records of all members instead."""
    groups: dict[str, list[str]] = {}
    """Means over some of the members: name -> members."""
    checked: Literal["scores", "prompts", "nothing"] = "scores"
    """What the tests compared with lm-evaluation-harness: scores on real records, prompts on hand-written
    ones, or nothing.
    """
