"""The page docs/task-file.md: every field, kind, metric and filter of a task file, from the program itself."""

from typing import Any

from throughline.core.recipe import describe
from throughline.eval.kinds.kind import Kind
from throughline.eval.metrics import METRICS
from throughline.eval.task import KINDS
from throughline.eval.task_file import Matching, Prompt, Source, Step, Task
from throughline.eval.textops import FILTERS

EXAMPLE = """# Task files

Made by `make reference` from the program; a test checks that it is current and runs the example.

A task of one's own is a TOML file. `throughline eval --tasks PATH.toml` reads it like the shipped ones, which lie in
`eval/tasks/` and are the other examples.

## An example

Records in the form that the Hugging Face hub gives multiple choice, `my-data/rivers/test.jsonl`:

```json
{"question": "Which river flows through Paris?", "choices": {"text": ["the Thames", "the Seine", "the Tiber"], "label": ["A", "B", "C"]}, "answerKey": "B"}
{"question": "Which river flows through Rome?", "choices": {"text": ["the Tiber", "the Ebro", "the Rhine"], "label": ["A", "B", "C"]}, "answerKey": "A"}
```

The task, `rivers.toml`: where the records are, and how one becomes a question.

```toml
about = "Rivers of capitals (test)"
kind = "multiple_choice"
metrics = ["acc", "acc_norm"]
checked = "nothing"

[source]
files = ["rivers/test*"]

[[prompt]]
fields = ["question", "choices", "answerKey"]
context = "Question: {{ question }}\\nAnswer:"
choices = "choices.text"
gold = "choices.label.index(answerKey)"
```

```text
throughline eval runs/my-gpt --tasks rivers.toml --data-dir my-data
```

`context` is a Jinja template; `choices` and `gold` are Jinja expressions, which keep their type. With `--shots 1` the other
record, solved, stands before each question. A record that lacks a field, or whose `gold` is no choice's index, is an error that
names its file and line.
"""


def tasks_page() -> str:
    """The page."""
    own = {name: said(kind.of_scores) for name, kind in KINDS.items() if kind.of_scores is not Kind.of_scores}
    kinds = [
        (f"`{name}`", f"{said(kind)} {own.get(name, '')}", code(kind.needs), code(kind.metrics))
        for name, kind in KINDS.items()
    ]
    metrics = [
        (
            f"`{name}`",
            metric.per,
            "more" if metric.higher else "less",
            "closed form" if metric.mean else "bootstrap",
        )
        for name, metric in METRICS.items()
    ]
    filters = [(f"`{name}`", said(function)) for name, function in FILTERS.items()]
    parts = [
        EXAMPLE,
        "## The task\n",
        *fields(Task, "source.", "exact_match."),
        "\n## `[source]`\n",
        *fields(Source),
        "\n## `[[prompt]]`\n",
        "Templates and expressions know the record's fields, and `member` in a group.\n",
        *fields(Prompt),
        "\n## `[[filters.NAME]]`\n",
        *fields(Step),
        "\n## `[exact_match]`\n",
        *fields(Matching),
        "\n## Kinds\n",
        *lines(("kind", "what it asks and scores", "every prompt has", "metrics"), kinds),
        "\n## Metrics\n",
        *lines(("metric", "per", "better", "standard error"), metrics),
        "\n## Filters of templates\n",
        "`{{ text | lower_first }}`; Jinja's own are there too.\n",
        *lines(("filter", "what it does"), filters),
    ]
    return "\n".join(parts) + "\n"


def fields(section: type[Any], *apart: str) -> list[str]:
    """The fields of a section, without those of sections that have a table of their own."""
    rows = [
        (f"`{key}`", f"`{kind}`", default, note)
        for key, kind, default, note in describe(section)
        if not key.startswith(apart or " ")
    ]
    return lines(("field", "type", "default", "meaning"), rows)


def said(thing: Any) -> str:
    """The first paragraph of what a class or function says of itself."""
    return " ".join((thing.__doc__ or "").partition("\n\n")[0].split())


def code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def lines(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """A table."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *cells)]
