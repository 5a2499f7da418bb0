"""A step of many sequences as calls with rectangular inputs, for runtimes whose graphs take (batch, sequence).

Single tokens of answers go in one call over the rows from the first to the last of them; rows in between that
take no part get a token that nobody reads, behind their own. Parts of prompts follow, adjacent rows of nearly
the same length together.

Letters: B rows of a call, S its longest span, N the most positions asked of one of its rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.backend import Span, library
from .sampler import copy_of

FILLED = 0.8  # share of real tokens that several prompts in one call must have


@dataclass(frozen=True)
class Call:
    """One call: spans by their place in the step (None: a row that takes no part), and its first row."""

    owners: tuple[int | None, ...]
    first_row: int
    ids_BS: np.ndarray
    past_B: np.ndarray
    ask_BN: np.ndarray

    @property
    def arguments(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.ids_BS, self.past_B, self.ask_BN


def rectangles(
    spans: Sequence[Span],
    context: int,
    length_of: Callable[[int], int] | None = None,
    rows: int | None = None,
) -> list[Call]:
    """The calls of a step, of at most `rows` rows; no padding reaches behind `context`.

    `length_of` tells how many tokens a row that takes no part holds; without it, rows of single tokens that
    are not adjacent go in calls of their own.
    """
    order = sorted(range(len(spans)), key=lambda i: spans[i].row)
    single = [i for i in order if len(spans[i].ids) == 1]
    groups: list[list[int]] = []
    for i in single:
        beside = groups and (length_of is not None or spans[groups[-1][-1]].row + 1 == spans[i].row)
        if beside and (rows is None or spans[i].row - spans[groups[-1][0]].row < rows):
            groups[-1].append(i)
        else:
            groups.append([i])
    calls = [_call(spans, group, length_of) for group in groups]
    prompts: list[list[int]] = []
    for i in (i for i in order if len(spans[i].ids) > 1):
        if prompts and len(prompts[-1]) != rows and _joins(spans, prompts[-1], i, context):
            prompts[-1].append(i)
        else:
            prompts.append([i])
    return calls + [_call(spans, group, None) for group in prompts]


def _joins(spans: Sequence[Span], group: list[int], new: int, context: int) -> bool:
    """Whether a part of a prompt suits a call: the next row, and little padding."""
    lengths = [len(spans[i].ids) for i in (*group, new)]
    adjacent = spans[group[-1]].row + 1 == spans[new].row
    fits = max(spans[i].past for i in (*group, new)) + max(lengths) <= context
    return adjacent and fits and sum(lengths) >= FILLED * max(lengths) * len(lengths)


def _call(spans: Sequence[Span], group: list[int], length_of: Callable[[int], int] | None) -> Call:
    by_row = {spans[i].row: i for i in group}
    first, last = spans[group[0]].row, spans[group[-1]].row
    owners = tuple(by_row.get(row) for row in range(first, last + 1))
    longest = max(len(spans[i].ids) for i in group)
    ids = np.zeros((len(owners), longest), np.int64)
    past = np.zeros(len(owners), np.int64)
    ask = np.zeros((len(owners), max(spans[i].asked for i in group)), np.int64)
    for line, owner in enumerate(owners):
        if owner is None:
            assert length_of is not None
            past[line] = length_of(first + line)
            continue
        span = spans[owner]
        ids[line, : len(span.ids)], past[line] = span.ids, span.past
        ask[line, : span.asked] = np.arange(len(span.ids) - span.asked, len(span.ids))
    return Call(owners, first, ids, past, ask)


def scatter_logits(spans: Sequence[Span], calls: Sequence[Call], logits_BNV: Sequence[Any]) -> Any:
    """What the calls returned as one array (N, V), span after span."""
    in_order = len(calls) == 1 and calls[0].owners == tuple(range(len(spans)))
    if in_order and all(span.asked == 1 for span in spans):
        return logits_BNV[0][:, 0]
    found: dict[int, Any] = {}
    for call, logits in zip(calls, logits_BNV):
        for line, owner in enumerate(call.owners):
            if owner is not None:
                found[owner] = logits[line, : spans[owner].asked]
    return library(logits_BNV[0]).concatenate([found[i] for i in range(len(spans))])


def in_pieces(step: Callable[..., Any], spans: Sequence[Span], cache: Any, most: int) -> Any:
    """A step in which no span has more than `most` tokens, and then one of what is left of them."""
    firsts, rests = [], []
    for span in spans:
        left = max(0, len(span.ids) - most)
        firsts.append(Span(span.row, span.past, span.ids[:most], max(0, span.asked - left)))
        if left:
            rests.append(Span(span.row, span.past + most, span.ids[most:], min(span.asked, left)))
    before = copy_of(step(firsts, cache))
    behind = step(rests, cache)  # which splits again what is still too long
    found, at, then = [], 0, 0
    for span, first in zip(spans, firsts):
        found.append(before[at : at + first.asked])
        at += first.asked
        if more := span.asked - first.asked:
            found.append(behind[then : then + more])
            then += more
    return library(before).concatenate(found)
