"""What stands before a question: a description and solved examples.

Which examples is a pure function of (seed, task, record number), so that a draw depends on no rank, batch or limit, and
two models see the same ones; or, with `HarnessDraw`, lm-evaluation-harness's own draw, one generator over all records
in their order. The form is the harness's: each example solved, a separator behind it.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..core.errors import WrongUse
from .items import Item, template

HARNESS_SEED = 1234  # of its draws, unless --fewshot_seed says otherwise


@dataclass(frozen=True)
class Draw:
    """`count` different examples for each record; `first`: the first ones, in order."""

    task: str
    count: int
    seed: int = 0
    first: bool = False

    def picks(
        self, items: Sequence[Item], source: Sequence[Item], own: Sequence[int | None]
    ) -> list[list[int]]:
        """For each item the places of its examples in `source`; never `own`, its own place there."""
        if self.first:
            places = [range(self.count + (place is not None)) for place in own]
            return [[i for i in row if i != place][: self.count] for row, place in zip(places, own)]
        sizes = (self.count, len(source), self.seed)
        return [draw(self.task, number, *sizes, exclude=place) for number, place in enumerate(own)]


class HarnessDraw:
    """As the harness draws: `random.sample` by one generator, record after record. With `headroom` it draws one more
    and leaves the question's own record out.
    """

    def __init__(self, own: Draw, seed: int | None, headroom: bool) -> None:
        self.own, self.count, self.headroom = own, own.count, headroom
        self.seed = HARNESS_SEED if seed is None else seed

    def picks(
        self, items: Sequence[Item], source: Sequence[Item], own: Sequence[int | None]
    ) -> list[list[int]]:
        """See `Draw.picks`; a record is left out where its data are the same."""
        if self.own.first:
            return self.own.picks(items, source, own)
        generator = random.Random(self.seed)
        found = []
        for item in items:
            drawn = generator.sample(range(len(source)), self.count + self.headroom)
            if self.headroom:
                drawn = [place for place in drawn if source[place].data != item.data][: self.count]
            if len(drawn) < self.count:  # several copies of the question were drawn
                others = [place for place, other in enumerate(source) if other.data != item.data]
                drawn = generator.sample(others, self.count)
            found.append(drawn)
        return found


class CoreDraw:
    """As nanochat draws for CORE: records in one shuffled order, and of each the sample of a generator of its own."""

    def __init__(self, count: int) -> None:
        self.count = count

    def picks(
        self, items: Sequence[Item], source: Sequence[Item], own: Sequence[int | None]
    ) -> list[list[int]]:
        """See `Draw.picks`."""
        order = list(range(len(source)))
        random.Random(1337).shuffle(order)
        places = {record: place for place, record in enumerate(order)}
        found = []
        for record in own:
            place = -1 if record is None else places[record]
            others = [one for one in range(len(order)) if one != place]
            found.append(
                [order[one] for one in random.Random(HARNESS_SEED + place).sample(others, self.count)]
            )
        return found


def draw(task: str, record: int, count: int, pool: int, seed: int, *, exclude: int | None) -> list[int]:
    """Indices of `count` different examples out of `pool`; never `exclude`, the record's own place there."""
    digest = hashlib.sha256(f"{seed}/{task}/{record}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    candidates = pool if exclude is None else pool - 1
    picks = generator.choice(candidates, size=count, replace=False, shuffle=True).tolist()
    return [pick + 1 if exclude is not None and pick >= exclude else pick for pick in picks]


@dataclass(frozen=True)
class Before:
    """How a description and solved examples are put before a question."""

    description: str = ""
    separator: str = "\n\n"

    def pairs(self, item: Item, examples: Sequence[Item]) -> tuple[tuple[str, str], ...]:
        """The pairs of the item with all that comes before."""
        description = template(self.description).render(item.data) if self.description else ""
        before = description + "".join(example.example + self.separator for example in examples)
        return tuple((before + context, answer) for context, answer in item.pairs)


def with_examples(
    name: str,
    items: Sequence[Item],
    pool: Sequence[Item] | None,
    draw: Draw | HarnessDraw | CoreDraw,
    before: Before = Before(),
) -> list[Item]:
    """The items with solved examples before every context. `pool` None: examples are the other evaluated items. A
    record that is in the pool too, by its file and line, is no example of itself.
    """
    source = items if pool is None else pool
    places = {item.where: place for place, item in enumerate(source)}
    own = [number if pool is None else places.get(item.where) for number, item in enumerate(items)]
    available = len(source) - any(place is not None for place in own)
    if draw.count > available:
        raise WrongUse(
            f"{draw.count} examples asked for, {available} to choose from",
            where=f"task {name}",
            fix="lower --shots",
        )
    picked = draw.picks(items, source, own) if draw.count else [[] for _ in items]
    return [
        replace(item, pairs=before.pairs(item, [source[place] for place in picks]))
        for item, picks in zip(items, picked)
    ]
