"""Readers: any byte range of any supported file as batches of documents, in bounded memory.

Ranges that cover a file yield each document once and in order. Plain .txt (a document per line or per block) and .jsonl
files are read in any range, .parquet by row groups, a saved dataset by rows, a streamed one by its files; a compressed
file and a document per file are read whole. What happens to dirty text is stated in text.py.
"""

import codecs
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ...core.errors import Failed
from ..fields import field_value, text_fields, with_field
from ..records import table
from .formats import (
    ANOTHER_FIELD,
    BLANK_LINES,
    LINE_END,
    between,
    dataset_rows,
    no_column,
    open_blocks,
    parquet_rows,
)
from .inputs import Source, suffix_of
from .text import (
    PIECE_BYTES,
    check_is_text,
    clean,
    clean_string,
    cut_place,
    line_feed_blocks,
    strip_bom,
    strip_front_matter,
)

TABLE_ROWS = 256  # of a table, in a batch
ARRAY = "of an array: jq -c .[] FILE"
MARKDOWN = (".md",)
_BLANK_LINES = re.compile(BLANK_LINES.pattern.decode())


@dataclass(frozen=True)
class ReadOptions:
    """How text becomes documents: `documents` for .txt and .md, `field` for all others (a name with dots is of a field
    inside of others), `split` for datasets.

    `piece_bytes` None hands every document over whole: for a tokenizer whose tokens cross white space.
    """

    documents: Literal["file", "line", "block"] = "file"
    field: str = "text"
    split: str = "train"
    unwrap: bool = False
    skip_front_matter: bool = False  # of Markdown files
    piece_bytes: int | None = PIECE_BYTES


class DocumentBatch(NamedTuple):
    """Documents in order. With `continues` the last one goes on in the first text of the next batch."""

    texts: list[str]
    continues: bool = False


def splittable(source: Source, options: ReadOptions) -> bool:
    """Whether byte ranges of the source can be read apart."""
    if source.format == "dataset":
        return not source.streamed  # a saved one, by rows; a streamed one by its parts
    if source.compression or source.format == "table":
        return False
    return source.format != "txt" or options.documents != "file"


