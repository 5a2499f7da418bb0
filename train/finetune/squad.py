"""Questions about a context and where their answers stand in it: SQuAD's file and the hub's rows, read and located.

Offsets are characters (code points). Files also count UTF-16 units or bytes (an emoji before the answer), or line ends
as one where there are two. An answer that is not at its offset is looked for by those counts, then as the occurrence
nearest to the offset, then with other white space; what is nowhere is left out of training, as google-research/bert
does, and counted.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.errors import Failed

Question = dict[str, Any]  # id, question, context, answers: (start or None, text)
WANTED = """SQuAD's {"data": [{"paragraphs": [...]}]}, or records of id, question, context and answers"""
WANTED += """, these as the hub has them: {"text": [...], "answer_start": [...]}"""
SHOWN = 5  # ids in a message


def questions(records: Iterable[dict[str, Any]], where: str) -> list[Question]:
    """The questions of SQuAD's articles or of the hub's rows, those without an answer too. Raises Failed for others."""
    found: list[Question] = []
    for number, record in enumerate(records, 1):
        try:
            found += _of_article(record) if "paragraphs" in record else [_of_row(record, number)]
        except (KeyError, TypeError, ValueError) as error:
            why = (
                f"record {number}: no {error}" if isinstance(error, KeyError) else f"record {number}: {error}"
            )
            why += f"; it has: {', '.join(map(str, record))}"
            raise Failed(
                "no questions in SQuAD's format", where=where, why=why, fix=f"give {WANTED}"
            ) from error
    return found


def _of_article(article: dict[str, Any]) -> Iterator[Question]:
    for paragraph in article["paragraphs"]:
        for asked in paragraph["qas"]:
            answers = [] if asked.get("is_impossible") else asked["answers"]
            yield _question(asked["id"], asked["question"], paragraph["context"], _pairs(answers))


def _of_row(row: dict[str, Any], number: int) -> Question:
    """A row of the hub's data set, whole, flattened (`answers.text`), or with one answer."""
    if "answers" in row:
        answers = _pairs(_parsed(row["answers"]))
    elif "answers.text" in row:
        answers = _pairs({"text": row["answers.text"], "answer_start": row.get("answers.answer_start")})
    else:
        text = row["answer_text"] if "answer_text" in row else row["answer"]
        answers = _pairs({"text": [text] if text else [], "answer_start": row.get("answer_start")})
    return _question(row.get("id", number), row["question"], row["context"], answers)


def _question(name: Any, question: Any, context: Any, answers: list[tuple[int | None, str]]) -> Question:
    if not isinstance(question, str) or not isinstance(context, str):
        raise TypeError("question and context are not texts")
    return {"id": str(name), "question": question, "context": context, "answers": answers}


def _parsed(value: Any) -> Any:
    """A cell of a table that holds JSON."""
    return json.loads(value) if isinstance(value, str) and value.lstrip()[:1] in ("[", "{") else value


def _pairs(answers: Any) -> list[tuple[int | None, str]]:
    """(start, text) of each answer: of a list of objects, or of an object of two lists."""
    if answers is None:
        return []
    if isinstance(answers, list):
        texts, starts = [one["text"] for one in answers], [one.get("answer_start") for one in answers]
    else:
        texts, starts = _listed(answers["text"]), _listed(answers.get("answer_start"))
    if not starts:
        starts = [None] * len(texts)
    if len(texts) != len(starts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{len(texts)} texts of answers and {len(starts)} places: {str(texts)[:80]}")
    return [(None if start in (None, "") else int(start), text) for start, text in zip(starts, texts)]


def _listed(value: Any) -> list[Any]:
    value = _parsed(value)
    if isinstance(value, list):
        return value
    return [] if value in (None, "") else [value]


@dataclass
class Located:
    """Where answers stand, and the ids of the questions whose first answer is elsewhere, nowhere or not there."""

    misplaced: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unanswerable: list[str] = field(default_factory=list)

    def take(self, records: Sequence[Question]) -> list[Question]:
        """The records with a `span` (first, after last) of characters, None without an answer; missing ones not."""
        found = []
        for record in records:
            span, is_there = None, True
            if record["answers"]:
                span, is_there = first_span(record["context"], record["answers"])
            if not record["answers"]:
                self.unanswerable.append(record["id"])
            elif span is None:
                self.missing.append(record["id"])
                continue
            elif not is_there:
                self.misplaced.append(record["id"])
            found.append(record | {"span": span})
        return found

    def notes(self) -> Iterator[tuple[bool, str]]:
        """(whether it is a warning, text) for each kind that there is."""
        kinds = {
            "misplaced answers, taken where they stand in the context": (True, self.misplaced),
            "missing answers, nowhere in their context: these questions are left out of training": (
                True,
                self.missing,
            ),
            "unanswerable questions, whose answer is no text": (False, self.unanswerable),
        }
        for text, (is_warning, ids) in kinds.items():
            if ids:
                others = f" and {len(ids) - SHOWN:,} others" if len(ids) > SHOWN else ""
                yield is_warning, f"{len(ids):,} {text}: {', '.join(ids[:SHOWN])}{others}"


def first_span(
    context: str, answers: Sequence[tuple[int | None, str]]
) -> tuple[tuple[int, int] | None, bool]:
    """Return the span of the first answer found in the context, and whether that is answer 0 at its stated offset."""
    for place, (start, text) in enumerate(answers):
        if (span := locate(context, text, start)) is not None:
            return span, place == 0 and start == span[0] and context[slice(*span)] == text
    return None, False


def locate(context: str, text: str, start: int | None) -> tuple[int, int] | None:
    """(first, after last) character of an answer in its context, None where it is not."""
    if not text.strip():
        return None
    if start is not None:
        for place in _readings(context, start):
            if place >= 0 and context.startswith(text, place):
                return place, place + len(text)
    near = 0 if start is None else start
    spans = [match.span() for match in re.finditer(f"(?={re.escape(text)})", context)]
    spans = [(first, first + len(text)) for first, _ in spans]
    if not spans:
        spaced = r"\s+".join(re.escape(word) for word in text.split())
        spans = [match.span(1) for match in re.finditer(f"(?=({spaced}))", context)]
    return min(spans, key=lambda span: (abs(span[0] - near), span[0]), default=None)


def _readings(context: str, start: int) -> Iterator[int]:
    """The places that an offset means in characters, UTF-16 units, bytes, and with line ends counted as one or two."""
    yield start
    if start < 0:
        return
    for encoding, size in (("utf-16-le", 2 * start), ("utf-8", start)):
        head = context.encode(encoding, "surrogatepass")[:size]
        place = len(head.decode(encoding, "replace"))
        if context[:place].encode(encoding, "surrogatepass") == head:  # not within a character
            yield place
    ends = [match.start() for match in re.finditer("\r\n", context)]
    yield start + sum(1 for number, end in enumerate(ends) if end - number < start)
    feeds = [match.start() for match in re.finditer("(?<!\r)\n", context)]
    yield start - sum(1 for number, feed in enumerate(feeds) if feed + number < start)
