"""A file of records, each of which becomes a line of another file, in the same order.

Finished lines are appended to OUT.partial as they come, with their number; the same call goes on where it stopped, and
the last step puts them in order as OUT. A line that cannot be answered has an "error" and stops nobody else.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.console import progress
from ..core.errors import Failed, WrongUse
from ..core.files import full_disk, json_lines, sha256_file, sha256_json, sync
from .fields import field_value, with_field
from .records import read_records

Numbered = tuple[int, dict[str, Any]]
Answers = Callable[[Iterator[Numbered]], Iterator[Numbered]]
Cut = Callable[[str], list[str]] | None  # a text into pieces


def answer_records(
    source: Path, out: Path, settings: list[Any], field: str, answer: Answers, cut: Cut = None
) -> dict[str, Any]:
    """Write OUT: what `answer` says of each record, or of each piece that `cut` makes of its `field`. `settings`: what
    else decides the answers. Returns counts. Raises WrongUse where there is nothing to answer, for an OUT that is there
    already, and for what a stopped run with other settings has left.
    """
    if out.exists():
        raise WrongUse("there is a file already", where=out, fix="choose another --out, or remove it")
    texts = [isinstance(_value(record, field), str) for _, record in _records(source, field, cut)]
    total = len(texts)
    if not any(texts):
        why = "" if not texts else f'none of its {total:,} lines has a text "{field}"'
        fix = f'give lines like {{"{field}": "..."}}, or name the field that holds the text'
        raise WrongUse("there is nothing to answer", where=source, why=why, fix=fix)
    partial = out.with_name(out.name + ".partial")
    with full_disk(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    places = _resume(partial, sha256_json([*settings, sha256_file(source)]))
    resumed, errors = len(places), []
    todo = (record for record in _records(source, field, cut) if record[0] not in places)
    with progress(out.name, total, "lines") as bar, open(partial, "ab") as file:
        bar.start_at(resumed)
        for number, row in answer(todo):
            places[number] = file.tell()
            with full_disk(partial):
                file.write(f"{number}\t{json.dumps(row, ensure_ascii=False)}\n".encode())
                file.flush()
            bar.advance(1)
    ordered = out.with_name(out.name + ".ordered")
    with full_disk(out), open(ordered, "wb") as target, open(partial, "rb") as file:
        for number in range(total):
            file.seek(places[number])
            line = file.readline().split(b"\t", 1)[1]
            if b'"error"' in line and "error" in (row := json.loads(line)):
                errors.append(f"record {number + 1}: {row['error']}")
            target.write(line)
    sync(ordered)
    os.replace(ordered, out)
    partial.unlink()
    return {"lines": total, "resumed": resumed, "errors": len(errors), "first_error": (errors or [""])[0]}


def _records(source: Path, field: str, cut: Cut = None) -> Iterator[Numbered]:
    """Numbered lines, or their pieces; what is no JSON object has an "error" and no text."""

    def pieces(record: dict[str, Any]) -> list[dict[str, Any]]:
        text = _value(record, field)
        if cut is None or not isinstance(text, str):
            return [record]
        return [with_field(record, field, piece) | {"chunk": chunk} for chunk, piece in enumerate(cut(text))]

    lines = _lines(source) if source.suffix == ".jsonl" else (one.data for one in read_records([source]))
    return enumerate(piece for record in lines for piece in pieces(record))


def _lines(source: Path) -> Iterator[dict[str, Any]]:
    with open(source, encoding="utf-8-sig", errors="replace") as file:  # LF, CRLF or CR ends a line
        for number, line in enumerate(file, 1):
            try:
                yield from (record for _, record in json_lines(source, [line]))
            except Failed:
                yield {"line": number, "error": "this line is no JSON object"}


def _value(record: dict[str, Any], field: str) -> Any:
    """The value of a field, or of one inside of others; None without it."""
    with suppress(KeyError):
        return field_value(record, field)
    return None


def text_of(record: dict[str, Any], field: str) -> str:
    """The text of a record. Raises WrongUse for a record that has none."""
    text = _value(record, field)
    if not isinstance(text, str):
        raise WrongUse(str(record.get("error") or f'this line has no text "{field}"'))
    return text


def _resume(partial: Path, identity: str) -> dict[int, int]:
    """Where earlier answers stand in OUT.partial, begun when there is none. Raises WrongUse for another's."""
    if not partial.exists():
        partial.write_text(identity + "\n")
        return {}
    places: dict[int, int] = {}
    with open(partial, "rb+") as file:
        if file.readline().decode(errors="replace").strip() != identity:
            fix = "give the command that began them, or remove the file to begin anew"
            what = "the answers so far are of another model, input or setting"
            raise WrongUse(what, where=partial, fix=fix)
        at = file.tell()
        for line in file:
            if not line.endswith(b"\n"):  # cut by a crash
                break
            places[int(line.split(b"\t", 1)[0])] = at
            at += len(line)
        file.truncate(at)
    return places
