"""Kinds `masked` (tokens of a window hidden at once, Devlin et al. 2019) and `cloze`: what a BERT names."""

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...core.errors import WrongUse
from ...core.scorer import Ids, Question, Score, Scorer
from ..items import MASK, Form, Item
from .kind import Asks, Kind, Outcome
from .texts import Text


def _check_masks(name: str, scorer: Scorer) -> int:
    if scorer.mask is None:
        why, fix = f"task {name} asks what stands behind a mask", "leave the task out, or evaluate a BERT"
        raise WrongUse("a model that reads from left to right has no masks", why=why, fix=fix)
    return scorer.mask


class Masked(Text):
    """Some of a text's tokens, masked at once: how many a BERT names, and their log-probability."""

    metrics = ("mlm_accuracy", "mlm_perplexity")
    asked = Kind.asked | {"hidden"}

    def windows(self, ids: Ids, scorer: Scorer) -> list[Question]:
        return hidden(ids, scorer.window, _check_masks(self.name, scorer), self.task.hidden)

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        tokens = float(sum(score.tokens for score in scores))
        return {
            "mlm_accuracy": [float(sum(score.right for score in scores)), tokens],
            "mlm_perplexity": [math.fsum(score.logprob for score in scores), tokens],
        }


class Cloze(Kind):
    """What a BERT names behind the masks of a context; the best of the accepted answers counts."""

    needs = ("context", "answers")
    metrics = ("p_at_1", "p_at_10")
    field = "answers[{}]"
    no_examples = "a solved example would have masks too"

    def item(self, form: Form) -> Item:
        answers, context = form.answers(), form.text("context")
        if MASK not in context:
            raise form.bad("context", f"it has no {MASK}")
        pairs = tuple((context, self.task.delimiter + answer) for answer in answers)
        return Item(form.where, pairs, answers=answers)

    def asks(self, items: Sequence[Item], scorer: Scorer) -> Iterator[tuple[Asks, int]]:
        """Of the accepted answers those that the masks can spell; all of them, to be refused, if none."""
        mask = _check_masks(self.name, scorer)
        for whole in scorer.encode([item.pairs for item in items]):
            pairs = tuple(pair for pair in whole.pairs if pair[0].count(mask) == len(pair[1]))
            question = Question(pairs) if pairs else whole
            yield [question], scorer.lost(question)

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        best = min(score.rank for score in scores)
        return {"p_at_1": [float(best < 1)], "p_at_10": [float(best < 10)]}


def hidden(ids: Ids, window: int, mask: int, share: float) -> list[Question]:
    """Disjoint windows with `share` of their tokens, one at least, masked at once, drawn by the window's ids."""
    questions = []
    for start in range(0, len(ids), window):
        row = np.array(ids[start : start + window], np.int64)
        seed = int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:8], "little")
        count = max(1, round(share * len(row)))
        places = np.sort(np.random.Generator(np.random.Philox(key=seed)).permutation(len(row))[:count])
        targets = tuple(row[places].tolist())
        row[places] = mask
        questions.append(Question(((tuple(row.tolist()), targets),)))
    return questions
