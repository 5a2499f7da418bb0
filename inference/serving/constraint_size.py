"""Bounds on the grammars of constrained output, checked before anything is compiled: what llguidance would build for a
few bytes of an expression or a schema can take it minutes, and there is no way to interrupt it.

| what | most | at the bound llguidance takes, on one core of 2026 |
|---|---|---|
| positions of an expression, its repetitions written out | 10,000 | 20 ms; 1,000,000 take 2.5 s and then fail |
| positions of all expressions of a schema | 100,000 | 0.4 s |
| repetition operators of all expressions | 1,000 | 0.5 s for `.?.?…`; their square counts |
| product of all `multipleOf` of a schema | 10,000 | 0.2 s; 999,983 takes 25 s |
"""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from ...core.errors import WrongUse

MOST_POSITIONS = 10_000
MOST_POSITIONS_OF_ALL = 100_000
MOST_REPETITIONS = 1000
MOST_MULTIPLE = 10_000
LARGEST = 10**12  # counted: beyond every bound
TOKENS = re.compile(
    r"(?P<escape>\\[pPxu]\{[^}]*\}|\\.)"
    r"|(?P<group>\((?:\?(?:P?<\w+>|<?[=!]|[\w-]*:?))?)"
    r"|(?P<end>\))"
    r"|(?P<either>\|)"
    r"|(?P<repeat>\{\d*+,?+\d*+\}|[*+?])"
    r"|(?P<set>\[\^?+\]?+(?:\\.|\[:\w++:\]|[^\]\\])*+(?:\]|\Z))"  # linear: an open one takes the rest
    r"|(?P<character>.)",
    re.DOTALL,
)


def expression_size(pattern: str) -> tuple[int, int]:
    """Positions of a regular expression with its repetitions written out, and its repetition operators."""
    positions, last, repetitions = 0, 0, 0  # `last`: of what a repetition would repeat
    around: list[int] = []  # positions before each open group
    for token in TOKENS.finditer(pattern):
        if token.lastgroup == "repeat":
            repetitions += 1
            counts = [int(count.lstrip("0")[:12] or "0") for count in re.findall(r"\d+", token[0])]
            factor = max([1, *counts])
            positions = min(positions + last * (factor - 1), LARGEST)
            last = min(last * factor, LARGEST)
        elif token.lastgroup == "group":
            around.append(positions)
            positions, last = 0, 0
        elif token.lastgroup == "end" and around:
            last = max(positions, 1)
            positions = around.pop() + last
        elif token.lastgroup == "either":
            last = 0
        else:
            last = 1
            positions += 1
    return min(positions + sum(around), LARGEST), repetitions


def check_expressions(patterns: list[str], where: str) -> None:
    """Raise WrongUse for expressions that are too large to follow."""
    sizes = [expression_size(pattern) for pattern in patterns]
    largest = max((positions for positions, _ in sizes), default=0)
    fix = "use smaller counts in { }, or * and + without a count"
    for what, count, most in (
        ("positions with its repetitions written out", largest, MOST_POSITIONS),
        ("positions in all expressions", sum(size[0] for size in sizes), MOST_POSITIONS_OF_ALL),
        ("repetitions", sum(size[1] for size in sizes), MOST_REPETITIONS),
    ):
        if count > most:
            why = f"{count:,} {what} > {most:,}"
            raise WrongUse("the expression is too large to follow", where=where, why=why, fix=fix)


def check_schema(schema: Any, where: str) -> None:
    """Raise WrongUse for a JSON schema that is too large to follow."""
    patterns, multiple = [], 1
    for name, value in _entries(schema):
        if name == "pattern" and isinstance(value, str):
            patterns.append(value)
        elif name == "patternProperties" and isinstance(value, dict):
            patterns += value
        elif name == "multipleOf" and isinstance(value, int | float) and abs(value) >= 1:
            multiple = min(multiple * _states(abs(value)), LARGEST)
    check_expressions(patterns, where)
    if multiple > MOST_MULTIPLE:
        why = f"the product of its multipleOf is {multiple:,} > {MOST_MULTIPLE:,}"
        fix = "leave multipleOf out and check the number yourself"
        raise WrongUse("the schema is too large to follow", where=where, why=why, fix=fix)


def _states(multiple: int | float) -> int:
    """Remainders that a number may leave so far, by the digits of what it must be a multiple of."""
    if multiple >= LARGEST:
        return LARGEST
    decimals = -Decimal(str(multiple)).normalize().as_tuple().exponent  # type: ignore[operator]
    return int(Decimal(str(multiple)).scaleb(max(decimals, 0)))


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    """Every name with its value, at any depth."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield from part.items()
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