@dataclass(frozen=True)
class Reader:
    """Documents as `options` say, cleaned and counted in `counts`; `on_bytes` is told the bytes taken of files.

    Raises Failed for a file that is cut, damaged or not text, and for a record without the field.
    """

    options: ReadOptions
    counts: Counter[str]
    on_bytes: Callable[[int], None] = lambda _: None

    def read(self, source: Source, start: int = 0, stop: int | None = None) -> Iterator[DocumentBatch]:
        """The documents of bytes (of a streamed dataset: parts) [start, stop) of `source`."""
        if source.format != "txt":
            for records in self._records(source, start, stop):
                yield from self._values(field_value(record, self.options.field) for record in records)
            return
        separator = BLANK_LINES if self.options.documents == "block" else LINE_END
        blocks = self._blocks(source, start, stop, separator)
        yield from self._whole(blocks) if self.options.documents == "file" else self._split(blocks, separator)

    def read_records(self, source: Source) -> Iterator[list[dict[str, Any]]]:
        """The documents of a whole source as `read` has them, with all fields, the text cleaned ("text" of a .txt)."""
        if source.format == "txt":
            for batch in self.read(source):
                yield [{"text": text} for text in batch.texts]
            return
        field = self.options.field
        for records in self._records(source, 0, None, whole=True):
            texts = [self._clean(field_value(record, field)) for record in records]
            yield [with_field(record, field, text) for record, text in zip(records, texts) if text.strip()]

    def _records(
        self, source: Source, start: int, stop: int | None, whole: bool = False
    ) -> Iterator[list[dict[str, Any]]]:
        """The records of bytes [start, stop) of a source with fields, with all of them when `whole`."""
        field = self.options.field
        if source.format == "dataset":
            scale = source.bytes or source.parts
            part = (start, scale if stop is None else stop, scale) if scale and not whole else None
            yield from dataset_rows(source.path, self.options.split, field, self.on_bytes, whole, part)
        elif source.format == "table":
            lines = _decoded_lines(self._blocks(source, 0, None, LINE_END))
            rows = table(lines, Path(source.path), "\t" if suffix_of(source.path)[0] == ".tsv" else ",")
            while batch := [record.data for record in islice(rows, TABLE_ROWS)]:
                if field not in batch[0]:
                    raise no_column(source.path, field, list(batch[0]))
                yield batch
        elif source.format == "parquet":
            yield from parquet_rows(source.path, start, stop, field, self.on_bytes, whole)
        else:
            where = source.path.replace("%", "%%") + (
                ":%d" if not start else f", line %d after byte {start:,}"
            )
            yield from self._json_records(self._blocks(source, start, stop, LINE_END), where)

    def _blocks(
        self, source: Source, start: int, stop: int | None, separator: re.Pattern[bytes]
    ) -> Iterator[bytes]:
        """The blocks of a range with LF as line end, after a look at the first: not binary, no byte-order mark, and
        no front matter where that is asked for.
        """
        with open_blocks(source.path, source.compression, max(start - 1, 0), self.on_bytes) as blocks:
            if splittable(source, self.options):
                blocks = between(blocks, start, stop, separator)
            blocks = line_feed_blocks(self._checked(blocks, source, start), self.counts)
            markdown = suffix_of(source.path)[0] in MARKDOWN
            if self.options.skip_front_matter and markdown and start == 0:
                head = next(blocks, b"")
                yield strip_front_matter(head, self.counts)
            yield from blocks

    def _checked(self, blocks: Iterator[bytes], source: Source, start: int) -> Iterator[bytes]:
        """The blocks, the first of which is text and loses a byte-order mark."""
        for place, block in enumerate(blocks):
            if not place:
                check_is_text(block, source.path, at_start=start == 0)
                block = strip_bom(block, self.counts) if start == 0 else block
            yield block

    def _clean(self, value: str | bytes | None) -> str:
        if isinstance(value, bytes):
            return clean(value, self.counts, self.options.unwrap)
        return clean_string(value or "", self.counts, self.options.unwrap)

    def _whole(self, blocks: Iterable[bytes]) -> Iterator[DocumentBatch]:
        """The whole stream as one document, in pieces."""
        carry, going, limit = b"", False, self.options.piece_bytes
        if limit is None:
            carry, blocks = b"".join(blocks), ()
        for block in blocks:
            carry += block
            while limit and len(carry) > limit:
                carry, piece = self._cut(carry, going)
                going = True
                yield piece
        yield from self._kept([clean(carry, self.counts, self.options.unwrap, going)], going)

    def _cut(self, raw: bytes, going: bool) -> tuple[bytes, DocumentBatch]:
        """Take one piece off a long document: (the rest, the piece)."""
        place, forced = cut_place(raw[: self.options.piece_bytes])
        self.counts["forced_cuts"] += forced
        self.counts["long"] += not going
        piece = clean(raw[:place], self.counts, self.options.unwrap, going)
        return raw[place:], DocumentBatch([piece], continues=True)

    def _kept(self, texts: list[str], going: bool = False) -> Iterator[DocumentBatch]:
        """A batch without its empty documents; with `going` the first ends one begun before and stays."""
        kept = [text for text in texts[going:] if text and not text.isspace()]
        self.counts["empty"] += len(texts) - going - len(kept)
        if going:
            kept.insert(0, texts[0])
        if kept:
            yield DocumentBatch(kept)

    def _split(self, blocks: Iterable[bytes], separator: re.Pattern[bytes]) -> Iterator[DocumentBatch]:
        """Documents between separators. A document longer than `piece_bytes` is cut by its own content alone."""
        limit, ending = self.options.piece_bytes, b"\n" if separator is LINE_END else b"\n\n"
        carry, going = b"", False

        def take(raw: bytes) -> Iterator[DocumentBatch]:
            """Whole documents with their separators; the first may be the rest of one that was begun."""
            nonlocal going
            while limit and (long := _first_long(raw, limit, separator)) is not None:
                if long:
                    yield from self._kept(self._texts(raw[:long], separator, going), going)
                    raw, going = raw[long:], False
                raw, piece = self._cut(raw, going)
                going = True
                yield piece
            if raw:
                yield from self._kept(self._texts(raw, separator, going), going)
                going = False

        waiting: list[bytes] = []
        size = 0
        for block in blocks:
            waiting.append(block)
            size += len(block)
            if limit is None and size < len(carry):  # a document held whole is looked at when it has doubled
                continue
            carry, waiting, size = b"".join([carry, *waiting]), [], 0
            if place := _last_end(carry, separator):
                yield from take(carry[:place])
                carry = carry[place:]
            while limit and len(carry if separator is LINE_END else carry.rstrip(b" \t\r\n")) > limit:
                carry, piece = self._cut(carry, going)
                going = True
                yield piece
        carry = b"".join([carry, *waiting])
        if carry or going:
            yield from take(carry if separator is LINE_END and carry.endswith(b"\n") else carry + ending)

    def _texts(self, raw: bytes, separator: re.Pattern[bytes], going: bool) -> list[str]:
        """Documents that end in separators; with `going` the first is the rest of one that was cut."""
        text = clean(raw, self.counts)
        if separator is LINE_END:
            return text.split("\n")[:-1]
        # without these runs a split does what the pattern does
        plain = not any(run in text for run in ("\n\n\n", "\n ", "\n\t"))
        texts = (text.split("\n\n") if plain else _BLANK_LINES.split(text))[:-1]
        if not self.options.unwrap:
            return texts
        return [clean(text.encode(), self.counts, True, going and not at) for at, text in enumerate(texts)]

    def _json_records(self, blocks: Iterable[bytes], where: str) -> Iterator[list[dict[str, Any]]]:
        """The objects of the lines; a line is held whole. `where` has a place for the number of a line."""
        number, field = 0, self.options.field
        pending: list[bytes] = []
        for block in blocks:
            place = block.rfind(b"\n") + 1
            if place:
                raw = b"".join([*pending, block[:place]])
                yield _parsed(clean(raw, self.counts), where, number, field)
                number += raw.count(b"\n")
                pending = []
            pending.append(block[place:])
        if rest := b"".join(pending):
            yield _parsed(clean(rest, self.counts), where, number, field)

    def _values(self, values: Iterable[str | bytes | None]) -> Iterator[DocumentBatch]:
        """Values of a column as batches; None counts as an empty document."""
        limit, texts = self.options.piece_bytes, list[str]()
        for value in values:
            text = self._clean(value)
            if limit is None or len(text) * 4 <= limit or len(text.encode()) <= limit:
                texts.append(text)
                continue
            yield from self._kept(texts)
            yield from Reader(ReadOptions(piece_bytes=limit), self.counts)._whole([text.encode()])
            texts = []
        yield from self._kept(texts)


