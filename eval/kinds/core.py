"""Kind `core`: the forms of DCLM's CORE (Li et al. 2024, arXiv 2406.11794), scored as nanochat does, whose figures are
the ones that are compared: choices by their mean log-probability a token, texts by whether all is the arg-max.

What counts is told by tokens: of choices what follows their common beginning, of contexts their common end. Delimiter,
number of examples and what guessing scores, in per cent, are the member's.
"""

import random
from collections.abc import Iterator, Sequence

import numpy as np

from ...core.scorer import Question, Score, Scorer, common
from ..items import HARNESS_SEED, Draw, Form, Item, Items
from .kind import Asks, Kind, Outcome


class CoreDraw(Draw):
    """As nanochat draws: records in one shuffled order, and of each the sample of a generator of its own."""

    def picks(self, items: Items, source: Items, own: Sequence[int | None]) -> list[list[int]]:
        order = list(range(len(source)))
        random.Random(1337).shuffle(order)
        found = []
        for record in own:
            place = -1 if record is None else order.index(record)
            others = [one for one in range(len(order)) if one != place]
            drawn = random.Random(HARNESS_SEED + place).sample(others, self.count)
            found.append([order[one] for one in drawn])
        return found


class Core(Kind):
    """Choices after one context, contexts before one target, or one target. `centred`: 0 for guessing, 1 for all."""

    needs = ("fields",)
    metrics = ("centred", "acc")
    draw = CoreDraw

    def item(self, form: Form) -> Item:
        delimiter, target = self.member.get("delimiter", " "), form.text("target")
        if form.prompt.choices:
            pairs = [(form.text("context"), delimiter + choice) for choice in form.texts("choices")]
        elif form.prompt.contexts:
            pairs = [(context, delimiter + target) for context in form.texts("contexts")]
        else:
            return Item(form.where, ((form.text("context") + delimiter, target),), data=form.data)
        choices = tuple(context + choice for context, choice in pairs)
        return Item(form.where, tuple(pairs), choices, form.gold(choices)[0], data=form.data)

    def asks(self, items: Sequence[Item], scorer: Scorer) -> Iterator[tuple[Asks, int]]:
        begins = () if scorer.bos else (scorer.prefix,)
        for item in items:
            contexts = [context.rstrip() for context, _ in item.pairs]
            texts = ["".join(pair) for pair in item.pairs]
            wholes = [begins + scorer.bos + ids for ids in scorer.tokenize(texts)]
            if len(wholes) == 1:
                cuts = [1 + len(*scorer.tokenize(contexts))]
            elif len({*contexts}) == 1:
                cuts = [min(common(wholes), *(len(whole) - 1 for whole in wholes))] * len(wholes)
            else:
                same = common([whole[::-1] for whole in wholes])
                cuts = [max(1, len(whole) - same) for whole in wholes]
            question = Question(tuple((whole[:cut], whole[cut:]) for whole, cut in zip(wholes, cuts)))
            yield [question], scorer.lost(question)

    def of_scores(self, item: Item, scores: Sequence[Score]) -> Outcome:
        means = [score.logprob / score.tokens for score in scores]
        right = float(np.argmax(means) == item.gold) if item.choices else float(scores[0].greedy)
        guessed = float(self.member.get("guessed", 0)) / 100
        return {"acc": [right], "centred": [(right - guessed) / (1 - guessed)]}
