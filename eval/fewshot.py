"""Few-shot prompts: which solved examples stand before a question is a pure function of (seed, task, record
number).

So a draw depends on no rank, batch or limit, and two models see the same examples. The form is
lm-evaluation-harness's: each example solved, two newlines between them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..core.errors import WrongUse
from .items import Item

SEPARATOR = "\n\n"


def draw(task: str, record: int, count: int, pool: int, *, seed: int, exclude: int | None) -> list[int]:
    """Indices of `count` different examples out of `pool`; never `exclude`, the record's own place there."""
    digest = hashlib.sha256(f"{seed}/{task}/{record}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    candidates = pool if exclude is None else pool - 1
    picks = generator.choice(candidates, size=count, replace=False, shuffle=True).tolist()
    return [pick + 1 if exclude is not None and pick >= exclude else pick for pick in picks]


def with_examples(
    name: str, items: Sequence[Item], pool: Sequence[Item] | None, shots: int, seed: int
) -> list[Item]:
    """The items with `shots` solved examples before every context. `pool` None: examples are the other
    evaluated items. A record that is in the pool too, by its file and line, is no example of itself.
    """
    source = items if pool is None else pool
    places = {item.where: place for place, item in enumerate(source)}
    own = [number if pool is None else places.get(item.where) for number, item in enumerate(items)]
    available = len(source) - any(place is not None for place in own)
    if shots > available:
        raise WrongUse(
            f"{shots} examples asked for, {available} to choose from",
            where=f"task {name}",
            fix="lower --shots",
        )
    made = []
    for number, item in enumerate(items):
        picks = draw(name, number, shots, len(source), seed=seed, exclude=own[number])
        before = "".join(source[pick].example + SEPARATOR for pick in picks)
        made.append(
            replace(
                item, pairs=tuple((before + context, continuation) for context, continuation in item.pairs)
            )
        )
    return made