def _decoded_lines(blocks: Iterable[bytes]) -> Iterator[str]:
    """Lines with their ends; bytes that are no UTF-8 become what the policy for text counts."""
    rest = ""
    for text in codecs.iterdecode(blocks, "utf-8", "surrogateescape"):
        *lines, rest = (rest + text).split("\n")
        yield from (f"{line}\n" for line in lines)
    yield rest


def _last_end(raw: bytes, separator: re.Pattern[bytes]) -> int:
    """Offset after the last separator whose end is certain, or 0."""
    if separator is LINE_END:
        return raw.rfind(b"\n") + 1
    solid = len(raw.rstrip(b" \t\n"))  # a run of blank lines may go on in the next block
    place = raw.rfind(b"\n\n", 0, solid)
    end = 0
    for found in separator.finditer(raw, max(place, 0), solid):  # behind the last plain one may be others
        end = found.end()
    return end


def _first_long(raw: bytes, limit: int, separator: re.Pattern[bytes]) -> int | None:
    """Offset of the first document longer than `limit` bytes in `raw` (whole documents), or None."""
    plain = b"\n" if separator is LINE_END else b"\n\n"
    place = 0
    while len(raw) - place > limit:  # in hops between newlines: text without long documents costs nothing
        hop = raw.rfind(plain, place, place + limit)
        if hop < 0:
            break
        place = hop + len(plain)
    else:
        return None
    place = 0
    for found in separator.finditer(raw):
        if found.start() - place > limit:
            return place
        place = found.end()
    return None


def _parsed(text: str, where: str, number: int, field: str) -> list[dict[str, Any]]:
    records = []
    for line in text.split("\n"):
        number += 1
        if not line or line.isspace():
            continue
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise TypeError
            value = field_value(record, field)
            if value is not None and not isinstance(value, str):
                raise TypeError
        except (ValueError, RecursionError) as error:
            fix = f"write one object a line ({ARRAY}), or remove that line"
            raise Failed("a line is not JSON", where=where % number, why=str(error), fix=fix) from error
        except (KeyError, TypeError) as error:
            raise _bad_field(line, where % number, field) from error
        records.append(record)
    return records


def _bad_field(line: str, where: str, field: str) -> Failed:
    record = json.loads(line)
    if not isinstance(record, dict):
        why, fix = f"it is {type(record).__name__}", f"write one object a line ({ARRAY})"
        return Failed("a line is not a JSON object", where=where, why=why, fix=fix)
    texts = ", ".join(text_fields(record)) or "none"
    with suppress(KeyError):
        why = f"{field!r} is {type(field_value(record, field)).__name__}, not a string; fields with text: {texts}"
        return Failed("a field holds no text", where=where, why=why, fix=ANOTHER_FIELD)
    lists = [key for key, value in record.items() if isinstance(value, list)]
    fix = "name one with --field, for train with --set data.field"
    if texts == "none" and lists:
        fix = f"of the records in the list {lists[0]!r} make lines: jq -c '.{lists[0]}[]' FILE"
    if "messages" in lists:
        fix = "of a chat make a text: jq -c '{text: ([.messages[].content] | join(\"\\n\\n\"))}' FILE"
    return Failed(f"no field {field!r}", where=where, why=f"fields with text: {texts}", fix=fix)
