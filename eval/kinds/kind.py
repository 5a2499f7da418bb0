"""What all kinds of task share: a kind is one class in a file of this folder, named in `KINDS` of `task.py`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...core.errors import Failed
from ...core.scorer import Score, Scorer, check_question
from ...data.records import Record
from ..items import Draw, Form, Item
from ..metrics import Metric, metric_of
from ..task_file import Task

Outcome = dict[str, list[float]]  # what a record contributes to each metric
ASKED = "kind prompt delimiter until max_tokens stride description separator"  # what the prompt hash covers
Asks = list[Any]  # of one record: Questions or, where the model writes, contexts


class Kind:
    """What all kinds share: pairs of a context and a continuation, whose log-probabilities count."""

    needs: tuple[str, ...]  # keys that every [[prompt]] gives
    metrics: tuple[str, ...]
    field = "target"  # what a task file calls the scored text; {} stands for its number
    no_examples = ""  # why solved examples cannot stand before a question
    draw: type[Draw] | None = None  # what draws its examples, where that is not the user's choice
    probabilities = True  # answers have log-probabilities
    runs_programs = False  # scoring runs what the model has written
    asked = frozenset(ASKED.split())

    def __init__(
        self, task: Task, name: str, form: type[Form] = Form, member: Mapping[str, str] | None = None
    ) -> None:
        self.task, self.name, self.form, self.member = task, name, form, member or {}

    @property
    def reported(self) -> list[str]:
        """The names of what is reported."""
        return self.task.metrics

    def metric(self, name: str) -> Metric:
        """How the contributions to what is reported become a number."""
        return metric_of(name)

    def item(self, form: Form) -> Item:
        """The question that a record becomes. Raises Failed naming its file, line and field."""
        raise NotImplementedError

    def items(self, records: Sequence[Record], *, example: bool = False) -> list[Item]:
        """The questions of all records, or (`example`) what examples are made of."""
        prompts = self.task.example_prompt if example and self.task.example_prompt else self.task.prompt
        return [self.item(self.form.of(prompts, self.name, record, self.member)) for record in records]

    def asks(self, items: Sequence[Item], scorer: Scorer) -> Iterator[tuple[Asks, int]]:
        """For each item what is asked, and its context tokens lost to the window. Raises WrongUse for a wrong model."""
        for question in scorer.encode([item.pairs for item in items], [item.before for item in items]):
            yield [question], scorer.lost(question)

    def key(self, ask: Any) -> str:
        """What an answer depends on besides the model."""
        return repr(ask.pairs)

    def check(self, item: Item, asks: Asks, scorer: Scorer) -> None:
        """Raises Failed when there is nothing to score, or too much for the window."""
        where = f"{item.where} (task {self.name})"
        fields = [self.field.format(number) for number in range(max(1, len(item.pairs)))]
        for question in asks:
            check_question(question, scorer.window, where, fields, scorer.mask)
        if not asks:
            why = "the tokenizer makes no token of it that could be predicted"
            fix = "mend or remove the record"
            raise Failed("nothing to score: text has no tokens", where=where, why=why, fix=fix)

    def answers(self, scorer: Scorer, asks: Asks, wheres: Sequence[str]) -> Iterator[list[tuple[int, Any]]]:
        """Yields batches of (index into `asks`, answer as it is stored): of each pair the fields of its `Score` as a
        JSON list, which gives numbers back bit for bit. Raises Failed for a NaN, saying where.
        """
        for batch in scorer.score(asks):
            for place, scores in batch:
                if not all(math.isfinite(score.logprob) for score in scores):
                    why = "a log-probability is not finite; among such the first choice would always win"
                    fix = "look for NaN or overflow in its weights; evaluate an earlier checkpoint"
                    raise Failed("the model predicts nothing", where=wheres[place], why=why, fix=fix)
            yield [(place, [_packed(score) for score in scores]) for place, scores in batch]

    def outcome(self, item: Item, found: Sequence[Any]) -> Outcome:
        """What the stored answers to all that was asked for an item contribute."""
        return self.of_scores(item, [Score(*values) for answer in found for values in answer])

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        """The same of answers with log-probabilities."""
        raise NotImplementedError


def _packed(score: Score) -> list[Any]:
    values = [score.logprob, score.right, score.tokens, score.rank]
    return [*values, list(score.token_logprobs)] if score.token_logprobs else values
