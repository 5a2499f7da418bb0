"""Kinds `rolling` (as lm-evaluation-harness: documents apart, disjoint windows, the first token behind the prefix),
`stream` (as Megatron-LM: one stream without prefix, overlapping windows) and `last_token`: texts as a whole.
"""

import math
import re
from collections.abc import Iterator, Sequence

from ...core.scorer import Ids, Question, Score, Scorer
from ...data.records import Record, whole_line
from ..items import Form, Item
from ..metrics import METRICS
from .choices import LogLikelihood
from .kind import Asks, Kind, Outcome


class Text(Kind):
    """Texts as a whole, cut into windows in which every token that counts is predicted once."""

    needs: tuple[str, ...] = ("text",)
    field = "text"
    no_examples = "it predicts whole documents"

    def item(self, form: Form) -> Item:
        text = form.text("text")
        original = form.text("original") if form.prompt.original else text
        return Item(form.where, text=text, original=original, data=form.data)

    def asks(self, items: Sequence[Item], scorer: Scorer) -> Iterator[tuple[Asks, int]]:
        for ids in scorer.tokenize([item.text for item in items]):
            yield self.windows(ids, scorer), 0  # windows of one text lose nothing

    def windows(self, ids: Ids, scorer: Scorer) -> list[Question]:
        """The questions of a text."""
        raise NotImplementedError


class LastToken(Text, LogLikelihood):
    """The last token of a text after all others."""

    def asks(self, items: Sequence[Item], scorer: Scorer) -> Iterator[tuple[Asks, int]]:
        for questions, _ in super().asks(items, scorer):
            yield questions, sum(map(scorer.lost, questions))

    def windows(self, ids: Ids, scorer: Scorer) -> list[Question]:
        return [Question(((scorer.bos + ids[:-1] or (scorer.prefix,), ids[-1:]),))]


class Rolling(Text):
    """Documents apart, as lm-evaluation-harness reads them."""

    metrics: tuple[str, ...] = ("word_perplexity", "byte_perplexity", "bits_per_byte", "token_perplexity")

    def windows(self, ids: Ids, scorer: Scorer) -> list[Question]:
        return rolling(scorer.bos + ids, scorer.window, scorer.prefix)

    def words(self, original: str) -> int:
        """By `re.split` on white space, which counts an empty one at each end that is white space."""
        return len(re.split(r"\s+", original))

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        """Words and UTF-8 bytes are those of the original."""
        total = math.fsum(score.logprob for score in scores)
        units = {"word": self.words(item.original), "byte": len(item.original.encode())}
        units["token"] = sum(score.tokens for score in scores)
        return {name: [total, float(units[METRICS[name].per])] for name in self.metrics}


class Stream(Rolling):
    """All records as one text, as Megatron-LM reads it."""

    metrics = ("adjusted_perplexity", "token_perplexity", "bits_per_byte")

    def items(self, records: Sequence[Record], *, example: bool = False) -> list[Item]:
        """All texts of the records, each with its line end, behind one another at the first one's place."""
        items = super().items(records)
        if len(items) == 1:
            return items
        parts = {
            key: [record.data[key] for record in records if isinstance(record.data.get(key), str)]
            for key, value in records[0].data.items()
            if isinstance(value, str)
        }
        whole = {key: "".join(map(whole_line, some)) for key, some in parts.items()}
        return super().items([Record(records[0].where, whole)])

    def windows(self, ids: Ids, scorer: Scorer) -> list[Question]:
        return stream(ids, scorer.window, self.task.stride)

    def words(self, original: str) -> int:
        """Megatron-LM's: parted by single blanks, less one."""
        return len(original.strip().split(" ")) - 1


def rolling(ids: Ids, window: int, prefix: int) -> list[Question]:
    """Disjoint windows over one document, a BOS of which is predicted like the rest (as the harness does);
    the last is filled up to the left, so that its first target has context.
    """
    questions = []
    whole = (prefix, *ids)  # whole[i] is the token before target i
    for start in range(0, len(ids), window):
        stop = min(start + window, len(ids))
        first = max(0, stop - window) if start else 0
        questions.append(Question(((whole[first : start + 1], ids[start:stop]),)))
    return questions


def stream(ids: Ids, window: int, stride: int) -> list[Question]:
    """Windows over one stream; all targets of the first count, of later ones the last `stride` (0: all)."""
    step = min(stride, window) or window
    questions = []
    done = 1
    while done < len(ids):
        # the last window keeps its place where the stream ends inside it
        stop = done + (window if done == 1 else step)
        questions.append(Question(((ids[max(0, stop - window - 1) : done], ids[done:stop]),)))
        done = stop
    return questions
